"""Regular expressions as trees, which are the same for all dialects, and as expressions over bytes.

An assertion, such as "^" or "\\b", is a leaf that reads nothing: a condition on the characters before and after its
place. A tree with assertions becomes a network whose places know the kind of the last character and the kinds that the
next one may have. What lies beyond them is an expression as it stands, so that its repetitions may be counted.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jlade.constraints.automaton import (
    NOTHING,
    Expression,
    Network,
    Ranges,
    Repeat,
    build,
    characters,
    choice,
    common,
    minimal,
    sequence,
    without,
)

Spelling = Callable[[Ranges], Expression]  # of one character
ALL = without(())


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


class Concatenation(NamedTuple):
    """Trees one after the other."""

    parts: tuple["Tree", ...]


class Alternation(NamedTuple):
    """One of several trees."""

    options: tuple["Tree", ...]


class Repetition(NamedTuple):
    """A tree several times."""

    part: "Tree"
    minimum: int
    maximum: int | None  # None for any number


Tree = Characters | Assertion | Concatenation | Alternation | Repetition
ANY_NEIGHBOR = Neighbor(ALL, True)
ANY_TEXT = Repetition(Characters(ALL), 0, None)


def begin(line_ends: Ranges = ()) -> Tree:
    """Returns the assertion that the text begins here, or a line after one of `line_ends`."""
    return Assertion(Neighbor(line_ends, True), ANY_NEIGHBOR)


def end(line_ends: Ranges = ()) -> Tree:
    """Returns the assertion that the text ends here, or a line before one of `line_ends`."""
    return Assertion(ANY_NEIGHBOR, Neighbor(line_ends, True))


def boundary(word: Ranges) -> Tree:
    """Returns the assertion that a word begins or ends here."""
    inside, outside = Neighbor(word, False), Neighbor(without(word), True)
    return Alternation((Assertion(inside, outside), Assertion(outside, inside)))


def no_boundary(word: Ranges) -> Tree:
    """Returns the assertion that no word begins or ends here."""
    inside, outside = Neighbor(word, False), Neighbor(without(word), True)
    return Alternation((Assertion(inside, inside), Assertion(outside, outside)))


def expression(tree: Tree, spell: Spelling = characters) -> Expression:
    """Returns the texts of a tree, `NOTHING` where its assertions contradict each other.

    Args:
      tree: its texts.
      spell: how a character of some ranges is written; in UTF-8 by default.
    """
    assertions = {leaf for leaf in _leaves(tree) if isinstance(leaf, Assertion)}
    return _Product(assertions, spell).network(tree) if assertions else _plain(tree, spell)


def _leaves(tree: Tree) -> Iterator[Characters | Assertion]:
    match tree:
        case Concatenation(parts) | Alternation(parts):
            for part in parts:
                yield from _leaves(part)
        case Repetition(part):
            yield from _leaves(part)
        case _:
            yield tree


def _plain(tree: Tree, spell: Spelling) -> Expression:
    """Returns the texts of a tree without assertions."""
    match tree:
        case Characters(ranges):
            return _spelled(ranges, spell)
        case Concatenation(parts):
            return sequence(*(_plain(part, spell) for part in parts))
        case Alternation(options):
            return choice(*(_plain(option, spell) for option in options))
        case Repetition(part, minimum, maximum):
            return Repeat(_plain(part, spell), minimum, maximum)
        case Assertion():
            raise AssertionError(tree)


@functools.lru_cache(maxsize=256)
def _spelled(ranges: Ranges, spell: Spelling) -> Expression:
    is_ascii = not ranges or ranges[-1][1] < 0x80
    return spell(ranges) if is_ascii else minimal(build(spell(ranges)))  # many ranges of bytes lead to one state


def _may_be_empty(tree: Tree) -> bool:
    match tree:
        case Concatenation(parts):
            return all(map(_may_be_empty, parts))
        case Alternation(options):
            return any(map(_may_be_empty, options))
        case Repetition(part, minimum):
            return minimum == 0 or _may_be_empty(part)
    return False


def _not_empty(tree: Tree) -> Tree:
    """Returns the texts of a tree without assertions, but for the empty one."""
    if not _may_be_empty(tree):
        return tree
    match tree:
        case Concatenation(parts):
            rests = (Concatenation((_not_empty(part), *parts[i + 1 :])) for i, part in enumerate(parts))
            return Alternation(tuple(rests))
        case Repetition(part, _, maximum) if maximum != 0:
            return Repetition(_not_empty(part), 1, maximum)
        case Alternation(options):
            return Alternation(tuple(map(_not_empty, options)))
    return Alternation(())


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
        neighbors = {each for assertion in assertions for each in assertion}
        parts = [ALL]
        for ranges in {each.ranges for each in neighbors}:
            parts = [part for each in parts for part in (common(each, ranges), common(each, without(ranges))) if part]
        last = [each for each in parts if any(other.is_last and common(each, other.ranges) for other in neighbors)]
        self.all_kinds = frozenset(range(1 + len(parts) + len(last)))
        self.kinds = [_Kind((), self.all_kinds)]
        self.kinds += [_Kind(each, self.all_kinds - {EDGE} if each in last else self.all_kinds) for each in parts]
        self.kinds += [_Kind(each, frozenset([EDGE])) for each in last]
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
        kept, left = {goal}, [goal]
        while left:
            new = set(sources.get(left.pop(), ())) - kept
            kept |= new
            left += new
        if 0 not in kept:
            return NOTHING
        number = {place: index for index, place in enumerate(sorted(kept))}
        edges = [(number[a], each, number[b]) for a, each, b in self.edges if a in kept and b in kept]
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
        if not any(isinstance(leaf, Assertion) for leaf in _leaves(tree)):
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
            case Concatenation(parts):
                for index, part in enumerate(parts):
                    places = self.walk(part, places, is_seen or _looks_back(Concatenation(parts[index + 1 :])))
                return places
            case Alternation(options):
                found = [self.walk(option, places, is_seen) for option in options]
                return self.joined((place, None, mode) for each in found for mode, place in each.items())
            case Repetition(part, minimum, maximum):
                is_seen = is_seen or _looks_back(part)
                for _ in range(minimum):
                    places = self.walk(part, places, is_seen)
                if maximum is None:
                    return self._loop(part, places, is_seen)
                found = [places]
                for _ in range(maximum - minimum):
                    found.append(self.walk(part, found[-1], is_seen))
                return self.joined((place, None, mode) for each in found for mode, place in each.items())

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
        found = {
            kind
            for leaf in _leaves(tree)
            for kind, (ranges, _) in enumerate(self.kinds)
            if isinstance(leaf, Characters) and common(ranges, leaf.ranges)
        }
        return found.pop() if len(found) == 1 else None

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
    return any(isinstance(leaf, Assertion) and leaf.before != ANY_NEIGHBOR for leaf in _leaves(tree))
