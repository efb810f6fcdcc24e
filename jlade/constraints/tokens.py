"""From automata over bytes to tables over tokens: tokens that act alike in every state are one class.

A token acts as a function from states to states. Along the trie of all tokens these functions are composed byte by
byte, and equal ones are one. So the work grows with the number of different functions, not with that of tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from jlade.constraints.automaton import DEAD, Automaton, live_states, restricted

NEVER, END = 0, 1  # classes of tokens that are never allowed, and of those that end a text
CHUNK = 2**24  # entries of functions that are composed at once


class _Level(NamedTuple):
    """The nodes of a trie at one depth."""

    parent: np.ndarray  # [n] int32, places in the level above
    byte: np.ndarray  # [n] uint8
    tokens: np.ndarray  # [m] int32, tokens that end in this level
    node: np.ndarray  # [m] int32, the nodes in which they end


class Trie:
    """The tokens of a vocabulary by their bytes. Those without bytes, such as special tokens, are not in it."""

    def __init__(self, token_bytes: Sequence[bytes]):
        self.num_tokens = len(token_bytes)
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


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """An automaton over tokens that begins in state 0, from each of whose states a text can be completed."""

    next_state: np.ndarray  # [S, C] int32, `DEAD` for tokens that are not allowed
    class_of_token: np.ndarray  # [V] int32

    @classmethod
    def of(cls, automaton: Automaton, trie: Trie, eos_ids: Sequence[int], vocab_size: int) -> Self:
        """Returns the table of the texts that an automaton accepts, each followed by an end token.

        Raises:
          ValueError: no sequence of tokens spells one of the texts.
        """
        next_state, num_classes = automaton.next_state, automaton.next_state.shape[1]
        states = np.arange(len(next_state), dtype=np.int32)
        never = np.full_like(states, DEAD)
        functions = [never, np.where(automaton.is_final, states, DEAD)]
        class_of_token: np.ndarray = np.zeros(vocab_size, np.int32)
        class_of_token[list(eos_ids)] = END
        known = {each.tobytes(): index for index, each in enumerate(functions)}
        above, of_node = states[None], np.array([0])  # the functions of a level, and that of each of its nodes
        for level in trie.levels:
            here = of_node[level.parent]
            is_live = here >= 0
            keys = here[is_live] * num_classes + automaton.class_of_byte[level.byte[is_live]]
            different, place = np.unique(keys, return_inverse=True)
            found, index = list[np.ndarray](), np.full(len(different), -1)
            ids: dict[bytes, int] = {}
            for begin in range(0, len(different), max(1, CHUNK // len(states))):
                part = different[begin : begin + max(1, CHUNK // len(states))]
                before = above[part // num_classes]
                after = np.where(before == DEAD, DEAD, next_state[before, (part % num_classes)[:, None]])
                for offset in np.flatnonzero((after != DEAD).any(axis=1)).tolist():
                    function = after[offset]
                    key = function.tobytes()
                    if key not in ids:
                        ids[key] = len(found)
                        found.append(function)
                    index[begin + offset] = ids[key]
            of_node = np.full(len(level.parent), -1)
            of_node[is_live] = index[place]
            above = np.stack(found) if found else never[None]
            used = of_node[level.node]
            numbers = np.full(len(found) + 1, NEVER)
            for each in np.unique(used[used >= 0]).tolist():
                key = found[each].tobytes()
                if key not in known:
                    known[key] = len(functions)
                    functions.append(found[each])
                numbers[each] = known[key]
            chosen = level.tokens < vocab_size
            class_of_token[level.tokens[chosen]] = numbers[used][chosen]
            if not found:
                break
        class_of_token[list(eos_ids)] = END
        return cls(np.stack(functions, axis=1), class_of_token).trimmed()

    def trimmed(self) -> Self:
        """Returns the table without states from which no tokens complete a text."""
        is_live = live_states(self.next_state, self.next_state[:, END] != DEAD)
        if not is_live[0]:
            raise ValueError("no tokens of this vocabulary spell a text of the grammar")
        different, of_class = np.unique(restricted(self.next_state, is_live), axis=1, return_inverse=True)
        # The first classes stay what they are.
        order = [int(of_class[NEVER]), int(of_class[END])]
        order += [each for each in range(different.shape[1]) if each not in order]
        rank = np.empty(len(order), np.int32)
        rank[order] = np.arange(len(order), dtype=np.int32)
        return type(self)(different[:, order], rank[of_class.reshape(-1)][self.class_of_token])

    def shortest(self, eos_ids: Sequence[int]) -> int:
        """Returns the number of tokens after which a text may have to end, the least one."""
        # Of the class `END` are also tokens that lead from each final state to itself, as in "(a|b)*".
        goes_on = self.next_state[:, np.unique(np.delete(self.class_of_token, list(eos_ids)))]
        has_to_end = (goes_on == DEAD).all(axis=1)
        reached = np.zeros(len(has_to_end), bool)
        reached[0], number = True, 0
        while not has_to_end[reached].any():
            after = np.unique(goes_on[reached])
            grown = reached.copy()
            grown[after[after != DEAD]] = True
            if (grown == reached).all():
                return 2**30  # no text has to end
            reached, number = grown, number + 1
        return number

    def allowed(self, state: int) -> np.ndarray:
        """Returns the tokens that may come next [V] bool."""
        return (self.next_state[state] != DEAD)[self.class_of_token]

    def advance(self, state: int, token: int) -> int:
        """Returns the state after a token, `DEAD` if it is not allowed."""
        return int(self.next_state[state, self.class_of_token[token]])
