"""The architectures of llama.cpp: what of a model a GGUF file has in another form than Hugging Face's format."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jlade.conversion.hf_rotary import FULL, SLIDING
from jlade.conversion.json_files import Values
from jlade.conversion.parts import Shape

# Tensors with divisors of the rotary frequencies: of LLaMA 3, and of LongRoPE up to the original length and beyond.
ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
HEADS, HEADS_OF_KEYS = "attention.head_count", "attention.head_count_kv"
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


class Metadata(NamedTuple):
    """What a file says of its model.

    Attributes:
      values: the keys.
      shapes: of the other tensors, by their names in the file.
      factors: the tensors of `ROPE_FACTORS`, `SHORT_FACTORS` and `LONG_FACTORS` that there are.
    """

    values: Values
    shapes: Mapping[str, Shape]
    factors: Mapping[str, np.ndarray]

    @property
    def prefix(self) -> str:
        """Begins the keys of the architecture."""
        return f"{self.values.get('general.architecture')}."

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key of the architecture."""
        return self.values.get(self.prefix + key, default)

    def size(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer, which may be listed for each layer, with 0 for layers that have none."""
        name, value = self.prefix + key, self.get(key, default)
        if isinstance(value, list) and len(sizes := {size for size in value if size != 0}) == 1:
            value = sizes.pop()
        return Values(self.values.file, {name: value}).size(name)

    def count(self, key: str) -> int:
        """Returns an integer that may be 0, for which a missing key stands too."""
        return self.values.count(self.prefix + key)

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a positive number."""
        return self.values.number(self.prefix + key, default)

    @property
    def num_layers(self) -> int:
        """The layers of the model, without those after them that predict further tokens."""
        blocks, others = self.size("block_count"), self.get("nextn_predict_layers", 0)
        if isinstance(others, bool) or not isinstance(others, int) or not 0 <= others < blocks:
            raise ValueError(
                f"{self.values.file}: {self.prefix}nextn_predict_layers must be an integer from 0 to {blocks - 1}, "
                f"got {others!r}"
            )
        return blocks - others

    @property
    def head_dim(self) -> int:
        """The elements of a head, in layers without a window where these differ."""
        return self.size("attention.key_length", self.size("embedding_length") // self.size(HEADS))

    def of_layers(self, key: str) -> list[Any]:
        """Returns the value of a key for each layer, one for all or a list of them."""
        value = self.get(key)
        listed = value if isinstance(value, list) else [value] * self.num_layers
        if len(listed) < self.num_layers:
            raise ValueError(
                f"{self.values.file}: {self.prefix}{key} has {len(listed)} elements for {self.num_layers} layers"
            )
        return listed[: self.num_layers]

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name, or one in a layer."""
        return name in self.shapes or any(f"blk.{i}.{name}" in self.shapes for i in range(self.num_layers))


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
      family: the `model_type` of transformers.
      values: keys of config.json that follow from other keys of the file, by a function, or from none.
      only: keys of the file that change the output, with the one value of them that jlade takes.
      tensors: names within a layer of the file, where those of the package gguf differ, by the path of the array in
        `jlade.models.layers.Layer`.
      fused: tensors within a layer of the file that hold several arrays, by name, where the family's do not.
      has_groups: whether the rows of fused tensors are in the family's groups.
      norm_offset: the converter adds it to the weights of norms, but those within recurrent layers.
      is_permuted: whether the converter reorders the rows of queries and keys, for rotations that turn neighbours.
      is_tiled: whether it reorders the heads of values in recurrent layers: the first of each key's, the second, ...
      like: the architecture with these names of tensors, of one that the package gguf does not know.
      scaling: keys of rope_scaling for the kind yarn.
      local_theta: the base of rotations in layers with a window, where no key says it; None for that of the others.
    """

    family: str
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    has_groups: bool = True
    norm_offset: float = 0.0
    is_permuted: bool = False
    is_tiled: bool = False
    like: str = ""
    scaling: Callable[[Metadata], Mapping[str, Any]] = lambda file: {}
    local_theta: float | None = None


Function = Callable[[Metadata], Any]


def _size(key: str) -> Function:
    """Returns the function that reads a size."""
    return lambda file: file.size(key)


def _has(name: str) -> Function:
    """Returns the function for whether there is a tensor."""
    return lambda file: file.has(name)


def _kinds(key: str, when: str, otherwise: str) -> Function:
    """Returns the function for a type of each layer, by whether a key is true for it, or more than 0."""
    return lambda file: None if file.get(key) is None else [when if one else otherwise for one in file.of_layers(key)]


def _value_size(file: Metadata) -> int:
    """Returns the elements of a head of values in recurrent layers."""
    return file.size("ssm.inner_size") // file.size("ssm.time_step_rank")


def _query_scale(layers_of_27b: int) -> dict[str, Function]:
    """Returns the key for the scale of the queries of Gemma 2 and 3, where one size differs from all others."""

    def scalar(file: Metadata) -> int:
        is_27b = file.num_layers == layers_of_27b
        return file.size("embedding_length") // file.size(HEADS) if is_27b else file.head_dim

    return {"query_pre_attn_scalar": scalar}


def _phi3_window(file: Metadata) -> int | None:
    """Returns the window of models whose files are older than the key for it."""
    return file.get(WINDOW, 2047 if file.size("context_length") == 4096 else None) or None


def _nemotron_kinds(file: Metadata) -> list[str]:
    mlp = "moe" if file.get("expert_count") else "mlp"
    pairs = zip(file.of_layers(HEADS_OF_KEYS), file.of_layers("feed_forward_length"), strict=True)
    return [FULL if heads else mlp if size else "linear_attention" for heads, size in pairs]


def _gemma4_heads(has_window: bool) -> Function:
    """Returns the function for the heads of keys in layers with a window, or in those without, None without such."""

    def heads(file: Metadata) -> Any:
        pairs = zip(file.of_layers(HEADS_OF_KEYS), file.of_layers(PATTERN), strict=True)
        return next((number for number, is_local in pairs if is_local == has_window), None)

    return heads


def _are_values_keys(file: Metadata) -> bool:
    """Whether the layers of Gemma 4 without a window have no matrix for values."""
    own = max(0, file.num_layers - file.count("attention.shared_kv_layers"))
    layers = enumerate(file.of_layers(PATTERN)[:own])
    return any(not has_window and f"blk.{i}.attn_v.weight" not in file.shapes for i, has_window in layers)


def _smallest_mlp(file: Metadata) -> Any:
    """Returns the inner size of Gemma 4's MLPs, which is twice that in some layers."""
    sizes = file.of_layers("feed_forward_length")
    return min(sizes) if all(type(size) is int for size in sizes) else sizes


def _per_layer_vocabulary(file: Metadata) -> int:
    return file.shapes.get("per_layer_token_embd.weight", file.shapes.get("token_embd.weight", (1,)))[0]


def _mscale(unit: float, mscale: float | None = None) -> Function:
    """Returns the function for the settings of YaRN that DeepSeek and Mistral add.

    `unit` is the value of the key that stands for 1, and `mscale` that setting, None for one equal to the other.
    """

    def settings(file: Metadata) -> dict[str, Any]:
        beta = {"llama_4_scaling_beta": file.get("attention.temperature_scale")}
        if not file.get("rope.scaling.yarn_log_multiplier"):
            return beta
        of_all = float(f"{file.number('rope.scaling.yarn_log_multiplier') / unit:.6g}")
        return beta | {"mscale": mscale or of_all, "mscale_all_dim": of_all}

    return settings


def _group_method(file: Metadata) -> str:
    return "group_limited_greedy" if file.count("expert_group_count") > 1 else "greedy"


def _has_chunks(file: Metadata) -> bool:
    """Whether layers of Llama 4 see chunks of a text: a window of 0 stands for none, and rotations in all layers."""
    return file.get(WINDOW) != 0


_LISTED = {
    "layer_types": lambda file: _kinds(PATTERN, SLIDING, FULL)(file) if isinstance(file.get(PATTERN), list) else None
}
_LONG_ROPE = {"original_max_position_embeddings": lambda file: file.get("rope.scaling.original_context_length")}
_GRANITE = {"attention_multiplier": lambda file: file.get("attention.scale") or file.head_dim**-0.5}
_MAMBA = {
    "mamba_conv_bias": _has("ssm_conv1d.bias"),
    "mamba_d_ssm": _size("ssm.inner_size"),
    "mamba_d_head": _value_size,
    "mamba_expand": lambda file: file.size("ssm.inner_size") // file.size("embedding_length"),
}
_DELTA = {
    "layer_types": _kinds("attention.recurrent_layers", "linear_attention", FULL),
    "linear_value_head_dim": _value_size,
}
_CONVOLUTION = {"layer_types": _kinds(HEADS_OF_KEYS, FULL, "conv")}
_LATENT = {
    "qk_rope_head_dim": _size("rope.dimension_count"),
    "qk_nope_head_dim": lambda file: file.size("attention.key_length_mla") - file.size("rope.dimension_count"),
    "num_key_value_heads": None,
    "head_dim": None,
    "rope_interleave": True,
}
_LATE_NORM = {"mlp_norm.weight": "post_attention_norm.weight"}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", is_permuted=True),  # also Mistral
    "mistral3": Architecture("llama", is_permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", {"norm_topk_prob": False}),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3next": Architecture(
        "qwen3_next",
        _DELTA | {"norm_topk_prob": True},
        tensors=_LATE_NORM,
        fused={"attn_qkv.weight": ("recurrent.query", "recurrent.key", "recurrent.value")},
        norm_offset=1.0,
    ),
    "qwen35": Architecture("qwen3_5_text", _DELTA, tensors=_LATE_NORM, norm_offset=1.0, is_tiled=True),
    "qwen35moe": Architecture("qwen3_5_moe_text", _DELTA, tensors=_LATE_NORM, norm_offset=1.0, is_tiled=True),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture(
        "gemma2",
        _LISTED | {"sliding_window": lambda file: file.get(WINDOW, 4096) or None} | _query_scale(layers_of_27b=46),
        norm_offset=1.0,
    ),
    "gemma3": Architecture("gemma3_text", _LISTED | _query_scale(layers_of_27b=62), norm_offset=1.0, local_theta=1e4),
    "gemma4": Architecture(
        "gemma4_text",
        _LISTED
        | {
            "head_dim": _size("attention.key_length_swa"),
            "global_head_dim": _size("attention.key_length"),
            "num_key_value_heads": _gemma4_heads(has_window=True),
            "num_global_key_value_heads": _gemma4_heads(has_window=False),
            "attention_k_eq_v": _are_values_keys,
            "intermediate_size": _smallest_mlp,
            "use_double_wide_mlp": lambda file: len(set(file.of_layers("feed_forward_length"))) > 1,
            "enable_moe_block": lambda file: bool(file.get("expert_count")),
            "vocab_size_per_layer_input": _per_layer_vocabulary,
        },
        tensors={
            "mixture.router_scale": "ffn_gate_inp.scale",
            "mixture.scales": "ffn_down_exps.scale",
            "scale.factor": "layer_output_scale.weight",
        },
        local_theta=1e4,
    ),
    "phi2": Architecture("phi"),
    "phi3": Architecture("phi3", _LONG_ROPE | {"sliding_window": _phi3_window}),
    "phimoe": Architecture("phimoe", _LONG_ROPE),
    "gptneox": Architecture("gpt_neox", has_groups=False),
    "falcon": Architecture(
        "falcon",
        {
            "new_decoder_architecture": lambda file: file.size(HEADS_OF_KEYS) not in (1, file.size(HEADS)),
            "multi_query": lambda file: file.size(HEADS_OF_KEYS) == 1,
            "num_ln_in_parallel_attn": lambda file: 2 if file.has("attn_norm_2.weight") else 1,
            "num_kv_heads": _size(HEADS_OF_KEYS),
            "ffn_hidden_size": _size("feed_forward_length"),
        },
        has_groups=False,
    ),
    "olmo2": Architecture("olmo2"),  # also OLMo 3
    "olmoe": Architecture("olmoe", {"norm_topk_prob": False}),
    "granite": Architecture("granite", _GRANITE, only={"rope.scaling.finetuned": True}, is_permuted=True),
    "granitemoe": Architecture("granitemoe", _GRANITE, is_permuted=True),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        _MAMBA
        | _GRANITE
        | {
            "layer_types": _kinds(HEADS_OF_KEYS, "attention", "mamba"),
            "position_embedding_type": lambda file: "rope" if file.get("rope.scaling.finetuned", True) else None,
        },
        is_permuted=True,
    ),
    "smollm3": Architecture("smollm3", is_permuted=True),
    "starcoder2": Architecture("starcoder2"),
    "stablelm": Architecture("stablelm"),
    "chatglm": Architecture("glm"),
    "glm4": Architecture("glm4"),
    "glm4moe": Architecture("glm4_moe", tensors=_LATE_NORM),
    "command-r": Architecture("cohere"),
    "cohere2": Architecture("cohere2", _LISTED),
    "ernie4_5": Architecture("ernie4_5"),
    "ernie4_5-moe": Architecture("ernie4_5_moe"),
    "exaone4": Architecture("exaone4", _LISTED),
    "exaone-moe": Architecture("exaone_moe", _LISTED),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "seed_oss": Architecture("seed_oss"),
    "dots1": Architecture("dots1", {"layer_types": None}),
    "afmoe": Architecture("afmoe", _LISTED | {"mup_enabled": True}),
    "minimax-m2": Architecture("minimax_m2"),
    "deepseek2": Architecture(
        "deepseek_v2",
        _LATENT | {"topk_method": _group_method},
        only={"attention.temperature_scale": 0.0},
        scaling=_mscale(unit=0.1),
    ),
    "mistral4": Architecture("mistral4", _LATENT, scaling=_mscale(unit=0.1, mscale=1.0)),
    "gpt-oss": Architecture(
        "gpt_oss",
        _LISTED,
        tensors=_LATE_NORM | {"attention.sinks": "attn_sinks.weight"},
        scaling=lambda file: {"truncate": False},
    ),
    "llama4": Architecture(
        "llama4_text",
        {
            "use_qk_norm": lambda file: file.get("expert_count") != 128,
            "attention_chunk_size": lambda file: 8192 if _has_chunks(file) else file.size("context_length"),
            "attn_temperature_tuning": _has_chunks,
            "no_rope_layers": lambda file: None if _has_chunks(file) else [1] * file.num_layers,
        },
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        _MAMBA
        | {
            "mamba_rms_norm": _has("ssm_norm.weight"),
            "mamba_norm_before_gate": False,
        },
        tensors={"mlp_norm.weight": "ffn_norm"},
    ),
    "lfm2": Architecture("lfm2", _CONVOLUTION | {"block_auto_adjust_ff_dim": False}),
    "lfm2moe": Architecture("lfm2_moe", _CONVOLUTION | {"norm_topk_prob": True}),
    "nemotron_h": Architecture(
        "nemotron_h",
        {
            "layers_block_type": _nemotron_kinds,
            "mamba_head_dim": _value_size,
            "use_conv_bias": _has("ssm_conv1d.bias"),
        },
        is_permuted=True,
    ),
    "hy_v3": Architecture(
        "hy_v3",
        {
            "num_shared_experts": lambda file: (
                file.size("expert_shared_feed_forward_length") // file.size("expert_feed_forward_length")
            ),
            "mlp_layer_types": lambda file: [
                "sparse" if f"blk.{i}.ffn_gate_inp.weight" in file.shapes else "dense" for i in range(file.num_layers)
            ],
        },
        tensors={"mixture.selection_bias": "exp_probs_b"},
        like="exaone-moe",
    ),
}
# Architectures of llama.cpp that are those of two families: the other one, and whether a file has it.
_OTHERS: dict[str, tuple[Architecture, Callable[[Metadata], bool]]] = {
    "llama": (Architecture("mixtral", is_permuted=True), lambda file: bool(file.get("expert_count"))),
    "mistral3": (
        Architecture("ministral3", is_permuted=True, scaling=_mscale(unit=1.0, mscale=1.0)),
        lambda file: bool(file.get("attention.temperature_scale")),
    ),
    "olmo2": (Architecture("olmo3", _LISTED), lambda file: bool(file.get(WINDOW))),
    "deepseek2": (
        dataclasses.replace(ARCHITECTURES["deepseek2"], family="deepseek_v3", values=_LATENT),
        lambda file: (file.get("expert_gating_func") or (2 if file.has("exp_probs_b.bias") else 1)) == 2,
    ),
}
ARCHITECTURES["nemotron_h_moe"] = ARCHITECTURES["nemotron_h"]


def name_of(values: Values) -> str:
    """Returns the name of the architecture, or raises a ValueError if it is not one of `ARCHITECTURES`."""
    name = values.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"{values.file}: general.architecture is {name!r}; supported are {', '.join(ARCHITECTURES)}")
    return name


def architecture_of(file: Metadata) -> Architecture:
    """Returns the architecture that the metadata of a file name."""
    name = name_of(file.values)
    if name in _OTHERS and _OTHERS[name][1](file):
        return _OTHERS[name][0]
    return ARCHITECTURES[name]
