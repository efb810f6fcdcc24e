"""Attention in plain JAX: it runs on every device and has windows, soft caps and scales."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jlade.models import kv_rounding, nn
from jlade.models.attention.operands import Operands

CHUNK = 256  # cache entries read at once; without a loop, a multiple
CHUNK_ON_CPU = 128  # whose time grows with the entries past the text's end; elsewhere each chunk costs a pass
SCORES = 2**24  # in memory at once without a loop, about: 64 MB

Take = Callable[[jax.Array, Any, int], jax.Array]  # entries of a layer


def attend(
    operands: Operands,
    window: int | None,
    scale: float | None = None,
    cap: float | None = None,
    split: int | None = None,
) -> jax.Array:
    """Returns `jlade.models.attention.attend` for a mask [1 or B, T, T].

    A loop reads the prefix up to the longest sequence. GPUs read the whole cache without a loop: a loop whose length
    is not static is run by the host, which waits for the GPU in every iteration.
    """
    is_row = operands.queries.shape[1:3] == (1, operands.keys.shape[2])  # one token, with a KV head for each head
    is_row = is_row and operands.chosen is None
    variations: dict[str, Any] = {"window": window, "scale": scale, "cap": cap, "split": split}
    loop = functools.partial(attend_in_chunks, unrolled=False, **variations)
    on_cpu = functools.partial(loop, chunk=CHUNK_ON_CPU)
    unrolled = functools.partial(attend_in_chunks, unrolled=True, **variations)
    on_tpu = functools.partial(attend_row_twice, **variations) if is_row else loop
    on_tpu = functools.partial(
        on_tpu,
        in_rows=operands.cached_keys is operands.cached_values,
        in_tiles=operands.key_scales is not None and operands.capacity % CHUNK == 0 and operands.table is None,
    )
    mixed: jax.Array = jax.lax.platform_dependent(operands, cuda=unrolled, rocm=unrolled, tpu=on_tpu, default=on_cpu)
    return mixed


def attend_row_twice(operands: Operands, **variations: Any) -> jax.Array:
    """Returns `attend` of one token with a KV head for each head, as of two: see `nn.multiply_row_twice`."""
    of_tokens = "queries", "keys", "values", "positions", "key_scales", "value_scales"
    names = [name for name in of_tokens if getattr(operands, name) is not None]
    twice = operands._replace(**{name: jnp.repeat(getattr(operands, name), 2, axis=1) for name in names})
    twice = twice._replace(block_mask=jnp.eye(2, dtype=bool)[None])
    return attend_in_chunks(twice, unrolled=False, **variations)[:, :1]


def attend_in_chunks(
    operands: Operands,
    *,
    unrolled: bool,
    window: int | None,
    scale: float | None = None,
    cap: float | None = None,
    split: int | None = None,
    chunk: int = CHUNK,
    in_rows: bool = False,
    in_tiles: bool = False,
) -> jax.Array:
    """Returns `attend` by an online softmax (arXiv 1805.02867) over the block, then over chunks of the prefix.

    Scores and weights are multiplied by the scales of keys and values in 8 bits, which compilers convert within the
    products with them.

    Args:
      unrolled: whether to read the whole cache in few large chunks, without a loop.
      split: see `jlade.models.attention.attend`.
      chunk: entries of a chunk; of a large one, a multiple.
      in_rows: whether to fix the layout of chunks. XLA for TPUs otherwise reads keys that are the values, with a size
        that is no multiple of 128, with the entries last: it copies the whole cache to that layout in every step.
      in_tiles: whether to take chunks in the tiles of a TPU, for the same reason.
    """
    queries, keys, values, cached_keys, cached_values, cached_length, block_mask, positions, sinks, *_ = operands
    key_scales, value_scales, *cached_scales, _, chosen = operands[-6:]
    batch_size, block_size, heads, head_dim = queries.shape
    kv_heads, capacity = cached_keys.shape[1], operands.capacity
    grouped = (batch_size, kv_heads, heads // kv_heads, block_size)
    chunk = chunk_size(operands, batch_size * heads * block_size, chunk, unrolled)

    def narrow(x: jax.Array) -> jax.Array:
        return x if x.shape[-1] == head_dim else x[..., :head_dim]

    # Heads first and the queries of a group in one dimension: each product is one matrix product per KV head.
    scale = head_dim**-0.5 if scale is None else scale
    queries = jnp.transpose(queries * scale, (0, 2, 1, 3)).reshape(batch_size, kv_heads, -1, head_dim)
    keys, values = (jnp.transpose(narrow(x), (0, 2, 1, 3)) for x in (keys, values))
    if key_scales is not None and value_scales is not None:
        key_scales, value_scales = jnp.swapaxes(key_scales, 1, 2), jnp.swapaxes(value_scales, 1, 2)

    def multiply(queries: jax.Array, keys: jax.Array) -> jax.Array:
        return jnp.einsum("bkqd,bksd->bkqs", queries, keys, preferred_element_type=jnp.float32)

    def products(queries: jax.Array, keys: jax.Array, scales: jax.Array | None) -> jax.Array:
        if scales is None:
            return multiply(queries, keys)
        keys = kv_rounding.numbers(keys, queries.dtype)
        if split is None:
            return multiply(queries, keys) * scales[:, :, None]
        first = multiply(queries[..., :split], keys[..., :split]) * scales[:, :1, None]
        return first + multiply(queries[..., split:], keys[..., split:]) * scales[:, 1:2, None]

    def scores(queries: jax.Array, keys: jax.Array, scales: jax.Array | None, mask: jax.Array) -> jax.Array:
        """Returns [B, KH, H/KH * T, K] for keys [B, KH, K, D] and a mask [1 or B, 1 or T, K]."""
        product = products(queries, keys, scales)
        product = nn.cap(product, cap)
        masked = jnp.where(mask[:, None, None], product.reshape(*grouped, -1), -jnp.inf)
        return masked.reshape(product.shape)

    def mix(weights: jax.Array, values: jax.Array, scales: jax.Array | None) -> jax.Array:
        if scales is not None:  # of a latent that is keys and values, the first: its rotated elements are no values
            weights, values = weights * scales[:, :kv_heads, None], kv_rounding.numbers(values, queries.dtype)
        weights = weights.astype(values.dtype)
        return jnp.einsum("bkqs,bksd->bkqd", weights, values, preferred_element_type=jnp.float32)

    def within_window(mask: jax.Array, key_positions: jax.Array | None) -> jax.Array:
        """Hides the keys, at `key_positions` [1 or B, K], that have left a token's window."""
        if window is None or positions is None or key_positions is None:
            return mask
        return mask & (positions[:, :, None] - key_positions[:, None, :] < window)

    def read_chunk(i: jax.Array | int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        queries, highest, total, mixed = carry
        start = jnp.minimum(i * chunk, capacity - chunk)  # the last chunk may overlap the one before
        entries = start + jnp.arange(chunk, dtype=jnp.int32)[None, :]
        unread = (entries >= i * chunk) & (entries < cached_length[:, None])
        mask = unread[:, None, :]
        if window is not None:
            # A ring holds the last positions. Until it is full, entry i has position i.
            rounds = (cached_length[:, None] - 1 - entries) // capacity
            mask = within_window(mask, entries + rounds * capacity)
        if chosen is not None:
            mask = mask & jax.lax.dynamic_slice_in_dim(chosen, start, chunk, axis=2)
        take_scales = taker(operands)
        take = kv_rounding.take_tiles if in_tiles else take_scales
        chunk_keys, chunk_values = (narrow(take(x, start, chunk)) for x in (cached_keys, cached_values))
        if in_rows:
            in_order = Layout((0, 1, 2, 3))
            chunk_keys, chunk_values = (with_layout_constraint(x, in_order) for x in (chunk_keys, chunk_values))
        scales = [x if x is None else take_scales(x, start, chunk) for x in cached_scales]
        seen = scores(queries, chunk_keys, scales[0], mask)
        higher = jnp.maximum(highest, jnp.max(seen, axis=-1, keepdims=True))
        shrink, weights = jnp.exp(highest - higher), jnp.exp(seen - higher)
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        return queries, higher, total, mixed * shrink + mix(weights, chunk_values, scales[1])

    seen = scores(queries, keys, key_scales, within_window(jnp.asarray(block_mask), positions))
    highest = jnp.max(seen, axis=-1, keepdims=True)  # finite, as every token sees itself
    if chosen is not None:
        highest = jnp.maximum(highest, jnp.finfo(jnp.float32).min)
    weights = jnp.exp(seen - highest)
    total, mixed = jnp.sum(weights, axis=-1, keepdims=True), mix(weights, values, value_scales)
    carry: tuple[jax.Array, ...] = queries, highest, total, mixed
    if unrolled:
        for i in range(-(-capacity // chunk)):
            # Without the barrier, compilers join the products of block and cache, and copy the keys for it.
            carry = read_chunk(i, jax.lax.optimization_barrier(carry))
    else:
        in_use = jnp.max(cached_length) if window is None else jnp.minimum(jnp.max(cached_length), capacity)
        num_chunks = (in_use + chunk - 1) // chunk
        carry = jax.lax.fori_loop(0, num_chunks, read_chunk, carry)
    _, highest, total, mixed = carry
    if sinks is not None:
        rows = jnp.repeat(sinks.astype(jnp.float32), block_size).reshape(1, kv_heads, -1, 1)
        total += jnp.exp(rows - highest)  # inf where a sink takes all the weight

    mixed = (mixed / total).astype(queries.dtype).reshape(batch_size, heads, block_size, head_dim)
    return jnp.transpose(mixed, (0, 2, 1, 3))


def chunk_size(operands: Operands, rows: int, chunk: int, unrolled: bool) -> int:
    """Returns the entries that are read at once for some rows of scores, a multiple of `chunk` and of whole pages."""
    capacity = operands.capacity
    if unrolled:
        fewest = -(-rows * capacity // SCORES)
        chunk *= -(-capacity // (fewest * chunk))
    chunk, page = min(chunk, capacity), operands.cached_keys.shape[2]
    return chunk if operands.table is None else max(chunk // page, 1) * page


def taker(operands: Operands) -> Take:
    """Returns the function that takes entries of a layer, or of their scales, from a start on."""
    if operands.table is None:
        return functools.partial(jax.lax.dynamic_slice_in_dim, axis=2)
    return functools.partial(_take_pages, operands.table)


def _take_pages(table: jax.Array, layer: jax.Array, start: jax.Array | int, count: int) -> jax.Array:
    """Returns `count` entries [B, KH, count, ...] from `start` on, both multiples of a page, of a layer in pages."""
    kv_heads, size, *vector = layer.shape[1:]
    pages = jax.lax.dynamic_slice_in_dim(table, start // size, count // size, axis=1)
    taken = jnp.moveaxis(layer[pages], 1, 2)  # [B, KH, pages, S, ...]
    return taken.reshape(len(table), kv_heads, count, *vector)
