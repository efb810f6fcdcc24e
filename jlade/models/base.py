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
# Keys and values array[B, T, KH, D] of a block, per layer; keys alone where they are the values. In 8 bits they are
# followed by their scales float32[B, T, KH].
BlockKV = Sequence[tuple[jax.Array, ...]]
Layers = tuple[tuple[jax.Array, ...], ...]  # keys, then values and scales of both where there are, per layer

MULTIPLE = 128  # of the entries of a ring; devices hold and read caches in tiles
MAX_TEXT_LENGTH = 2**31 - 1  # tokens


@flax.struct.dataclass
class KVCache:
    """Keys and values of the accepted tokens, one array per layer.

    Entry i of a sequence belongs to its token at position i. A layer with a sliding window may have fewer entries than
    the text has tokens. It is a ring, which keeps the last S tokens: the one at position p is in entry p % S. Rejected
    tokens never reach the cache, so S need not exceed the window.

    The layers without a window may lie in pages, which the sequences share. Entry i of a sequence is then entry i % S
    of the page `table[b, i // S]`. Sequences may have pages in common: those that are full of tokens that their texts
    begin with. Page 0 belongs to none; places of the table without a page name it.

    The heads come before the entries, in the order that attention reads: with the entries first, programs for CPUs copy
    the whole cache in every step to transpose it.

    Attributes:
      keys: array[B, KH, S, D] of each layer, which may differ in all but B: of its dtype, KV heads, entries and size.
      values: array[B, KH, S, D] of each layer; () where the keys are the values.
      length: int32[B], tokens before the next block.
      states: array[B, ...] in each array, of recurrent layers, which each token changes.
      key_scales: float32[B, KH, S] of each layer in 8 bits, float32[B, 2, S] for the two parts of a latent; () for
        other dtypes, see `jlade.models.kv_rounding`.
      value_scales: float32[B, KH, S] likewise.
      pages: array[P, KH, S, D] of the layers in P pages, which the fields above then lack: keys, values and scales of
        each, as those above.
      table: int32[B, places], the pages of each sequence; None for a cache without pages.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array
    states: Any = ()
    key_scales: tuple[jax.Array, ...] = ()
    value_scales: tuple[jax.Array, ...] = ()
    pages: tuple[tuple[jax.Array, ...], ...] = ()
    table: jax.Array | None = None

    @property
    def arrays(self) -> dict[str, tuple[jax.Array, ...]]:
        """The arrays of all layers that have entries, array[B, KH, S, ...], by their fields; those that there are."""
        names = "keys", "values", "key_scales", "value_scales"
        return {name: arrays for name in names if (arrays := getattr(self, name))}

    @property
    def layers(self) -> list[tuple[jax.Array, ...]]:
        """The arrays of each layer that is not in pages, array[B, KH, S, ...], in the order of a `BlockKV`."""
        return list(zip(*self.arrays.values(), strict=True))

    def layers_of(self, windows: Sequence[int | None]) -> list[tuple[jax.Array, ...]]:
        """Returns the arrays of all layers, given the window of each, in the order of a `BlockKV`.

        They are array[B, KH, S, ...], or array[P, KH, S, ...] in pages.
        """
        others = iter(self.layers)
        paged = others if self.table is None else iter(self.pages)
        return [next(paged if window is None else others) for window in windows]

    @property
    def divisible(self) -> int:
        """Tokens of the longest text that can be shortened: a ring that is full has lost the first ones."""
        return 0 if self.states else min((layer.shape[2] for layer in self.keys), default=MAX_TEXT_LENGTH)


class Decoder(Protocol):
    """A causal language model that runs on a block of tokens: the interface to implement for a model of your own.

    `jlade.testing.check_decoder` checks an implementation; `examples/flax_decoder.py` is an example.

    A decoder is static: hashable, equal by value, without arrays; these are in `params`, any pytree. jlade compiles one
    program per decoder and setting, so the methods are traced: Python may branch on shapes, not on values.

    A batch has B independent sequences of different lengths, which may be 0.

    The cache is a `KVCache`, which the functions of this module commit to, or a dataclass of the decoder's own that is
    a pytree, such as a `flax.struct.dataclass`. jlade puts sequences into it and takes them out, and changes its
    capacity; the rest is left to `forward` and `commit`. It has

    - `length`, int32[B], the tokens before the next block, and any other arrays array[B, ...];
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
          tokens: int32[B, T], 0 to V-1.
          positions: int32[B, T], absolute, in any order. A guess may be at or past `max_positions`. Its result is not
            used, but its keys and values must not be NaN: 0 * NaN is NaN, which would reach the other tokens.
          cache: the tokens before the block. Only entries below `cache.length` are seen; the others hold any finite
            numbers. Entry i of a full ring has the last position p < `cache.length` with p % S = i.
          block_mask: bool[T, T], or bool[B, T, T] with a mask for each sequence. `block_mask[..., q, k]` lets token q
            see token k. The mask is a tree's: a token sees itself and a path before it in the block, of which each
            token sees the earlier ones.

        Returns:
          The hidden states float[B, T, E], and the block's keys and values, a `BlockKV` for the function `commit`.
          Only `Decoder.commit` reads the latter, so they may be another pytree: also the arrays of the cache with the
          block written to spare entries, from which accepted tokens are then moved. On a mesh with an axis `lookahead`
          its arrays must be array[B, T, ...]: those of the accepted tokens are exchanged.
        """

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Returns the logits float32[B, R, V] of the next tokens from R hidden states of each text, float[B, R, E]."""

    def commit(self, cache: Cache, block_kv: Any, indices: jax.Array, num_accepted: jax.Array) -> Cache:
        """Returns the cache with the accepted tokens of each sequence's block appended, in the order of `indices`.

        They begin at entry `cache.length`, and the length grows by `num_accepted`. Entries below the length stay, even
        where fewer than A entries are free. In a ring the accepted tokens, and no rejected ones, take the place of the
        oldest. The function `commit` does this.

        Args:
          cache: the argument of `forward`.
          block_kv: the result of `forward`.
          indices: int32[B, A], 0 to T-1, of tokens in the block. The first `num_accepted` of each sequence were
            accepted, a path as above, and the others rejected.
          num_accepted: int32[B], 0 to A, and at most the number of free entries, which a ring does not limit.

        Returns:
          The new cache, with the shapes and dtypes of the old one.
        """


class CacheKind(NamedTuple):
    """The kind of a layer of a cache. Layers of a kind hold their tokens in the same entries."""

    size: int  # S
    is_ring: bool
    is_paged: bool = False
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
    windows, table = windows or [None] * len(block_kv), cache.table
    layers, are_paged = cache.layers_of(windows), [table is not None and window is None for window in windows]
    each = zip(layers, windows, are_paged, strict=True)
    kinds = tuple(CacheKind(keys.shape[2], window is not None, is_paged) for (keys, *_), window, is_paged in each)
    arrays, blocks = (tuple(zip(*every, strict=True)) for every in (layers, block_kv))
    # XLA for GPUs copies a layer to another layout, and back, to scatter as many tokens as a quarter of its entries.
    are_short = any(not kind.is_paged and kind.size <= 4 * indices.shape[1] for kind in kinds)
    on_gpu = write_slices if are_short else scatter_several
    forms = {"tpu": write_slices, "cuda": on_gpu, "rocm": on_gpu, "default": scatter}
    forms = {platform: functools.partial(form, kinds=kinds) for platform, form in forms.items()}
    written = jax.lax.platform_dependent(arrays, blocks, cache.length, indices, num_accepted, table, **forms)
    after = list(zip(zip(*written, strict=True), are_paged, strict=True))
    pages = tuple(layer for layer, is_paged in after if is_paged)
    others = zip(*(layer for layer, is_paged in after if not is_paged), strict=True)
    fields: dict[str, Any] = dict(zip(cache.arrays, others, strict=True))
    return dataclasses.replace(cache, **fields, pages=pages, length=cache.length + num_accepted)


def scatter(
    layers: Layers,
    blocks: Layers,
    length: jax.Array,
    indices: jax.Array,
    num_accepted: jax.Array,
    table: jax.Array | None = None,
    *,
    kinds: tuple[CacheKind, ...],
) -> Layers:
    """Returns the layers of a cache after `commit`. A token that is not kept gets an entry past the end: it is dropped.

    Args:
      layers, blocks, length, indices, num_accepted: arguments of `commit`.
      table: that of a `KVCache`, if layers are in pages.
      kinds: of each layer.
    """
    offset = jnp.arange(indices.shape[1], dtype=jnp.int32)[None, :]

    def place(kind: CacheKind) -> tuple[jax.Array, jax.Array | None]:
        """Returns the entries [B, A] of the tokens in a layer, and their pages [B, A]."""
        size, pages = kind.size, None
        is_kept, entries = offset < num_accepted[:, None], length[:, None] + offset
        if kind.is_ring:  # of more tokens than entries, the last are kept
            is_kept, entries = is_kept & (offset >= num_accepted[:, None] - size), entries % size
        if kind.is_paged:
            assert table is not None
            # Places differ, those of dropped tokens too.
            rows = jnp.arange(len(length), dtype=jnp.int32)[:, None]
            pages = jnp.where(is_kept, _pages(table, entries // size), rows)
            entries %= size
        return jnp.where(is_kept, entries, size + offset), pages

    places = {kind: place(kind) for kind in dict.fromkeys(kinds)}

    def write(layer: jax.Array, block: jax.Array, kind: CacheKind) -> jax.Array:
        return _scatter(layer, block, indices, *places[kind])

    return _write_layers(write, layers, blocks, kinds)


def scatter_several(
    layers: Layers, blocks: Layers, length: jax.Array, indices: jax.Array, *rest: Any, **kinds: Any
) -> Layers:
    """`scatter` for GPUs, of two tokens or more: XLA makes two kernels for each array where it writes a single one."""
    padded = jnp.pad(indices, ((0, 0), (0, max(0, 2 - indices.shape[1]))))
    return scatter(layers, blocks, length, padded, *rest, **kinds)


def _pages(table: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the pages at places [B, A] of a table [B, N]."""
    return jnp.take_along_axis(table, jnp.minimum(places, table.shape[1] - 1), axis=1)


@jax.jit
def _scatter(
    layer: jax.Array, block: jax.Array, indices: jax.Array, entries: jax.Array, pages: jax.Array | None
) -> jax.Array:
    """Writes the block's tokens with `indices` [B, A] to `entries` [B, A] of their sequences, or of `pages` [B, A].

    Under `jax.jit`, it is traced once.
    """
    sequence = jnp.arange(len(indices), dtype=jnp.int32)[:, None]
    chosen = block[sequence, indices].astype(layer.dtype)  # [B, A, KV heads, head_dim], or [B, A, KV heads] of scales
    owner = sequence if pages is None else pages
    return layer.at[owner, :, entries].set(chosen, mode="drop", unique_indices=True)


def write_slices(
    layers: Layers,
    blocks: Layers,
    length: jax.Array,
    indices: jax.Array,
    num_accepted: jax.Array,
    table: jax.Array | None = None,
    *,
    kinds: tuple[CacheKind, ...],
) -> Layers:
    """`scatter` for TPUs: writes consecutive entries of each sequence, the old ones where no token was accepted.

    XLA for TPUs scatters into layers with the entries first. It then copies every layer to that layout and back:
    around the loop over steps, and within it where attention is a kernel.
    """
    batch_size, num_chosen = indices.shape

    def place(kind: CacheKind) -> list[tuple[jax.Array, ...]]:
        """Returns the slices of a layer: first entry [B], tokens [B, K], which are accepted [B, K], and the page [B].

        They are whole tiles. In a ring the tokens may begin near the end and continue from entry 0 on, in a second
        slice; in pages they continue from entry 0 of the next pages on.
        """
        size, tile = kind.size, kind.tile
        count = min(-(-(num_chosen + tile - 1) // tile) * tile, size)
        first = length % size if kind.is_ring or kind.is_paged else length
        starts = [jnp.minimum(first if tile == 1 else first // tile * tile, size - count)]
        if kind.is_paged:
            starts += [jnp.zeros_like(length)] * -(-(num_chosen - 1) // size)
        elif kind.is_ring and count < size:
            starts.append(jnp.zeros_like(length))
        slices: list[tuple[jax.Array, ...]] = []
        for number, start in enumerate(starts):
            begin = length - start
            if kind.is_paged:  # of this slice, in the text
                begin = length - (length // size + number) * size - start
            offset = jnp.arange(count, dtype=jnp.int32)[None, :] - begin[:, None]
            if kind.is_ring:  # of the last accepted token that the entry may hold, negative if that is in the cache
                last = num_accepted[:, None] - 1
                offset = last - (last - offset) % size
            accepted = (offset >= 0) & (offset < num_accepted[:, None])
            chosen = jnp.maximum(offset, 0) if tile == 1 else jnp.clip(offset, 0, num_chosen - 1)
            pages = []
            if kind.is_paged:
                assert table is not None
                pages = [_pages(table, (length // size + number)[:, None])[:, 0]]
            slices.append((start, jnp.take_along_axis(indices, chosen, axis=1), accepted, *pages))
        return slices

    def in_tiles(layer: jax.Array, kind: CacheKind) -> CacheKind:
        is_whole = layer.dtype.itemsize == 1 and kind.size % TILE == 0
        return kind._replace(tile=TILE) if is_whole else kind

    tiled = [in_tiles(layer, kind) for arrays in layers for layer, kind in zip(arrays, kinds, strict=True)]
    places = {kind: place(kind) for kind in dict.fromkeys(tiled)}

    def write(i: jax.Array, layers: Layers) -> Layers:
        slices = jax.tree.map(lambda x: x[i], places)
        sequence = i.astype(jnp.int32)  # with 64-bit types, loops count in int64

        def write_layer(layer: jax.Array, block: jax.Array, kind: CacheKind) -> jax.Array:
            kind = in_tiles(layer, kind)
            for part in slices[kind]:
                layer = _write_slice(layer, block, sequence, *part, tile=kind.tile)
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
    page: jax.Array | None = None,
    *,
    tile: int,
) -> jax.Array:
    """Writes the tokens of sequence i with `indices` [A] that are `accepted` [A] to the entries from `start` on.

    The entries are those of the sequence, or of a page.
    Tiles have an axis of their own while they are written. XLA would otherwise copy the whole layer to smaller ones.
    """
    axes, vector = tuple(range(layer.ndim)), layer.shape[3:]  # () for scales
    layer = with_layout_constraint(layer, Layout(axes))  # otherwise slices too have the entries first
    entries = (len(indices),) if tile == 1 else (len(indices) // tile, tile)
    apart = layer.reshape(*layer.shape[:2], -1, *entries[1:], *vector)
    rest = [jnp.zeros_like(i)] * (len(entries[1:]) + len(vector))
    owner = i if page is None else page
    at = (owner, jnp.zeros_like(i), start if tile == 1 else start // tile, *rest)
    old = jax.lax.dynamic_slice(apart, at, (1, layer.shape[1], *entries, *vector))
    new = jnp.swapaxes(block[i, indices], 0, 1)[None].astype(layer.dtype).reshape(old.shape)
    is_new = jnp.expand_dims(accepted.reshape(entries), (0, 1, *range(-len(vector), 0)))
    return jax.lax.dynamic_update_slice(apart, jnp.where(is_new, new, old), at).reshape(layer.shape)


def _write_layers(
    write: Callable[[jax.Array, jax.Array, CacheKind], jax.Array],
    layers: Layers,
    blocks: Layers,
    kinds: Sequence[CacheKind],
) -> Layers:
    """Returns `write(layer, block, kind)` of each array of each layer."""
    pairs = zip(layers, blocks, strict=True)
    return tuple(tuple(itertools.starmap(write, zip(*pair, kinds, strict=True))) for pair in pairs)


def cache_shapes(decoder: Decoder, params: Params, batch_size: int, capacity: int) -> Cache:
    """Returns the shapes of `Decoder.init_cache`, without allocating it."""
    shapes: Cache = jax.eval_shape(lambda params: decoder.init_cache(params, batch_size, capacity), params)
    return shapes


def in_pages(shapes: KVCache, windows: Sequence[int | None], num_pages: int, size: int) -> KVCache:
    """Returns an empty cache whose layers without a window lie in pages.

    Args:
      shapes: of the cache without pages, for B sequences of C tokens.
      windows: the sliding window of each layer, None for a layer without.
      num_pages: P, page 0 included.
      size: S, entries of a page.
    """
    pages = []
    kept: list[list[jax.Array]] = [[] for _ in shapes.arrays]
    for layer, window in zip(shapes.layers, windows, strict=True):
        if window is None:
            pages.append(tuple(jnp.zeros((num_pages, x.shape[1], size, *x.shape[3:]), x.dtype) for x in layer))
        else:
            for arrays, x in zip(kept, layer, strict=True):
                arrays.append(jnp.zeros(x.shape, x.dtype))
    batch_size = len(shapes.length)
    capacity = max(
        (keys.shape[2] for keys, window in zip(shapes.keys, windows, strict=True) if window is None), default=0
    )
    table = jnp.zeros((batch_size, -(-capacity // size)), jnp.int32)
    rest = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), dataclasses.replace(shapes, keys=(), values=()))
    fields = dict(zip(shapes.arrays, map(tuple, kept), strict=True))
    return dataclasses.replace(rest, **fields, pages=tuple(pages), table=table if pages else None)


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
