"""Attention of a block to its prefix in the cache and to itself."""

import jax
import jax.numpy as jnp
import numpy as np


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

    The prefix needs no mask but its length; the mask is for the block alone. The two are kept apart up to the sum, so
    nothing is ever joined to the cache.

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
    # Heads first, the queries of a group in one dimension: so each product is one plain matrix product per KV head.
    queries = jnp.transpose(queries * head_dim**-0.5, (0, 2, 1, 3)).reshape(batch_size, kv_heads, -1, head_dim)
    keys, values = jnp.transpose(keys, (0, 2, 1, 3)), jnp.transpose(values, (0, 2, 1, 3))

    def scores(keys: jax.Array, mask: jax.Array) -> jax.Array:
        product = jnp.einsum("bkqd,bksd->bkqs", queries, keys, preferred_element_type=jnp.float32)
        masked = jnp.where(mask, product.reshape(*grouped, -1), -jnp.inf)
        return masked.reshape(product.shape)

    def mix(weights: jax.Array, values: jax.Array) -> jax.Array:
        weights = weights.astype(values.dtype)
        return jnp.einsum("bkqs,bksd->bkqd", weights, values, preferred_element_type=jnp.float32)

    row = jnp.arange(capacity, dtype=jnp.int32)
    sees_prefix = (row[None, :] < cached_length[:, None])[:, None, :]  # [B, 1, S]
    sees_block = jnp.asarray(block_mask)[None]  # [1, T, T]
    if window is not None and positions is not None:
        sees_prefix &= positions[:, :, None] - row[None, None, :] < window
        sees_block &= positions[:, :, None] - positions[:, None, :] < window
    prefix = scores(cached_keys, sees_prefix[:, None, None])
    block = scores(keys, sees_block[:, None, None])
    highest = jnp.maximum(jnp.max(prefix, axis=-1), jnp.max(block, axis=-1))[..., None]  # finite: a token sees itself
    prefix, block = jnp.exp(prefix - highest), jnp.exp(block - highest)
    total = jnp.sum(prefix, axis=-1) + jnp.sum(block, axis=-1)
    mixed = (mix(prefix, cached_values) + mix(block, values)) / total[..., None]  # [B, KH, H/KH * T, D]

    mixed = mixed.astype(values.dtype).reshape(batch_size, heads, block_size, head_dim)
    return jnp.transpose(mixed, (0, 2, 1, 3))
