"""Routers: the experts of a token, and their weights."""

import jax
import jax.numpy as jnp

from jlade.models import nn
from jlade.models.architecture import SCORED, LlamaConfig

NEAR = 0.02  # relative distance below the highest score, within which the sparse mixer weighs experts


def route(
    x: jax.Array,
    router: jax.Array,
    bias: jax.Array | None,
    selection_bias: jax.Array | None,
    config: LlamaConfig,
) -> tuple[jax.Array, jax.Array]:
    """Returns the experts of each token [..., K] int32, by descending score, and their weights in float32.

    Args:
      x: [..., E].
      router: [N, E], of all experts.
      bias: [N], None for routers without, as those of `SCORED` are.
      selection_bias: [N], None for routers without.
      config: of the model, with the `routing`. Those of `SCORED` alone have groups, biases of the selection, and
        scales; they and "softmax" alone can be normalized.
    """
    c = config
    if c.routing in SCORED:  # bfloat16 would choose other experts
        logits = nn.linear(x.astype(jnp.float32), router.astype(jnp.float32))
        scores = jax.nn.sigmoid(logits) if c.routing == "sigmoids" else jax.nn.softmax(logits)
        return _scored(scores, selection_bias, c)
    logits = nn.linear(x, router, bias).astype(jnp.float32)
    if c.routing == "sparsemixer":
        return _sparse_mixer(logits, c.experts_per_token)
    highest, chosen = jax.lax.top_k(logits, c.experts_per_token)
    if c.routing == "sigmoid":
        return chosen, jax.nn.sigmoid(highest)
    if c.normalized_experts:
        return chosen, jax.nn.softmax(highest)
    return chosen, jnp.exp(highest - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def _scored(scores: jax.Array, selection_bias: jax.Array | None, config: LlamaConfig) -> tuple[jax.Array, jax.Array]:
    """Returns `route` for the scores [..., N] that are the weights (DeepSeek V3, arXiv 2412.19437, section 2.1.2)."""
    c = config
    choice = scores if selection_bias is None else scores + jnp.broadcast_to(selection_bias, scores.shape)
    if c.groups_per_token < c.expert_groups:
        grouped = choice.reshape(*choice.shape[:-1], c.expert_groups, -1)
        of_groups = jnp.sum(jax.lax.top_k(grouped, c.group_leaders)[0], axis=-1)
        _, groups = jax.lax.top_k(of_groups, c.groups_per_token)
        is_chosen = jnp.any(jax.nn.one_hot(groups, c.expert_groups, dtype=bool), axis=-2)
        choice = jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(choice.shape)
    _, chosen = jax.lax.top_k(choice, c.experts_per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if c.normalized_experts:
        total = jnp.sum(weights, axis=-1, keepdims=True) + c.expert_epsilon
        weights /= jnp.maximum(total, c.least_divisor) if c.least_divisor else total
    return chosen, weights * c.expert_scale


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
