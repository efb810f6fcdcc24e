"""The arrays of attention, for every implementation, and its variations."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

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
      key_scales, value_scales: [B, T, KH] float32, of keys and values in 8 bits: see `jlade.models.kv_rounding`. None
        where keys and values have the dtype of the queries.
      cached_key_scales, cached_value_scales: [B, KH, S] float32, those of the cache.
      table: [B, N] int32, if the entries lie in pages: those of the cache then have P pages for B, and entry i is entry
        i % S of the page `table[b, i // S]`. None otherwise.
      chosen: [B, T, S] bool, the entries that each token sees of those below `cached_length`, None for all. A token may
        then not see itself.

    Where an index chooses what is seen, keys and values have more elements than D, which attention does not read: see
    `jlade.models.attention.choice`.
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
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None
    cached_key_scales: jax.Array | None = None
    cached_value_scales: jax.Array | None = None
    table: jax.Array | None = None
    chosen: jax.Array | None = None

    @classmethod
    def of(
        cls,
        queries: jax.Array,
        block: Sequence[jax.Array],
        cached: Sequence[jax.Array],
        *rest: Any,
        table: jax.Array | None = None,
    ) -> Self:
        """Returns the operands of a layer. Keys without values are the values too.

        Args:
          queries: [B, T, H, D].
          block: keys, values where there are, and the scales of each where there are.
          cached: the same of the cache.
          rest: the attributes from `cached_length` to `sinks`.
          table: the attribute.
        """
        vectors, scales = ([[x for x in arrays if x.ndim == n] for arrays in (block, cached)] for n in (4, 3))
        both = [array for arrays in vectors for array in (arrays[0], arrays[-1])]
        scales_of_both = [array for arrays in scales if arrays for array in (arrays[0], arrays[-1])]
        return cls(queries, *both, *rest, *scales_of_both)._replace(table=table)

    @property
    def capacity(self) -> int:
        """Entries of a sequence in the cache."""
        size: int = self.cached_keys.shape[2]
        return size if self.table is None else size * self.table.shape[1]


class Variation(NamedTuple):
    """The parts that a layer adds to the attention of LLaMA."""

    window: bool = False
    cap: bool = False
    sinks: bool = False
    choice: bool = False  # of the tokens that are seen
