"""Mixtures of experts: each token passes a few of a layer's MLPs, those that a router chooses.

And the choice of their implementation.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlade.models import layers, trial
from jlade.models.experts import products
from jlade.models.experts.contest import Shape as Shape
from jlade.models.experts.contest import prepare
from jlade.models.kernels import hopper_obstacle
from jlade.models.quantization import Int8Matrix

IMPLEMENTATIONS = ("auto", "plain", "gpu")
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
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    experts: Experts,
    activation: str,
    axes: tuple[str, ...] = (),
    implementation: str = "plain",
) -> jax.Array:
    """Returns the weighted sum [..., E] of the experts of each token.

    "plain" is JAX without kernels. On TPUs and CPUs it reads the experts that some token has chosen, each about once:
    the tokens are sorted by expert. On GPUs it reads all experts in one product, or, for few tokens, those of each
    token. "gpu" is a kernel for NVIDIA's Hopper GPUs, which reads the experts that some token has chosen.

    Args:
      x: [..., E].
      chosen, weights: [..., K], results of `route`.
      experts: those on this device, which are a slice of all along the devices of `axes`.
      activation: one of `jlade.models.architecture.ACTIVATIONS`.
      axes: of the mesh, that divide the experts.
      implementation: "plain" or "gpu".
    """
    tokens, k = x.reshape(-1, x.shape[-1]), chosen.shape[-1]
    chosen, weights = chosen.reshape(-1, k), weights.reshape(-1, k)
    if axes:
        chosen -= experts.number * jax.lax.axis_index(axes)
        is_here = (chosen >= 0) & (chosen < experts.number)
        chosen, weights = jnp.where(is_here, chosen, experts.number), jnp.where(is_here, weights, 0)
    if implementation == "gpu" and len(tokens) > 1:  # the experts of one token differ: "plain" reads them once too
        load = chosen.size / (experts.number * jax.lax.axis_size(axes))
        mixed = _tiled(tokens, chosen, weights, experts, activation, load)
    else:
        run = functools.partial(jax.lax.platform_dependent, tokens, chosen, weights, experts)
        kinds = {"sorted": _sorted, "gpu": _each if chosen.size < experts.number else _all}
        by_expert, on_gpu = (functools.partial(kind, activation=activation) for kind in kinds.values())
        mixed = run(cuda=on_gpu, rocm=on_gpu, default=by_expert)
    mixed = mixed.reshape(x.shape)
    return jax.lax.psum(mixed, axes) if axes else mixed


def resolve(implementation: str, device: jax.Device, shape: Shape, may_run: bool = True) -> str:
    """Returns the implementation that runs on `device`: "plain" or "gpu".

    "auto" gives the kernel if it can run there and passes its trial, otherwise "plain"; see `jlade.models.trial`.
    Other implementations are not tried.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      device: the device that holds the parameters.
      shape: of the experts.
      may_run: whether "auto" may run the kernel on `device` to try it; otherwise only a remembered verdict counts.

    Raises:
      ValueError: `implementation` is unknown, or names a kernel that cannot run on `device`.
    """
    check_implementation(implementation)
    obstacle = None if implementation == "plain" else _obstacle(device, shape)
    if implementation == "gpu" and obstacle is not None:
        raise ValueError(f"experts 'gpu' {obstacle}; choose 'auto' or 'plain'")
    if implementation != "auto":
        return implementation

    def run(x: jax.Array, chosen: jax.Array, weights: jax.Array, matrices: Any, name: str) -> jax.Array:
        return mix(x, chosen, weights, Experts(*matrices), "silu", implementation=name)

    kernel, plain = (functools.partial(run, name=name) for name in ("gpu", "plain"))
    contest = functools.partial(prepare, kernel, plain, device, shape)
    passed = obstacle is None and trial.passes("experts", "gpu", device, shape, contest, may_run)
    return "gpu" if passed else "plain"


def resolve_unattached(implementation: str, device: jax.Device, shape: Shape) -> str:
    """Returns `resolve` for a device that is not there: "auto" is its kernel if that can run, as if it had passed."""
    if implementation == "auto":
        return "gpu" if _obstacle(device, shape) is None else "plain"
    return resolve(implementation, device, shape)


def check_implementation(implementation: str) -> None:
    """Raises a ValueError if `implementation` is unknown."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"experts must be one of {', '.join(map(repr, IMPLEMENTATIONS))}; got {implementation!r}")


def _obstacle(device: jax.Device, shape: Shape) -> str | None:
    """Returns the reason why the kernel cannot run, None if it can."""
    if reason := hopper_obstacle(device):
        return reason
    from jlade.models.experts import hopper  # on demand, as some builds of JAX lack parts of Pallas

    return hopper.obstacle(shape.dtype, hopper.ROWS[0], shape.size, shape.width)


def _sorted(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts, activation: str) -> jax.Array:
    """Sorts the tokens by expert, for grouped products. Tokens of experts on other devices come last."""
    of_pair = chosen.reshape(-1)
    order = jnp.argsort(of_pair)
    of_row = of_pair[order]
    sizes = jnp.sum(jax.nn.one_hot(of_pair, experts.number, dtype=jnp.int32), axis=0)

    def multiply(rows: jax.Array, *matrices: Weights) -> list[jax.Array]:
        return [products.grouped(rows, each, sizes, of_row) for each in matrices]

    rows = _mlp(x[order // chosen.shape[1]], experts, multiply, lambda bias: bias[of_row], activation)
    rows = rows[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return _sum(jnp.where((chosen < experts.number)[..., None], rows, 0), weights, x)


def _each(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts, activation: str) -> jax.Array:
    """Multiplies each token by the matrices of its experts."""
    of_row = jnp.minimum(chosen.reshape(-1), experts.number - 1)

    def multiply(rows: jax.Array, *matrices: Weights) -> list[jax.Array]:
        return [products.each(rows, each, of_row) for each in matrices]

    rows = jnp.repeat(x, chosen.shape[1], axis=0)
    rows = _mlp(rows, experts, multiply, lambda bias: bias[of_row], activation)
    return _sum(rows.reshape(*chosen.shape, -1), weights, x)


def _all(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts, activation: str) -> jax.Array:
    """Multiplies each token by the matrices of all experts."""

    def multiply(rows: jax.Array, *matrices: Weights) -> list[jax.Array]:
        return [products.all_with_all(rows, each) for each in matrices]

    rows = jnp.broadcast_to(x, (experts.number, *x.shape))
    rows = _mlp(rows, experts, multiply, lambda bias: bias[:, None], activation)
    of_expert = jnp.sum(jax.nn.one_hot(chosen, experts.number) * weights[..., None], axis=1)
    return _sum(jnp.moveaxis(rows, 0, 1), of_expert, x)


def _tiled(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    experts: Experts,
    activation: str,
    load: float,
    interpret: Any = None,
) -> jax.Array:
    """Arranges the tokens in tiles of one expert each, for the Hopper kernel. Tokens of other devices are in no tile.

    An expert's tokens keep their order, so they need no sort. The last of its tiles ends with padding.

    Args:
      load: the average number of tokens of an expert.
      interpret: see `jlade.models.experts.hopper.multiply`.
    """
    from jlade.models.experts import hopper  # on demand, as some builds of JAX lack parts of Pallas

    of_pair, number, rows = chosen.reshape(-1), experts.number, hopper.rows_of_tile(load)
    in_use = min(of_pair.size, number)
    num_tiles = in_use + (of_pair.size - in_use) // rows  # at most: each follows a full one, or is its expert's first
    is_of = jax.nn.one_hot(of_pair, number, dtype=jnp.int32)  # [pair, expert]
    count = jnp.cumsum(is_of, axis=0)
    tiles = -(-count[-1] // rows)
    ends = jnp.cumsum(tiles)
    row = jnp.sum(is_of * ((ends - tiles)[None] * rows + count - 1), axis=1)
    # Pairs of other devices have rows past the end, all different, which the scatter drops.
    row = jnp.where(of_pair < number, row, num_tiles * rows + jnp.arange(of_pair.size))
    of_tile = jnp.sum(ends[None] <= jnp.arange(num_tiles)[:, None], axis=1)

    def multiply(rows: jax.Array, *matrices: Any) -> list[jax.Array]:
        return hopper.multiply(rows, of_tile, *matrices, interpret=interpret)

    token = jnp.arange(of_pair.size) // chosen.shape[1]
    token_of_row = jnp.zeros(num_tiles * rows, jnp.int32).at[row].set(token, mode="drop", unique_indices=True)
    arranged = x[token_of_row].reshape(num_tiles, rows, -1)
    arranged = _mlp(arranged, experts, multiply, lambda bias: bias[of_tile][:, None], activation)
    mixed = arranged.reshape(num_tiles * rows, -1)[row].reshape(*chosen.shape, -1)
    return _sum(jnp.where((chosen < number)[..., None], mixed, 0), weights, x)


def _mlp(
    rows: jax.Array,
    experts: Experts,
    multiply: Callable[..., list[jax.Array]],
    spread: Callable[[jax.Array], jax.Array],
    activation: str,
) -> jax.Array:
    """Returns the MLPs of rows [..., E].

    Args:
      multiply: returns the products of rows with each array of matrices.
      spread: returns the bias of each row, of biases [N, out].
    """

    def linear(rows: jax.Array, *pairs: tuple[Weights, jax.Array | None]) -> list[jax.Array]:
        found = multiply(rows, *(matrices for matrices, _ in pairs))
        return [
            product if bias is None else product + spread(bias) for product, (_, bias) in zip(found, pairs, strict=True)
        ]

    gate, up = linear(rows, (experts.gate, experts.gate_bias), (experts.up, experts.up_bias))
    (result,) = linear(layers.gated(gate, up, activation), (experts.down, experts.down_bias))
    return result


def _sum(rows: jax.Array, weights: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the sum [T, E] of rows [T, K, E] with weights [T, K], in the dtype of `x`."""
    return jnp.sum(rows.astype(jnp.float32) * weights[..., None], axis=1).astype(x.dtype)
