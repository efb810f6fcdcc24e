"""Mixtures of experts: each token passes a few of a layer's MLPs, those that a router chooses."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlade.models import layers
from jlade.models.experts import products
from jlade.models.quantization import Int8Matrix

Weights = jax.Array | Int8Matrix
NEAR = 0.02  # relative distance below the highest score, within which the sparse mixer weighs experts


class Experts(NamedTuple):
    """The MLPs of N experts, [expert, in, out] as grouped products read them, with biases [expert, out]."""

    gate: Weights  # [N, E, F]
    up: Weights  # [N, E, F]
    down: Weights  # [N, F, E]
    gate_bias: jax.Array | None = None  # [N, F]
    up_bias: jax.Array | None = None  # [N, F]
    down_bias: jax.Array | None = None  # [N, E]

    @property
    def number(self) -> int:
        """N, of the experts on this device."""
        return (self.gate.weight if isinstance(self.gate, Int8Matrix) else self.gate).shape[0]


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


def mix(
    x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts, activation: str, axes: tuple[str, ...] = ()
) -> jax.Array:
    """Returns the weighted sum [..., E] of the experts of each token.

    TPUs and CPUs read the experts that some token has chosen, each about once: the tokens are sorted by expert. GPUs
    read all experts in one product, or, for few tokens, those of each token.

    Args:
      x: [..., E].
      chosen, weights: [..., K], results of `route`.
      experts: those on this device, which are a slice of all along the devices of `axes`.
      activation: one of `jlade.models.architecture.ACTIVATIONS`.
      axes: of the mesh, that divide the experts.
    """
    tokens, k = x.reshape(-1, x.shape[-1]), chosen.shape[-1]
    chosen, weights = chosen.reshape(-1, k), weights.reshape(-1, k)
    if axes:
        chosen -= experts.number * jax.lax.axis_index(axes)
        is_here = (chosen >= 0) & (chosen < experts.number)
        chosen, weights = jnp.where(is_here, chosen, experts.number), jnp.where(is_here, weights, 0)
    run = functools.partial(jax.lax.platform_dependent, tokens, chosen, weights, experts)
    kinds = {"sorted": _sorted, "gpu": _each if chosen.size < experts.number else _all}
    by_expert, on_gpu = (functools.partial(kind, activation=activation) for kind in kinds.values())
    mixed: jax.Array = run(cuda=on_gpu, rocm=on_gpu, default=by_expert)
    mixed = mixed.reshape(x.shape)
    return jax.lax.psum(mixed, axes) if axes else mixed


def _sorted(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts, activation: str) -> jax.Array:
    """Sorts the tokens by expert, for grouped products. Tokens of experts on other devices come last."""
    of_pair = chosen.reshape(-1)
    order = jnp.argsort(of_pair)
    of_row = of_pair[order]
    sizes = jnp.sum(jax.nn.one_hot(of_pair, experts.number, dtype=jnp.int32), axis=0)

    def multiply(rows: jax.Array, matrices: Weights, bias: jax.Array | None) -> jax.Array:
        product = products.grouped(rows, matrices, sizes, of_row)
        return product if bias is None else product + bias[of_row]

    rows = _mlp(x[order // chosen.shape[1]], experts, multiply, activation)
    rows = rows[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return _sum(jnp.where((chosen < experts.number)[..., None], rows, 0), weights, x)


def _each(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts, activation: str) -> jax.Array:
    """Multiplies each token by the matrices of its experts."""
    of_row = jnp.minimum(chosen.reshape(-1), experts.number - 1)

    def multiply(rows: jax.Array, matrices: Weights, bias: jax.Array | None) -> jax.Array:
        product = products.each(rows, matrices, of_row)
        return product if bias is None else product + bias[of_row]

    rows = _mlp(jnp.repeat(x, chosen.shape[1], axis=0), experts, multiply, activation)
    return _sum(rows.reshape(*chosen.shape, -1), weights, x)


def _all(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts, activation: str) -> jax.Array:
    """Multiplies each token by the matrices of all experts."""

    def multiply(rows: jax.Array, matrices: Weights, bias: jax.Array | None) -> jax.Array:
        product = products.all_with_all(rows, matrices)
        return product if bias is None else product + bias[:, None]

    rows = _mlp(jnp.broadcast_to(x, (experts.number, *x.shape)), experts, multiply, activation)
    of_expert = jnp.sum(jax.nn.one_hot(chosen, experts.number) * weights[..., None], axis=1)
    return _sum(jnp.moveaxis(rows, 0, 1), of_expert, x)


def _mlp(rows: jax.Array, experts: Experts, multiply: Any, activation: str) -> jax.Array:
    gate, up = multiply(rows, experts.gate, experts.gate_bias), multiply(rows, experts.up, experts.up_bias)
    result: jax.Array = multiply(layers.gated(gate, up, activation), experts.down, experts.down_bias)
    return result


def _sum(rows: jax.Array, weights: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the sum [T, E] of rows [T, K, E] with weights [T, K], in the dtype of `x`."""
    return jnp.sum(rows.astype(jnp.float32) * weights[..., None], axis=1).astype(x.dtype)
