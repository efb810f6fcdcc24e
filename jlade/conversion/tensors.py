"""The tensors of a model: their names in checkpoints, shapes, dtypes and places on devices."""

import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jlade.conversion.families import FAMILIES
from jlade.conversion.json_files import refuse_or_warn
from jlade.conversion.parts import Shape
from jlade.mesh import default_device
from jlade.models import sharding as model_sharding
from jlade.models.architecture import dtype_of, is_matrix, layer_arrays
from jlade.models.llama import OUTPUT_BITS, LlamaConfig, LlamaLayer, LlamaParams, PerLayer, quantize
from jlade.models.quantization import is_quantized

EMBEDDING, OUTPUT, OUTPUT_BIAS = "model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"
LAYER = {  # names within a layer, by the field of `LlamaLayer`; a bias has the name of its weight
    "attention_norm": "input_layernorm.weight",
    "output_gate": "self_attn.gate_proj.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "attention_output": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "query_down": "self_attn.q_a_proj.weight",
    "query_down_norm": "self_attn.q_a_layernorm.weight",
    "key_down": "self_attn.kv_a_proj_with_mqa.weight",
    "key_down_norm": "self_attn.kv_a_layernorm.weight",
    "key_up": "self_attn.k_b_proj.weight",
    "value_up": "self_attn.v_b_proj.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
    "layer_scale": "layer_scalar",
    "sinks": "self_attn.sinks",
    "router": "mlp.gate.weight",
    "selection_bias": "mlp.gate.e_score_correction_bias",
    "shared_router": "mlp.shared_expert_gate.weight",
    "expert_gate": "mlp.experts.gate_proj.weight",
    "expert_up": "mlp.experts.up_proj.weight",
    "expert_down": "mlp.experts.down_proj.weight",
    "recurrent_query": "linear_attn.q_proj.weight",
    "recurrent_key": "linear_attn.k_proj.weight",
    "recurrent_value": "linear_attn.v_proj.weight",
    "recurrent_gate": "linear_attn.in_proj_z.weight",
    "recurrent_output": "linear_attn.out_proj.weight",
    "beta": "linear_attn.in_proj_b.weight",
    "decay": "linear_attn.in_proj_a.weight",
    "query_filter": "linear_attn.q_conv.weight",
    "key_filter": "linear_attn.k_conv.weight",
    "value_filter": "linear_attn.v_conv.weight",
    "decay_rate": "linear_attn.A_log",
    "decay_bias": "linear_attn.dt_bias",
    "recurrent_norm": "linear_attn.norm.weight",
}
QUERY_UP = "self_attn.q_b_proj.weight"  # of queries that follow from a latent
# Suffixes of a matrix's name, for the arrays of an `Int8Matrix` or `GroupedMatrix`, by their fields
ARRAYS = {"weight": "", "scale": "_scale", "zero": "_zero", "offset": "_offset", "levels": "_levels"}
SCALE = ARRAYS["scale"]

Sharding = jax.sharding.Sharding | Callable[[str, Shape], jax.sharding.Sharding]


def layer_tensors(config: LlamaConfig, layer: int) -> dict[str, tuple[str, Shape]]:
    """Returns name within a layer and shape of each tensor, by the field of `LlamaLayer`.

    Tensors that a file holds as one have the names of LLaMA's, and experts one name for all. `hf_tensors` has the names
    in files.
    """
    family = FAMILIES[config.family]
    names = LAYER | dict(family.tensors) | (dict(family.parallel_tensors) if config.parallel_norm else {})
    if config.latent is not None and config.latent.query_rank is not None:
        names["query"] = QUERY_UP
    if layer in config.dense_layers:  # the names of the family are those of an MLP beside experts
        names |= {field: re.sub(r"shared_(experts?|mlp)\.", "", names[field]) for field in ("gate", "up", "down")}

    def name(field: str) -> str:
        return names[field] if field in names else names[field.removesuffix("_bias")].removesuffix("weight") + "bias"

    return {field: (name(field), shape) for field, (shape, _) in layer_arrays(config, layer).items()}


def name_in_files(name: str, config: LlamaConfig) -> str:
    """Returns the name in files of a tensor with a name of the model's, or the beginning of names for one."""
    prefixes = FAMILIES[config.family].prefixes
    own = next((own for own in prefixes if name.startswith(own)), "")
    return prefixes.get(own, "") + name.removeprefix(own)


@functools.lru_cache(maxsize=8)  # asked for each tensor
def fields_of_names(config: LlamaConfig) -> Mapping[str, str]:
    """Returns the field of `LlamaLayer` for each name within some layer."""
    layers = (layer_tensors(config, i) for i in range(config.num_layers))
    return {name: field for tensors in layers for field, (name, _) in tensors.items()}


def build_params(config: LlamaConfig, read: Callable[[str, Shape], Any]) -> LlamaParams:
    """Returns parameters with `read(name, shape)` in the place of each tensor."""
    embedding_shape = (config.vocab_size, config.hidden_size)
    norm = "model." + FAMILIES[config.family].tensors.get("norm", "norm.weight")
    return LlamaParams(
        embedding=read(EMBEDDING, embedding_shape),
        layers=tuple(
            LlamaLayer(
                **{
                    field: read(f"model.layers.{i}.{name}", shape)
                    for field, (name, shape) in layer_tensors(config, i).items()
                }
            )
            for i in range(config.num_layers)
        ),
        norm=read(norm, (config.hidden_size,)),
        output=None if config.tie_embeddings else read(OUTPUT, embedding_shape),
        config=config,
        norm_bias=read(norm.removesuffix("weight") + "bias", (config.hidden_size,)) if config.norm_bias else None,
        output_bias=read(OUTPUT_BIAS, (config.vocab_size,)) if config.output_bias else None,
        per_layer=_build_per_layer(config, read) if config.per_layer_size else None,
    )


def _build_per_layer(config: LlamaConfig, read: Callable[[str, Shape], Any]) -> PerLayer:
    total = config.num_layers * config.per_layer_size
    return PerLayer(
        embedding=read("model.embed_tokens_per_layer.weight", (config.per_layer_vocab_size, total)),
        projection=read("model.per_layer_model_projection.weight", (total, config.hidden_size)),
        norm=read("model.per_layer_projection_norm.weight", (config.per_layer_size,)),
    )


def expected_tensors(config: LlamaConfig) -> dict[str, Shape]:
    """Returns the shape of each tensor of a model, by name."""
    expected: dict[str, Shape] = {}
    build_params(config, expected.__setitem__)
    return expected


def named_arrays(params: LlamaParams) -> dict[str, jax.Array]:
    """Returns the arrays of `params` by name. Those of a matrix in few bits follow one another; see `ARRAYS`."""
    names = jax.tree.leaves(build_params(params.config, lambda name, shape: name))
    arrays: dict[str, jax.Array] = {}
    for name, leaf in zip(names, jax.tree.leaves(params, is_leaf=is_quantized), strict=True):
        if is_quantized(leaf):
            fields = {suffix: getattr(leaf, field, None) for field, suffix in ARRAYS.items()}
            arrays |= {name + suffix: array for suffix, array in fields.items() if array is not None}
        else:
            arrays[name] = leaf
    return arrays


def param_shapes(
    config: LlamaConfig, dtype: jax.typing.DTypeLike, bits: int | None = None, shards: int = 1
) -> LlamaParams:
    """Returns parameters with a `jax.ShapeDtypeStruct` in the place of each array.

    Args:
      bits, shards: see `jlade.models.llama.quantize`; None for floating point.
    """
    params = build_params(config, lambda name, shape: jax.ShapeDtypeStruct(shape, dtype_of_name(name, config, dtype)))
    return params if bits is None else jax.eval_shape(functools.partial(quantize, bits=bits, shards=shards), params)


def dtype_of_name(name: str, config: LlamaConfig, dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """Returns the dtype of a tensor in a model of a dtype."""
    field = fields_of_names(config).get(name.split(".", 3)[-1])
    return dtype if field is None else dtype_of(config, field, dtype)


def scale_shape(shape: Shape) -> Shape:
    """Returns the shape of the scale of an `Int8Matrix`."""
    return (shape[0], *shape[2:])


def bits_of(name: str, config: LlamaConfig, bits: int | None) -> int | None:
    """Returns the bits that `jlade.models.llama.quantize` gives the elements of a tensor, None for floating point."""
    if name == OUTPUT or (name == EMBEDDING and config.tie_embeddings):
        return None if bits is None else OUTPUT_BITS
    field = fields_of_names(config).get(name.split(".", 3)[-1])
    return bits if field is not None and is_matrix(field) else None


def sharding_for(config: LlamaConfig, sharding: Sharding | None, mesh: Mesh | None) -> Sharding | None:
    """Returns `sharding`, or the sharding of each array by its name in `named_arrays` when a model is put on `mesh`."""
    if mesh is None:
        return sharding
    if sharding is not None:
        raise ValueError(f"sharding must be None with a mesh, which places the parameters, got {sharding!r}: give one")
    divided = model_sharding.mesh_for(config, mesh)
    specs = named_arrays(model_sharding.specs(param_shapes(config, np.float32, bits=8), divided))
    return lambda name, shape: jax.sharding.NamedSharding(divided, cast(Any, specs[name]))


def place_of(sharding: Sharding | None, name: str, shape: Shape) -> jax.sharding.Sharding | None:
    """Returns the sharding of a tensor, None for the default device."""
    return sharding(name, shape) if callable(sharding) else sharding


def device_of(sharding: Sharding | None, config: LlamaConfig) -> jax.Device:
    """Returns a device that holds the embedding; the other tensors are taken to be on the same platform."""
    place = place_of(sharding, EMBEDDING, (config.vocab_size, config.hidden_size))
    return default_device() if place is None else next(iter(place.device_set))


def check_dtype(
    dtype: jax.typing.DTypeLike | None, stored: str, path: str | os.PathLike[str], device: jax.Device
) -> np.dtype:
    """Returns the dtype of the parameters of a checkpoint whose first tensor has the dtype `stored`.

    None is the default of the device that will hold them: float32 on CPUs, bfloat16 elsewhere.
    """
    if dtype is None:
        return np.dtype("float32" if device.platform == "cpu" else "bfloat16")
    if isinstance(dtype, str) and dtype == "auto":
        if stored == "float64":
            raise ValueError(f"{path} holds float64: dtype cannot be 'auto', name float32, bfloat16 or float16")
        return np.dtype(stored)
    try:
        checked: np.dtype = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype must be float32, bfloat16, float16 or 'auto', got {dtype!r}") from error
    if checked not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"dtype must be float32, bfloat16, float16 or 'auto', got {checked}")
    return checked


def check_finite(
    source: str | os.PathLike[str], broken: Mapping[str, set[int]], shapes: Mapping[str, Shape], strict: bool
) -> None:
    """Warns of NaN and infinite values, or refuses them if `strict`.

    `broken` has the rows with such values of each tensor that has any, of a vector the elements.
    """
    if not broken:
        return
    named = [
        f"{name} ({len(broken[name])} of {shape[0]} rows: {first_few([str(row) for row in sorted(broken[name])])})"
        for name, shape in shapes.items()
        if name in broken
    ]
    message = f"NaN or infinite values in {first_few(named)}"
    refuse_or_warn(strict, source, message, f"{source}: {message}")


def first_few(names: list[str]) -> str:
    """Returns up to five names for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
