"""Mixtures of experts: each token passes a few of a layer's MLPs, those that a router chooses.

And the choice of their implementation.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jlade.models import trial
from jlade.models.experts import products as experts_products
from jlade.models.experts import ways
from jlade.models.experts.contest import ExpertShape as ExpertShape
from jlade.models.experts.contest import prepare
from jlade.models.experts.routing import route as route
from jlade.models.experts.ways import Experts as Experts
from jlade.models.kernels import hopper_obstacle

IMPLEMENTATIONS = ("auto", "plain", "gpu")


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
    token. "gpu" is a kernel for NVIDIA's Hopper GPUs, which reads the experts that some token has chosen. Matrices in
    groups that `jlade.models.products` multiplies by its kernel for TPUs are read by that one in the same way.

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
    load = chosen.size / (experts.number * jax.lax.axis_size(axes))
    if implementation == "gpu" and len(tokens) > 1:  # the experts of one token differ: "plain" reads them once too
        from jlade.models.experts import hopper  # on demand, as some builds of JAX lack parts of Pallas

        rows = hopper.rows_of_tile(load)
        mixed = ways.tiled(tokens, chosen, weights, experts, activation, rows, hopper.multiply)
    elif experts_products.takes_tiles(experts[:3], x.dtype):
        rows = experts_products.rows_of_tile(load)
        mixed = ways.tiled(tokens, chosen, weights, experts, activation, rows, experts_products.of_tiles)
    else:
        run = functools.partial(jax.lax.platform_dependent, tokens, chosen, weights, experts)
        gpu_way = ways.by_token if chosen.size < experts.number else ways.all_with_all
        by_expert, on_gpu = (functools.partial(way, activation=activation) for way in (ways.by_expert, gpu_way))
        mixed = run(cuda=on_gpu, rocm=on_gpu, default=by_expert)
    mixed = mixed.reshape(x.shape)
    return jax.lax.psum(mixed, axes) if axes else mixed


def resolve(implementation: str, device: jax.Device, shape: ExpertShape, may_run: bool = True) -> str:
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


def resolve_unattached(implementation: str, device: jax.Device, shape: ExpertShape) -> str:
    """Returns `resolve` for a device that is not there: "auto" is its kernel if that can run, as if it had passed."""
    if implementation == "auto":
        return "gpu" if _obstacle(device, shape) is None else "plain"
    return resolve(implementation, device, shape)


def check_implementation(implementation: str) -> None:
    """Raises a ValueError if `implementation` is unknown."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"experts must be one of {', '.join(map(repr, IMPLEMENTATIONS))}; got {implementation!r}")


def _obstacle(device: jax.Device, shape: ExpertShape) -> str | None:
    """Returns the reason why the kernel cannot run, None if it can."""
    if reason := hopper_obstacle(device):
        return reason
    from jlade.models.experts import hopper  # on demand, as some builds of JAX lack parts of Pallas

    return hopper.obstacle(shape.dtype, hopper.ROWS[0], shape.size, shape.width)
