"""The block: order, positions and mask of the tokens that one step feeds to the model.

For W = 3, N = 4, G = 2 the block is a window of N-1 rows and W columns, then G candidates of N-1 tokens:

    window  row 0   cur  r01  r02     position p    p+1  p+2
            row 1   r10  r11  r12              p+1  p+2  p+3
            row 2   r20  r21  r22              p+2  p+3  p+4
    candidates      c00  c01  c02              p+1  p+2  p+3
                    c10  c11  c12              p+1  p+2  p+3

`cur`, the last accepted token at position p, stands in column 0 of row 0. A window token sees row 0 up to its own
column, then its column down to itself: the trajectory of the Jacobi iterations. A candidate's token sees `cur` and the
candidate up to itself. All tokens see the cache. (arXiv 2402.02057, section 3.3 and Figure 2.)
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Block(NamedTuple):
    """The layout of a step's T tokens, in NumPy: it depends on W, N and G alone. An index is a place in the block."""

    positions: np.ndarray  # [T] int32, relative to the position of the current token
    mask: np.ndarray  # [T, T] bool, mask[q, k]: token q sees token k
    newest_row: np.ndarray  # [W] int32, indices of the newest window row
    candidates: np.ndarray  # [G, N-1] int32, indices of the candidates' tokens

    @property
    def outputs(self) -> np.ndarray:
        """[1 + W + G(N-1)] indices of the tokens whose logits are used: current, newest window row, candidates."""
        return np.concatenate([np.zeros(1, np.int32), self.newest_row, self.candidates.reshape(-1)])

    @property
    def drafted(self) -> int:
        """Index of the first drafted token: of a candidate, or of the tree that takes the place of the candidates."""
        return len(self.positions) - self.candidates.size


@functools.cache
def build(window_size: int, ngram_size: int, guess_set_size: int) -> Block:
    """Returns the block of the setting W, N, G."""
    columns, rows, guesses = window_size, ngram_size - 1, guess_set_size
    window_end = max(1, rows * columns)  # without a window the current token comes alone
    size = window_end + guesses * rows
    positions = np.zeros(size, np.int32)
    mask = np.eye(size, dtype=bool)
    mask[:, 0] = True

    window = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    for row in range(rows):
        for column in range(columns):
            positions[window[row, column]] = row + column
            mask[window[row, column], window[0, : column + 1]] = True
            mask[window[row, column], window[: row + 1, column]] = True

    candidates = window_end + np.arange(guesses * rows, dtype=np.int32).reshape(guesses, rows)
    for candidate in candidates:
        positions[candidate] = 1 + np.arange(rows)
        mask[np.ix_(candidate, candidate)] = np.tri(rows, dtype=bool)

    for array in (positions, mask):
        array.flags.writeable = False  # the result is cached and shared
    return Block(positions, mask, window[-1], candidates)


def tokens(current: jax.Array, window: jax.Array, drafted: jax.Array) -> jax.Array:
    """Returns a block's tokens [T] from the current token [], the window [N-1, W] and the drafted tokens [...]."""
    return jnp.concatenate([current[None], window.reshape(-1)[1:], drafted.reshape(-1)])


def with_tree(block: Block, depths: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns positions [T] and mask [T, T] of a block without candidates, followed by a tree.

    Args:
      block: the window alone.
      depths: [M] int32, positions of the tree's tokens relative to the current token.
      mask: [M, M] bool, of the tree.
    """
    size = len(depths)
    positions = jnp.concatenate([block.positions, depths])
    of_window = np.pad(block.mask, ((0, size), (0, 0)))
    of_window[:, 0] = True  # all see the current token
    of_tree = jnp.pad(mask, ((len(block.positions), 0), (0, 0)))
    return positions, jnp.concatenate([of_window, of_tree], axis=1)
