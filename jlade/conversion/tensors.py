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
from jlade.models import layers
from jlade.models import sharding as model_sharding
from jlade.models.layers import PerLayer
from jlade.models.layers.arrays import Array
from jlade.models.llama import OUTPUT_BITS, LlamaConfig, LlamaParams, quantize
from jlade.models.quantization import FILE, Bits, is_quantized

EMBEDDING, OUTPUT, OUTPUT_BIAS = "model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"
POSITIONS = "model.embed_positions.weight"
LAYER = {  # names within a layer, by the path in `jlade.models.layers.Layer`; a bias has the name of its weight
    "mixer_norm.weight": "input_layernorm.weight",
    "attention.gate": "self_attn.gate_proj.weight",
    "attention.query": "self_attn.q_proj.weight",
    "attention.key": "self_attn.k_proj.weight",
    "attention.value": "self_attn.v_proj.weight",
    "attention.output": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
    "attention.query_down": "self_attn.q_a_proj.weight",
    "attention.query_down_norm": "self_attn.q_a_layernorm.weight",
    "attention.key_down": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.key_down_norm": "self_attn.kv_a_layernorm.weight",
    "attention.key_up": "self_attn.k_b_proj.weight",
    "attention.value_up": "self_attn.v_b_proj.weight",
    "index.query": "self_attn.indexer.wq_b.weight",
    "index.key": "self_attn.indexer.wk.weight",
    "index.key_norm": "self_attn.indexer.k_norm.weight",
    "index.weights": "self_attn.indexer.weights_proj.weight",
    "attention.query_norm": "self_attn.q_norm.weight",
    "attention.key_norm": "self_attn.k_norm.weight",
    "mixer_post_norm.weight": "post_attention_layernorm.weight",
    "mlp_post_norm.weight": "post_feedforward_layernorm.weight",
    "scale.factor": "layer_scalar",
    "attention.sinks": "self_attn.sinks",
    "mixture.router": "mlp.gate.weight",
    "mixture.selection_bias": "mlp.gate.e_score_correction_bias",
    "mixture.shared_router": "mlp.shared_expert_gate.weight",
    "mixture.gate": "mlp.experts.gate_proj.weight",
    "mixture.up": "mlp.experts.up_proj.weight",
    "mixture.down": "mlp.experts.down_proj.weight",
    "recurrent.query": "linear_attn.q_proj.weight",
    "recurrent.key": "linear_attn.k_proj.weight",
    "recurrent.value": "linear_attn.v_proj.weight",
    "recurrent.gate": "linear_attn.in_proj_z.weight",
    "recurrent.output": "linear_attn.out_proj.weight",
    "recurrent.beta": "linear_attn.in_proj_b.weight",
    "recurrent.decay": "linear_attn.in_proj_a.weight",
    "recurrent.query_filter": "linear_attn.q_conv.weight",
    "recurrent.key_filter": "linear_attn.k_conv.weight",
    "recurrent.value_filter": "linear_attn.v_conv.weight",
    "recurrent.decay_rate": "linear_attn.A_log",
    "recurrent.decay_bias": "linear_attn.dt_bias",
    "recurrent.norm": "linear_attn.norm.weight",
}
# Suffixes of a matrix's name, for the arrays of an `Int8Matrix` or `GroupedMatrix`, by their fields
ARRAYS = {"weight": "", "scale": "_scale", "zero": "_zero", "offset": "_offset", "levels": "_levels"}
SCALE = ARRAYS["scale"]

Sharding = jax.sharding.Sharding | Callable[[str, Shape], jax.sharding.Sharding]


def layer_tensors(config: LlamaConfig, layer: int) -> dict[str, tuple[str, Array]]:
    """Returns name within a layer and description of each tensor, by its path in `jlade.models.layers.Layer`.

    Tensors that a file holds as one have the names of LLaMA's, and experts one name for all. `hf_tensors` has the names
    in files.
    """
    family = FAMILIES[config.family]
    names = LAYER | dict(family.tensors) | (dict(family.parallel_tensors) if config.parallel_norm else {})
    if config.latent is not None and config.latent.query_rank is not None:
        names["attention.query"] = names["attention.query"].replace("q_proj", "q_b_proj")
    if layer in config.dense_layers:  # the names of the family are those of an MLP beside experts
        mlp = [path for path in names if path.startswith("mlp.")]
        names |= {path: re.sub(r"shared_(experts?|mlp)\.", "", names[path]) for path in mlp}
        names |= {path: names[path].replace("block_sparse_moe.", "mlp.") for path in mlp}

    def name(path: str) -> str:
        if path in names:
            return names[path]
        weight = path.replace(".bias", ".weight").removesuffix("_bias")
        return names[weight].removesuffix("weight") + "bias"

    return {path: (name(path), array) for path, array in layers.arrays_of(config, layer).items()}


def name_in_files(name: str, config: LlamaConfig) -> str:
    """Returns the name in files of a tensor with a name of the model's, or the beginning of names for one."""
    prefixes = FAMILIES[config.family].prefixes
    own = next((own for own in prefixes if name.startswith(own)), "")
    return prefixes.get(own, "") + name.removeprefix(own)


@functools.lru_cache(maxsize=8)  # asked for each tensor
def arrays_by_name(config: LlamaConfig) -> Mapping[str, tuple[str, Array]]:
    """Returns the path in some `jlade.models.layers.Layer`, and its description, for each name within a layer."""
    tensors = (layer_tensors(config, i) for i in range(config.num_layers))
    return {name: (path, array) for of_layer in tensors for path, (name, array) in of_layer.items()}


def array_of(name: str, config: LlamaConfig) -> Array | None:
    """Returns the description of a tensor of a layer, None for others."""
    return arrays_by_name(config).get(name.split(".", 3)[-1], (None, None))[1]


def build_params(config: LlamaConfig, read: Callable[[str, Shape], Any]) -> LlamaParams:
    """Returns parameters with `read(name, shape)` in the place of each tensor."""
    embedding_shape = (config.vocab_size, config.hidden_size)
    norm = "model." + FAMILIES[config.family].tensors.get("norm", "norm.weight")

    def layer(i: int) -> layers.Layer:
        names = {path: name for path, (name, _) in layer_tensors(config, i).items()}
        return layers.build(config, i, lambda path, array: read(f"model.layers.{i}.{names[path]}", array.shape))

    return LlamaParams(
        embedding=read(EMBEDDING, embedding_shape),
        layers=tuple(map(layer, range(config.num_layers))),
        norm=read(norm, (config.hidden_size,)),
        output=None if config.tie_embeddings else read(OUTPUT, embedding_shape),
        config=config,
        norm_bias=read(norm.removesuffix("weight") + "bias", (config.hidden_size,)) if config.norm_bias else None,
        output_bias=read(OUTPUT_BIAS, (config.vocab_size,)) if config.output_bias else None,
        per_layer=_build_per_layer(config, read) if config.per_layer_size else None,
        positions=read(POSITIONS, (config.max_positions, config.hidden_size)) if config.learned_positions else None,
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
    array = array_of(name, config)
    return dtype if array is None else array.dtype_in(dtype)


def scale_shape(shape: Shape) -> Shape:
    """Returns the shape of the scale of an `Int8Matrix`."""
    return (shape[0], *shape[2:])


def bits_of(name: str, config: LlamaConfig, bits: Bits) -> Bits:
    """Returns the `bits` of a tensor, None for floating point.

    Numbers are those that `jlade.models.llama.quantize` gives its elements. An embedding that is not the output matrix
    is in few bits for "file" alone.
    """
    if name in (EMBEDDING, OUTPUT):
        is_output = name == OUTPUT or config.tie_embeddings
        return bits if bits in (None, FILE) else OUTPUT_BITS if is_output else None
    array = array_of(name, config)
    return bits if array is not None and array.may_round else None


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
