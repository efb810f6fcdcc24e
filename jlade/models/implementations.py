"""The implementations of attention, of experts and of products with matrices in groups that a model has on a device."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.mesh import HEADS, MODEL
from jlade.models import attention, experts, products
from jlade.models.architecture import Heads, LlamaConfig
from jlade.models.grouped import is_grouped


class Implementations(NamedTuple):
    """Names of implementations, "auto" where none is chosen."""

    attention: str
    experts: str
    products: str


def resolve(
    config: LlamaConfig,
    chosen: Implementations,
    params: Any,
    cache_dtype: Callable[[], jax.typing.DTypeLike],
    mesh: Mesh | None,
    kv_dtype: str | None = None,
) -> Implementations:
    """Returns the implementations for the device that holds `params`, or for those of a mesh.

    Args:
      config: of the model.
      chosen: by the user. For a model without experts theirs is returned as it is, and so for one without groups.
      params, mesh: see `jlade.models.llama.Llama.on`.
      cache_dtype: returns the dtype of queries, keys and values. It is called for kernels alone.
      kv_dtype: of keys and values in 8 bits, None for others.

    Raises:
      ValueError: one names a kernel that cannot run there.
    """
    device, is_spread = mesh_lib.device_of(params, mesh), mesh is None and len(mesh_lib.devices_of(params)) > 1
    leaves = jax.tree.leaves(params)
    may_run = all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
    of_attention, of_experts, of_products = chosen
    if (
        device.platform not in attention.AUTOMATIC
        or is_spread
        or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    ):
        of_attention, of_experts, of_products = ("plain" if name == "auto" else name for name in chosen)
    if of_attention != "plain":
        dtype = cache_dtype()
        found = {
            attention.resolve(of_attention, device, dtype, *_heads(config, heads, mesh), may_run, variations, kv_dtype)
            for heads, variations in config.attention_variations.items()
        }
        of_attention = _common(found)
    if not config.num_experts:
        of_experts = chosen.experts
    elif of_experts != "plain":
        of_experts = experts.resolve(of_experts, device, _experts(config, params, mesh), may_run)
    if not (shapes := _matrices(params, mesh)):
        of_products = chosen.products
    elif of_products != "plain":
        of_products = products.resolve(of_products, device, shapes, may_run)
    return Implementations(of_attention, of_experts, of_products)


def resolve_unattached(
    config: LlamaConfig,
    chosen: Implementations,
    params: Any,
    device: jax.Device,
    mesh: Mesh | None,
) -> Implementations:
    """Returns `resolve` for a device that is not there: "auto" is its kernel if that can run, as if it had passed."""
    of_attention, of_experts, of_products = chosen
    found = {
        attention.resolve_unattached(of_attention, device, params.norm.dtype, *_heads(config, heads, mesh))
        for heads in config.attention_variations
    }
    of_attention = _common(found)
    if config.num_experts:
        of_experts = experts.resolve_unattached(of_experts, device, _experts(config, params, mesh))
    if shapes := _matrices(params, mesh):
        of_products = products.resolve_unattached(of_products, device, shapes)
    return Implementations(of_attention, of_experts, of_products)


def _common(found: Collection[str]) -> str:
    """Returns the implementation that layers of all kinds have, "plain" if they differ."""
    return next(iter(found)) if len(found) == 1 else "plain"


def _heads(config: LlamaConfig, heads: Heads, mesh: Mesh | None) -> tuple[int, int, int]:
    """Returns the heads and KV heads on a device, and the size of a head."""
    return config.num_heads // mesh_lib.size(mesh, *MODEL), heads.number // mesh_lib.size(mesh, HEADS), heads.size


def _matrices(params: Any, mesh: Mesh | None) -> list[products.MatrixShape]:
    """Returns the shape, on a device, of the largest matrix in groups of each kind, those of experts included.

    A kind has its groups, bits and levels. The largest matrices come first.
    """
    shards = mesh_lib.size(mesh, *MODEL)
    largest: dict[products.MatrixShape, products.MatrixShape] = {}
    for leaf in jax.tree.leaves(params, is_leaf=is_grouped):
        if is_grouped(leaf):
            shape = products.MatrixShape.of(leaf, params.norm.dtype)
            if len(leaf.shape) == 2:  # experts are whole
                shape = shape._replace(outputs=max(1, shape.outputs // shards))
            kind = shape._replace(inputs=0, outputs=0)
            largest[kind] = max(largest.get(kind, kind), shape, key=_size)
    return sorted(largest.values(), key=_size, reverse=True)


def _size(shape: products.MatrixShape) -> int:
    return shape.inputs * shape.outputs


def _experts(config: LlamaConfig, params: Any, mesh: Mesh | None) -> experts.ExpertShape:
    """Returns the shape of the experts on a device, and how many of them a token has on average."""
    c, shards = config, mesh_lib.size(mesh, *MODEL)
    dtype = next(jax.tree.leaves(layer.experts)[0].dtype for layer in params.layers if layer.experts)
    per_token = -(-c.experts_per_token // shards)
    return experts.ExpertShape(
        c.num_experts // shards, per_token, c.expert_width, c.expert_size, dtype.name, c.gated_mlp
    )
