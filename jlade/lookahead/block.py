"""The block: order, positions and mask of the tokens that one step feeds to the model.

For W = 3, N = 4 and G = 2 the block is a window of N-1 rows and W columns, then a tree of drafts, here G chains:

    window  row 0   cur  r01  r02     position p    p+1  p+2
            row 1   r10  r11  r12              p+1  p+2  p+3
            row 2   r20  r21  r22              p+2  p+3  p+4
    drafts          d00  d01  d02              p+1  p+2  p+3
                    d10  d11  d12              p+1  p+2  p+3

`cur`, the last accepted token at position p, stands in column 0 of row 0. A window token attends to row 0 up to its own
column, then to its column down to itself: the trajectory of the Jacobi iterations. A draft's token attends to `cur`, to
its predecessors and to itself. All tokens attend to the cache. (arXiv 2402.02057, section 3.3 and Figure 2.)
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts.tree import Form, TreeShape

Array = np.ndarray | jax.Array


class Layout(NamedTuple):
    """The layout of a step's T tokens, with a tree of M. An index is a place in the block.

    It is in NumPy for a tree of static form. Otherwise positions and mask are arrays [..., T] and [..., T, T].
    """

    positions: Array  # [T] int32, relative to the position of the current token
    mask: Array  # [T, T] bool, mask[q, k]: token q attends to token k
    outputs: np.ndarray  # [1 + W + M] int32, indices of the tokens whose logits are used: current, newest row, drafts
    first_draft: int  # index of the first token of the tree


@functools.cache
def window(window_size: int, ngram_size: int) -> Layout:
    """Returns the block of W and N without drafts: the window, or without one the current token."""
    columns, rows = window_size, ngram_size - 1
    size = max(1, rows * columns)
    positions = np.zeros(size, np.int32)
    mask = np.eye(size, dtype=bool)
    mask[:, 0] = True
    index = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    for row in range(rows):
        for column in range(columns):
            positions[index[row, column]] = row + column
            mask[index[row, column], index[0, : column + 1]] = True
            mask[index[row, column], index[: row + 1, column]] = True
    outputs = np.append(np.zeros(1, np.int32), index[-1])
    for array in (positions, mask, outputs):
        array.flags.writeable = False  # the result is cached and shared
    return Layout(positions, mask, outputs, size)


def build(window_size: int, ngram_size: int, form: TreeShape | Form) -> Layout:
    """Returns the block of the window of W and N, followed by a tree. The fields of a `Form` may be [..., M]."""
    before = window(window_size, ngram_size)
    (*batch, drafts), size = np.shape(form.depths), before.first_draft
    xp = np if isinstance(form, TreeShape) else jnp
    window_mask = np.pad(before.mask, ((0, drafts), (0, 0)))
    window_mask[:, 0] = True  # all attend to the current token
    tree_mask = xp.pad(form.mask, [(0, 0)] * len(batch) + [(size, 0), (0, 0)])
    return Layout(
        positions=xp.concatenate([xp.broadcast_to(before.positions, (*batch, size)), form.depths], axis=-1),
        mask=xp.concatenate([xp.broadcast_to(window_mask, (*batch, *window_mask.shape)), tree_mask], axis=-1),
        outputs=np.append(before.outputs, size + np.arange(drafts, dtype=np.int32)),
        first_draft=size,
    )


def tokens(current: jax.Array, window: jax.Array, drafts: jax.Array) -> jax.Array:
    """Returns a block's tokens [T] from the current token [], the window [N-1, W] and the tree's tokens [M].

    Where there are fewer drafts, it has arbitrary tokens; verification knows them.
    """
    return jnp.maximum(jnp.concatenate([current[None], window.reshape(-1)[1:], drafts]), 0)
