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
    """A causal language model that can be run on a block of tokens: what to write to decode a model of one's own.

    `jlade.testing.check_decoder` tries what is said here, and `examples/flax_decoder.py` is an example.

    A decoder is static: hashable, equal by value, without arrays. Those are in `params`, any pytree. `jlade` compiles
    one program per decoder and setting, so the methods are traced: shapes may decide what Python does, values may not.

    B sequences are decoded side by side. They are independent and of different lengths, which may be 0.
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
        """Returns an empty cache for `batch_size` sequences of up to `capacity` tokens.

        It is a `KVCache`, since `resize` shortens and extends it when a conversation goes on.
        """

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        block_mask: jax.Array | np.ndarray,
    ) -> tuple[jax.Array, BlockKV]:
        """Runs a block: every token sees the whole cache and, of the block, what `block_mask` allows.

        What a token gets depends on what it sees and on their positions, not on its place in the block: a block may
        hold several guesses for one position.

        Args:
          params: the model's parameters.
          tokens: [B, T] int32, 0 to V-1.
          positions: [B, T] int32, absolute, in any order. A guess may stand at or past `max_positions`. What it gets is
            of no use, but NaN in its keys or values would reach the others, for 0 times NaN is NaN.
          cache: what came before; it is read, not written. Row i of a sequence is its token at position i. Only rows
            below `cache.length` are seen; the others hold anything finite.
          block_mask: [T, T] bool, `block_mask[q, k]` lets token q see token k. Every token sees itself; beside that,
            any mask is possible.

        Returns:
          The hidden states [B, T, E], floating, and the block's keys and values. Only `commit` reads these, so a
          decoder with a `commit` of its own may return another pytree.
        """

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Turns hidden states [B, R, E] into float32 logits [B, R, V] of the tokens that follow."""

    def commit(self, cache: KVCache, block_kv: BlockKV, rows: jax.Array, num_rows: jax.Array) -> KVCache:
        """Appends the first `num_rows` [B] of the block rows `rows` [B, A] to each sequence's cache.

        They stand from `cache.length` on, in the order of `rows`, and the length grows by `num_rows`. What is below
        the length stays as it is, even where fewer than A rows are free. The function `commit` does this.

        Args:
          cache: as `forward` read it.
          block_kv: as `forward` returned it.
          rows: int32, 0 to T-1; those from `num_rows` on were rejected.
          num_rows: int32, 0 to A, and never more than there is room for.

        Returns:
          The new cache, with the shapes and dtypes of the old one.
        """


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


def resize(cache: KVCache, lengths: jax.Array | np.ndarray, capacity: int) -> KVCache:
    """Returns `cache` with only the first `lengths` [B] rows of each sequence in use, and room for `capacity`."""

    def pad(layer: jax.Array) -> jax.Array:
        missing = capacity - layer.shape[2]
        return jnp.pad(layer, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing else layer

    return KVCache(tuple(map(pad, cache.keys)), tuple(map(pad, cache.values)), jnp.asarray(lengths))
