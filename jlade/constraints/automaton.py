"""Deterministic automata over bytes, made of expressions: sequences, choices, repetitions, and what they exclude.

They are made by the subset construction. An automaton may count the iterations of a repetition, such as the characters
of a string, where the next byte always says whether another one begins: its states are those of one iteration then, not
of all.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Set
from typing import Any, NamedTuple, Self

import numpy as np

from jlade.constraints import moves as moves_lib
from jlade.constraints.moves import DEAD

MOST_STATES = moves_lib.STATE  # of an automaton; those of larger ones would take minutes to find
COUNTED = 8  # iterations of which a repetition is counted
CHEAP = 20  # iterations of one byte that may take states each, if a repetition around them is counted
NO_LOOP = -1
LAST_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


class TooLargeError(ValueError):
    """An automaton has more than `MOST_STATES` states."""

    def __init__(self) -> None:
        super().__init__(f"an automaton has more than {MOST_STATES} states")


class Byte(NamedTuple):
    """One byte of a set."""

    accepted: int  # bit b is set for byte b


class Series(NamedTuple):
    """Expressions one after the other."""

    parts: tuple["Expression", ...]


class Choice(NamedTuple):
    """One of several expressions."""

    options: tuple["Expression", ...]


class Repeat(NamedTuple):
    """An expression several times."""

    part: "Expression"
    least: int
    most: int | None  # None for any number


class Network(NamedTuple):
    """Expressions between numbered places, from place 0 to the last one; None for a move that reads nothing."""

    size: int
    edges: tuple[tuple[int, "Expression | None", int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
    """A deterministic automaton that begins in state 0, from each of whose states a text can be completed."""

    moves: np.ndarray  # [S, K] int32, as `jlade.constraints.moves` has them: without loops, the states after them
    class_of_byte: np.ndarray  # [256] int32, bytes that are alike in all states
    is_final: np.ndarray  # [S] bool, at the least count of its loop
    bounds: np.ndarray | None = None  # [S, 2] int32, the least and most iterations of its loop; None without loops

    @property
    def next_state(self) -> np.ndarray:
        """The state after a byte of each class in each state, `DEAD` where no text goes on, [S, K] int32."""
        return self.moves if self.bounds is None else moves_lib.state_after(self.moves)

    def likely(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the likely text after each state, and the number of its bytes that are certain: no other may come.

        It is the shortest one with which a text ends, but for a space after each comma and colon, as JSON is written.

        Returns:
          [S, most] int32, -1 after its end, and [S] int32.
        """
        next_state = self.next_state
        distance = np.append(_distances(next_state, self.is_final), len(self.is_final))
        chosen = distance[next_state].argmin(axis=1)  # of the classes of bytes; `DEAD` is the last
        _, byte_of_class = np.unique(self.class_of_byte, return_index=True)
        byte = np.where(self.is_final, -1, byte_of_class[chosen])
        number = (next_state != DEAD) @ np.bincount(self.class_of_byte, minlength=next_state.shape[1])
        is_certain = (number == 1) & ~self.is_final

        takes_space = next_state[:, self.class_of_byte[ord(" ")]] != DEAD

        state, last = np.arange(len(byte)), np.full(len(byte), -1)
        text, num_certain = np.full((len(byte), most), -1), np.zeros(len(byte), np.int32)
        for place in range(most):
            last = np.where(np.isin(last, list(b",:")) & takes_space[state], ord(" "), byte[state])
            last[state == DEAD] = -1
            text[:, place] = last
            num_certain += (num_certain == place) & (last >= 0) & is_certain[state]
            state = np.where(last < 0, DEAD, next_state[state, self.class_of_byte[last]])
        return text, num_certain

    def checked(self) -> Self:
        """Returns the automaton, whose arrays may be of a file.

        Raises:
          ValueError: they are not those of an automaton.
        """
        (size, num_classes), classes = self.moves.shape, self.class_of_byte
        bounds = np.zeros((size, 2), np.int32) if self.bounds is None else self.bounds
        arrays = self.moves, classes, bounds, self.is_final
        states = moves_lib.state_after(self.moves)
        if not (
            [each.dtype for each in arrays] == [np.int32, np.int32, np.int32, np.bool_]
            and (classes.shape, bounds.shape, self.is_final.shape) == ((256,), (size, 2), (size,))
            and 0 < size <= MOST_STATES
            and ((states >= DEAD) & (states < size)).all()
            and ((classes >= 0) & (classes < num_classes)).all()
        ):
            raise ValueError("the arrays are not those of an automaton")
        return self

    def accepts(self, text: bytes) -> bool:
        """Whether the automaton accepts a whole text."""
        state = self.run(text)
        return state != DEAD and self.ends(state)

    def ends(self, state: int) -> bool:
        """Whether a text may end in a state, which has a count."""
        least = 0 if self.bounds is None else self.bounds[state & moves_lib.STATE, 0]
        return bool(self.is_final[state & moves_lib.STATE] and moves_lib.count(state) >= least)

    def run(self, text: bytes, state: int = 0) -> int:
        """Returns the state after a text, with its count."""
        for byte in text:
            place = state & moves_lib.STATE
            move = int(self.moves[place, self.class_of_byte[byte]])
            least, most = (0, moves_lib.UNBOUNDED) if self.bounds is None else self.bounds[place].tolist()
            if not moves_lib.is_allowed(state, move, least, most):
                return DEAD
            state = moves_lib.after(state, move)
        return state


Expression = Byte | Series | Choice | Repeat | Network | Automaton
EMPTY = Series(())
NOTHING = Choice(())


def sequence(*parts: Expression) -> Expression:
    """Returns expressions one after the other."""
    return parts[0] if len(parts) == 1 else Series(parts)


def choice(*options: Expression) -> Expression:
    """Returns one of several expressions."""
    return options[0] if len(options) == 1 else Choice(options)


def optional(part: Expression) -> Expression:
    """Returns an expression that may be left out."""
    return Repeat(part, 0, 1)


def literal(text: str | bytes) -> Expression:
    """Returns a text."""
    encoded = text.encode() if isinstance(text, str) else text
    return sequence(*(Byte(1 << byte) for byte in encoded)) if encoded else EMPTY


def byte_range(first: int, last: int) -> Byte:
    """Returns one byte from `first` to `last`."""
    return Byte(((1 << (last - first + 1)) - 1) << first)


Ranges = tuple[tuple[int, int], ...]  # of code points, sorted and apart


def characters(ranges: Ranges) -> Expression:
    """Returns one character of some ranges of code points, in UTF-8."""
    return choice(*(option for first, last in ranges for option in _utf8(first, last)))


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Returns the ranges of code points that are in one of several."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def without(ranges: Ranges) -> Ranges:
    """Returns the code points of characters that are in none of some ranges."""
    left, begin = [], 0
    for first, last in union([*ranges, SURROGATES]):
        if begin < first:
            left.append((begin, first - 1))
        begin = last + 1
    return (*left, (begin, LAST_CODE_POINT)) if begin <= LAST_CODE_POINT else tuple(left)


def character_set(ranges: Iterable[tuple[int, int]], is_negated: bool) -> Ranges:
    """Returns the code points of characters that are in one of some ranges, or in none of them."""
    rest = without(union(ranges))
    return rest if is_negated else without(rest)


@functools.cache
def _utf8(first: int, last: int) -> tuple[Expression, ...]:
    """Returns sequences of ranges of bytes that spell the code points `first` to `last`."""
    for bound in (0x7F, 0x7FF, SURROGATES[0] - 1, SURROGATES[1], 0xFFFF):
        if first <= bound < last:
            return _utf8(first, bound) + _utf8(bound + 1, last)
    if SURROGATES[0] <= first <= SURROGATES[1] or first > last:
        return ()
    begin, end = chr(first).encode(), chr(last).encode()
    for place in range(1, len(begin)):
        # All continuation bytes from here on must be free, or the bytes before them must be equal.
        mask = (1 << (6 * (len(begin) - place))) - 1
        if first & ~mask != last & ~mask:
            if first & mask:
                return _utf8(first, first | mask) + _utf8((first | mask) + 1, last)
            if last & mask != mask:
                return _utf8(first, (last & ~mask) - 1) + _utf8(last & ~mask, last)
    return (sequence(*(byte_range(*pair) for pair in zip(begin, end, strict=True))),)


class _Graph:
    """A nondeterministic automaton that grows, with moves that read nothing.

    A counted loop has one place between iterations. From there lead a state in which an iteration begins, and one in
    which the loop has been left.

    Args:
      unrolled: repetitions that are not counted; None for all.
    """

    def __init__(self, unrolled: Set[Repeat] | None) -> None:
        self.reads: list[list[tuple[int, int]]] = []  # of each state: a set of bytes, and the state after it
        self.skips: list[list[int]] = []
        self.loop: list[int] = []  # of each state, `NO_LOOP` for none
        self.loops: list[Repeat] = []
        self.known_loops: dict[Repeat, int] = {}  # the places in `loops`
        self.between: set[int] = set()  # the places between iterations
        self.begins: set[int] = set()  # states in which an iteration begins
        self.unrolled = unrolled
        self.current = NO_LOOP
        self.begin = self.end = self.state()

    def state(self) -> int:
        self.reads.append([])
        self.skips.append([])
        self.loop.append(self.current)
        if len(self.reads) > 40 * MOST_STATES:
            raise TooLargeError
        return len(self.reads) - 1

    def _is_counted(self, part: Repeat) -> bool:
        """Whether a repetition is a loop: it has more iterations than each one within it."""
        if self.unrolled is None or self.current != NO_LOOP or part.most is None:
            return False
        is_long = COUNTED <= part.most <= moves_lib.MOST_COUNT
        return is_long and part not in self.unrolled and _most_within(part.part) < part.most

    def _add_loop(self, part: Repeat, begin: int) -> int:
        """Adds a counted loop, and returns the state in which it has been left."""
        # Equal ones are one loop: where a text may be in several of them, it has begun as many iterations in each.
        self.current = self.known_loops.setdefault(part, len(self.loops))
        if self.current == len(self.loops):
            self.loops.append(part)
        between, first = self.state(), self.state()
        self.between.add(between)
        self.begins.add(first)
        self.skips[begin].append(between)
        self.skips[between].append(first)
        self.skips[self.add(part.part, first)].append(between)
        self.current = NO_LOOP
        end = self.state()
        self.skips[between].append(end)
        return end

    def add(self, expression: Expression, begin: int) -> int:
        """Adds an expression that begins in a state, and returns the state in which it ends."""
        match expression:
            case Byte(accepted):
                end = self.state()
                self.reads[begin].append((accepted, end))
            case Series(parts):
                end = begin
                for part in parts:
                    end = self.add(part, end)
            case Choice(options):
                end = self.state()
                for option in options:
                    first = self.state()
                    self.skips[begin].append(first)
                    self.skips[self.add(option, first)].append(end)
            case Repeat() if self._is_counted(expression):
                end = self._add_loop(expression, begin)
            case Repeat(part, least, most):
                end = begin
                for _ in range(least):
                    end = self.add(part, end)
                if most is None:
                    loop, begin = self.state(), end
                    end = self.state()
                    self.skips[begin].append(loop)
                    self.skips[self.add(part, loop)].append(loop)
                    self.skips[loop].append(end)
                else:
                    exits = [end]
                    for _ in range(most - least):
                        exits.append(self.add(part, exits[-1]))
                    end = self.state()
                    for each in exits:
                        self.skips[each].append(end)
            case Network(size, edges):
                places = [self.state() for _ in range(size)]
                self.skips[begin].append(places[0])
                end = places[-1]
                for source, move, target in edges:
                    if move is None:
                        self.skips[places[source]].append(places[target])
                    else:
                        # A state of its own, as a move may lead back to its beginning.
                        first = self.state()
                        self.skips[places[source]].append(first)
                        self.skips[self.add(move, first)].append(places[target])
            case Automaton():
                end = self._add_automaton(expression, begin)
        return end

    def _add_automaton(self, automaton: Automaton, begin: int) -> int:
        end, states = self.state(), [self.state() for _ in automaton.next_state]
        members = [0] * automaton.next_state.shape[1]
        for byte, each in enumerate(automaton.class_of_byte):
            members[each] |= 1 << byte
        self.skips[begin].append(states[0])
        for state, row, is_final in zip(states, automaton.next_state, automaton.is_final, strict=True):
            accepted: dict[int, int] = {}
            for member, target in zip(members, row.tolist(), strict=True):
                if target != DEAD:
                    accepted[target] = accepted.get(target, 0) | member
            self.reads[state] += [(each, states[target]) for target, each in accepted.items()]
            if is_final:
                self.skips[state].append(end)
        return end


def _most_within(expression: Expression) -> int:
    """Returns the most iterations of the bounded repetitions in an expression, but for cheap ones."""
    match expression:
        case Series(parts) | Choice(parts):
            return max(map(_most_within, parts), default=0)
        case Repeat(Byte(), _, int(most)) if most <= CHEAP:
            return 0
        case Repeat(part, _, most):
            return max(most or 0, _most_within(part))
        case Network(_, edges):
            return max((_most_within(part) for _, part, _ in edges if part is not None), default=0)
    return 0


class _Member(NamedTuple):
    """One of the states of a graph in which a text may be, and what has been passed since the last byte."""

    state: int
    begins: bool = False  # an iteration has begun, in the loop of the text or in the next one
    leaves: bool = False  # the loop of the text has been left


class _Subset(NamedTuple):
    """The states of a graph in which a text may be: a state of the deterministic automaton."""

    members: frozenset[_Member]
    loop: int  # which counts for all of them, or `NO_LOOP`


class _AmbiguousError(Exception):
    """A text may be in one of several loops, or may have begun another iteration or not."""

    def __init__(self, loops: set[int]) -> None:
        super().__init__()
        self.loops = loops


def _closure(graph: _Graph, state: int) -> frozenset[_Member]:
    """Returns the members that are reached without reading, of those that read and the end.

    Raises:
      _AmbiguousError: an iteration may be empty.
    """
    seen, left = {_Member(state)}, [_Member(state)]
    while left:
        here, begins, leaves = left.pop()
        for target in graph.skips[here]:
            after = _Member(target, begins, leaves)
            if target in graph.begins:
                after = _Member(target, True, leaves)
            elif target in graph.between and begins:
                raise _AmbiguousError({graph.loop[target]})
            elif here in graph.between:
                loop = graph.loop[here]
                if loop == graph.loop[state] and not leaves:
                    after = _Member(target, begins, True)
                elif graph.loops[loop].least > 0:  # it has just been entered
                    continue
            if after not in seen:
                seen.add(after)
                left.append(after)
    return frozenset(each for each in seen if graph.reads[each.state] or each.state == graph.end)


def build(expression: Expression, counts: bool = False) -> Automaton:
    """Returns the automaton that accepts the texts of an expression.

    Args:
      expression: its texts.
      counts: whether it may count iterations. Products are made of automata that do not.

    Raises:
      TooLargeError: it has more than `MOST_STATES` states.
    """
    if isinstance(expression, Automaton):
        return expression
    unrolled = set[Repeat]() if counts else None
    while True:
        graph = _Graph(unrolled)
        graph.end = graph.add(expression, graph.begin)
        found, ambiguous = _determined(graph)
        if unrolled is None or not ambiguous:
            return found
        unrolled |= {graph.loops[loop] for loop in ambiguous}


def _determined(graph: _Graph) -> tuple[Automaton, set[int]]:
    """Returns the deterministic automaton of a graph, and the loops that it cannot count.

    Raises:
      TooLargeError: it has more than `MOST_STATES` states.
    """
    class_of_byte, members = _byte_classes({accepted for reads in graph.reads for accepted, _ in reads})
    reads = [[(members[accepted], target) for accepted, target in reads] for reads in graph.reads]
    closure, ambiguous = functools.cache(functools.partial(_closure, graph)), set[int]()

    def subset(states: frozenset[int]) -> _Subset:
        try:
            if len(loops := {graph.loop[each] for each in states}) > 1:
                raise _AmbiguousError(loops)
            return _Subset(frozenset().union(*map(closure, states)), loops.pop())
        except _AmbiguousError as error:
            ambiguous.update(error.loops)
            return _Subset(frozenset(), NO_LOOP)

    first = subset(frozenset([graph.begin]))
    places, subsets, rows = {first: 0}, [first], list[np.ndarray]()
    while len(rows) < len(subsets):
        here = subsets[len(rows)]
        targets: dict[int, set[int]] = {}
        passed: dict[int, tuple[bool, bool]] = {}
        for state, begins, leaves in here.members:
            for classes, target in reads[state]:
                for each in classes:
                    targets.setdefault(each, set()).add(target)
                    if passed.setdefault(each, (begins, leaves)) != (begins, leaves):
                        ambiguous.add(here.loop)
        row = np.full(class_of_byte.max() + 1, DEAD, np.int32)
        known: dict[frozenset[int], int] = {}
        for each, reached in targets.items():
            key = frozenset(reached)
            if key not in known:
                after = subset(key)
                if after not in places:
                    places[after] = len(subsets)
                    subsets.append(after)
                    if len(subsets) > MOST_STATES:
                        raise TooLargeError
                known[key] = places[after]
            row[each] = moves_lib.move(known[key], *passed[each])
        rows.append(row)
    is_final = np.array([any(member.state == graph.end for member in each.members) for each in subsets])
    bounds = None
    if graph.loops:
        of_loop = [(each.least, each.most) for each in graph.loops]
        bounds = np.array([*of_loop, (0, moves_lib.UNBOUNDED)], np.int32)[[each.loop for each in subsets]]
    return _trimmed(Automaton(np.stack(rows), class_of_byte, is_final, bounds)), ambiguous - {NO_LOOP}


def minimal(automaton: Automaton) -> Automaton:
    """Returns the automaton of the same texts with the fewest states, by Moore's algorithm.

    It is for small parts, of which others have many copies: the time grows with the length of texts.
    """
    next_state, block = automaton.next_state, automaton.is_final.astype(np.intp)
    while True:  # states that differ after one byte more are apart
        after = np.where(next_state == DEAD, DEAD, block[next_state])
        rows = np.column_stack([block, after])
        _, members, refined = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        if len(members) == len(np.unique(block)):
            break
        block = refined.reshape(-1)
    order = np.argsort(members)  # the block of state 0 comes first
    rank = np.append(np.argsort(order), DEAD).astype(np.int32)
    members = members[order]
    after = np.where(next_state == DEAD, DEAD, refined.reshape(-1)[next_state])[members]
    return Automaton(rank[after], automaton.class_of_byte, automaton.is_final[members])


def _byte_classes(sets: Iterable[int]) -> tuple[np.ndarray, dict[int, tuple[int, ...]]]:
    """Returns the class of each byte [256], and the classes of each set of bytes."""
    different = list(sets)
    bits = np.array([list((each).to_bytes(32, "little")) for each in different], np.uint8).reshape(len(different), 32)
    columns = np.unpackbits(bits, axis=1, bitorder="little")  # [sets, 256]
    of_class, class_of_byte = np.unique(columns, axis=1, return_inverse=True)
    members = {each: tuple(np.flatnonzero(row).tolist()) for each, row in zip(different, of_class, strict=True)}
    return class_of_byte.reshape(256).astype(np.int32), members


def distances(sources: np.ndarray, targets: np.ndarray, is_final: np.ndarray) -> np.ndarray:
    """Returns the least number of transitions from each state to a final one [S] int32, -1 where there is no way.

    Args:
      sources, targets: the ends of the transitions.
      is_final: [S] bool.
    """
    distance = np.where(is_final, 0, -1).astype(np.int32)
    sources, targets = np.divmod(np.unique(sources.astype(np.int64) * len(is_final) + targets), len(is_final))
    while (is_met := distance[targets] >= 0).any():
        distance[sources[is_met]] = distance.max() + 1
        is_left = distance[sources] < 0
        sources, targets = sources[is_left], targets[is_left]
    return distance


def _distances(next_state: np.ndarray, is_final: np.ndarray) -> np.ndarray:
    """Returns `distances` for the transitions of an automaton [S, K]."""
    sources, classes = np.nonzero(next_state != DEAD)
    return distances(sources, next_state[sources, classes], is_final)


def restricted(moves: np.ndarray, is_kept: np.ndarray) -> np.ndarray:
    """Returns the moves between the states that are kept, numbered anew."""
    place = np.append(np.where(is_kept, np.cumsum(is_kept) - 1, DEAD), DEAD).astype(np.int32)  # the last for `DEAD`
    kept = moves[is_kept]
    target = place[moves_lib.state_after(kept)]
    return np.where(target == DEAD, DEAD, target | kept & ~moves_lib.STATE)


def _trimmed(automaton: Automaton) -> Automaton:
    """Returns an automaton without the states from which no text can be completed, but for the first one."""
    is_kept = _distances(automaton.next_state, automaton.is_final) >= 0
    is_kept[0] = True
    bounds = None if automaton.bounds is None else automaton.bounds[is_kept]
    moves = restricted(automaton.moves, is_kept)
    return Automaton(moves, automaton.class_of_byte, automaton.is_final[is_kept], bounds)


def intersection(first: Expression, second: Expression) -> Automaton:
    """Returns the automaton of the texts that both expressions accept."""
    return _product(build(first), build(second), lambda x, y: x & y)


def difference(first: Expression, second: Expression) -> Automaton:
    """Returns the automaton of the texts that the first expression accepts and the second does not."""
    return _product(build(first), build(second), lambda x, y: x & ~y)


def _product(first: Automaton, second: Automaton, is_final: Callable[[np.ndarray, np.ndarray], Any]) -> Automaton:
    pairs = np.stack([first.class_of_byte, second.class_of_byte])
    classes, class_of_byte = np.unique(pairs, axis=1, return_inverse=True)

    def completed(automaton: Automaton, of_class: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the transitions and the final states with a last state for dead texts."""
        dead = len(automaton.next_state)
        table = automaton.next_state[:, of_class]
        table = np.vstack([np.where(table == DEAD, dead, table), np.full((1, table.shape[1]), dead)])
        return table, np.append(automaton.is_final, False)

    (table, final), (other, other_final) = completed(first, classes[0]), completed(second, classes[1])
    dead = len(table) - 1, len(other) - 1
    places, states, rows = {(0, 0): 0}, [(0, 0)], list[list[int]]()
    while len(rows) < len(states):
        here = states[len(rows)]
        row = []
        for pair in zip(table[here[0]].tolist(), other[here[1]].tolist(), strict=True):
            if pair[0] == dead[0]:
                row.append(DEAD)
                continue
            if pair not in places:
                places[pair] = len(states)
                states.append(pair)
                if len(states) > MOST_STATES:
                    raise TooLargeError
            row.append(places[pair])
        rows.append(row)
    chosen = np.array(states)
    accepted = is_final(final[chosen[:, 0]], other_final[chosen[:, 1]])
    return _trimmed(Automaton(np.array(rows, np.int32), class_of_byte.reshape(256).astype(np.int32), accepted))
