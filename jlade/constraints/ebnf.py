"""Grammars of named rules in EBNF, as llama.cpp (GBNF) and XGrammar write them, as expressions over bytes.

Rules that lead back to themselves by references at their ends, or else at their beginnings, are loops of the automaton.
Other references of a rule to itself, as within brackets, are followed to a bounded depth.
"""

import functools
import re
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

from jlade.constraints.automaton import (
    NOTHING,
    Automaton,
    Choice,
    Expression,
    Network,
    Repeat,
    Series,
    build,
    characters,
    choice,
    leaves,
    literal,
    reached,
    replaced,
    sequence,
)
from jlade.constraints.code_points import ALL, LAST_CODE_POINT, character_set

DEPTH = 3  # of rules within themselves
ROOT = "root"
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<is>::=)|(?P<name>[A-Za-z_][\w.-]*)|(?P<text>"(?:[^"\\\n]|\\.)*")"""
    r"""|(?P<set>\[(?:[^\]\\\n]|\\.)*\])|(?P<count>\{\s*(?P<minimum>\d+)\s*(?P<comma>,\s*(?P<maximum>\d*)\s*)?\})"""
    r"""|(?P<sign>[()|*+?.])|(?P<end>\Z)"""
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
        automaton = build(_Compiler(rules, depth).rule(ROOT, depth), counts)
    except RecursionError as error:
        raise ValueError("ebnf: parentheses or rules are too many within each other") from error
    if not automaton.is_final.any():
        raise ValueError(f"ebnf: no text of the rule {ROOT!r} ends, with rules up to {depth} levels within themselves")
    return automaton


class _Parser:
    """Reads the rules of a text, each as a node."""

    def __init__(self, text: str) -> None:
        self._text, self._tokens, self._index = text, list(_tokens(text)), 0

    @property
    def _token(self) -> re.Match[str]:
        return self._tokens[self._index]

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._token.lastgroup != "end":
            name = self._take("name", "the name of a rule")
            if name in rules:
                raise self._error(f"another name than {name!r}, which is a rule already", -1)
            self._take("is", "'::='")
            rules[name] = self._options()
        for token in self._tokens:
            if token.lastgroup == "name" and token[0] not in rules:
                raise self._wrong(token, f"there is no rule {token[0]!r}")
        return rules

    def _options(self) -> _Node:
        options = [self._sequence()]
        while self._is_sign("|"):
            options.append(self._sequence())
        return choice(*options)

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while (part := self._part()) is not None:
            parts.append(self._counted(part))
        return sequence(*parts)

    def _part(self) -> _Node | None:
        token = self._token
        if token.lastgroup == "name" and self._tokens[self._index + 1].lastgroup == "is":
            return None
        if token.lastgroup in ("name", "text", "set"):
            self._index += 1
        match token.lastgroup:
            case "name":
                return _Name(token[0])
            case "text":
                return literal("".join(chr(code) for _, code in self._spelled(token, token[0][1:-1])))
            case "set":
                return self._set(token)
        if self._is_sign("."):
            return characters(ALL)
        if self._is_sign("("):
            inner = self._options()
            if not self._is_sign(")"):
                raise self._error("')'")
            return inner
        return None

    def _counted(self, part: _Node) -> _Node:
        while (token := self._token).lastgroup == "count" or token[0] in _COUNTS:
            if token.lastgroup == "count":
                minimum = int(token["minimum"])
                maximum = minimum if token["comma"] is None else int(token["maximum"]) if token["maximum"] else None
                if maximum is not None and maximum < minimum:
                    raise self._error(f"a count of at least {minimum}")
            else:
                minimum, maximum = _COUNTS[token[0]]
            self._index += 1
            part = Repeat(part, minimum, maximum)
        return part

    def _set(self, token: re.Match[str]) -> Expression:
        content = token[0][1:-1]
        is_negated = content.startswith("^")
        spelled = list(self._spelled(token, content[is_negated:]))
        ranges, index = list[tuple[int, int]](), 0
        while index < len(spelled):
            first = last = spelled[index][1]
            if index + 2 < len(spelled) and spelled[index + 1][0] == "-":
                last = spelled[index + 2][1]
                index += 2
            if last < first:
                raise self._wrong(token, f"{token[0]} has a range that ends before it begins")
            ranges.append((first, last))
            index += 1
        return characters(character_set(ranges, is_negated))

    def _spelled(self, token: re.Match[str], text: str) -> Iterator[tuple[str, int]]:
        """Yields how each character is written, and its code point."""
        for character in _CHARACTER.finditer(text):
            *codes, escaped, plain = character.groups()
            code = next((int(digits, 16) for digits in codes if digits), None)
            if code is None:
                if escaped is not None and escaped not in _ESCAPES:
                    raise self._wrong(token, f"\\{escaped} is no known escape")
                code = ord(plain if escaped is None else _ESCAPES[escaped])
            if code > LAST_CODE_POINT or 0xD800 <= code <= 0xDFFF:
                raise self._wrong(token, f"{character[0]} is no character")
            yield character[0], code

    def _is_sign(self, sign: str) -> bool:
        """Whether the next token is a sign, which is then taken."""
        is_next = self._token[0] == sign
        self._index += is_next
        return is_next

    def _take(self, kind: str, name: str) -> str:
        token = self._token
        if token.lastgroup != kind:
            raise self._error(name)
        self._index += 1
        return token[0]

    def _error(self, expected: str, ahead: int = 0) -> ValueError:
        token = self._tokens[self._index + ahead]
        got = "the end" if token.lastgroup == "end" else repr(token[0])
        return self._wrong(token, f"expected {expected}, got {got}")

    def _wrong(self, token: re.Match[str], message: str) -> ValueError:
        return ValueError(f"ebnf, line {_line(self._text, token.start())}: {message}")


def _tokens(text: str) -> Iterator[re.Match[str]]:
    """Yields the tokens of a grammar, the last one of which is its end."""
    begin = 0
    while True:
        token = _TOKEN.match(text, begin)
        if token is None:
            got = text[begin : begin + 12]
            raise ValueError(f"ebnf, line {_line(text, begin)}: expected a part of a rule, got {got!r}")
        if token.lastgroup != "space":
            yield token
        if token.lastgroup == "end":
            return
        begin = token.end()


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


class _Compiler:
    """Makes expressions of rules."""

    def __init__(self, rules: dict[str, _Node], depth: int) -> None:
        self._rules, self._depth = rules, depth
        uses = {name: _names(node) for name, node in rules.items()}
        self._reached = {name: reached(uses, name) for name in rules}
        self.rule = functools.cache(self._rule)

    def _rule(self, name: str, depth: int) -> Expression:
        """Returns the texts of a rule, with itself up to `depth` levels within it."""
        if depth < 0:
            return NOTHING
        together = {rule for rule in self._reached[name] if name in self._reached[rule]}
        # The rules that refer to rule other are places of a network, and a reference at an end is a move among them.
        places = {rule: place for place, rule in enumerate([name, *sorted(together - {name})])}
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
        return any(rule in reached(moves, rule) for rule in together)

    def _expression(self, node: _Node, depth: int, together: Set[str]) -> Expression:
        """Returns the texts of a part of a rule with `depth` levels."""

        def of_leaf(leaf: Any) -> Expression:
            if not isinstance(leaf, _Name):
                return leaf
            return self.rule(leaf.name, depth - 1 if leaf.name in together else self._depth)

        return replaced(node, of_leaf)


def _names(node: _Node) -> set[str]:
    """Returns the rules that a node refers to."""
    return {leaf.name for leaf in leaves(node) if isinstance(leaf, _Name)}


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
