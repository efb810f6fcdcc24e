"""From automata over bytes to tables over tokens: tokens that act alike in every state are one class.

A token acts as a function from states to states. Along the trie of all tokens these functions are composed byte by
byte, and equal ones are one. So the work grows with the number of different functions, not with that of tokens. Most
tokens are allowed in few states, and a function has these alone.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import numpy as np

from jlade.constraints.automaton import DEAD, Automaton, distances, restricted

LIKELY = 32  # bytes of a likely text, which its first token seldom exceeds
NEVER, END = 0, 1  # classes of tokens that are never allowed, and of those that end a text


class _Level(NamedTuple):
    """The nodes of a trie at one depth."""

    parent: np.ndarray  # [n] int32, places in the level above
    byte: np.ndarray  # [n] uint8
    tokens: np.ndarray  # [m] int32, tokens that end in this level
    node: np.ndarray  # [m] int32, the nodes in which they end


class _Function(NamedTuple):
    """What a text does: the states in which it is allowed, and the one after each."""

    before: np.ndarray  # [n] int32, sorted
    after: np.ndarray  # [n] int32

    def key(self) -> tuple[bytes, bytes]:
        """Returns what equal functions alone have in common."""
        return self.before.tobytes(), self.after.tobytes()


class Trie:
    """The tokens of a vocabulary by their bytes. Those without bytes, such as special tokens, are not in it."""

    def __init__(self, token_bytes: Sequence[bytes]):
        self.lengths: np.ndarray = np.array([*map(len, token_bytes), 0])  # of the tokens, and of none
        self.levels: list[_Level] = []
        nodes: dict[bytes, int] = {b"": 0}
        at_depth: dict[int, list[int]] = {}
        for token, spelled in enumerate(token_bytes):
            if spelled:
                at_depth.setdefault(len(spelled), []).append(token)
        deepest = max(at_depth, default=0)
        left = sorted((spelled, token) for token, spelled in enumerate(token_bytes) if spelled)
        for depth in range(1, deepest + 1):
            found: dict[bytes, int] = {}
            parents, last, ending, ends = [], [], [], []
            for spelled, token in left:
                prefix = spelled[:depth]
                if prefix not in found:
                    found[prefix] = len(found)
                    parents.append(nodes[prefix[:-1]])
                    last.append(prefix[-1])
                if len(spelled) == depth:
                    ending.append(token)
                    ends.append(found[prefix])
            left = [each for each in left if len(each[0]) > depth]
            nodes = found
            arrays = (np.array(each, np.int32) for each in (parents, last, ending, ends))
            self.levels.append(_Level(*arrays))


def _longer(
    functions: list[_Function], is_asked: np.ndarray, by_class: np.ndarray
) -> tuple[list[_Function], np.ndarray]:
    """Returns the functions of texts that are a byte longer, and the place of each among them, -1 if it allows nothing.

    Args:
      functions: F functions of texts.
      is_asked: which classes of bytes follow each text [F, K] bool, as the places are.
      by_class: the state after a byte of each class in each state [K, S].
    """
    found, places = list[_Function](), np.full(is_asked.shape, -1)
    known: dict[tuple[bytes, bytes], int] = {}
    for number, function in enumerate(functions):
        classes = np.flatnonzero(is_asked[number])
        after = by_class[classes[:, None], function.after]
        is_allowed = after != DEAD
        for row in np.flatnonzero(is_allowed.any(axis=1)).tolist():
            longer = _Function(function.before[is_allowed[row]], after[row, is_allowed[row]])
            place = places[number, classes[row]] = known.setdefault(longer.key(), len(found))
            if place == len(found):
                found.append(longer)
    return found, places


def _likely(automaton: Automaton, first_tokens: Callable[[Sequence[bytes]], Sequence[int]], trie: Trie) -> np.ndarray:
    """Returns the likely token of each state; see `Table.likely`."""
    texts, num_certain = automaton.likely(LIKELY)
    (states,) = np.nonzero(texts[:, 0] >= 0)
    spelled = [bytes(text[text >= 0].tolist()) for text in texts[states]]
    found = np.array(first_tokens(spelled), np.int64)
    is_certain = num_certain[states] >= trie.lengths[found]
    likely = np.full(len(texts), -1, np.int32)
    likely[states] = np.where(is_certain | (found < 0), found, -2 - found)
    return likely


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """An automaton over tokens that begins in state 0, from each of whose states a text can be completed."""

    next_state: np.ndarray  # [S, C] int32, `DEAD` for tokens that are not allowed
    class_of_token: np.ndarray  # [V] int32
    likely: np.ndarray  # [S] int32, the token that is likely to come next, t if it is certain, else -2 - t; -1 for none

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

        Args:
          automaton: over bytes.
          trie: of the tokens.
          eos_ids: end tokens.
          vocab_size: V.
          first_tokens: returns the token with which the tokenizer begins each of some texts, -1 for none.

        Raises:
          ValueError: no sequence of tokens spells one of the texts.
        """
        num_states, num_classes = automaton.next_state.shape
        by_class = np.ascontiguousarray(automaton.next_state.T)
        states = np.arange(num_states, dtype=np.int32)
        final = states[automaton.is_final]
        functions = [_Function(states[:0], states[:0]), _Function(final, final)]  # of the classes
        known: dict[tuple[bytes, bytes], int] = {}  # without the first two: a token may act as an end does
        class_of_token: np.ndarray = np.zeros(vocab_size, np.int32)
        above, of_node = [_Function(states, states)], np.array([0])  # of the level above, and that of each of its nodes
        for level in trie.levels:
            here = of_node[level.parent]
            is_live = here >= 0
            keys = here[is_live], automaton.class_of_byte[level.byte[is_live]]
            is_asked = np.zeros((len(above), num_classes), bool)
            is_asked[keys] = True
            above, of_key = _longer(above, is_asked, by_class)
            of_node = np.full(len(level.parent), -1)
            of_node[is_live] = of_key[keys]
            used = of_node[level.node]
            numbers = np.full(len(above) + 1, NEVER)
            for each in np.unique(used[used >= 0]).tolist():
                numbers[each] = known.setdefault(above[each].key(), len(functions))
                if numbers[each] == len(functions):
                    functions.append(above[each])
            chosen = level.tokens < vocab_size
            class_of_token[level.tokens[chosen]] = numbers[used][chosen]
            if not above:
                break
        class_of_token[list(eos_ids)] = END
        before, after = (np.concatenate(each) for each in zip(*functions, strict=True))
        classes = np.repeat(np.arange(len(functions)), [len(each.before) for each in functions])
        next_state = np.full((num_states, len(functions)), DEAD, np.int32)
        next_state[before, classes] = after
        likely = _likely(automaton, first_tokens, trie)
        return cls(next_state, class_of_token, likely)._trimmed(distances(before, after, automaton.is_final) >= 0)

    def _trimmed(self, is_live: np.ndarray) -> Self:
        """Returns the table without states from which no tokens complete a text."""
        if is_live.all():
            return self
        if not is_live[0]:
            raise ValueError("no tokens of this vocabulary spell a text of the grammar")
        first, others = np.split(restricted(self.next_state, is_live), [2], axis=1)
        different, of_class = np.unique(others, axis=1, return_inverse=True)
        rank = np.append([NEVER, END], 2 + of_class).astype(np.int32)
        return type(self)(np.hstack([first, different]), rank[self.class_of_token], self.likely[is_live])

    def shortest(self) -> int:
        """Returns the number of tokens after which a text may have to end, the least one."""
        has_to_end = (np.delete(self.next_state, END, axis=1) == DEAD).all(axis=1)
        reached = np.zeros(len(has_to_end), bool)
        reached[0], number = True, 0
        while not has_to_end[reached].any():
            after = np.unique(np.delete(self.next_state[reached], END, axis=1))
            grown = reached.copy()
            grown[after[after != DEAD]] = True
            if (grown == reached).all():
                return 2**30  # no text has to end
            reached, number = grown, number + 1
        return number

    @property
    def num_classes(self) -> int:
        """C."""
        return self.next_state.shape[1]

    @property
    def num_entries(self) -> int:
        """The number of `entries`."""
        return self.next_state.size + len(self.next_state)

    def entries(self, begin: int) -> np.ndarray:
        """Returns the table as one row of entries: of each state the likely token, and the states after each class.

        A state is the place of its first entry, from `begin` on.
        """
        after = np.where(self.next_state == DEAD, DEAD, self.next_state * (1 + self.num_classes) + begin)
        return np.concatenate([self.likely[:, None], after], axis=1).reshape(-1)

    def allowed(self, state: int) -> np.ndarray:
        """Returns the tokens that may come next [V] bool."""
        return (self.next_state[state] != DEAD)[self.class_of_token]

    def advance(self, state: int, token: int) -> int:
        """Returns the state after a token, `DEAD` if it is not allowed."""
        return int(self.next_state[state, self.class_of_token[token]])
