"""The arrays of attention, for every implementation, and its variations."""

from typing import NamedTuple

import jax
import numpy as np


class Operands(NamedTuple):
    """A block of tokens, and the prefix that the cache holds.

    Attributes:
      queries: [B, T, H, D].
      keys, values: [B, T, KH, D] of the block; H is a multiple of KH.
      cached_keys, cached_values: [B, KH, S, D]. Entry i has position i. With a sliding window, S may be less than
        `cached_length`, but no less than the window without the token itself: the cache then has the last S tokens, and
        entry i has the last position p < `cached_length` with p % S = i.
      cached_length: [B] int32, tokens before the block.
      block_mask: [T, T] bool, or [B, T, T] with a mask for each sequence. Token q sees token k where
        `block_mask[..., q, k]`; every token sees itself.
      positions: [B, T] of the block's tokens; needed with a sliding window.
      sinks: [H], a logit of each query head that joins the softmax of its scores and has no value; None for none.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    cached_keys: jax.Array
    cached_values: jax.Array
    cached_length: jax.Array
    block_mask: jax.Array | np.ndarray
    positions: jax.Array | None = None
    sinks: jax.Array | None = None


class Variation(NamedTuple):
    """The parts that a layer adds to the attention of LLaMA."""

    window: bool = False
    cap: bool = False
    sinks: bool = False
