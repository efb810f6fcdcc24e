"""The implementations of attention, of experts and of products with matrices in groups that a model has on a device."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.mesh import HEADS, MODEL
from jlade.models import base, kernels
from jlade.models.architecture import LlamaConfig
from jlade.models.grouped import MatrixShape, is_grouped
from jlade.models.kernels import ExpertShape, HeadShape


def resolve(decoder: Any, params: Any, mesh: Mesh | None, absent: jax.Device | None) -> dict[str, str]:
    """Returns the implementations for the device of `params`, for those of a mesh, or for one that is not attached.

    That of experts stays as it is for a model without them, and that of products for a model without groups.

    Args:
      decoder: a `jlade.models.llama.Llama`.
      params, mesh, absent: see `Llama.on`.

    Raises:
      ValueError: one names a kernel that cannot run there.
    """
    config, device = decoder.config, absent or mesh_lib.device_of(params, mesh)
    is_plain = (  # where XLA does not partition kernels, and where it is not known what the device is
        (mesh is None and len(mesh_lib.devices_of(params)) > 1)
        or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params))
    )

    def resolved(operation: str, is_used: bool, shapes: Callable[[], Sequence[Any]]) -> str:
        chosen: str = getattr(decoder, operation)
        if not is_used or chosen == "plain":
            return chosen
        if chosen == "auto" and (is_plain or device.platform not in kernels.PLATFORMS):
            return "plain"
        return kernels.choose(operation, chosen, shapes(), device)

    matrices = _matrices(params, mesh)
    return {
        "attention": resolved("attention", True, lambda: _heads(decoder, params, mesh)),
        "experts": resolved("experts", config.num_experts > 0, lambda: [_experts(config, params, mesh)]),
        "products": resolved("products", bool(matrices), lambda: matrices),
    }


def _heads(decoder: Any, params: Any, mesh: Mesh | None) -> list[HeadShape]:
    """Returns the shape of the heads on a device, of each kind and variation."""
    cache = base.cache_shapes(dataclasses.replace(decoder, kv_dtype=None), params, 1, 1)
    dtype = (cache.keys[0] if cache.keys else params.norm).dtype.name  # of queries, keys and values
    c, devices, shards = decoder.config, mesh_lib.size(mesh, *MODEL), mesh_lib.size(mesh, HEADS)
    return [
        HeadShape(number // devices, heads.number // shards, heads.size, dtype, variation, decoder.kv_dtype)
        for heads, variations in c.attention_variations.items()
        for variation in variations
        for number in dict.fromkeys(map(c.num_heads_of, c.attention_layers))
    ]


def _experts(config: LlamaConfig, params: Any, mesh: Mesh | None) -> ExpertShape:
    """Returns the shape of the experts on a device, and how many of them a token has on average."""
    c, shards = config, mesh_lib.size(mesh, *MODEL)
    dtype = next(jax.tree.leaves(layer.experts)[0].dtype for layer in params.layers if layer.experts)
    per_token = -(-c.experts_per_token // shards)
    return ExpertShape(c.num_experts // shards, per_token, c.expert_width, c.expert_size, dtype.name, c.gated_mlp)


def _matrices(params: Any, mesh: Mesh | None) -> list[MatrixShape]:
    """Returns the shape, on a device, of the largest matrix in groups of each kind, those of experts included.

    A kind has its groups, bits and levels. The largest matrices come first.
    """
    shards = mesh_lib.size(mesh, *MODEL)
    largest: dict[MatrixShape, MatrixShape] = {}
    for leaf in filter(is_grouped, jax.tree.leaves(params, is_leaf=is_grouped)):
        shape = MatrixShape.of(leaf, params.norm.dtype)
        if len(leaf.shape) == 2:  # experts are whole
            shape = shape._replace(outputs=max(1, shape.outputs // shards))
        kind = shape._replace(inputs=0, outputs=0)
        largest[kind] = max(largest.get(kind, kind), shape, key=_size)
    return sorted(largest.values(), key=_size, reverse=True)


def _size(shape: MatrixShape) -> int:
    return shape.inputs * shape.outputs
