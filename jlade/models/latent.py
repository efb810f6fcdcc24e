"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434, section 2.1).

The keys and values of all heads are products of one latent, which the cache keeps in their place. A score is the
product of a query, a head's matrix for keys and a latent. The query is multiplied by the matrix here, not each latent:
attention then has one KV head, whose keys are the latents followed by the rotated elements that all heads share. Its
values are the latents too, and a head's matrix for values multiplies their weighted sum.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jlade.models.architecture import LlamaConfig
from jlade.models.layers import linear, normalize, split_heads
from jlade.models.quantization import Matrix
from jlade.models.rotary import rotate

NORM_EPS = 1e-6  # of the norms of latents, whatever that of the hidden states


class Projections(NamedTuple):
    """The matrices of a layer, with the norms of its latents: see `jlade.models.llama.LlamaLayer`."""

    query_down: Matrix | None
    query_down_norm: jax.Array | None
    query: Matrix
    key_down: Matrix
    key_down_norm: jax.Array
    key_up: jax.Array
    value_up: jax.Array


def project(
    projections: Projections,
    normed: jax.Array,
    rotation: tuple[jax.Array, jax.Array] | None,
    query_scales: jax.Array | None,
    config: LlamaConfig,
) -> tuple[jax.Array, jax.Array]:
    """Returns queries [B, T, H, D] and keys [B, T, 1, D], which are the values too, of hidden states [B, T, E]."""
    p, sizes = projections, config.latent
    assert sizes is not None
    inputs = normed
    if p.query_down is not None:
        inputs = normalize(linear(normed, p.query_down), p.query_down_norm, "rms", NORM_EPS)
    queries = split_heads(linear(inputs, p.query), sizes.query_size)
    unrotated, rotated = jnp.split(queries, [sizes.unrotated], axis=-1)
    latent, shared = jnp.split(linear(normed, p.key_down)[:, :, None], [sizes.rank], axis=-1)
    latent = normalize(latent, p.key_down_norm, "rms", NORM_EPS)
    if rotation is not None:
        rotated, shared = (rotate(x, rotation, config.interleaved_rotary) for x in (rotated, shared))
    key_up = p.key_up.reshape(-1, sizes.unrotated, sizes.rank)
    queries = jnp.concatenate([_by_head("bthd,hdr->bthr", unrotated, key_up), rotated], axis=-1)
    if query_scales is not None:
        queries = (queries.astype(jnp.float32) * query_scales).astype(queries.dtype)
    return queries, jnp.concatenate([latent, shared], axis=-1)


def values(projections: Projections, mixed: jax.Array) -> jax.Array:
    """Returns the values [B, T, H, V] of the weighted sums of keys [B, T, H, D]."""
    rank = projections.value_up.shape[-1]
    up = projections.value_up.reshape(mixed.shape[2], -1, rank)
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
