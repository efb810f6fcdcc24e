"""Attention of a block to its prefix in the cache and to itself."""

import jax
import jax.numpy as jnp
import numpy as np

CHUNK = 256  # rows of the cache read at once


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    cached_keys: jax.Array,
    cached_values: jax.Array,
    cached_length: jax.Array,
    block_mask: jax.Array | np.ndarray,
    positions: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Grouped-query attention with one softmax over prefix and block.

    The prefix needs no mask but its length; the mask is for the block alone. The prefix is read in chunks, as many as
    the longest sequence fills, so that the work grows with the text and not with the cache's capacity; the softmax is
    kept up as they come (arXiv 1805.02867).

    Args:
      queries: [B, T, H, D].
      keys, values: [B, T, KH, D] of the block; H is a multiple of KH.
      cached_keys, cached_values: [B, KH, S, D].
      cached_length: [B], rows of the cache in use.
      block_mask: [T, T] bool, which token (row) sees which (column); every token sees itself.
      positions: [B, T] of the block's tokens; needed with `window`. Row i of the cache is position i.
      window: the most positions that a token sees, its own included; None for all.

    Returns:
      [B, T, H, D] in the dtype of `queries`; scores and softmax are float32.
    """
    batch_size, block_size, heads, head_dim = queries.shape
    kv_heads, capacity = cached_keys.shape[1:3]
    grouped = (batch_size, kv_heads, heads // kv_heads, block_size)
    chunk = min(CHUNK, capacity)
    # Heads first, the queries of a group in one dimension: so each product is one plain matrix product per KV head.
    queries = jnp.transpose(queries * head_dim**-0.5, (0, 2, 1, 3)).reshape(batch_size, kv_heads, -1, head_dim)
    keys, values = jnp.transpose(keys, (0, 2, 1, 3)), jnp.transpose(values, (0, 2, 1, 3))

    def scores(keys: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns [B, KH, H/KH * T, rows] for keys [B, KH, rows, D] and a mask [B or 1, T or 1, rows]."""
        product = jnp.einsum("bkqd,bksd->bkqs", queries, keys, preferred_element_type=jnp.float32)
        masked = jnp.where(mask[:, None, None], product.reshape(*grouped, -1), -jnp.inf)
        return masked.reshape(product.shape)

    def mix(weights: jax.Array, values: jax.Array) -> jax.Array:
        weights = weights.astype(values.dtype)
        return jnp.einsum("bkqs,bksd->bkqd", weights, values, preferred_element_type=jnp.float32)

    def within_window(mask: jax.Array, rows: jax.Array | None) -> jax.Array:
        """Narrows the mask to those of the positions `rows` [B or 1, rows] that are near enough."""
        if window is None or positions is None or rows is None:
            return mask
        return mask & (positions[:, :, None] - rows[:, None, :] < window)

    def read_chunk(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        highest, total, mixed = carry
        start = jnp.minimum(i * chunk, capacity - chunk)  # the last chunk may begin earlier, where the one before ended
        rows = start + jnp.arange(chunk, dtype=jnp.int32)
        in_use = (rows[None, :] >= i * chunk) & (rows[None, :] < cached_length[:, None])
        mask = within_window(in_use[:, None, :], rows[None, :])
        chunk_keys, chunk_values = (
            jax.lax.dynamic_slice_in_dim(x, start, chunk, 2) for x in (cached_keys, cached_values)
        )
        products = scores(chunk_keys, mask)
        higher = jnp.maximum(highest, jnp.max(products, axis=-1, keepdims=True))
        shrink, weights = jnp.exp(highest - higher), jnp.exp(products - higher)
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        return higher, total, mixed * shrink + mix(weights, chunk_values)

    products = scores(keys, within_window(jnp.asarray(block_mask)[None], positions))
    highest = jnp.max(products, axis=-1, keepdims=True)  # finite, as every token sees itself
    weights = jnp.exp(products - highest)
    carry = highest, jnp.sum(weights, axis=-1, keepdims=True), mix(weights, values)
    num_chunks = (jnp.max(cached_length) + chunk - 1) // chunk
    _, total, mixed = jax.lax.fori_loop(0, num_chunks, read_chunk, carry)

    mixed = (mixed / total).astype(values.dtype).reshape(batch_size, heads, block_size, head_dim)
    return jnp.transpose(mixed, (0, 2, 1, 3))
