"""The names and axes of parameters in other JAX code bases: tunix, gemma (google-deepmind), MaxText and keras-hub.

A layout is a table: for each field of jlade's parameters, the arrays of a tree that may hold it. Axes have a letter
each, so that a row of the table says how its array is arranged.
"""

import math
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlade.conversion.hf_tensors import check_names
from jlade.conversion.parts import Shape
from jlade.conversion.tensors import EMBEDDING, OUTPUT, arrays_by_name, build_params
from jlade.models.architecture import LlamaConfig
from jlade.models.llama import LlamaParams
from jlade.models.rotary import Llama3Scaling

TOP = {EMBEDDING: "embedding", OUTPUT: "output"}  # fields by jlade's names of arrays outside of layers

# V tokens of the vocabulary, E elements of hidden states, H heads, K KV heads, D elements of a head, F columns of the
# MLP, N experts, X columns of an expert
AXES = {
    "embedding": "VE",
    "norm": "E",
    "output": "VE",
    "mixer_norm.weight": "E",
    "attention.query": "HDE",
    "attention.key": "KDE",
    "attention.value": "KDE",
    "attention.output": "EHD",
    "mlp_norm.weight": "E",
    "mlp.gate": "FE",
    "mlp.up": "FE",
    "mlp.down": "EF",
    "attention.query_bias": "HD",
    "attention.key_bias": "KD",
    "attention.value_bias": "KD",
    "attention.query_norm": "D",
    "attention.key_norm": "D",
    "mixer_post_norm.weight": "E",
    "mlp_post_norm.weight": "E",
    "mixture.router": "NE",
    "mixture.gate": "NEX",
    "mixture.up": "NEX",
    "mixture.down": "NXE",
}

JOINED = {"Q": "HD", "P": "KD"}  # axes of a tree that are several


class TreeArray(NamedTuple):
    """An array of a tree that holds one of jlade's.

    Attributes:
      name: in the tree, or in a layer of it.
      axes: of the array, those of `AXES` in another order; see `JOINED`.
      part: index along one more axis before them, of `parts` elements; None without that axis.
    """

    name: str
    axes: str
    part: int | None = None
    parts: int = 0


def _as_it_is(field: str, array: jax.Array, config: LlamaConfig) -> jax.Array:
    return array


class TreeLayout(NamedTuple):
    """How a code base names and arranges parameters.

    Attributes:
      families: `LlamaConfig.family` of the models that it may hold.
      layers: begins the names in a layer, with its number in the place of {}.
      arrays: for each field, the arrays that may hold it.
      stacked: begins the names of arrays of all layers, whose second axis is the layer; None where there are none.
      change: returns the values [..., D] that jlade needs of a field's array, in the axes of the tree.
    """

    families: tuple[str, ...]
    layers: str
    arrays: Mapping[str, tuple[TreeArray, ...]]
    stacked: str | None = None
    change: Callable[[str, jax.Array, LlamaConfig], jax.Array] = _as_it_is

    def root(self, names: Collection[str]) -> str | None:
        """Returns the beginning of all names of a tree, None for a tree of another layout."""
        (embedding,) = self.arrays["embedding"]
        of_layers = [self.layers.partition("{}")[0], *([] if self.stacked is None else [self.stacked])]
        roots = [name.removesuffix(embedding.name) for name in names if f".{name}".endswith(f".{embedding.name}")]
        return next(
            (root for root in roots if any(name.startswith(root + each) for name in names for each in of_layers)), None
        )


def _maxtext_change(field: str, array: jax.Array, config: LlamaConfig) -> jax.Array:
    """Returns queries that are not scaled, and heads whose halves are rotated.

    MaxText folds the scale of scores into the queries of some families, and rotates neighbours of a head where its
    `rope_type` is "llama3.1".
    """
    if field in ("attention.query", "attention.key") and isinstance(config.rope_scaling, Llama3Scaling):
        array = jnp.concatenate([array[..., ::2], array[..., 1::2]], axis=-1)
    if field == "attention.query" and config.family in ("llama", "mistral", "mixtral"):
        scaled = array.astype(jnp.float32) * math.sqrt(config.head_dim)
        array = scaled.astype(array.dtype)
    return array


_OF_LLAMA = {
    "embedding": (TreeArray("embedder.input_embedding", "VE"),),
    "norm": (TreeArray("final_norm.w", "E"),),
    "output": (TreeArray("lm_head.w", "EV"),),
    "mixer_norm.weight": (TreeArray("input_layernorm.w", "E"),),
    "attention.query": (TreeArray("attn.q_proj.w", "EHD"),),
    "attention.key": (TreeArray("attn.k_proj.w", "EKD"),),
    "attention.value": (TreeArray("attn.v_proj.w", "EKD"),),
    "attention.output": (TreeArray("attn.o_proj.w", "HDE"),),
    "attention.query_bias": (TreeArray("attn.q_bias", "Q"),),
    "attention.key_bias": (TreeArray("attn.k_bias", "P"),),
    "attention.value_bias": (TreeArray("attn.v_bias", "P"),),
    "attention.query_norm": (TreeArray("attn.q_norm.w", "D"),),
    "attention.key_norm": (TreeArray("attn.k_norm.w", "D"),),
    "mlp_norm.weight": (TreeArray("post_attention_layernorm.w", "E"),),
    "mlp.gate": (TreeArray("mlp.gate_proj.kernel", "EF"),),
    "mlp.up": (TreeArray("mlp.up_proj.kernel", "EF"),),
    "mlp.down": (TreeArray("mlp.down_proj.kernel", "FE"),),
    "mixture.router": (TreeArray("mlp.router.kernel", "EN"),),
    "mixture.gate": (TreeArray("mlp.gate_proj", "NEX"),),
    "mixture.up": (TreeArray("mlp.up_proj", "NEX"),),
    "mixture.down": (TreeArray("mlp.down_proj", "NXE"),),
}
_OF_GEMMA = {
    "embedding": (TreeArray("embedder.input_embedding", "VE"),),
    "norm": (TreeArray("final_norm.scale", "E"),),
    "mixer_norm.weight": (TreeArray("pre_attention_norm.scale", "E"),),
    "attention.query": (TreeArray("attn.q_einsum.w", "HED"), TreeArray("attn.qkv_einsum.w", "HED", 0, 3)),
    "attention.key": (TreeArray("attn.kv_einsum.w", "KED", 0, 2), TreeArray("attn.qkv_einsum.w", "KED", 1, 3)),
    "attention.value": (TreeArray("attn.kv_einsum.w", "KED", 1, 2), TreeArray("attn.qkv_einsum.w", "KED", 2, 3)),
    "attention.output": (TreeArray("attn.attn_vec_einsum.w", "HDE"),),
    "attention.query_norm": (TreeArray("attn._query_norm.scale", "D"),),
    "attention.key_norm": (TreeArray("attn._key_norm.scale", "D"),),
    "mixer_post_norm.weight": (TreeArray("post_attention_norm.scale", "E"), TreeArray("post_attn_norm.scale", "E")),
    "mlp_norm.weight": (TreeArray("pre_ffw_norm.scale", "E"),),
    "mlp.gate": (
        TreeArray("mlp.gate_proj.kernel", "EF"),
        TreeArray("mlp.gating_einsum", "EF", 0, 2),
        TreeArray("mlp.gating_einsum", "FE", 0, 2),
    ),
    "mlp.up": (
        TreeArray("mlp.up_proj.kernel", "EF"),
        TreeArray("mlp.gating_einsum", "EF", 1, 2),
        TreeArray("mlp.gating_einsum", "FE", 1, 2),
    ),
    "mlp.down": (TreeArray("mlp.down_proj.kernel", "FE"), TreeArray("mlp.linear", "FE")),
    "mlp_post_norm.weight": (TreeArray("post_ffw_norm.scale", "E"),),
}
_OF_MAXTEXT = {
    "embedding": (TreeArray("token_embedder.embedding", "VE"),),
    "norm": (TreeArray("decoder.decoder_norm.scale", "E"),),
    "output": (TreeArray("decoder.logits_dense.kernel", "EV"),),
    "mixer_norm.weight": (TreeArray("pre_self_attention_layer_norm.scale", "E"),),
    "attention.query": (TreeArray("self_attention.query.kernel", "EHD"),),
    "attention.key": (TreeArray("self_attention.key.kernel", "EKD"),),
    "attention.value": (TreeArray("self_attention.value.kernel", "EKD"),),
    "attention.output": (TreeArray("self_attention.out.kernel", "HDE"),),
    "attention.query_bias": (TreeArray("self_attention.query.bias", "HD"),),
    "attention.key_bias": (TreeArray("self_attention.key.bias", "KD"),),
    "attention.value_bias": (TreeArray("self_attention.value.bias", "KD"),),
    "attention.query_norm": (TreeArray("self_attention.query_norm.scale", "D"),),
    "attention.key_norm": (TreeArray("self_attention.key_norm.scale", "D"),),
    "mlp_norm.weight": (TreeArray("post_self_attention_layer_norm.scale", "E"),),
    "mlp.gate": (TreeArray("mlp.wi_0.kernel", "EF"),),
    "mlp.up": (TreeArray("mlp.wi_1.kernel", "EF"),),
    "mlp.down": (TreeArray("mlp.wo.kernel", "FE"),),
    "mixture.router": (TreeArray("moe_block.gate.kernel", "EN"), TreeArray("MoeBlock_0.gate.kernel", "EN")),
    "mixture.gate": (TreeArray("moe_block.wi_0", "NEX"), TreeArray("MoeBlock_0.wi_0", "NEX")),
    "mixture.up": (TreeArray("moe_block.wi_1", "NEX"), TreeArray("MoeBlock_0.wi_1", "NEX")),
    "mixture.down": (TreeArray("moe_block.wo", "NXE"), TreeArray("MoeBlock_0.wo", "NXE")),
}
_OF_KERAS = {
    "embedding": (TreeArray("token_embedding.embeddings", "VE"),),
    "norm": (TreeArray("sequence_output_layernorm.scale", "E"),),
    "output": (TreeArray("token_embedding.reverse_embeddings", "EV"),),
    "mixer_norm.weight": (TreeArray("self_attention_layernorm.scale", "E"),),
    "attention.query": (TreeArray("self_attention.query.kernel", "EHD"),),
    "attention.key": (TreeArray("self_attention.key.kernel", "EKD"),),
    "attention.value": (TreeArray("self_attention.value.kernel", "EKD"),),
    "attention.output": (TreeArray("self_attention.attention_output.kernel", "HDE"),),
    "attention.query_bias": (TreeArray("self_attention.query.bias", "HD"),),
    "attention.key_bias": (TreeArray("self_attention.key.bias", "KD"),),
    "attention.value_bias": (TreeArray("self_attention.value.bias", "KD"),),
    "attention.query_norm": (TreeArray("self_attention.query_dense_layernorm.scale", "D"),),
    "attention.key_norm": (TreeArray("self_attention.key_dense_layernorm.scale", "D"),),
    "mlp_norm.weight": (TreeArray("feedforward_layernorm.scale", "E"),),
    "mlp.gate": (TreeArray("feedforward_gate_dense.kernel", "EF"),),
    "mlp.up": (TreeArray("feedforward_intermediate_dense.kernel", "EF"),),
    "mlp.down": (TreeArray("feedforward_output_dense.kernel", "FE"),),
}
_OF_KERAS_GEMMA = {
    "embedding": _OF_KERAS["embedding"],
    "norm": (TreeArray("final_normalization.scale", "E"),),
    "mixer_norm.weight": (TreeArray("pre_attention_norm.scale", "E"),),
    "attention.query": (TreeArray("attention.query.kernel", "HED"),),
    "attention.key": (TreeArray("attention.key.kernel", "KED"),),
    "attention.value": (TreeArray("attention.value.kernel", "KED"),),
    "attention.output": (TreeArray("attention.attention_output.kernel", "HDE"),),
    "attention.query_norm": (TreeArray("attention.query_norm.scale", "D"),),
    "attention.key_norm": (TreeArray("attention.key_norm.scale", "D"),),
    "mixer_post_norm.weight": (TreeArray("post_attention_norm.scale", "E"),),
    "mlp_norm.weight": (TreeArray("pre_ffw_norm.scale", "E"),),
    "mlp.gate": (TreeArray("ffw_gating.kernel", "EF"),),
    "mlp.up": (TreeArray("ffw_gating_2.kernel", "EF"),),
    "mlp.down": (TreeArray("ffw_linear.kernel", "FE"),),
    "mlp_post_norm.weight": (TreeArray("post_ffw_norm.scale", "E"),),
}
_OF_TUNIX = {field: tuple(dict.fromkeys(_OF_LLAMA.get(field, ()) + _OF_GEMMA.get(field, ()))) for field in AXES}

GEMMAS = "gemma", "gemma2", "gemma3_text"
QWENS = "qwen2", "qwen3", "qwen3_moe"
LAYOUTS = {
    "tunix": TreeLayout(("llama", *QWENS, *GEMMAS), "layers.{}.", _OF_TUNIX),
    "gemma": TreeLayout(GEMMAS, "layer_{}.", _OF_GEMMA),
    "MaxText": TreeLayout(
        ("llama", "mistral", "mixtral", *QWENS),
        "decoder.layers_{}.",
        _OF_MAXTEXT,
        stacked="decoder.layers.",
        change=_maxtext_change,
    ),
    "keras-hub": TreeLayout(("llama", "mistral", "qwen2", "qwen3"), "transformer_layer_{}.", _OF_KERAS),
    "keras-hub's Gemma": TreeLayout(GEMMAS, "decoder_block_{}.", _OF_KERAS_GEMMA),
}


def layout_of(names: Collection[str]) -> str | None:
    """Returns the name of the layout of a tree, given the names of its arrays; None if it is none of `LAYOUTS`."""
    return next((name for name, layout in LAYOUTS.items() if layout.root(names) is not None), None)


def read(
    arrays: Mapping[str, jax.Array], config: LlamaConfig, dtype: np.dtype, name: str, source: pathlib.Path
) -> LlamaParams:
    """Returns the parameters that the arrays of a tree make, given the name of its layout."""
    layout = LAYOUTS[name]
    if config.family not in layout.families:
        raise ValueError(
            f"{source} has the names of {name}, of whose models {', '.join(layout.families)} are known; config is of a "
            f"{config.family}"
        )
    reader = _Reader(arrays, config, layout, source)
    params = build_params(config, lambda name, shape: reader.read(name, shape, dtype))
    check_names(source, reader.missing, arrays.keys() - reader.used)
    return params


class _Reader:
    """Finds the arrays of a model in a tree, and arranges them as jlade's."""

    def __init__(self, arrays: Mapping[str, jax.Array], config: LlamaConfig, layout: TreeLayout, source: pathlib.Path):
        self.arrays, self.config, self.layout, self.source = arrays, config, layout, source
        self.root = layout.root(arrays) or ""
        self.missing: list[str] = []
        self.used: set[str] = set()
        c = config
        self.sizes = {"V": c.vocab_size, "E": c.hidden_size, "H": c.num_heads, "K": c.num_kv_heads, "D": c.head_dim}
        self.sizes |= {joined: math.prod(self.sizes[axis] for axis in axes) for joined, axes in JOINED.items()}
        self.sizes |= {"F": c.intermediate_size, "N": c.num_experts, "X": c.expert_size, "L": c.num_layers}

    def read(self, name: str, shape: Shape, dtype: np.dtype) -> jax.Array | None:
        """Returns the array of a name and a shape of jlade's, None if the tree lacks it."""
        number, _, within = name.removeprefix("model.layers.").partition(".")
        layer = int(number) if number.isdecimal() else None
        field = TOP.get(name, "norm") if layer is None else arrays_by_name(self.config)[within][0]
        if not self.layout.arrays.get(field):
            raise ValueError(f"{self.source}: no name is known for {name} in a tree with these names")
        match = self._find(self.layout.arrays[field], layer)
        if match is None:
            return None
        own_name, source, is_stacked = match
        self.used.add(own_name)
        array = self.arrays[own_name]
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{self.source}: {own_name} is of type {array.dtype}; accepted are floating ones")
        if is_stacked:
            array = array[:, layer]
        if source.part is not None:
            array = array[source.part]
        axes = "".join(JOINED.get(axis, axis) for axis in source.axes)
        array = self.layout.change(field, array.reshape([self.sizes[axis] for axis in axes]), self.config)
        order = [axes.index(axis) for axis in AXES[field]]
        return array.transpose(order).reshape(shape).astype(dtype)

    def _find(self, sources: Sequence[TreeArray], layer: int | None) -> tuple[str, TreeArray, bool] | None:
        """Returns the name and the source of an array of a layer, None outside of layers, and whether it is stacked."""
        before = {self.root: False}
        if layer is not None:
            before = {self.root + self.layout.layers.format(layer): False}
            before |= {} if self.layout.stacked is None else {self.root + self.layout.stacked: True}
        places = [(start + each.name, each, is_stacked) for start, is_stacked in before.items() for each in sources]
        there = [place for place in places if place[0] in self.arrays]
        shapes = [self._shape(each, is_stacked) for _, each, is_stacked in there]
        fit = [place for place, shape in zip(there, shapes, strict=True) if self.arrays[place[0]].shape == shape]
        if not there:
            self.missing.append(" or ".join(dict.fromkeys(name for name, _, _ in places)))
        elif len(fit) != 1:
            name = there[0][0]
            raise ValueError(
                f"{self.source}: {name} has shape {self.arrays[name].shape}; config implies "
                f"{' or '.join(map(str, shapes))}" + (", which do not tell inputs from outputs" if fit else "")
            )
        return fit[0] if fit else None

    def _shape(self, source: TreeArray, is_stacked: bool) -> Shape:
        """Returns the shape of an array in the tree."""
        shape = [self.sizes[axis] for axis in source.axes]
        if is_stacked:
            shape.insert(1, self.sizes["L"])
        return tuple(shape if source.part is None else [source.parts, *shape])
