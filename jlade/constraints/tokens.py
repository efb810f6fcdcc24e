"""From automata over bytes to tables over tokens: tokens that act alike in every state are one class.

A token acts as a function from states to states. Along the trie of all tokens these functions are composed byte by
byte, and equal ones are one. So the work grows with the number of different functions, not with that of tokens. Most
tokens are allowed in few states, and a function has these alone.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import numpy as np

from jlade.constraints import moves as moves_lib
from jlade.constraints.automaton import Automaton, distances
from jlade.constraints.blocks import END, NEVER, Blocks
from jlade.constraints.moves import DEAD

NO_CHARACTER = [0xC0, 0xC1, *range(0xF5, 0x100)]  # bytes that UTF-8 never has, `special.BYTE` among them
LIKELY = 32  # bytes of a likely text, which its first token seldom exceeds


class _Level(NamedTuple):
    """The nodes of a trie at one depth."""

    parent: np.ndarray  # [n] int32, places in the level above
    byte: np.ndarray  # [n] uint8
    tokens: np.ndarray  # [m] int32, tokens that end in this level
    node: np.ndarray  # [m] int32, the nodes in which they end


class _Function(NamedTuple):
    """What a text does: the states in which it is allowed, and its move in each."""

    before: np.ndarray  # [n] int32, sorted
    moves: np.ndarray  # [n] int32

    def key(self) -> tuple[bytes, bytes]:
        """Returns what equal functions alone have in common."""
        return self.before.tobytes(), self.moves.tobytes()


class Trie:
    """The tokens of a vocabulary by their bytes. Those without bytes are not in it."""

    def __init__(self, token_bytes: Sequence[bytes]):
        self.lengths: np.ndarray = np.array([*map(len, token_bytes), 0])  # of the tokens, and of none
        self.levels: list[_Level] = []
        nodes: dict[bytes, int] = {b"": 0}
        left = sorted((spelled, token) for token, spelled in enumerate(token_bytes) if spelled)
        for depth in range(1, max(self.lengths) + 1):
            here: dict[bytes, int] = {}
            parents, last, ending, ends = [], [], [], []
            for spelled, token in left:
                prefix = spelled[:depth]
                if prefix not in here:
                    here[prefix] = len(here)
                    parents.append(nodes[prefix[:-1]])
                    last.append(prefix[-1])
                if len(spelled) == depth:
                    ending.append(token)
                    ends.append(here[prefix])
            left = [pair for pair in left if len(pair[0]) > depth]
            nodes = here
            arrays = (np.array(numbers, np.int32) for numbers in (parents, last, ending, ends))
            self.levels.append(_Level(*arrays))

    def may_count(self, automaton: Automaton, eos_ids: Sequence[int]) -> bool:
        """Whether a text can be completed by tokens at every count: each byte of its texts is a token and no end.

        Special tokens are whole, and bytes of no character are read only where others may be read, too. Tokens must not
        be longer than moves can count.
        """
        if not self.levels or self.lengths.max() > moves_lib.LONGEST:
            return False
        first = self.levels[0]
        alone = np.append(first.byte[first.node[~np.isin(first.tokens, eos_ids)]], NO_CHARACTER)
        read = np.flatnonzero((automaton.moves != DEAD).any(axis=0))
        return bool(np.isin(read, automaton.class_of_byte[alone]).all())


def _longer(
    functions: list[_Function], is_asked: np.ndarray, automaton: Automaton
) -> tuple[list[_Function], np.ndarray]:
    """Returns the functions of texts that are a byte longer, and the place of each among them, -1 if it allows nothing.

    Args:
      functions: F functions of texts.
      is_asked: which classes of bytes follow each text [F, K] bool, as the places are.
      automaton: of the states.
    """
    by_class, bounds = automaton.moves.T, automaton.bounds
    different, places = list[_Function](), np.full(is_asked.shape, -1)
    known: dict[tuple[bytes, bytes], int] = {}
    for number, function in enumerate(functions):
        classes = np.flatnonzero(is_asked[number])
        if bounds is None:
            moves = by_class[classes[:, None], function.moves]
        else:
            between = moves_lib.state_after(function.moves)
            counts = bounds[function.before, 1] != moves_lib.UNBOUNDED
            moves = moves_lib.composed(function.moves, by_class[classes[:, None], between], counts, bounds[between])
        is_allowed = moves != DEAD
        for row in np.flatnonzero(is_allowed.any(axis=1)).tolist():
            longer = _Function(function.before[is_allowed[row]], moves[row, is_allowed[row]])
            place = places[number, classes[row]] = known.setdefault(longer.key(), len(different))
            if place == len(different):
                different.append(longer)
    return different, places


def _likely(automaton: Automaton, first_tokens: Callable[[Sequence[bytes]], Sequence[int]], trie: Trie) -> np.ndarray:
    """Returns the likely token of each state; see `Table.likely`."""
    texts, num_certain = automaton.likely(LIKELY)
    (states,) = np.nonzero(texts[:, 0] >= 0)
    spelled = [bytes(text[text >= 0].tolist()) for text in texts[states]]
    tokens = np.array(first_tokens(spelled), np.int64)
    is_certain = num_certain[states] >= trie.lengths[tokens]
    likely = np.full(len(texts), -1, np.int32)
    likely[states] = np.where(is_certain | (tokens < 0), tokens, -2 - tokens)
    return likely


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """An automaton over tokens that begins in state 0, from each of whose states a text can be completed."""

    blocks: Blocks  # the moves of S states by C classes, as `jlade.constraints.moves` has them
    class_of_token: np.ndarray  # [V] int32
    likely: np.ndarray  # [S] int32, the token that is likely to come next, t if it is certain, else -2 - t; -1 for none
    bounds: np.ndarray | None = None  # [S, 2] int32, the least and most iterations of its loop; None without loops
    is_tagged: bool = False  # whether its texts have tagged parts, in which no stop string ends them

    @classmethod
    def of(
        cls,
        automaton: Automaton,
        trie: Trie,
        eos_ids: Sequence[int],
        vocab_size: int,
        first_tokens: Callable[[Sequence[bytes]], Sequence[int]] = lambda texts: [-1] * len(texts),
    ) -> Self:
        """Returns the table of the texts that an automaton accepts, each followed by an end token.

        An end token is no part of a text, also where its bytes would be.

        Args:
          automaton: over bytes.
          trie: of the tokens.
          eos_ids: end tokens.
          vocab_size: V.
          first_tokens: returns the token with which the tokenizer begins each of some texts, -1 for none.

        Raises:
          ValueError: no sequence of tokens spells one of the texts.
        """
        num_states, num_classes = automaton.moves.shape
        states = np.arange(num_states, dtype=np.int32)
        final = states[automaton.is_final]
        ends = final
        if automaton.bounds is not None:  # the end of a text leaves a loop, as its count may be too low for that
            in_loop = automaton.bounds[final, 1] != moves_lib.UNBOUNDED
            ends = np.where(in_loop, moves_lib.move(final, leaves=True), final)
        functions = [_Function(states[:0], states[:0]), _Function(final, ends)]  # of the classes
        known: dict[tuple[bytes, bytes], int] = {}  # without the first two: a token may act as an end does
        class_of_token: np.ndarray = np.zeros(vocab_size, np.int32)
        above, of_node = [_Function(states, states)], np.array([0])  # of the level above, and that of each of its nodes
        for level in trie.levels:
            here = of_node[level.parent]
            is_live = here >= 0
            keys = here[is_live], automaton.class_of_byte[level.byte[is_live]]
            is_asked = np.zeros((len(above), num_classes), bool)
            is_asked[keys] = True
            above, of_key = _longer(above, is_asked, automaton)
            of_node = np.full(len(level.parent), -1)
            of_node[is_live] = of_key[keys]
            is_chosen = (level.tokens < vocab_size) & ~np.isin(level.tokens, eos_ids)
            used = of_node[level.node[is_chosen]]
            numbers = np.full(len(above) + 1, NEVER)
            for index in np.unique(used[used >= 0]).tolist():
                numbers[index] = known.setdefault(above[index].key(), len(functions))
                if numbers[index] == len(functions):
                    functions.append(above[index])
            class_of_token[level.tokens[is_chosen]] = numbers[used]
            if not above:
                break
        class_of_token[list(eos_ids)] = END
        before, moved = (np.concatenate(arrays) for arrays in zip(*functions, strict=True))
        classes = np.repeat(np.arange(len(functions)), [len(function.before) for function in functions])
        likely, bounds = _likely(automaton, first_tokens, trie), automaton.bounds
        # States from which no tokens complete a text are left out.
        is_live = distances(before, moves_lib.state_after(moved), automaton.is_final) >= 0
        if not is_live[0]:
            raise ValueError("no tokens of this vocabulary spell a text of the grammar")
        place = np.where(is_live, np.cumsum(is_live) - 1, DEAD).astype(np.int32)
        before, after = place[before], place[moves_lib.state_after(moved)]
        is_kept = (before != DEAD) & (after != DEAD)
        moved = after | moved & ~moves_lib.STATE
        kept = before[is_kept], classes[is_kept], moved[is_kept]
        blocks, class_of_function = Blocks.of(*kept, num_states=int(is_live.sum()), num_classes=len(functions))
        bounds = None if bounds is None else bounds[is_live]
        return cls(blocks, class_of_function[class_of_token], likely[is_live], bounds)

    def shortest(self) -> int:
        """Returns the number of tokens after which a text may have to end, the least one."""
        reached = known = np.zeros(1, np.int64)
        number = 0
        while len(reached):
            moves = self._allowed_moves(reached)
            moves[:, END] = DEAD
            if (moves == DEAD).all(axis=1).any():
                return number
            rows, classes = np.nonzero(moves != DEAD)
            after = np.unique(moves_lib.after(reached[rows], moves[rows, classes]))
            reached, number = np.setdiff1d(after, known), number + 1
            known = np.union1d(known, reached)
        return 2**30  # no text has to end

    def _allowed_moves(self, states: np.ndarray) -> np.ndarray:
        """Returns the moves of each class [n, C] in states with counts [n], `DEAD` for those that are not allowed."""
        rows = states & moves_lib.STATE
        moves = self.blocks.of_states(rows)
        if self.bounds is None:
            return moves
        minimum, maximum = self.bounds[rows].T
        is_allowed = moves_lib.is_allowed(states[:, None], moves, minimum[:, None], maximum[:, None])
        return np.where(is_allowed, moves, DEAD)

    @property
    def num_classes(self) -> int:
        """C."""
        return self.blocks.columns.shape[1]

    @property
    def num_states(self) -> int:
        """S."""
        return len(self.likely)

    def allowed(self, state: int) -> np.ndarray:
        """Returns the tokens that may come next [V] bool, in a state with its count."""
        return (self._allowed_moves(np.array([state]))[0] != DEAD)[self.class_of_token]

    def may_end(self, state: int) -> bool:
        """Whether a text may end in a state with its count."""
        return bool(self._allowed_moves(np.array([state]))[0, END] != DEAD)

    def advance(self, state: int, token: int) -> int:
        """Returns the state with its count after a token, `DEAD` if it is not allowed."""
        move = int(self._allowed_moves(np.array([state]))[0, self.class_of_token[token]])
        return DEAD if move == DEAD else moves_lib.after(state, move)
