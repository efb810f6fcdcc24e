"""Routers: the experts of a token, and their weights."""

import jax
import jax.numpy as jnp

from jlade.models import layers

NEAR = 0.02  # relative distance below the highest score, within which the sparse mixer weighs experts


def route(
    x: jax.Array,
    router: jax.Array,
    bias: jax.Array | None,
    experts_per_token: int,
    normalized: bool,
    routing: str = "softmax",
) -> tuple[jax.Array, jax.Array]:
    """Returns the experts of each token [..., K] int32, by descending probability, and their weights in float32.

    Args:
      x: [..., E].
      router: [N, E], of all experts.
      bias: [N], None for routers without.
      experts_per_token: K.
      normalized: whether the weights of a token's experts add up to one, and not the probabilities of all.
      routing: one of `jlade.models.architecture.ROUTINGS`. "softmax" alone can be normalized.
    """
    logits = layers.linear(x, router, bias).astype(jnp.float32)
    if routing == "sparsemixer":
        return _sparse_mixer(logits, experts_per_token)
    highest, chosen = jax.lax.top_k(logits, experts_per_token)
    if routing == "sigmoid":
        return chosen, jax.nn.sigmoid(highest)
    if normalized:
        return chosen, jax.nn.softmax(highest)
    return chosen, jnp.exp(highest - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def _sparse_mixer(logits: jax.Array, experts_per_token: int) -> tuple[jax.Array, jax.Array]:
    """Returns `route` for logits [..., N] by SparseMixer-v2 (arXiv 2409.12136), as at inference.

    The weight of an expert is its probability among those not chosen before it, with logits near its own.
    """
    chosen, weights, left = [], [], logits
    for _ in range(experts_per_token):
        highest, expert = jnp.max(left, axis=-1, keepdims=True), jnp.argmax(left, axis=-1)
        is_near = highest - logits <= NEAR * jnp.maximum(jnp.abs(logits), highest)
        near = jnp.where(is_near, left, -jnp.inf)
        chosen.append(expert.astype(jnp.int32))
        weights.append(jnp.exp(highest[..., 0] - jax.nn.logsumexp(near, axis=-1)))
        left = jnp.where(jax.nn.one_hot(expert, logits.shape[-1], dtype=bool), -jnp.inf, left)
    return jnp.stack(chosen, axis=-1), jnp.stack(weights, axis=-1)
