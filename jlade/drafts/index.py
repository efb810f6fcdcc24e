"""An index of texts: their places, sorted by the tokens before them.

It is a suffix array that reads backwards and K tokens deep. A place near the one where the end of a text belongs
matches it longest. The sorted places are divided into blocks, and the first place of a block stands for it in the
search. The matches may go on in the blocks beside the one that is found; then the first place of a block is one of
them, and the block knows the latest of all of them.
"""

import flax.struct
import jax
import jax.numpy as jnp

BLOCK = 64  # places
FAN = 64  # blocks that are compared at once


@flax.struct.dataclass
class TextIndex:
    """Texts of S tokens, and the places in them sorted by the K tokens before each; arrays of NumPy or of JAX.

    Attributes:
      tokens: int32[S], each text followed by -1.
      order: int32[S / 64, 64], the sorted places in blocks; of equal ones the later one is last.
      keys: int32[S / 64, K], the tokens before the first place of each block, the last one first.
      latest: int32[S / 64, K, R], of the places that share 1 to K tokens with that one, the latest R; 0 for none.
    """

    tokens: jax.Array
    order: jax.Array
    keys: jax.Array
    latest: jax.Array


def candidates(index: TextIndex, last: jax.Array) -> jax.Array:
    """Returns places [n] int32 among which the longest matches of the `last` [K] tokens are; some more than once.

    These are the latest of each length: R for a length, or all if there are fewer.
    """
    num_blocks = len(index.keys)
    group = min(FAN, num_blocks)
    begin = group * _last_not_above(index.keys[::group], last)
    block = begin + _last_not_above(jax.lax.dynamic_slice_in_dim(index.keys, begin, group), last)
    beside = jnp.minimum(block + 1, num_blocks - 1)
    return jnp.concatenate([index.order[block], *(index.latest[each].reshape(-1) for each in (block, beside))])


def _last_not_above(keys: jax.Array, last: jax.Array) -> jax.Array:
    """Returns the index [] int32 of the last of some sorted keys [n, K] that is not above `last` [K]; 0 for none."""
    differs = keys != last[None, :]
    first = jnp.argmax(differs, axis=1)
    at_first = jnp.take_along_axis(keys, first[:, None], axis=1)[:, 0]
    is_above = jnp.any(differs, axis=1) & (at_first > last[first])
    return jnp.maximum(jnp.sum(~is_above, dtype=jnp.int32) - 1, 0)
