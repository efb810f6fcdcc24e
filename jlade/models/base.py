"""The interface of a model that jlade can decode: the `Decoder` protocol and its cache."""

from collections.abc import Sequence
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

Params = Any  # the model's own pytree of arrays
BlockKV = Sequence[tuple[jax.Array, jax.Array]]  # keys and values [B, T, KV heads, head_dim] of a block, per layer
Layers = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]  # keys and values, per layer


@flax.struct.dataclass
class KVCache:
    """Keys and values of the accepted tokens, one array per layer.

    Entry i of a sequence belongs to its token at position i. The heads come before the entries, in the order that
    attention reads: with the entries first, programs for CPUs copy the whole cache in every step to transpose it.
    """

    keys: tuple[jax.Array, ...]  # [B, KV heads, S, head_dim]
    values: tuple[jax.Array, ...]  # [B, KV heads, S, head_dim]
    length: jax.Array  # [B] int32, entries in use


class Decoder(Protocol):
    """A causal language model that runs on a block of tokens: the interface to implement for a model of your own.

    `jlade.testing.check_decoder` checks an implementation; `examples/flax_decoder.py` is an example.

    A decoder is static: hashable, equal by value, without arrays; these are in `params`, any pytree. jlade compiles one
    program per decoder and setting, so the methods are traced: Python may branch on shapes, not on values.

    A batch has B independent sequences of different lengths, which may be 0.
    """

    @property
    def vocab_size(self) -> int:
        """V, size of the vocabulary."""

    @property
    def max_positions(self) -> int:
        """Length of the longest text that the model can read, in tokens."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text by default."""

    def init_cache(self, params: Params, batch_size: int, capacity: int) -> KVCache:
        """Returns an empty cache for `batch_size` sequences of up to `capacity` tokens.

        It is a `KVCache`: `resize` shortens and extends it between the turns of a conversation.
        """

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        block_mask: jax.Array | np.ndarray,
    ) -> tuple[jax.Array, BlockKV]:
        """Runs a block: every token sees the whole cache and the tokens of the block that `block_mask` allows.

        A token's result depends on the tokens that it sees and their positions, not on its index in the block: several
        guesses in a block may have the same position.

        Args:
          params: the model's parameters.
          tokens: [B, T] int32, 0 to V-1.
          positions: [B, T] int32, absolute, in any order. A guess may be at or past `max_positions`. Its result is not
            used, but its keys and values must not be NaN: 0 * NaN is NaN, which would reach the other tokens.
          cache: the tokens before the block; it is read, not written. Only entries below `cache.length` are seen; the
            others hold any finite numbers.
          block_mask: [T, T] bool, or [B, T, T] with a mask for each sequence. `block_mask[..., q, k]` lets token q see
            token k. Every token sees itself; otherwise any mask is possible.

        Returns:
          The hidden states [B, T, E], floating, and the block's keys and values. Only `commit` reads the latter, so a
          decoder with its own `commit` may return another pytree. On a mesh with an axis `lookahead` its arrays must
          be [B, T, ...]: those of the accepted tokens are exchanged.
        """

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Returns the float32 logits [B, R, V] of the next tokens from hidden states [B, R, E]."""

    def commit(self, cache: KVCache, block_kv: BlockKV, indices: jax.Array, num_accepted: jax.Array) -> KVCache:
        """Returns the cache with the accepted tokens of each sequence's block appended, in the order of `indices`.

        They begin at entry `cache.length`, and the length grows by `num_accepted`. Entries below the length stay, even
        where fewer than A entries are free. The function `commit` does this.

        Args:
          cache: the argument of `forward`.
          block_kv: the result of `forward`.
          indices: [B, A] int32, 0 to T-1, of tokens in the block. The first `num_accepted` of each sequence were
            accepted, the others rejected.
          num_accepted: [B] int32, 0 to A, and at most the number of free entries.

        Returns:
          The new cache, with the shapes and dtypes of the old one.
        """


def commit(cache: KVCache, block_kv: BlockKV, indices: jax.Array, num_accepted: jax.Array) -> KVCache:
    """Returns `Decoder.commit` for every model that returns a `BlockKV`: rejected tokens never reach the cache."""
    layers, blocks = (cache.keys, cache.values), tuple(zip(*block_kv, strict=True))
    keys, values = jax.lax.platform_dependent(
        layers, blocks, cache.length, indices, num_accepted, tpu=write_slices, default=scatter
    )
    return KVCache(keys=keys, values=values, length=cache.length + num_accepted)


def scatter(layers: Layers, blocks: Layers, length: jax.Array, indices: jax.Array, num_accepted: jax.Array) -> Layers:
    """Returns the layers of a cache after `commit`. A rejected token gets an entry past the end and is dropped."""
    offset = jnp.arange(indices.shape[1], dtype=jnp.int32)[None, :]
    capacity = jax.tree.leaves(layers)[0].shape[2]
    entries = jnp.where(offset < num_accepted[:, None], length[:, None] + offset, capacity + offset)
    return jax.tree.map(lambda layer, block: _scatter(layer, block, indices, entries), layers, blocks)


@jax.jit
def _scatter(layer: jax.Array, block: jax.Array, indices: jax.Array, entries: jax.Array) -> jax.Array:
    """Writes the block's tokens with `indices` [B, A] to `entries` [B, A]. Under `jax.jit`, it is traced once."""
    sequence = jnp.arange(len(layer), dtype=jnp.int32)[:, None]
    chosen = block[sequence, indices].astype(layer.dtype)  # [B, A, KV heads, head_dim]
    return layer.at[sequence, :, entries].set(chosen, mode="drop", unique_indices=True)


def write_slices(
    layers: Layers, blocks: Layers, length: jax.Array, indices: jax.Array, num_accepted: jax.Array
) -> Layers:
    """`scatter` for TPUs: writes A consecutive entries of each sequence, the old ones where no token was accepted.

    XLA for TPUs scatters into layers with the entries first. It then copies every layer to that layout and back:
    around the loop over steps, and within it where attention is a kernel.
    """
    batch_size, num_chosen = indices.shape
    capacity = jax.tree.leaves(layers)[0].shape[2]
    size = min(num_chosen, capacity)
    start = jnp.minimum(length, capacity - size)
    offset = jnp.arange(size, dtype=jnp.int32)[None, :] - (length - start)[:, None]
    accepted = (offset >= 0) & (offset < num_accepted[:, None])
    indices = jnp.take_along_axis(indices, jnp.maximum(offset, 0), axis=1)

    def write(i: jax.Array, layers: Layers) -> Layers:
        place = i.astype(jnp.int32), start[i], indices[i], accepted[i]  # with 64-bit types, loops count in int64
        return jax.tree.map(lambda layer, block: _write_slice(layer, block, *place), layers, blocks)

    return jax.lax.fori_loop(0, batch_size, write, layers)


@jax.jit
def _write_slice(
    layer: jax.Array, block: jax.Array, i: jax.Array, start: jax.Array, indices: jax.Array, accepted: jax.Array
) -> jax.Array:
    """Writes the tokens of sequence i with `indices` [A] that are `accepted` [A] to the entries from `start` on."""
    layer = with_layout_constraint(layer, Layout((0, 1, 2, 3)))  # otherwise slices too have the entries first
    at = (i, jnp.zeros_like(i), start, jnp.zeros_like(i))
    old = jax.lax.dynamic_slice(layer, at, (1, layer.shape[1], len(indices), layer.shape[3]))
    new = jnp.swapaxes(block[i, indices], 0, 1)[None].astype(layer.dtype)
    return jax.lax.dynamic_update_slice(layer, jnp.where(accepted[None, None, :, None], new, old), at)


def resize(cache: KVCache, lengths: jax.Array | np.ndarray, capacity: int) -> KVCache:
    """Returns `cache` with the first `lengths` [B] entries of each sequence in use, and room for `capacity`."""

    def pad(layer: jax.Array) -> jax.Array:
        missing = capacity - layer.shape[2]
        return jnp.pad(layer, ((0, 0), (0, 0), (0, missing), (0, 0))) if missing else layer

    return KVCache(tuple(map(pad, cache.keys)), tuple(map(pad, cache.values)), jnp.asarray(lengths))
