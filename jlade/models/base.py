"""The interface of a model that jlade can decode: the `Decoder` protocol and its cache."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from jlade.models.kv_rounding import TILE

Params = Any  # the model's own pytree of arrays
Cache = Any  # a `KVCache`, or a pytree of the decoder's own; see `Decoder`
# Keys and values [B, T, KV heads, head_dim] of a block, per layer; keys alone where they are the values. In 8 bits they
# are followed by their scales [B, T, KV heads].
BlockKV = Sequence[tuple[jax.Array, ...]]
Layers = tuple[tuple[jax.Array, ...], ...]  # keys, then values and scales of both where there are, per layer

MULTIPLE = 128  # of the entries of a ring; devices hold and read caches in tiles


@flax.struct.dataclass
class KVCache:
    """Keys and values of the accepted tokens, one array per layer.

    Entry i of a sequence belongs to its token at position i. A layer with a sliding window may have fewer entries than
    the text has tokens. It is a ring, which keeps the last S tokens: the one at position p is in entry p % S. Rejected
    tokens never reach the cache, so S need not exceed the window.

    The heads come before the entries, in the order that attention reads: with the entries first, programs for CPUs copy
    the whole cache in every step to transpose it.
    """

    keys: tuple[jax.Array, ...]  # [B, KV heads, S, head_dim], where layers may differ in all but B
    values: tuple[jax.Array, ...]  # [B, KV heads, S, head_dim]; () where the keys are the values
    length: jax.Array  # [B] int32, tokens before the next block
    states: Any = ()  # [B, ...] in every array, of recurrent layers, which each token changes
    # Of vectors in 8 bits, () for others: see `jlade.models.kv_rounding`
    key_scales: tuple[jax.Array, ...] = ()  # [B, KV heads, S] float32; [B, 2, S] for the two parts of a latent
    value_scales: tuple[jax.Array, ...] = ()  # [B, KV heads, S] float32

    @property
    def arrays(self) -> dict[str, tuple[jax.Array, ...]]:
        """The arrays of all layers that have entries, by their fields; those that there are."""
        names = "keys", "values", "key_scales", "value_scales"
        return {name: arrays for name in names if (arrays := getattr(self, name))}

    @property
    def layers(self) -> list[tuple[jax.Array, ...]]:
        """The arrays of each layer, in the order of a `BlockKV`."""
        return list(zip(*self.arrays.values(), strict=True))

    @property
    def divisible(self) -> int:
        """Tokens of the longest text that can be shortened: a ring that is full has lost the first ones."""
        return 0 if self.states else min(layer.shape[2] for layer in self.keys)


class Decoder(Protocol):
    """A causal language model that runs on a block of tokens: the interface to implement for a model of your own.

    `jlade.testing.check_decoder` checks an implementation; `examples/flax_decoder.py` is an example.

    A decoder is static: hashable, equal by value, without arrays; these are in `params`, any pytree. jlade compiles one
    program per decoder and setting, so the methods are traced: Python may branch on shapes, not on values.

    A batch has B independent sequences of different lengths, which may be 0.

    The cache is a `KVCache`, which the functions of this module commit to, or a dataclass of the decoder's own that is
    a pytree, such as a `flax.struct.dataclass`. jlade puts sequences into it and takes them out, and changes its
    capacity; the rest is left to `forward` and `commit`. It has

    - `length`, [B] int32, the tokens before the next block, and any other arrays [B, ...];
    - arrays that a larger capacity extends with zeros, at the ends of their axes: those of a text of n tokens are the
      same in all capacities of n or more, but for these zeros;
    - `divisible`, the number of tokens of the longest text that can be shortened: with a smaller `length`, it is the
      cache of as many tokens. Without this attribute, as for a recurrent state, no text can. Then the turns of a
      batch are read anew unless each continues its whole earlier text, and an engine shares the reading of whole texts
      alone.
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

    def init_cache(self, params: Params, batch_size: int, capacity: int) -> Cache:
        """Returns an empty cache for `batch_size` sequences of up to `capacity` tokens.

        A layer of a `KVCache` has `capacity` entries; with a sliding window, `num_entries(window, capacity)` suffice.
        """

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        cache: Cache,
        block_mask: jax.Array | np.ndarray,
    ) -> tuple[jax.Array, Any]:
        """Runs a block: every token sees the whole cache and the tokens of the block that `block_mask` allows.

        A token's result depends on the tokens that it sees and their positions, not on its index in the block: several
        guesses in a block may have the same position.

        Args:
          params: the model's parameters.
          tokens: [B, T] int32, 0 to V-1.
          positions: [B, T] int32, absolute, in any order. A guess may be at or past `max_positions`. Its result is not
            used, but its keys and values must not be NaN: 0 * NaN is NaN, which would reach the other tokens.
          cache: the tokens before the block. Only entries below `cache.length` are seen; the others hold any finite
            numbers. Entry i of a full ring has the last position p < `cache.length` with p % S = i.
          block_mask: [T, T] bool, or [B, T, T] with a mask for each sequence. `block_mask[..., q, k]` lets token q see
            token k. The mask is a tree's: a token sees itself and a path before it in the block, of which each token
            sees the earlier ones.

        Returns:
          The hidden states [B, T, E], floating, and the block's keys and values, a `BlockKV` for the function
          `commit`. Only `Decoder.commit` reads the latter, so they may be another pytree: also the arrays of the cache
          with the block written to spare entries, from which accepted tokens are then moved. On a mesh with an axis
          `lookahead` its arrays must be [B, T, ...]: those of the accepted tokens are exchanged.
        """

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Returns the float32 logits [B, R, V] of the next tokens from hidden states [B, R, E]."""

    def commit(self, cache: Cache, block_kv: Any, indices: jax.Array, num_accepted: jax.Array) -> Cache:
        """Returns the cache with the accepted tokens of each sequence's block appended, in the order of `indices`.

        They begin at entry `cache.length`, and the length grows by `num_accepted`. Entries below the length stay, even
        where fewer than A entries are free. In a ring the accepted tokens, and no rejected ones, take the place of the
        oldest. The function `commit` does this.

        Args:
          cache: the argument of `forward`.
          block_kv: the result of `forward`.
          indices: [B, A] int32, 0 to T-1, of tokens in the block. The first `num_accepted` of each sequence were
            accepted, a path as above, and the others rejected.
          num_accepted: [B] int32, 0 to A, and at most the number of free entries, which a ring does not limit.

        Returns:
          The new cache, with the shapes and dtypes of the old one.
        """


class Kind(NamedTuple):
    """The kind of a layer of a cache. Layers of a kind hold their tokens in the same entries."""

    size: int  # S
    is_ring: bool
    tile: int = 1  # entries that are written together


def num_entries(window: int | None, capacity: int) -> int:
    """Returns S, the cache entries of a layer for up to `capacity` tokens: no more than its sliding window needs.

    The first token of a block sees `window - 1` tokens of the cache, and the others no earlier ones.
    """
    return capacity if window is None else min(capacity, -(-window // MULTIPLE) * MULTIPLE)


def commit(
    cache: KVCache,
    block_kv: BlockKV,
    indices: jax.Array,
    num_accepted: jax.Array,
    windows: Sequence[int | None] = (),
) -> KVCache:
    """Returns `Decoder.commit` for every model that returns a `BlockKV`: rejected tokens never reach the cache.

    Args:
      cache, block_kv, indices, num_accepted: those of `Decoder.commit`.
      windows: the sliding window of each layer, None for a layer without; () if no layer has one.
    """
    layers, blocks = tuple(cache.arrays.values()), tuple(zip(*block_kv, strict=True))
    pairs = zip(cache.keys, windows or [None] * len(cache.keys), strict=True)
    kinds = tuple(Kind(layer.shape[2], window is not None) for layer, window in pairs)
    # XLA for GPUs copies a layer to another layout, and back, to scatter as many tokens as a quarter of its entries.
    are_short = any(kind.is_ring and kind.size <= 4 * indices.shape[1] for kind in kinds)
    on_gpu = write_slices if are_short else scatter
    forms = {"tpu": write_slices, "cuda": on_gpu, "rocm": on_gpu, "default": scatter}
    forms = {platform: functools.partial(form, kinds=kinds) for platform, form in forms.items()}
    written = jax.lax.platform_dependent(layers, blocks, cache.length, indices, num_accepted, **forms)
    fields = dict(zip(cache.arrays, written, strict=True))
    return dataclasses.replace(cache, **fields, length=cache.length + num_accepted)


def scatter(
    layers: Layers,
    blocks: Layers,
    length: jax.Array,
    indices: jax.Array,
    num_accepted: jax.Array,
    kinds: tuple[Kind, ...],
) -> Layers:
    """Returns the layers of a cache after `commit`. A token that is not kept gets an entry past the end: it is dropped.

    Args:
      layers, blocks, length, indices, num_accepted: arguments of `commit`.
      kinds: of each layer.
    """
    offset = jnp.arange(indices.shape[1], dtype=jnp.int32)[None, :]

    def place(size: int, is_ring: bool) -> jax.Array:
        """Returns the entries [B, A] of the tokens in a layer of `size` entries."""
        is_kept, entries = offset < num_accepted[:, None], length[:, None] + offset
        if is_ring:  # of more tokens than entries, the last are kept
            is_kept, entries = is_kept & (offset >= num_accepted[:, None] - size), entries % size
        return jnp.where(is_kept, entries, size + offset)

    places = {kind: place(kind.size, kind.is_ring) for kind in dict.fromkeys(kinds)}

    def write(layer: jax.Array, block: jax.Array, kind: Kind) -> jax.Array:
        return _scatter(layer, block, indices, places[kind])

    return _write_layers(write, layers, blocks, kinds)


@jax.jit
def _scatter(layer: jax.Array, block: jax.Array, indices: jax.Array, entries: jax.Array) -> jax.Array:
    """Writes the block's tokens with `indices` [B, A] to `entries` [B, A]. Under `jax.jit`, it is traced once."""
    sequence = jnp.arange(len(layer), dtype=jnp.int32)[:, None]
    chosen = block[sequence, indices].astype(layer.dtype)  # [B, A, KV heads, head_dim], or [B, A, KV heads] of scales
    return layer.at[sequence, :, entries].set(chosen, mode="drop", unique_indices=True)


def write_slices(
    layers: Layers,
    blocks: Layers,
    length: jax.Array,
    indices: jax.Array,
    num_accepted: jax.Array,
    kinds: tuple[Kind, ...],
) -> Layers:
    """`scatter` for TPUs: writes consecutive entries of each sequence, the old ones where no token was accepted.

    XLA for TPUs scatters into layers with the entries first. It then copies every layer to that layout and back:
    around the loop over steps, and within it where attention is a kernel.
    """
    batch_size, num_chosen = indices.shape

    def place(size: int, is_ring: bool, tile: int) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
        """Returns the slices of a layer of `size` entries: first entry [B], tokens [B, K], which are accepted [B, K].

        They are whole tiles. In a ring the tokens may begin near the end and continue from entry 0 on, in a second
        slice.
        """
        count = min(-(-(num_chosen + tile - 1) // tile) * tile, size)
        first = length % size if is_ring else length
        starts = [jnp.minimum(first if tile == 1 else first // tile * tile, size - count)]
        if is_ring and count < size:
            starts.append(jnp.zeros_like(length))
        slices = []
        for start in starts:
            offset = jnp.arange(count, dtype=jnp.int32)[None, :] - (length - start)[:, None]
            if is_ring:  # of the last accepted token that the entry may hold, negative if that is in the cache
                last = num_accepted[:, None] - 1
                offset = last - (last - offset) % size
            accepted = (offset >= 0) & (offset < num_accepted[:, None])
            chosen = jnp.maximum(offset, 0) if tile == 1 else jnp.clip(offset, 0, num_chosen - 1)
            slices.append((start, jnp.take_along_axis(indices, chosen, axis=1), accepted))
        return slices

    def in_tiles(layer: jax.Array, kind: Kind) -> Kind:
        is_whole = layer.dtype.itemsize == 1 and kind.size % TILE == 0
        return kind._replace(tile=TILE) if is_whole else kind

    tiled = [in_tiles(layer, kind) for arrays in layers for layer, kind in zip(arrays, kinds, strict=True)]
    places = {kind: place(*kind) for kind in dict.fromkeys(tiled)}

    def write(i: jax.Array, layers: Layers) -> Layers:
        own = jax.tree.map(lambda x: x[i], places)
        sequence = i.astype(jnp.int32)  # with 64-bit types, loops count in int64

        def write_layer(layer: jax.Array, block: jax.Array, kind: Kind) -> jax.Array:
            kind = in_tiles(layer, kind)
            for each in own[kind]:
                layer = _write_slice(layer, block, sequence, *each, tile=kind.tile)
            return layer

        return _write_layers(write_layer, layers, blocks, kinds)

    return jax.lax.fori_loop(0, batch_size, write, layers)


@functools.partial(jax.jit, static_argnames="tile")
def _write_slice(
    layer: jax.Array,
    block: jax.Array,
    i: jax.Array,
    start: jax.Array,
    indices: jax.Array,
    accepted: jax.Array,
    tile: int,
) -> jax.Array:
    """Writes the tokens of sequence i with `indices` [A] that are `accepted` [A] to the entries from `start` on.

    Tiles have an axis of their own while they are written. XLA would otherwise copy the whole layer to smaller ones.
    """
    axes, vector = tuple(range(layer.ndim)), layer.shape[3:]  # () for scales
    layer = with_layout_constraint(layer, Layout(axes))  # otherwise slices too have the entries first
    entries = (len(indices),) if tile == 1 else (len(indices) // tile, tile)
    apart = layer.reshape(*layer.shape[:2], -1, *entries[1:], *vector)
    rest = [jnp.zeros_like(i)] * (len(entries[1:]) + len(vector))
    at = (i, jnp.zeros_like(i), start if tile == 1 else start // tile, *rest)
    old = jax.lax.dynamic_slice(apart, at, (1, layer.shape[1], *entries, *vector))
    new = jnp.swapaxes(block[i, indices], 0, 1)[None].astype(layer.dtype).reshape(old.shape)
    is_new = jnp.expand_dims(accepted.reshape(entries), (0, 1, *range(-len(vector), 0)))
    return jax.lax.dynamic_update_slice(apart, jnp.where(is_new, new, old), at).reshape(layer.shape)


def _write_layers(
    write: Callable[[jax.Array, jax.Array, Kind], jax.Array], layers: Layers, blocks: Layers, kinds: Sequence[Kind]
) -> Layers:
    """Returns `write(layer, block, kind)` of each array of each layer."""
    pairs = zip(layers, blocks, strict=True)
    return tuple(tuple(itertools.starmap(write, zip(*pair, kinds, strict=True))) for pair in pairs)


def cache_shapes(decoder: Decoder, params: Params, batch_size: int, capacity: int) -> Cache:
    """Returns the shapes of `Decoder.init_cache`, without allocating it."""
    shapes: Cache = jax.eval_shape(lambda params: decoder.init_cache(params, batch_size, capacity), params)
    return shapes


def divisible(cache: Cache) -> int:
    """Returns the number of tokens of the longest text that can be shortened; see `Decoder`."""
    number: int = getattr(cache, "divisible", 0)
    return number


def resize(cache: Cache, lengths: jax.Array | np.ndarray, shapes: Cache) -> Cache:
    """Returns `cache` with the first `lengths` [B] tokens of each sequence, in the arrays of another capacity.

    Args:
      cache: of texts of `lengths` tokens, or of more, up to `divisible(cache)`. A ring that is full can be emptied too.
      lengths: tokens to keep.
      shapes: of the other cache, of `Decoder.init_cache` for `lengths` or more tokens.
    """

    def fit(array: jax.Array, wanted: jax.Array) -> jax.Array:
        if array.shape == wanted.shape:
            return array
        array = array[tuple(map(slice, wanted.shape))]
        missing = (size - here for size, here in zip(wanted.shape, array.shape, strict=True))
        return jnp.pad(array, [(0, number) for number in missing])

    return dataclasses.replace(jax.tree.map(fit, cache, shapes), length=jnp.asarray(lengths))
