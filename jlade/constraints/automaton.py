"""Deterministic automata over bytes, made of expressions: sequences, choices, repetitions, and what they exclude.

They are made by the subset construction. An automaton may count the iterations of a repetition, such as the characters
of a string, where the next byte always says whether another one begins: its states are those of one iteration then, not
of all.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from jlade.constraints import moves as moves_lib
from jlade.constraints.code_points import SURROGATES, Ranges
from jlade.constraints.moves import DEAD

MAX_STATES = moves_lib.STATE  # of an automaton; those of larger ones would take minutes to find
MAX_PLACES = 8 * MAX_STATES  # of a nondeterministic automaton, of which one is made
COUNTED = 8  # iterations of which a repetition is counted
NO_LOOP = -1
Node = TypeVar("Node", bound=Hashable)  # of a graph


class TooLargeError(ValueError):
    """An automaton has more than `MAX_STATES` states.

    Args:
      name: of the part that has most of them, None if there is no such part.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__((f"{name}: " if name else "") + f"an automaton of more than {MAX_STATES} states is too large")
        self.name = name


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
    minimum: int
    maximum: int | None  # None for any number


class Network(NamedTuple):
    """Expressions between numbered places, from place 0 to the last one; None for a move that reads nothing."""

    size: int
    edges: tuple[tuple[int, "Expression | None", int], ...]


class Named(NamedTuple):
    """An expression with a name for errors."""

    part: "Expression"
    name: str


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

    def likely(self, maximum: int) -> tuple[np.ndarray, np.ndarray]:
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
        text, num_certain = np.full((len(byte), maximum), -1), np.zeros(len(byte), np.int32)
        for place in range(maximum):
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
            [array.dtype for array in arrays] == [np.int32, np.int32, np.int32, np.bool_]
            and (classes.shape, bounds.shape, self.is_final.shape) == ((256,), (size, 2), (size,))
            and 0 < size <= MAX_STATES
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
        minimum = 0 if self.bounds is None else self.bounds[state & moves_lib.STATE, 0]
        return bool(self.is_final[state & moves_lib.STATE] and moves_lib.count(state) >= minimum)

    def run(self, text: bytes, state: int = 0) -> int:
        """Returns the state after a text, with its count."""
        for byte in text:
            place = state & moves_lib.STATE
            move = int(self.moves[place, self.class_of_byte[byte]])
            minimum, maximum = (0, moves_lib.UNBOUNDED) if self.bounds is None else self.bounds[place].tolist()
            if not moves_lib.is_allowed(state, move, minimum, maximum):
                return DEAD
            state = moves_lib.after(state, move)
        return state


class Counted(NamedTuple):
    """The texts of an automaton with some number of iterations, which another one counts; made by `counted`."""

    part: Automaton
    counter: Automaton
    minimum: int
    maximum: int | None
    automaton: Automaton  # that has one loop, and its first state outside of it

    def unrolled(self) -> Automaton:
        """Returns the automaton that has states for each number of iterations."""
        return intersection(self.part, _repeated(self.counter, self.minimum, self.maximum))


Expression = Byte | Series | Choice | Repeat | Network | Named | Automaton | Counted
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


def leaves(tree: Any) -> Iterator[Any]:
    """Yields what the sequences, choices and repetitions of an expression are made of; it may be anything."""
    match tree:
        case Series(parts) | Choice(parts):
            for part in parts:
                yield from leaves(part)
        case Repeat(part):
            yield from leaves(part)
        case _:
            yield tree


def replaced(tree: Any, replace: Callable[[Any], Expression]) -> Expression:
    """Returns an expression with others in the place of its leaves."""
    match tree:
        case Series(parts):
            return sequence(*(replaced(part, replace) for part in parts))
        case Choice(options):
            return choice(*(replaced(option, replace) for option in options))
        case Repeat(part, minimum, maximum):
            return Repeat(replaced(part, replace), minimum, maximum)
    return replace(tree)


def reached(moves: Mapping[Node, Iterable[Node]], first: Node) -> set[Node]:
    """Returns the nodes that a node leads to, directly or by way of others."""
    nodes, left = set[Node](), [first]
    while left:
        new = {*moves.get(left.pop(), ())} - nodes
        nodes |= new
        left += new
    return nodes


def characters(ranges: Ranges) -> Expression:
    """Returns one character of some ranges of code points, in UTF-8."""
    return choice(*(option for first, last in ranges for option in _utf8(first, last)))


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


class _Loop(NamedTuple):
    """A part of a graph whose iterations are counted."""

    part: Repeat | Counted
    minimum: int
    maximum: int


class _Graph:
    """A nondeterministic automaton that grows, with moves that read nothing.

    A repetition that is counted has one place between iterations. From there lead a state in which an iteration begins,
    and one in which the loop has been left. The moves of an automaton that counts have iterations of their own.

    Args:
      unrolled: repetitions that are not counted; None for all.
    """

    def __init__(self, unrolled: Set[Repeat | Counted] | None) -> None:
        # Of each state: a set of bytes, the state after it, and the iterations that it begins.
        self.reads: list[list[tuple[int, int, int]]] = []
        self.skips: list[list[int]] = []
        self.loop: list[int] = []  # of each state, `NO_LOOP` for none
        self.loops: list[_Loop] = []
        self.between: set[int] = set()  # the places between iterations
        self.begins: set[int] = set()  # states in which an iteration begins
        self.unrolled = unrolled
        self.current = NO_LOOP
        self.sizes = collections.Counter[str]()  # states of the parts that have names
        self.known_sizes: dict[tuple[int, bool], float] = {}
        self.begin = self.end = self.state()

    def state(self) -> int:
        self.reads.append([])
        self.skips.append([])
        self.loop.append(self.current)
        if len(self.reads) > MAX_PLACES:
            raise TooLargeError
        return len(self.reads) - 1

    def largest(self) -> str | None:
        """Returns the name of the part that has most of the states."""
        return next((name for name, size in self.sizes.items() if 2 * size > len(self.reads)), None)

    def _may_count(self, part: Repeat | Counted) -> bool:
        return self.unrolled is not None and self.current == NO_LOOP and part not in self.unrolled

    def _is_counted(self, part: Repeat) -> bool:
        """Whether a repetition is a loop: it takes more states than those within it if they are not counted."""
        number = _iterations(part)
        if number < COUNTED or part.minimum > moves_lib.MAX_COUNT or not self._may_count(part):
            return False
        return self._size(part.part, False) <= number * self._size(part.part, True)

    def _size(self, expression: Expression, counts: bool) -> float:
        """Returns about the number of states of an expression, which may count or not."""
        key = id(expression), counts
        if key not in self.known_sizes:
            self.known_sizes[key] = self._found_size(expression, counts)
        return self.known_sizes[key]

    def _found_size(self, expression: Expression, counts: bool) -> float:
        match expression:
            case Series(parts) | Choice(parts):
                return 1 + sum(self._size(part, counts) for part in parts)
            case Network(size, edges):
                return size + sum(self._size(part, counts) for _, part, _ in edges if part is not None)
            case Named(part):
                return self._size(part, counts)
            case Repeat(part):
                number, alone = _iterations(expression), self._size(part, False)
                if counts and number >= COUNTED:
                    return min(alone, number * self._size(part, True))
                return number * (self._size(part, True) if counts else alone)
            case Automaton(is_final=is_final):
                return len(is_final)
            case Counted(part, _, minimum, maximum):
                return len(part.is_final) * (1 if counts else minimum + 1 if maximum is None else maximum)
        return 1

    def _add_loop(self, part: Repeat, begin: int) -> int:
        """Adds a counted loop, and returns the state in which it has been left."""
        self.current = len(self.loops)
        self.loops.append(_Loop(part, part.minimum, _most_counted(part.maximum)))
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
                self.reads[begin].append((accepted, end, 0))
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
            case Repeat(part, minimum, maximum):
                self._check_unrolled(expression)
                end = begin
                for _ in range(minimum):
                    end = self.add(part, end)
                if maximum is None:
                    loop, begin = self.state(), end
                    end = self.state()
                    self.skips[begin].append(loop)
                    self.skips[self.add(part, loop)].append(loop)
                    self.skips[loop].append(end)
                else:
                    exits = [end]
                    for _ in range(maximum - minimum):
                        exits.append(self.add(part, exits[-1]))
                    end = self.state()
                    for exit in exits:
                        self.skips[exit].append(end)
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
            case Named(part, name):
                before = len(self.reads)
                try:
                    end = self.add(part, begin)
                except TooLargeError as error:
                    raise TooLargeError(error.name and name) from None
                finally:
                    self.sizes[name] += len(self.reads) - before
            case Automaton():
                end = self._add_automaton(expression, begin)
            case Counted(automaton=automaton):
                if self._may_count(expression):
                    self.loops.append(_Loop(expression, expression.minimum, _most_counted(expression.maximum)))
                    end = self._add_automaton(automaton, begin, len(self.loops) - 1)
                else:
                    end = self._add_automaton(expression.unrolled(), begin)
        return end

    def _check_unrolled(self, part: Repeat) -> None:
        """Raises the error of a repetition without a loop that has too many states, before they are made."""
        number = _iterations(part)
        # The states of a deterministic part are certain, those of others are a guess.
        maximum = 2 * MAX_STATES if isinstance(part.part, Automaton) else MAX_PLACES
        counts = self.unrolled is not None and self.current == NO_LOOP
        if number > MAX_STATES or number * self._size(part.part, counts) > maximum:
            raise TooLargeError(
                f"a repetition of {part.minimum} to {'any number' if part.maximum is None else part.maximum}"
            )

    def _add_automaton(self, automaton: Automaton, begin: int, loop: int = NO_LOOP) -> int:
        """Adds an automaton, whose states but for the first one may be in a loop."""
        end, first = self.state(), self.state()
        around, self.current = self.current, self.current if loop == NO_LOOP else loop
        states = [first, *(self.state() for _ in automaton.is_final[1:])]
        self.current = around
        self.skips[begin].append(states[0])
        for state, reads, is_final in zip(states, _reads(automaton), automaton.is_final.tolist(), strict=True):
            self.reads[state] += [(accepted, states[target], begun) for accepted, target, begun in reads]
            if is_final:
                self.skips[state].append(end)
                if loop != NO_LOOP and state != first:
                    self.between.add(state)
        return end


@functools.lru_cache(maxsize=256)
def _reads(automaton: Automaton) -> list[list[tuple[int, int, int]]]:
    """Returns for each state the sets of bytes that it reads, the states after these, and the iterations they begin."""
    members = [0] * automaton.moves.shape[1]
    for byte, byte_class in enumerate(automaton.class_of_byte.tolist()):
        members[byte_class] |= 1 << byte
    of_states = []
    for row in automaton.moves.tolist():
        accepted: dict[int, int] = {}
        for member, move in zip(members, row, strict=True):
            if move != DEAD:
                accepted[move] = accepted.get(move, 0) | member
        of_states.append([(each, move & moves_lib.STATE, moves_lib.begun(move)) for move, each in accepted.items()])
    return of_states


def _iterations(part: Repeat) -> int:
    """Returns the iterations of a repetition that take states if they are not counted."""
    return part.minimum + 1 if part.maximum is None else part.maximum


def _most_counted(maximum: int | None) -> int:
    """Returns the most iterations of a loop: the count has no place for more."""
    return min(moves_lib.MAX_COUNT, moves_lib.MAX_COUNT if maximum is None else maximum)


# One of the states of a graph in which a text may be, and what has been passed since the last byte: whether an
# iteration begins, in the loop of the text or in the next one, and whether the loop of the text has been left. It is a
# plain tuple, as a NamedTuple takes three times as long to make.
_Member = tuple[int, bool, bool]


class _Subset(NamedTuple):
    """The states of a graph in which a text may be: a state of the deterministic automaton."""

    members: frozenset[_Member]
    bounds: tuple[int, int] | None  # of the loops, which have one count for all of them; None outside of loops


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
    first = state, False, False
    seen, left = {first}, [first]
    while left:
        here, begins, leaves = left.pop()
        for target in graph.skips[here]:
            after = target, begins, leaves
            if target in graph.begins:
                after = target, True, leaves
            elif target in graph.between and begins:
                raise _AmbiguousError({graph.loop[target]})
            elif here in graph.between:
                loop = graph.loop[here]
                if loop == graph.loop[state] and not leaves:
                    after = target, begins, True
                elif graph.loops[loop].minimum > 0:  # it has just been entered
                    continue
            if after not in seen:
                seen.add(after)
                left.append(after)
    return frozenset(member for member in seen if graph.reads[member[0]] or member[0] == graph.end)


def build(expression: Expression, counts: bool = False) -> Automaton:
    """Returns the automaton that accepts the texts of an expression.

    Args:
      expression: its texts.
      counts: whether it may count iterations. Products are made of automata that do not.

    Raises:
      TooLargeError: it has more than `MAX_STATES` states.
    """
    if isinstance(expression, Automaton):
        return expression
    if isinstance(expression, Counted) and not counts:
        return expression.unrolled()
    unrolled = set[Repeat | Counted]() if counts else None
    while True:
        graph = _Graph(unrolled)
        try:
            graph.end = graph.add(expression, graph.begin)
            automaton, ambiguous = _determined(graph)
        except TooLargeError as error:
            raise TooLargeError(error.name or graph.largest()) from None
        if unrolled is None or not ambiguous:
            return automaton
        unrolled |= {graph.loops[loop].part for loop in ambiguous}


def _determined(graph: _Graph) -> tuple[Automaton, set[int]]:
    """Returns the deterministic automaton of a graph, and the loops that it cannot count.

    Raises:
      TooLargeError: it has more than `MAX_STATES` states.
    """
    class_of_byte, members = _byte_classes({accepted for reads in graph.reads for accepted, _, _ in reads})
    reads = [[(members[accepted], target, begun) for accepted, target, begun in reads] for reads in graph.reads]
    closure, ambiguous = functools.cache(functools.partial(_closure, graph)), set[int]()
    bounds_of = [(loop.minimum, loop.maximum) for loop in graph.loops] + [None]  # the last for `NO_LOOP`

    def subset(states: frozenset[int]) -> _Subset:
        try:
            # Loops of equal bounds may have one count: they are entered by the same byte, and begin their iterations
            # by the same bytes, or else the moves are ambiguous.
            loops = {graph.loop[state] for state in states}
            if len(bounds := {bounds_of[loop] for loop in loops}) > 1:
                raise _AmbiguousError(loops)
            return _Subset(frozenset().union(*map(closure, states)), bounds.pop())
        except _AmbiguousError as error:
            ambiguous.update(error.loops)
            return _Subset(frozenset(), None)

    first = subset(frozenset([graph.begin]))
    places, subsets = {first: 0}, [first]
    classes_read, moves, number_read = list[int](), list[int](), list[int]()  # of all states, one after the other

    @functools.cache
    def place_after(states: frozenset[int]) -> int:
        after = subset(states)
        if after not in places:
            places[after] = len(subsets)
            subsets.append(after)
            if len(subsets) > MAX_STATES:
                raise TooLargeError
        return places[after]

    for state_set in subsets:  # which grows
        number_read.append(-len(moves))
        reading = [member for member in state_set.members if reads[member[0]]]
        if len(reading) == 1 and _are_apart(accepted for accepted, _, _ in graph.reads[reading[0][0]]):
            state, begins, leaves = reading[0]
            for classes, target, begun in reads[state]:
                classes_read += classes
                moves += [moves_lib.move(place_after(frozenset([target])), begins + begun, leaves)] * len(classes)
            number_read[-1] += len(moves)
            continue
        targets: dict[int, set[int]] = {}
        passed: dict[int, tuple[int, bool]] = {}
        for state, begins, leaves in reading:
            for classes, target, begun in reads[state]:
                passes = begins + begun, leaves
                for byte_class in classes:
                    targets.setdefault(byte_class, set()).add(target)
                    if passed.setdefault(byte_class, passes) != passes:
                        ambiguous |= {graph.loop[other] for other in targets[byte_class]}
        for byte_class, states in targets.items():
            classes_read.append(byte_class)
            moves.append(moves_lib.move(place_after(frozenset(states)), *passed[byte_class]))
        number_read[-1] += len(moves)
    table = np.full((len(subsets), class_of_byte.max() + 1), DEAD, np.int32)
    table[np.repeat(np.arange(len(subsets)), number_read), classes_read] = moves
    is_final = np.array([any(state == graph.end for state, _, _ in state_set.members) for state_set in subsets])
    bounds = None
    if graph.loops:
        bounds = np.array([state_set.bounds or (0, moves_lib.UNBOUNDED) for state_set in subsets], np.int32)
    return _trimmed(Automaton(table, class_of_byte, is_final, bounds)), ambiguous - {NO_LOOP}


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


def _are_apart(sets: Iterable[int]) -> bool:
    """Whether no byte is in two of some sets."""
    seen = 0
    for accepted in sets:
        if seen & accepted:
            return False
        seen |= accepted
    return True


def _byte_classes(sets: Iterable[int]) -> tuple[np.ndarray, dict[int, list[int]]]:
    """Returns the class of each byte [256], and the classes of each set of bytes."""
    different = list(sets)
    bits = np.array([list(member.to_bytes(32, "little")) for member in different], np.uint8).reshape(len(different), 32)
    columns = np.unpackbits(bits, axis=1, bitorder="little")  # [sets, 256]
    of_class, class_of_byte = np.unique(columns, axis=1, return_inverse=True)
    members = {accepted: np.flatnonzero(row).tolist() for accepted, row in zip(different, of_class, strict=True)}
    return class_of_byte.reshape(256).astype(np.int32), members


def distances(sources: np.ndarray, targets: np.ndarray, is_final: np.ndarray) -> np.ndarray:
    """Returns the least number of transitions from each state to a final one [S] int32, -1 where there is no way.

    Args:
      sources, targets: the ends of the transitions.
      is_final: [S] bool.
    """
    distance = np.where(is_final, 0, -1).astype(np.int32)
    sources, targets = np.divmod(np.unique(sources.astype(np.int64) * len(is_final) + targets), len(is_final))
    while True:
        is_left = distance[sources] < 0
        sources, targets = sources[is_left], targets[is_left]
        if not (is_met := distance[targets] >= 0).any():
            return distance
        distance[sources[is_met]] = distance.max() + 1


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
    return _product(build(first), build(second), both=True)


def difference(first: Expression, second: Expression) -> Automaton:
    """Returns the automaton of the texts that the first expression accepts and the second does not."""
    return _product(build(first), build(second), both=False)


def _product(first: Automaton, second: Automaton, both: bool) -> Automaton:
    """Returns the automaton of the texts that the first one accepts, and the second one too, or does not."""
    pairs = _pairs(first, second, both)
    here, there = pairs.states.T
    is_final = first.is_final[here] & (np.append(second.is_final, False)[there] == both)
    return _trimmed(Automaton(pairs.next_state, pairs.class_of_byte, is_final))


class _Pairs(NamedTuple):
    """The pairs of states in which two automata may be after a text: states of their product."""

    next_state: np.ndarray  # [S, K] int32
    class_of_byte: np.ndarray  # [256] int32
    states: np.ndarray  # [S, 2], the last state of an automaton and one for `DEAD`
    classes: np.ndarray  # [2, K], of each automaton


def _pairs(first: Automaton, second: Automaton, both: bool) -> _Pairs:
    """Returns the pairs of states that texts of the first automaton reach, or texts of both.

    Raises:
      TooLargeError: there are more than `MAX_STATES`.
    """
    pairs = np.stack([first.class_of_byte, second.class_of_byte])
    classes, class_of_byte = np.unique(pairs, axis=1, return_inverse=True)
    number = len(second.is_final) + 1  # of the second one's states, with one for `DEAD`
    one, other = first.next_state[:, classes[0]], second.next_state[:, classes[1]]
    other = np.vstack([np.where(other == DEAD, number - 1, other), np.full((1, other.shape[1]), number - 1)])

    # A pair is one number, of which each that is reached has a place.
    place_of, rows = {0: 0}, list[np.ndarray]()
    new: np.ndarray = np.zeros(1, np.int64)
    while len(new):
        here, there = np.divmod(new, number)
        is_dead = (one[here] == DEAD) | (both & (other[there] == number - 1))
        targets = np.where(is_dead, DEAD, one[here].astype(np.int64) * number + other[there])
        different, places = np.unique(targets, return_inverse=True)
        num_before = len(place_of)
        numbers = [DEAD if pair == DEAD else place_of.setdefault(pair, len(place_of)) for pair in different.tolist()]
        if len(place_of) > MAX_STATES:
            raise TooLargeError
        place = np.array(numbers, np.int32)
        rows.append(place[places.reshape(targets.shape)])
        new = different[place >= num_before]
    states = np.stack(np.divmod(np.array(list(place_of), np.int64), number), axis=1)
    return _Pairs(np.vstack(rows), class_of_byte.reshape(256).astype(np.int32), states, classes)


def meter(item: Expression) -> Automaton:
    """Returns the automaton of any number of items, whose moves say where each one begins.

    No item may begin with another one.
    """
    one = minimal(build(item))
    moves = np.where((one.next_state != DEAD) & one.is_final[one.next_state], 0, one.next_state)
    moves[0] = np.where(moves[0] == DEAD, DEAD, moves_lib.move(moves[0], 1))
    is_final, bounds = np.arange(len(moves)) == 0, moves_lib.without_bounds(len(moves))
    return _trimmed(Automaton(moves.astype(np.int32), one.class_of_byte, is_final, bounds))


def counted(part: Expression, counter: Automaton, minimum: int, maximum: int | None) -> Expression:
    """Returns the texts of an expression with `minimum` to `maximum` iterations, which a meter counts.

    The count is of the iterations that a text will have at least: those that it has begun, and the fewest with which it
    can be completed. So a text goes on as long as this is at most `maximum`, and each state takes one row.

    Args:
      part: its texts are texts of the meter too.
      counter: begins iterations by its moves, as `meter` makes it.
      minimum, maximum: the iterations; None for any number.

    Raises:
      TooLargeError: it has more than `MAX_STATES` states.
    """
    if max(minimum, maximum or 0) < COUNTED:
        return intersection(part, _repeated(counter, minimum, maximum))
    texts = build(part)
    pairs = _pairs(texts, counter, both=True)
    begins = moves_lib.begun(counter.moves)[pairs.states[:, 1]][:, pairs.classes[1]]
    moves = np.where(pairs.next_state == DEAD, DEAD, moves_lib.move(pairs.next_state, begins)).astype(np.int32)
    is_final = texts.is_final[pairs.states[:, 0]] & counter.is_final[pairs.states[:, 1]]
    whole = _trimmed(Automaton(moves, pairs.class_of_byte, is_final, moves_lib.without_bounds(len(moves))))
    ways = _Ways.of(whole)
    nearest = ways.fewest()
    if nearest[0] == FAR or (maximum is not None and nearest[0] > maximum):
        return NOTHING
    if minimum > nearest[0] and not ways.go_on(nearest):
        texts = intersection(texts, _repeated(counter, minimum, None))
        return texts if maximum is None else counted(texts, counter, 0, maximum)
    if (maximum is None or ways.are_within(maximum)) and minimum <= nearest[0]:
        return part
    if minimum > moves_lib.MAX_COUNT or nearest.max() >= moves_lib.LONGEST:
        return intersection(texts, _repeated(counter, minimum, maximum))
    return Counted(texts, counter, minimum, maximum, _counting(whole, nearest, minimum, _most_counted(maximum)))


def _counting(whole: Automaton, nearest: np.ndarray, minimum: int, maximum: int) -> Automaton:
    """Returns an automaton that counts, with a first state outside of its loop.

    Args:
      whole: without bounds; its moves begin iterations.
      nearest: the fewest iterations after each state [S].
      minimum, maximum: of a text.
    """
    target = moves_lib.state_after(whole.moves)
    before = np.vstack([np.zeros(target.shape[1], int), np.broadcast_to(nearest[:, None], target.shape)])
    target = np.vstack([target[:1], target])
    begun = np.vstack([moves_lib.begun(whole.moves[:1]), moves_lib.begun(whole.moves)]) + nearest[target] - before
    is_dead = target == DEAD
    is_dead[0] |= begun[0] > maximum
    moves = np.where(is_dead, DEAD, moves_lib.move(target + 1, begun)).astype(np.int32)
    is_final = np.append(whole.is_final[0] and minimum == 0, whole.is_final)
    bounds = np.full((len(moves), 2), (minimum, maximum), np.int32)
    bounds[0] = 0, moves_lib.UNBOUNDED
    return _trimmed(Automaton(moves, whole.class_of_byte, is_final, bounds))


FAR = 2**30  # more iterations than any


class _Ways(NamedTuple):
    """The moves of an automaton between its states, and whether each begins an iteration."""

    source: np.ndarray
    target: np.ndarray
    begins: np.ndarray
    is_final: np.ndarray  # [S]

    @classmethod
    def of(cls, automaton: Automaton) -> Self:
        states, classes = np.nonzero(automaton.moves != DEAD)
        moves = automaton.moves[states, classes]
        moves = np.stack([states, moves_lib.state_after(moves), moves_lib.begun(moves)])
        source, target, begins = np.unique(moves, axis=1)
        return cls(source, target, begins, automaton.is_final)

    def fewest(self) -> np.ndarray:
        """Returns the fewest iterations that begin after each state before a text ends [S], `FAR` for no way."""
        number = np.where(self.is_final, 0, FAR)
        while True:
            known = number.copy()
            np.minimum.at(number, self.source, number[self.target] + self.begins)
            if (number == known).all():
                return number

    def go_on(self, nearest: np.ndarray) -> bool:
        """Whether a text that may end may have one iteration more instead, and so any number more."""
        goes_on = np.zeros(len(nearest), bool)
        goes_on[self.source[(self.begins > 0) & (nearest[self.target] == 0)]] = True
        return bool(goes_on[self.is_final].all())

    def are_within(self, maximum: int) -> bool:
        """Whether all texts have at most some iterations."""
        has_more: np.ndarray = np.ones(len(self.is_final), bool)  # than the number that is passed
        for _ in range(maximum + 1):
            known, has_more = has_more, np.zeros(len(self.is_final), bool)
            has_more[self.source[(self.begins > 0) & known[self.target]]] = True
            while True:
                number = has_more.sum()
                has_more[self.source[has_more[self.target]]] = True
                if has_more.sum() == number:
                    break
            if not has_more[0]:
                return True
            if (has_more == known).all():
                return False
        return False


def _repeated(counter: Automaton, minimum: int, maximum: int | None) -> Automaton:
    """Returns the automaton of the texts of a meter with some number of iterations, by a state for each of them.

    Raises:
      TooLargeError: it has more than `MAX_STATES` states.
    """
    number, size = (minimum if maximum is None else maximum) + 1, len(counter.moves)
    if number * size > MAX_STATES:
        raise TooLargeError
    after = np.arange(number)[:, None, None] + moves_lib.begun(counter.moves)
    if maximum is None:
        after = np.minimum(after, minimum)
    is_dead = (counter.moves == DEAD) | (after >= number)
    next_state = np.where(is_dead, DEAD, after * size + moves_lib.state_after(counter.moves))
    is_final = (np.arange(number) >= minimum)[:, None] & counter.is_final
    flat = next_state.reshape(number * size, -1).astype(np.int32)
    return Automaton(flat, counter.class_of_byte, is_final.reshape(-1))
