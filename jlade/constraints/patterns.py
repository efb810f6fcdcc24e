"""Regular expressions as trees, which are the same for all dialects, and as expressions over bytes.

An assertion, such as "^" or "\\b", is a leaf that reads nothing: a condition on the characters before and after its
place. A tree with assertions becomes a network whose places know the kind of the last character and the kinds that the
next one may have. What lies beyond them is an expression as it stands, so that its repetitions may be counted. Of what
follows a look-ahead the texts are those that begin with its texts, too, or that do not: a product of automata.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jlade.constraints.automaton import (
    NOTHING,
    Choice,
    Expression,
    Network,
    Repeat,
    Series,
    build,
    characters,
    difference,
    intersection,
    leaves,
    minimal,
    reached,
    replaced,
)
from jlade.constraints.code_points import ALL, Ranges, common, without

Spelling = Callable[[Ranges], Expression]  # of one character


class Characters(NamedTuple):
    """One character of some ranges."""

    ranges: Ranges


class Neighbor(NamedTuple):
    """What may be on one side of a place: a character of some ranges, or nothing, where the text begins or ends."""

    ranges: Ranges
    is_edge: bool  # whether it may be nothing
    is_last: bool = False  # whether the character must be the last one of the text


class Assertion(NamedTuple):
    """A place between two neighbors."""

    before: Neighbor
    after: Neighbor


MAX_WAYS = 64  # through alternatives with a look-ahead, each of which is an expression of its own


class LookAhead(NamedTuple):
    """A place after which a text of a tree comes, or none."""

    tree: "Tree"
    is_negative: bool


# An `Expression` of `Series`, `Choice` and `Repeat`, whose leaves are `Characters`, `Assertion` and `LookAhead`.
Tree = Any
ANY_NEIGHBOR = Neighbor(ALL, True)
ANY_CHARACTER: Tree = Characters(ALL)
ANY_TEXT = Repeat(ANY_CHARACTER, 0, None)


def begin(line_ends: Ranges = ()) -> Tree:
    """Returns the assertion that the text begins here, or a line after one of `line_ends`."""
    return Assertion(Neighbor(line_ends, True), ANY_NEIGHBOR)


def end(line_ends: Ranges = ()) -> Tree:
    """Returns the assertion that the text ends here, or a line before one of `line_ends`."""
    return Assertion(ANY_NEIGHBOR, Neighbor(line_ends, True))


def boundary(word: Ranges) -> Tree:
    """Returns the assertion that a word begins or ends here."""
    inside, outside = Neighbor(word, False), Neighbor(without(word), True)
    return either(Assertion(inside, outside), Assertion(outside, inside))


def no_boundary(word: Ranges) -> Tree:
    """Returns the assertion that no word begins or ends here."""
    inside, outside = Neighbor(word, False), Neighbor(without(word), True)
    return either(Assertion(inside, inside), Assertion(outside, outside))


def either(first: Tree, second: Tree) -> Tree:
    """Returns one of two trees."""
    return Choice((first, second))


def expression(tree: Tree, spell: Spelling = characters) -> Expression:
    """Returns the texts of a tree, `NOTHING` where its assertions contradict each other.

    Args:
      tree: its texts.
      spell: how a character of some ranges is written; in UTF-8 by default.

    Raises:
      ValueError: a look-ahead is where it is not supported.
    """
    if _looks_ahead(tree):
        if (number := _ways(tree)) > MAX_WAYS:
            raise ValueError(
                f"look-ahead in {number} combinations of alternatives is not supported, only in {MAX_WAYS}"
            )
        return _looking((), (tree,), spell)
    assertions = set(_assertions(tree))
    return _Product(assertions, spell).network(tree) if assertions else _plain(tree, spell)


def _looks_ahead(tree: Tree) -> bool:
    return any(isinstance(leaf, LookAhead) for leaf in leaves(tree))


def _ways(tree: Tree) -> int:
    """Returns the number of ways through the alternatives in which there is a look-ahead."""
    match tree:
        case _ if not _looks_ahead(tree):
            return 1
        case LookAhead(part):
            return _ways(part)
        case Series(parts):
            return math.prod(map(_ways, parts))
        case Choice(options):
            return sum(map(_ways, options))
        case Repeat(part):
            return 1 + _ways(part)
    raise AssertionError(tree)


def _looking(before: tuple[Tree, ...], after: tuple[Tree, ...], spell: Spelling) -> Expression:
    """Returns the texts of trees one after the other, of which `before` has no look-ahead."""
    if not any(map(_looks_ahead, after)):
        return expression(Series((*before, *after)), spell)
    first, *rest = after
    match first:
        case LookAhead(tree, is_negative):
            if any(assertion.after != ANY_NEIGHBOR for assertion in _assertions(Series(before))):
                raise ValueError("a look-ahead after $, \\b or \\B is not supported")
            if before[-1:] != (begin(),) and _looks_back(Series((tree, *rest))):
                raise ValueError("^, \\b or \\B after a look-ahead that is not at the beginning is not supported")
            left, seen = _looking((), tuple(rest), spell), _looking((), (tree, ANY_TEXT), spell)
            return Series(
                (expression(Series(before), spell), (difference if is_negative else intersection)(left, seen))
            )
        case Series(parts):
            return _looking(before, (*parts, *rest), spell)
        case Choice(options) if _looks_ahead(first):
            return Choice(tuple(_looking(before, (option, *rest), spell) for option in options))
        case Repeat(part, 0, 1) if _looks_ahead(first):
            return Choice((_looking(before, tuple(rest), spell), _looking(before, (part, *rest), spell)))
        case Repeat() if _looks_ahead(first):
            raise ValueError("a look-ahead that is repeated is not supported")
    return _looking((*before, first), tuple(rest), spell)


def _plain(tree: Tree, spell: Spelling) -> Expression:
    """Returns the texts of a tree without assertions."""
    return replaced(tree, lambda leaf: _spelled(leaf.ranges, spell))


def _assertions(tree: Tree) -> Iterator[Assertion]:
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Assertion))


@functools.lru_cache(maxsize=256)
def _spelled(ranges: Ranges, spell: Spelling) -> Expression:
    is_ascii = not ranges or ranges[-1][1] < 0x80
    return spell(ranges) if is_ascii else minimal(build(spell(ranges)))  # many ranges of bytes lead to one state


def _may_be_empty(tree: Tree) -> bool:
    match tree:
        case Series(parts):
            return all(map(_may_be_empty, parts))
        case Choice(options):
            return any(map(_may_be_empty, options))
        case Repeat(part, minimum):
            return minimum == 0 or _may_be_empty(part)
    return False


def _not_empty(tree: Tree) -> Tree:
    """Returns the texts of a tree without assertions, but for the empty one."""
    if not _may_be_empty(tree):
        return tree
    match tree:
        case Series(parts):
            rests = (Series((_not_empty(part), *parts[i + 1 :])) for i, part in enumerate(parts))
            return Choice(tuple(rests))
        case Repeat(part, _, maximum) if maximum != 0:
            return Repeat(_not_empty(part), 1, maximum)
        case Choice(options):
            return Choice(tuple(map(_not_empty, options)))
    return Choice(())


class _Kind(NamedTuple):
    """Characters that no assertion of a tree tells apart."""

    ranges: Ranges
    next_kinds: frozenset[int]  # of the character after one of these


class _Mode(NamedTuple):
    """What is known around a place."""

    before: int  # the kind of the last character
    after: frozenset[int]  # kinds that the next one may have


EDGE = 0  # the kind of nothing, where the text begins or ends
UNKNOWN = -1  # the kind before a place that no assertion looks back from
Places = dict[_Mode, int]
Move = tuple[int, Expression | None, _Mode]


class _Product:
    """The network of a tree: places of the tree times modes."""

    def __init__(self, assertions: Iterable[Assertion], spell: Spelling) -> None:
        neighbors = {neighbor for assertion in assertions for neighbor in assertion}
        parts = [ALL]
        for ranges in {neighbor.ranges for neighbor in neighbors}:
            sides = ranges, without(ranges)
            parts = [common_part for part in parts for side in sides if (common_part := common(part, side))]
        last = [part for part in parts if any(other.is_last and common(part, other.ranges) for other in neighbors)]
        self.all_kinds = frozenset(range(1 + len(parts) + len(last)))
        self.kinds = [_Kind((), self.all_kinds)]
        self.kinds += [_Kind(part, self.all_kinds - {EDGE} if part in last else self.all_kinds) for part in parts]
        self.kinds += [_Kind(part, frozenset([EDGE])) for part in last]
        self.spell, self.size, self.edges = spell, 0, list[tuple[int, Expression | None, int]]()

    def network(self, tree: Tree) -> Expression:
        """Returns the texts of the tree."""
        ends = self.walk(tree, {_Mode(EDGE, self.all_kinds): self.place()}, False)
        goal = self.place()
        self.edges += [(place, None, goal) for mode, place in ends.items() if EDGE in mode.after]
        # Places from which there is no way to the end would keep repetitions elsewhere from being counted.
        sources: dict[int, list[int]] = {}
        for source, _, target in self.edges:
            sources.setdefault(target, []).append(source)
        kept = {goal} | reached(sources, goal)
        if 0 not in kept:
            return NOTHING
        number = {place: index for index, place in enumerate(sorted(kept))}
        edges = [(number[a], move, number[b]) for a, move, b in self.edges if a in kept and b in kept]
        return Network(len(kept), tuple(edges))

    def place(self) -> int:
        self.size += 1
        return self.size - 1

    def joined(self, moves: Iterable[Move]) -> Places:
        """Returns a new place for each mode that some moves lead to."""
        places: Places = {}
        for source, move, mode in moves:
            if mode not in places:
                places[mode] = self.place()
            self.edges.append((source, move, places[mode]))
        return places

    def walk(self, tree: Tree, places: Places, is_seen: bool) -> Places:
        """Returns the places after a tree that begins in some places.

        Args:
          tree: what lies between them.
          places: where it begins.
          is_seen: whether an assertion after the tree looks back.
        """
        if not any(_assertions(tree)):
            if not is_seen and all(mode.after == self.all_kinds for mode in places):
                whole = _plain(tree, self.spell)
                return self.joined((place, whole, _Mode(UNKNOWN, self.all_kinds)) for place in places.values())
            if (kind := self._kind_of(tree)) is not None:
                return self.joined(self._moves_of_a_kind(tree, kind, places, is_seen))
        match tree:
            case Characters(ranges):
                return self.joined(
                    (place, _spelled(shared, self.spell), _Mode(kind if is_seen else UNKNOWN, next_kinds))
                    for mode, place in places.items()
                    for kind, (of_kind, next_kinds) in enumerate(self.kinds)
                    if kind in mode.after and (shared := common(of_kind, ranges))
                )
            case Assertion(before, after):
                return self.joined(
                    (place, None, _Mode(mode.before if is_seen else UNKNOWN, left))
                    for mode, place in places.items()
                    if self._fits(mode.before, before)
                    and (left := frozenset(kind for kind in mode.after if self._fits(kind, after)))
                )
            case Series(parts):
                for index, part in enumerate(parts):
                    places = self.walk(part, places, is_seen or _looks_back(Series(parts[index + 1 :])))
                return places
            case Choice(options):
                ends = [self.walk(option, places, is_seen) for option in options]
                return self.joined((place, None, mode) for places in ends for mode, place in places.items())
            case Repeat(part, minimum, maximum):
                is_seen = is_seen or _looks_back(part)
                for _ in range(minimum):
                    places = self.walk(part, places, is_seen)
                if maximum is None:
                    return self._loop(part, places, is_seen)
                ends = [places]
                for _ in range(maximum - minimum):
                    ends.append(self.walk(part, ends[-1], is_seen))
                return self.joined((place, None, mode) for places in ends for mode, place in places.items())
        raise AssertionError(tree)

    def _loop(self, part: Tree, places: Places, is_seen: bool) -> Places:
        """Returns the places between the iterations of any number of a part."""
        loop = self.joined((place, None, mode) for mode, place in places.items())
        new = dict(loop)
        while new:
            ends = self.walk(part, new, is_seen)
            new = {mode: self.place() for mode in ends if mode not in loop}
            loop |= new
            self.edges += [(place, None, loop[mode]) for mode, place in ends.items()]
        return loop

    def _kind_of(self, tree: Tree) -> int | None:
        """Returns the kind of all characters of a tree, None if there are several or they may be the last one."""
        kinds = {
            kind
            for leaf in leaves(tree)
            for kind, (ranges, _) in enumerate(self.kinds)
            if isinstance(leaf, Characters) and common(ranges, leaf.ranges)
        }
        return kinds.pop() if len(kinds) == 1 else None

    def _moves_of_a_kind(self, tree: Tree, kind: int, places: Places, is_seen: bool) -> Iterator[Move]:
        """Yields the moves of a tree whose characters are of one kind."""
        some = _plain(_not_empty(tree), self.spell)
        for mode, place in places.items():
            if _may_be_empty(tree):
                yield place, None, mode
            if kind in mode.after:
                yield place, some, _Mode(kind if is_seen else UNKNOWN, self.all_kinds)

    def _fits(self, kind: int, neighbor: Neighbor) -> bool:
        if neighbor == ANY_NEIGHBOR:
            return True
        ranges, next_kinds = self.kinds[kind]
        if kind == EDGE:
            return neighbor.is_edge
        return bool(common(ranges, neighbor.ranges)) and (not neighbor.is_last or next_kinds == {EDGE})


def _looks_back(tree: Tree) -> bool:
    return any(
        _looks_back(leaf.tree) if isinstance(leaf, LookAhead) else leaf.before != ANY_NEIGHBOR
        for leaf in leaves(tree)
        if isinstance(leaf, LookAhead | Assertion)
    )
