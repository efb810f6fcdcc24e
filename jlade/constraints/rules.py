"""Grammars of named rules, in whichever notation, as expressions over bytes.

Rules that lead back to themselves by references at their ends, or else at their beginnings, are loops of the automaton.
Other references of a rule to itself, as within brackets, are followed to a bounded depth.
"""

import abc
import functools
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

from jlade.constraints.automaton import (
    NOTHING,
    Automaton,
    Choice,
    Expression,
    Network,
    Repeat,
    Series,
    TooLargeError,
    build,
    choice,
    leaves,
    minimal,
    reached,
    replaced,
    sequence,
)
from jlade.constraints.code_points import LAST_CODE_POINT

DEPTH = 3  # of rules within themselves
_CHARACTER = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class Name(NamedTuple):
    """A reference to a rule."""

    name: str


Node = Any  # an `Expression` in which a `Name` stands for the texts of its rule


def automaton_of(notation: str, rules: Mapping[str, Node], first: str, depth: int, counts: bool) -> Automaton:
    """Returns the texts of a rule.

    Args:
      notation: the name of the notation, for errors.
      rules: by their names.
      first: the name of the rule.
      depth: how often a rule may be within itself, where this is no loop.
      counts: as of `jlade.constraints.automaton.build`.

    Raises:
      ValueError: the rule is missing, or has no text.
    """
    if first not in rules:
        raise ValueError(f"{notation}: the rule {first!r} is missing; there are {', '.join(rules) or 'none'}")
    automaton = build(_Compiler(rules, first, depth).rule(first, depth), counts)
    if not automaton.is_final.any():
        levels = f"with rules up to {depth} levels within themselves"
        raise ValueError(f"{notation}: no text of the rule {first!r} ends, {levels}")
    return automaton


def names_in(node: Node) -> set[str]:
    """Returns the rules that a node refers to."""
    return {leaf.name for leaf in leaves(node) if isinstance(leaf, Name)}


class Parser(abc.ABC):
    """Reads tokens one after the other: the parts that notations share.

    A token is a match of an expression with a group for each kind. That of counts is "count", with the groups
    "minimum", "comma" and "maximum"; the last token is of the kind "end".
    """

    notation: str
    escapes: Mapping[str, str]  # the characters that a letter after a backslash stands for

    def __init__(self, text: str, tokens: Iterator[re.Match[str]]) -> None:
        self.text, self.tokens, self.index = text, list(tokens), 0
        self.references: list[re.Match[str]] = []

    @property
    def token(self) -> re.Match[str]:
        return self.tokens[self.index]

    @abc.abstractmethod
    def part(self) -> Node | None:
        """Returns the next part of a sequence, None if it has ended."""

    def options(self) -> Node:
        options = [self.option()]
        while self.is_sign("|"):
            options.append(self.option())
        return choice(*options)

    def option(self) -> Node:
        parts: list[Node] = []
        while (part := self.part()) is not None:
            parts.append(self.counted(part))
        return sequence(*parts)

    def within(self, end: str) -> Node:
        """Returns what is before a closing bracket."""
        inner = self.options()
        if not self.is_sign(end):
            raise self.error(repr(end))
        return inner

    def counted(self, part: Node) -> Node:
        while (token := self.token).lastgroup == "count" or token[0] in _COUNTS:
            if token.lastgroup == "count":
                minimum = int(token["minimum"] or 0)
                maximum = minimum if token["comma"] is None else int(token["maximum"]) if token["maximum"] else None
                if maximum is not None and maximum < minimum:
                    raise self.error(f"a count of at least {minimum}")
            else:
                minimum, maximum = _COUNTS[token[0]]
            self.index += 1
            part = Repeat(part, minimum, maximum)
        return part

    def spelled(self, token: re.Match[str], text: str) -> Iterator[tuple[str, int]]:
        """Yields how each character is written, and its code point."""
        for character in _CHARACTER.finditer(text):
            *codes, escaped, plain = character.groups()
            code = next((int(digits, 16) for digits in codes if digits), None)
            if code is None:
                if escaped is not None and escaped not in self.escapes:
                    raise self.wrong(token, f"\\{escaped} is no known escape")
                code = ord(plain if escaped is None else self.escapes[escaped])
            if code > LAST_CODE_POINT or 0xD800 <= code <= 0xDFFF:
                raise self.wrong(token, f"{character[0]} is no character")
            yield character[0], code

    def is_sign(self, sign: str) -> bool:
        """Whether the next token is a sign, which is then taken."""
        is_next = self.token[0] == sign
        self.index += is_next
        return is_next

    def take(self, kind: str, name: str) -> re.Match[str]:
        token = self.token
        if token.lastgroup != kind:
            raise self.error(name)
        self.index += 1
        return token

    def reference(self, token: re.Match[str]) -> Name:
        self.references.append(token)
        return Name(token[0])

    def check_references(self, rules: Mapping[str, Node]) -> None:
        """Raises the error of a reference to a rule that is missing."""
        for token in self.references:
            if token[0] not in rules:
                raise self.wrong(token, f"there is no rule {token[0]!r}")

    def error(self, expected: str, ahead: int = 0) -> ValueError:
        token = self.tokens[self.index + ahead]
        got = "the end" if token.lastgroup == "end" else repr(token[0])
        return self.wrong(token, f"expected {expected}, got {got}")

    def wrong(self, token: re.Match[str], message: str) -> ValueError:
        return error_at(self.notation, self.text, token.start(), message)


def error_at(notation: str, text: str, position: int, message: str) -> ValueError:
    """Returns an error of a notation that names the line."""
    line = text.count("\n", 0, position) + 1
    return ValueError(f"{notation}, line {line}: {message}")


class _Compiler:
    """Makes expressions of rules."""

    def __init__(self, rules: Mapping[str, Node], first: str, depth: int) -> None:
        self._rules, self._depth = rules, depth
        self._uses = {name: names_in(node) for name, node in rules.items()}
        self._reached = {name: reached(self._uses, name) for name in rules}
        self._order = {name: place for place, name in enumerate(self._from(first))}
        self.rule, self._nested = functools.cache(self._rule), functools.cache(self._minimal)

    def _from(self, first: str) -> list[str]:
        """Returns the rules that one refers to, directly or by way of others, the nearest ones first."""
        names, known = [first], {first}
        for name in names:  # which grows
            new = self._uses[name] - known
            names += sorted(new)
            known |= new
        return names

    def _rule(self, name: str, depth: int) -> Expression:
        """Returns the texts of a rule, with itself up to `depth` levels within it."""
        if depth < 0:
            return NOTHING
        together = {rule for rule in self._reached[name] if name in self._reached[rule]}
        ends, begins = (self._moved(name, together, at_end) for at_end in (True, False))
        at_end = name in ends or name not in begins
        # The rules that refer to rule other are places of a network, and a reference at an end is a move among them.
        others = (ends if at_end else begins) - {name}
        places = {rule: place for place, rule in enumerate([name, *sorted(others)])}
        end = len(places)
        edges: list[tuple[int, Expression | None, int]] = []
        for rule, place in places.items():
            for parts, other in _branches(self._rules[rule], together, at_end):
                moved = self._expression(Series(parts), name, depth, together)
                if at_end:
                    edges.append((place, moved, end if other is None else places[other]))
                else:  # the other rule comes first; place 0 is before all of them
                    edges.append((0 if other is None else 1 + places[other], moved, 1 + place))
        if at_end:
            return Network(end + 1, tuple(edges))
        return Network(end + 2, (*edges, (1, None, end + 1)))

    def _moved(self, name: str, together: Set[str], at_end: bool) -> set[str]:
        """Returns the rules that one leads to by references at ends alone, or at beginnings."""
        moves = {
            rule: {other for _, other in _branches(self._rules[rule], together, at_end) if other is not None}
            for rule in together
        }
        return reached(moves, name)

    def _expression(self, node: Node, name: str, depth: int, together: Set[str]) -> Expression:
        """Returns the texts of a part of the rule `name`, or of one at its end or beginning, with `depth` levels."""

        def of_leaf(leaf: Any) -> Expression:
            if not isinstance(leaf, Name):
                return leaf
            if leaf.name not in together:
                return self.rule(leaf.name, self._depth)
            # Each way from a rule to itself goes back in the order once.
            return self._nested(leaf.name, depth - (self._order[leaf.name] <= self._order[name]))

        return replaced(node, of_leaf)

    def _minimal(self, name: str, depth: int) -> Expression:
        """Returns the texts of a rule within itself, of which there are many copies at each level."""
        texts = self.rule(name, depth)
        try:
            return minimal(build(texts))
        except TooLargeError:  # as long as its repetitions are not counted
            return texts


def _branches(node: Node, names: Set[str], at_end: bool) -> Iterator[tuple[tuple[Node, ...], str | None]]:
    """Yields the alternatives of a node: a rule among `names` at its end, or its beginning, and the parts besides."""
    if names.isdisjoint(names_in(node)):
        yield (node,), None
        return
    match node:
        case Name(name):
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
