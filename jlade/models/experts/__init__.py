"""Mixtures of experts: each token passes a few of a layer's MLPs, those that a router chooses."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jlade.models import products
from jlade.models.experts import ways
from jlade.models.experts.routing import route as route
from jlade.models.experts.ways import Experts as Experts

TILES = (16, 32, 64, 128)  # rows of a tile for kernels of products


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

        rows = ways.rows_of_tile(load, hopper.ROWS)
        mixed = ways.tiled(tokens, chosen, weights, experts, activation, rows, hopper.multiply)
    elif all(products.takes_tiles(matrices, x.dtype) for matrices in experts[:3] if matrices is not None):

        def multiply(tiles: jax.Array, of_tile: jax.Array, *arrays: Any) -> list[jax.Array]:
            return [products.multiply_tiles(tiles, of_tile, matrices) for matrices in arrays]

        rows = ways.rows_of_tile(load, TILES)
        mixed = ways.tiled(tokens, chosen, weights, experts, activation, rows, multiply)
    else:
        run = functools.partial(jax.lax.platform_dependent, tokens, chosen, weights, experts)
        gpu_way = ways.by_token if chosen.size < experts.number else ways.all_with_all
        by_expert, on_gpu = (functools.partial(way, activation=activation) for way in (ways.by_expert, gpu_way))
        mixed = run(cuda=on_gpu, rocm=on_gpu, default=by_expert)
    mixed = mixed.reshape(x.shape)
    return jax.lax.psum(mixed, axes) if axes else mixed
