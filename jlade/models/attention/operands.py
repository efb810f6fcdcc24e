"""The arrays of attention, for every implementation."""

from typing import NamedTuple

import jax
import numpy as np


class Operands(NamedTuple):
    """A block of tokens, and the prefix that the cache holds.

    Attributes:
      queries: [B, T, H, D].
      keys, values: [B, T, KH, D] of the block; H is a multiple of KH.
      cached_keys, cached_values: [B, KH, S, D].
      cached_length: [B] int32, cache entries in use.
      block_mask: [T, T] bool, or [B, T, T] with a mask for each sequence. Token q sees token k where
        `block_mask[..., q, k]`; every token sees itself.
      positions: [B, T] of the block's tokens; needed with a sliding window. Cache entry i has position i.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    cached_keys: jax.Array
    cached_values: jax.Array
    cached_length: jax.Array
    block_mask: jax.Array | np.ndarray
    positions: jax.Array | None = None
