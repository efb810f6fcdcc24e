"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434, section 2.1).

The keys and values of all heads are products of one latent, which the cache keeps in their place. A score is the
product of a query, a head's matrix for keys and a latent. The query is multiplied by the matrix here, not each latent:
attention then has one KV head, whose keys are the latents followed by the rotated elements that all heads share. Its
values are the latents too, and a head's matrix for values multiplies their weighted sum.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jlade.models.architecture import LlamaConfig
from jlade.models.layers import linear, normalize, split_heads
from jlade.models.rotary import rotate

NORM_EPS = 1e-6  # of the norms of latents, whatever that of the hidden states


def project(
    layer: Any,
    normed: jax.Array,
    rotation: tuple[jax.Array, jax.Array] | None,
    query_scales: jax.Array | None,
    config: LlamaConfig,
) -> tuple[jax.Array, jax.Array]:
    """Returns queries [B, T, H, D] and keys [B, T, 1, D], which are the values too, of hidden states [B, T, E].

    `layer` is a `jlade.models.llama.LlamaLayer` with the arrays of a latent.
    """
    sizes = config.latent
    assert sizes is not None
    inputs = normed
    if layer.query_down is not None:
        inputs = normalize(linear(normed, layer.query_down), layer.query_down_norm, "rms", NORM_EPS)
    queries = split_heads(linear(inputs, layer.query), sizes.query_size)
    unrotated, rotated = jnp.split(queries, [sizes.unrotated], axis=-1)
    latent, shared = jnp.split(linear(normed, layer.key_down)[:, :, None], [sizes.rank], axis=-1)
    latent = normalize(latent, layer.key_down_norm, "rms", NORM_EPS)
    if rotation is not None:
        rotated, shared = (rotate(x, rotation, config.interleaved_rotary) for x in (rotated, shared))
    key_up = layer.key_up.reshape(-1, sizes.unrotated, sizes.rank)
    queries = jnp.concatenate([_by_head("bthd,hdr->bthr", unrotated, key_up), rotated], axis=-1)
    if query_scales is not None:
        queries = (queries.astype(jnp.float32) * query_scales).astype(queries.dtype)
    return queries, jnp.concatenate([latent, shared], axis=-1)


def values(layer: Any, mixed: jax.Array) -> jax.Array:
    """Returns the values [B, T, H, V] of the weighted sums of keys [B, T, H, D]."""
    rank = layer.value_up.shape[-1]
    up = layer.value_up.reshape(mixed.shape[2], -1, rank)
    return _by_head("bthr,hvr->bthv", mixed[..., :rank], up)


def _by_head(equation: str, x: jax.Array, matrices: jax.Array) -> jax.Array:
    """Returns the products of each head with its matrix, on TPUs as in `layers.multiply_row_twice`."""

    def multiply(x: jax.Array, matrices: jax.Array) -> jax.Array:
        return jnp.einsum(equation, x, matrices, preferred_element_type=jnp.float32)

    def multiply_twice(x: jax.Array, matrices: jax.Array) -> jax.Array:
        return multiply(jnp.repeat(x, 2, axis=1), matrices)[:, :1]

    if x.shape[:2] != (1, 1):
        return multiply(x, matrices).astype(x.dtype)
    product = jax.lax.platform_dependent(x, matrices, tpu=multiply_twice, default=multiply)
    return product.astype(x.dtype)
