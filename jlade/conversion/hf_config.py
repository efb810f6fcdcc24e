"""config.json of Hugging Face checkpoints, as transformers 4 and 5 write it, and `LlamaConfig`."""

import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from jlade.conversion.hf_rotary import DEFAULT_THETA, read_rotary, write_scaling
from jlade.conversion.json_files import Values, read_json, write_json
from jlade.models.llama import LlamaConfig

# The defaults of transformers for missing keys, by model_type.
_SHARED = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": DEFAULT_THETA,
    "rope_scaling": None,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SHARED
    | {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False, "max_sequence_length": None},
    "mistral": _SHARED | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": _SHARED | _QWEN,
    "qwen3": _SHARED | _QWEN | {"head_dim": 128, "attention_bias": False},
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Keys that change the output of models that read them, here or in other families, with the one value besides null that
# does not. The keys of the family itself are exempt.
_ONLY_VALUES: dict[str, Any] = {
    "attention_bias": False,
    "attention_chunk_size": None,  # Llama 4
    "attention_multiplier": None,  # Granite
    "attn_logit_softcapping": None,  # Gemma
    "attn_temperature_tuning": False,  # Llama 4
    "clip_qkv": None,  # OLMo
    "embedding_multiplier": 1.0,  # Granite
    "final_logit_softcapping": None,  # Gemma
    "hidden_act": "silu",
    "hidden_activation": "silu",  # Gemma
    "layer_types": None,
    "logit_scale": 1.0,  # Cohere
    "logits_scaling": 1.0,  # Granite
    "mlp_bias": False,
    "mlp_layer_types": None,  # mixtures of experts
    "no_rope_layers": None,  # SmolLM3, Llama 4
    "num_experts": None,  # Qwen3-MoE
    "num_local_experts": None,  # Mixtral
    "partial_rotary_factor": 1.0,
    "per_layer_config": None,  # transformers 5
    "pruned_heads": {},  # transformers 4
    "qk_layernorm": False,  # Phi
    "qk_norm": False,
    "quantization": None,  # MLX
    "quantization_config": None,
    "query_pre_attn_scalar": None,  # Gemma
    "residual_multiplier": 1.0,  # Granite
    "rope_interleaved": False,
    "rope_traditional": False,  # MLX
    "scale_depth": None,  # MiniCPM
    "scale_emb": 1.0,  # MiniCPM
    "sliding_window": None,
    "use_mrope": False,
    "use_qk_norm": False,  # Llama 4
    "use_sliding_window": False,
}
_WITHOUT_EFFECT = {  # on the output of the model
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "is_llama_config",
    "label2id",
    "model_type",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
}


def read_config(directory: pathlib.Path, strict: bool = False) -> LlamaConfig:
    """Returns the configuration in config.json, with the end tokens of generation_config.json if it exists.

    Args:
      directory: the checkpoint.
      strict: whether to refuse keys that jlade does not know, rather than to ignore them with a warning.

    Raises:
      ValueError: names the file, the key and the supported values. A key that is known to change the model's output is
        never ignored.

    Warns:
      UserWarning: names the unknown keys.
    """
    file = directory / "config.json"
    raw = read_json(file)
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ValueError(f"{file}: model_type is {family!r}; supported are {', '.join(_FAMILIES)}")
    _check_keys(file, raw, family, strict)
    keys = {*_REQUIRED, *_FAMILIES[family]}
    values = Values(file, _FAMILIES[family] | {key: value for key, value in raw.items() if key in keys})

    num_heads = values.size("num_attention_heads")
    num_layers = values.size("num_hidden_layers")
    theta, scaling, max_positions = read_rotary(values)
    attention_bias = values.boolean("attention_bias")
    config = LlamaConfig(
        vocab_size=values.size("vocab_size"),
        hidden_size=values.size("hidden_size"),
        intermediate_size=values.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=values.size("num_key_value_heads", num_heads),
        head_dim=values.size("head_dim", values.size("hidden_size") // num_heads),
        max_positions=max_positions,
        rms_norm_eps=values.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=values.boolean("tie_word_embeddings"),
        qkv_bias=attention_bias or family == "qwen2",
        attention_output_bias=attention_bias,
        mlp_bias=values.boolean("mlp_bias"),
        qk_norm=family == "qwen3",
        sliding_windows=_read_windows(values, num_layers),
        eos_ids=_read_eos_ids(directory, raw),
    )
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"{file}: num_attention_heads ({config.num_heads}) must be a multiple of "
            f"num_key_value_heads ({config.num_kv_heads})"
        )
    if config.head_dim % 2:
        raise ValueError(f"{file}: head_dim must be even, got {config.head_dim}")
    return config


def write_configs(config: LlamaConfig, dtype: str, directory: pathlib.Path) -> None:
    """Writes config.json and generation_config.json."""
    content = to_hf(config, dtype)
    write_json(directory / "config.json", content)
    write_json(directory / "generation_config.json", {"eos_token_id": content["eos_token_id"]})


def to_hf(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Returns the content of config.json, with the keys that transformers 4 and 5 both read.

    Raises:
      ValueError: if no family of transformers has this combination of settings.
    """
    windows, family = set(config.sliding_windows or (None,)), config.family
    has_qkv_bias = config.attention_output_bias or family == "qwen2"
    if config.qkv_bias != has_qkv_bias or (config.mlp_bias and family != "llama") or len(windows - {None}) > 1:
        raise ValueError(f"no model of transformers has the settings of {config}")
    result: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": write_scaling(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": _one_or_list(config.eos_ids),
        "torch_dtype": dtype,
    }
    if family in ("llama", "qwen3"):
        result["attention_bias"] = config.attention_output_bias
    if family == "llama":
        result["mlp_bias"] = config.mlp_bias
    window = max((size for size in windows if size is not None), default=None)
    if family == "mistral":
        if None in windows:
            raise ValueError(f"no model of transformers has the settings of {config}")
        result["sliding_window"] = window
    if family.startswith("qwen"):
        kinds = ["full_attention" if size is None else "sliding_attention" for size in config.sliding_windows]
        result |= {"use_sliding_window": window is not None, "sliding_window": window}
        result["layer_types"] = kinds or ["full_attention"] * config.num_layers
    return result


def _check_keys(file: pathlib.Path, raw: Mapping[str, Any], family: str, strict: bool) -> None:
    """Raises if a key, or the value of a key, is not supported, and warns of unknown keys unless `strict`."""
    architectures = raw.get("architectures") or [_ARCHITECTURES[family]]
    if not isinstance(architectures, list):
        raise ValueError(f"{file}: architectures must be a list of names, got {architectures!r}")
    lower = [str(name).lower() for name in architectures]  # old files: LLaMAForCausalLM
    if _ARCHITECTURES[family].lower() not in lower:
        raise ValueError(f"{file}: architectures is {architectures}; supported is {_ARCHITECTURES[family]}")
    for key, supported in _ONLY_VALUES.items():
        if key not in _FAMILIES[family] and raw.get(key) not in (None, supported):
            raise ValueError(f"{file}: {key} is {raw[key]!r}; supported is {supported!r}")
    known = {*_REQUIRED, *_FAMILIES[family], *_ONLY_VALUES, *_WITHOUT_EFFECT}
    if unknown := ", ".join(key for key in raw if key not in known and not key.startswith("_")):
        if strict:
            raise ValueError(f"{file}: strict=True refuses unknown keys: {unknown}")
        # All warnings come from this level, so Python shows the warning of a file once, whoever reads it again.
        warnings.warn(f"{file}: ignored unknown keys, which strict=True refuses: {unknown}", stacklevel=2)


def _read_windows(values: Values, num_layers: int) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer, () if no layer has one."""
    if values.get("sliding_window") is None or not values.boolean("use_sliding_window", True):
        return ()
    window = values.size("sliding_window")
    kinds = values.get("layer_types")
    if kinds is None:
        first = values.size("max_window_layers") if values.get("max_window_layers") else 0
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    supported = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in supported for kind in kinds):
        raise ValueError(
            f"{values.file}: layer_types must name full_attention or sliding_attention for each of {num_layers} "
            f"layers, got {kinds!r}"
        )
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _read_eos_ids(directory: pathlib.Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the end tokens of generation_config.json if it names any, else those of config.json."""
    file = directory / "generation_config.json"
    generation: Mapping[str, Any] = read_json(file) if file.exists() else {}
    if generation.get("eos_token_id") is None:
        file, generation = directory / "config.json", raw
    value = generation.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError(f"{file}: eos_token_id must be a token id or a list of them, got {value!r}")
    outside = [i for i in ids if i >= raw["vocab_size"]]
    if outside:
        raise ValueError(f"{file}: eos_token_id must be below vocab_size, {raw['vocab_size']}, got {outside[0]}")
    return tuple(ids)


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return (ids[0] if len(ids) == 1 else list(ids)) if ids else None
