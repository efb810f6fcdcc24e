"""The moves of states by classes of tokens, in blocks of states that have columns of their own.

Most states allow few tokens, and of all classes a block tells few apart: so its rows are short. A state has its row in
one of them, and each block the column of every class.
"""

import itertools
from typing import NamedTuple, Self

import numpy as np

from jlade.constraints.moves import DEAD

LANES = 128  # the entries of a row are a multiple of these, so that TPUs read them whole
STATES = 128  # of a block
NEVER, END = 0, 1  # classes of tokens that are never allowed, and of those that end a text


def padded(number: int) -> int:
    """Returns the least multiple of `LANES` that is at least `number`."""
    return LANES * -(-number // LANES)


class Blocks(NamedTuple):
    """The moves of S states by C classes, in K blocks. The first column of each block has no moves."""

    moves: np.ndarray  # [E] int32, those of each row one after the other; `DEAD` for tokens that are not allowed
    begin: np.ndarray  # [S] int32, the place of the row of each state
    block: np.ndarray  # [S] int32, the block of each state
    columns: np.ndarray  # [K, C] int32, the column of each class in each block

    @classmethod
    def of(
        cls, before: np.ndarray, classes: np.ndarray, moves: np.ndarray, num_states: int, num_classes: int
    ) -> tuple[Self, np.ndarray]:
        """Returns the blocks of some moves, and the class that each of the given ones has in them.

        Classes are one that are alike in all states, but for `NEVER` and `END`, which stay as they are.

        Args:
          before, classes, moves: the state, the class of tokens, and the move of each [n].
          num_states: S.
          num_classes: of the given classes.
        """
        # States that allow about as many classes are alike: within names, for example, or within strings.
        order = np.argsort(np.bincount(before, minlength=num_states), kind="stable")
        block = np.zeros(num_states, np.int32)
        block[order] = np.arange(num_states) // STATES
        by_column = np.lexsort((before, classes, block[before]))
        before, classes, moves = before[by_column], classes[by_column], moves[by_column]
        of_block = block[before]
        columns = np.zeros((1 + block.max(), num_classes), np.int32)
        known: list[dict[tuple[bytes, bytes], int]] = [{} for _ in columns]
        begins = np.flatnonzero(np.diff(of_block.astype(np.int64) * num_classes + classes, prepend=-1)).tolist()
        for first, end in itertools.pairwise([*begins, len(before)]):
            of_column = known[of_block[first]]
            key = before[first:end].tobytes(), moves[first:end].tobytes()
            columns[of_block[first], classes[first]] = of_column.setdefault(key, 1 + len(of_column))

        strides = np.array([padded(1 + len(of_column)) for of_column in known])[block[order]]
        begin = np.zeros(num_states, np.int32)
        begin[order] = np.cumsum(strides) - strides
        entries = np.full(strides.sum(), DEAD, np.int32)
        entries[begin[before] + columns[of_block, classes]] = moves
        different, of_class = np.unique(columns[:, END + 1 :], axis=1, return_inverse=True)
        rank = np.append([NEVER, END], END + 1 + of_class.reshape(-1)).astype(np.int32)
        return cls(entries, begin, block, np.hstack([columns[:, : END + 1], different])), rank

    def of_states(self, states: np.ndarray) -> np.ndarray:
        """Returns the moves of some states by all classes [n, C]."""
        return self.moves[self.begin[states][:, None] + self.columns[self.block[states]]]

    @property
    def num_columns(self) -> int:
        """The entries of the longest row."""
        return int(np.diff(np.sort(self.begin), append=len(self.moves)).max())
