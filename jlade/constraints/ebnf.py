"""Grammars of named rules in EBNF, as llama.cpp (GBNF) and XGrammar write them, as expressions over bytes.

Rules that lead back to themselves by references at their ends, or else at their beginnings, are loops of the automaton.
Other references of a rule to itself, as within brackets, are followed to a bounded depth.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

from jlade.constraints.automaton import (
    LAST_CODE_POINT,
    NOTHING,
    Automaton,
    Choice,
    Expression,
    Network,
    Repeat,
    Series,
    build,
    character_set,
    characters,
    literal,
)

DEPTH = 3  # of rules within themselves
ROOT = "root"
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<is>::=)|(?P<name>[A-Za-z_][\w.-]*)|(?P<text>"(?:[^"\\\n]|\\.)*")"""
    r"""|(?P<set>\[(?:[^\]\\\n]|\\.)*\])|(?P<count>\{\s*(?P<minimum>\d+)\s*(?P<comma>,\s*(?P<maximum>\d*)\s*)?\})"""
    r"""|(?P<sign>[()|*+?.])"""
)
_CHARACTER = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {each: each for each in "\\\"'[]^-"}
_COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Name(NamedTuple):
    """A reference to a rule."""

    name: str


_Node = Any  # an `Expression` in which a `_Name` stands for the texts of its rule


def parse(text: str, depth: int = DEPTH, counts: bool = False) -> Automaton:
    """Returns the texts of the rule "root".

    Args:
      text: rules `name ::= expression`. An expression has texts in double quotes, sets of characters `[a-z]` and
        `[^a-z]`, `.` for any character, names of rules, parentheses, `|`, and `*`, `+`, `?`, `{2}`, `{2,}` or `{2,4}`
        after a part. Comments begin with `#`.
      depth: how often a rule may be within itself, where this is no loop.
      counts: as of `jlade.constraints.automaton.build`.

    Raises:
      ValueError: names the line and what is expected there, a rule that is missing, or a rule without texts.
    """
    try:
        rules = _Parser(text).rules()
        if ROOT not in rules:
            raise ValueError(f"ebnf: the rule {ROOT!r} is missing; there are {', '.join(rules) or 'none'}")
        found = build(_Compiler(rules, depth).rule(ROOT, depth), counts)
    except RecursionError as error:
        raise ValueError("ebnf: parentheses or rules are too many within each other") from error
    if not found.is_final.any():
        raise ValueError(f"ebnf: no text of the rule {ROOT!r} ends, with rules up to {depth} levels within themselves")
    return found


class _Parser:
    """Reads the rules of a text, each as a node."""

    def __init__(self, text: str) -> None:
        self._text, self._tokens, self._place = text, list(_tokens(text)), 0

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._kind() != "end":
            name = self._take("name")
            if name in rules:
                raise self._error(f"another name than {name!r}, which is a rule already", -1)
            self._take("is")
            rules[name] = self._options()
        for match in self._tokens:
            if match is not None and match.lastgroup == "name" and match[0] not in rules:
                raise ValueError(f"ebnf, line {self._line(match)}: there is no rule {match[0]!r}")
        return rules

    def _options(self) -> _Node:
        options = [self._sequence()]
        while self._is_sign("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while (part := self._part()) is not None:
            parts.append(self._counted(part))
        return parts[0] if len(parts) == 1 else Series(tuple(parts))

    def _part(self) -> _Node | None:
        kind, match = self._kind(), self._tokens[self._place]
        if match is None or (kind == "name" and self._kind(1) == "is"):
            return None
        if kind in ("name", "text", "set"):
            self._place += 1
        match kind:
            case "name":
                return _Name(match[0])
            case "text":
                return literal("".join(chr(code) for _, code in self._spelled(match, match[0][1:-1])))
            case "set":
                return self._set(match)
        if self._is_sign("."):
            return characters(((0, LAST_CODE_POINT),))
        if self._is_sign("("):
            inner = self._options()
            if not self._is_sign(")"):
                raise self._error("')'")
            return inner
        return None

    def _counted(self, part: _Node) -> _Node:
        while (match := self._tokens[self._place]) is not None:
            if match["minimum"] is not None:
                minimum = int(match["minimum"])
                maximum = minimum if match["comma"] is None else int(match["maximum"]) if match["maximum"] else None
                if maximum is not None and maximum < minimum:
                    raise self._error(f"a count of at least {minimum}")
            elif match[0] in _COUNTS:
                minimum, maximum = _COUNTS[match[0]]
            else:
                break
            self._place += 1
            part = Repeat(part, minimum, maximum)
        return part

    def _set(self, match: re.Match[str]) -> Expression:
        content = match[0][1:-1]
        is_negated = content.startswith("^")
        spelled = [(each[0], code) for each, code in self._spelled(match, content[is_negated:])]
        ranges, place = list[tuple[int, int]](), 0
        while place < len(spelled):
            first = last = spelled[place][1]
            if place + 2 < len(spelled) and spelled[place + 1][0] == "-":
                last = spelled[place + 2][1]
                place += 2
            if last < first:
                raise ValueError(f"ebnf, line {self._line(match)}: {match[0]} has a range that ends before it begins")
            ranges.append((first, last))
            place += 1
        return characters(character_set(ranges, is_negated))

    def _spelled(self, match: re.Match[str], text: str) -> Iterator[tuple[str, int]]:
        """Yields how each character is written, and its code point."""
        for each in _CHARACTER.finditer(text):
            *codes, escaped, plain = each.groups()
            code = next((int(digits, 16) for digits in codes if digits), None)
            if code is None:
                if escaped is not None and escaped not in _ESCAPES:
                    raise ValueError(f"ebnf, line {self._line(match)}: \\{escaped} is no known escape")
                code = ord(plain if escaped is None else _ESCAPES[escaped])
            if code > LAST_CODE_POINT or 0xD800 <= code <= 0xDFFF:
                raise ValueError(f"ebnf, line {self._line(match)}: {each[0]} is no character")
            yield each[0], code

    def _kind(self, ahead: int = 0) -> str:
        place = self._place + ahead
        match = self._tokens[place] if place < len(self._tokens) else None
        return "end" if match is None else str(match.lastgroup)

    def _is_sign(self, sign: str) -> bool:
        """Whether the next token is a sign, which is then taken."""
        match = self._tokens[self._place]
        is_next = match is not None and match[0] == sign and match.lastgroup == "sign"
        self._place += is_next
        return is_next

    def _take(self, kind: str) -> str:
        match = self._tokens[self._place]
        if match is None or match.lastgroup != kind:
            raise self._error({"name": "the name of a rule", "is": "'::='"}[kind])
        self._place += 1
        return match[0]

    def _error(self, expected: str, ahead: int = 0) -> ValueError:
        match = self._tokens[self._place + ahead]
        got = "the end" if match is None else repr(match[0])
        return ValueError(f"ebnf, line {self._line(match)}: expected {expected}, got {got}")

    def _line(self, match: re.Match[str] | None) -> int:
        end = len(self._text) if match is None else match.start()
        return self._text.count("\n", 0, end) + 1


def _tokens(text: str) -> Iterator[re.Match[str] | None]:
    """Yields the tokens of a grammar, and None at its end."""
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            line = text.count("\n", 0, place) + 1
            raise ValueError(f"ebnf, line {line}: expected a part of a rule, got {text[place : place + 12]!r}")
        if match.lastgroup != "space":
            yield match
        place = match.end()
    yield None


class _Compiler:
    """Makes expressions of rules."""

    def __init__(self, rules: dict[str, _Node], depth: int) -> None:
        self._rules, self._depth = rules, depth
        uses = {name: _names(node) for name, node in rules.items()}
        self._reached = {name: _reach(uses, name) for name in rules}
        self.rule = functools.cache(self._rule)

    def _rule(self, name: str, depth: int) -> Expression:
        """Returns the texts of a rule, with itself up to `depth` levels within it."""
        if depth < 0:
            return NOTHING
        together = {each for each in self._reached[name] if name in self._reached[each]}
        # The rules that refer to each other are places of a network, and a reference at an end is a move among them.
        places = {each: place for place, each in enumerate([name, *sorted(together - {name})])}
        end = len(places)
        at_end = self._has_loop(together, True) or not self._has_loop(together, False)
        edges: list[tuple[int, Expression | None, int]] = []
        for rule, place in places.items():
            for parts, other in _branches(self._rules[rule], together, at_end):
                moved = self._expression(Series(parts), depth, together)
                if at_end:
                    edges.append((place, moved, end if other is None else places[other]))
                else:  # the other rule comes first; place 0 is before all of them
                    edges.append((0 if other is None else 1 + places[other], moved, 1 + place))
        if at_end:
            return Network(end + 1, tuple(edges))
        return Network(end + 2, (*edges, (1, None, end + 1)))

    def _has_loop(self, together: Set[str], at_end: bool) -> bool:
        """Whether some of the rules lead back to themselves by references at their ends, or at their beginnings."""
        moves = {
            rule: {other for _, other in _branches(self._rules[rule], together, at_end) if other is not None}
            for rule in together
        }
        return any(rule in _reach(moves, rule) for rule in together)

    def _expression(self, node: _Node, depth: int, together: Set[str]) -> Expression:
        """Returns the texts of a part of a rule with `depth` levels."""
        match node:
            case _Name(name):
                return self.rule(name, depth - 1 if name in together else self._depth)
            case Series(parts):
                return Series(tuple(self._expression(each, depth, together) for each in parts))
            case Choice(options):
                return Choice(tuple(self._expression(each, depth, together) for each in options))
            case Repeat(part, minimum, maximum):
                return Repeat(self._expression(part, depth, together), minimum, maximum)
        return node


def _reach(moves: Mapping[str, set[str]], name: str) -> set[str]:
    """Returns the names that a name leads to, directly or by way of others."""
    reached, left = set[str](), [name]
    while left:
        new = moves[left.pop()] - reached
        reached |= new
        left += new
    return reached


def _names(node: _Node) -> set[str]:
    """Returns the rules that a node refers to."""
    match node:
        case _Name(name):
            return {name}
        case Series(parts) | Choice(parts):
            return set().union(*map(_names, parts))
        case Repeat(part):
            return _names(part)
    return set()


def _branches(node: _Node, names: Set[str], at_end: bool) -> Iterator[tuple[tuple[_Node, ...], str | None]]:
    """Yields the alternatives of a node: a rule among `names` at its end, or its beginning, and the parts besides."""
    if names.isdisjoint(_names(node)):
        yield (node,), None
        return
    match node:
        case _Name(name):
            yield (), name
        case Choice(options):
            for option in options:
                yield from _branches(option, names, at_end)
        case Repeat(part, 0, 1):
            yield (), None
            yield from _branches(part, names, at_end)
        case Series((*parts, last)) if at_end:
            for rest, other in _branches(last, names, at_end):
                yield (*parts, *rest), other
        case Series((first, *parts)):
            for rest, other in _branches(first, names, at_end):
                yield (*rest, *parts), other
        case _:
            yield (node,), None
