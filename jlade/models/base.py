"""What a language model has to offer to be decoded: the `Decoder` protocol and the cache it works on."""

from collections.abc import Sequence
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Params = Any  # the model's own pytree of arrays
BlockKV = Sequence[tuple[jax.Array, jax.Array]]  # per layer, keys and values [B, T, KV heads, head_dim] of a block


@flax.struct.dataclass
class KVCache:
    """Keys and values of the accepted tokens, one array per layer.

    The heads come before the rows, so that attention reads each array as it lies. With the rows first, programs for
    CPUs transpose, that is copy, the whole cache in every step.
    """

    keys: tuple[jax.Array, ...]  # [B, KV heads, S, head_dim]
    values: tuple[jax.Array, ...]  # [B, KV heads, S, head_dim]
    length: jax.Array  # [B] int32, rows in use


class Decoder(Protocol):
    """A causal language model that can be run on a block of tokens.

    A decoder is static: hashable, equal by value, without arrays. `jlade` compiles one program per decoder and setting.
    """

    @property
    def vocab_size(self) -> int:
        """V, number of tokens the model knows."""

    @property
    def max_positions(self) -> int:
        """The longest text, in tokens, that the model can read."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, unless the caller names others."""

    def init_cache(self, params: Params, batch_size: int, capacity: int) -> KVCache:
        """Returns an empty cache for `batch_size` sequences of up to `capacity` tokens."""

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        block_mask: jax.Array | np.ndarray,
    ) -> tuple[jax.Array, BlockKV]:
        """Runs a block: every token sees the whole cache and, of the block, what `block_mask` allows.

        Args:
          params: the model's parameters.
          tokens: [B, T] int32.
          positions: [B, T] int32, absolute.
          cache: what came before; it is read, not written.
          block_mask: [T, T] bool, `block_mask[q, k]` lets token q see token k.

        Returns:
          The hidden states [B, T, E] and the block's keys and values.
        """

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Turns hidden states [B, R, E] into float32 logits [B, R, V] of the tokens that follow."""

    def commit(self, cache: KVCache, block_kv: BlockKV, rows: jax.Array, num_rows: jax.Array) -> KVCache:
        """Appends the first `num_rows` [B] of the block rows `rows` [B, A] to each sequence's cache."""


def commit(cache: KVCache, block_kv: BlockKV, rows: jax.Array, num_rows: jax.Array) -> KVCache:
    """`Decoder.commit` for every model whose cache is a `KVCache`.

    A row beyond `num_rows` is given an index past the end and dropped: a rejected token never reaches the cache.
    """
    batch_size, num_candidates = rows.shape
    capacity = cache.keys[0].shape[2]
    sequence = jnp.arange(batch_size, dtype=jnp.int32)[:, None]
    offset = jnp.arange(num_candidates, dtype=jnp.int32)[None, :]
    target = jnp.where(offset < num_rows[:, None], cache.length[:, None] + offset, capacity + offset)

    def append(layer: jax.Array, block: jax.Array) -> jax.Array:
        accepted = block[sequence, rows].astype(layer.dtype)  # [B, A, KV heads, head_dim]
        return layer.at[sequence, :, target].set(accepted, mode="drop", unique_indices=True)

    return KVCache(
        keys=tuple(append(layer, k) for layer, (k, _) in zip(cache.keys, block_kv, strict=True)),
        values=tuple(append(layer, v) for layer, (_, v) in zip(cache.values, block_kv, strict=True)),
        length=cache.length + num_rows,
    )
