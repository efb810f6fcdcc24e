"""config.json of Hugging Face checkpoints, as transformers 4 and 5 write it, and `LlamaConfig`."""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from jlade.models.llama import LlamaConfig
from jlade.models.rotary import LinearScaling, Llama3Scaling, Scaling, YarnScaling

# What transformers assumes for keys that a config leaves out, by model_type.
_SHARED = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
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
_ONLY_VALUES = {  # what other values would mean is not implemented
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "rope_interleaved": False,
    "use_mrope": False,
}
_WITHOUT_EFFECT = {  # on what the model computes
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
_ROPE_KEYS = {  # beside rope_type, type and rope_theta
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


def read_config(directory: pathlib.Path) -> LlamaConfig:
    """Reads config.json, and the end tokens from generation_config.json where there is one.

    Raises:
      ValueError: names the file, the key and what is supported. No key that changes what the model computes is ignored.
    """
    file = directory / "config.json"
    raw = read_json(file)
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ValueError(f"{file}: model_type is {family!r}; supported are {', '.join(_FAMILIES)}")
    _check_keys(file, raw, family)
    values = _Values(file, _FAMILIES[family] | raw)

    num_heads = values.size("num_attention_heads")
    num_layers = values.size("num_hidden_layers")
    rope = _rope_parameters(file, raw)
    scaling, max_positions = _read_rope(_Values(file, rope), values)
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
        rope_theta=_Values(file, rope).number("rope_theta"),
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
    """Returns the config.json of a model, with the keys that transformers 4 and 5 both read.

    Raises:
      ValueError: when no family of transformers has this combination of settings.
    """
    windows = set(config.sliding_windows or (None,))
    if config.qk_norm:
        family = "qwen3"
    elif config.qkv_bias and not config.attention_output_bias:
        family = "qwen2"
    else:
        family = "llama" if windows == {None} else "mistral"
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
        "rope_scaling": _write_rope_scaling(config.rope_scaling),
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


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object, or raises a ValueError that names the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


def write_json(file: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a JSON object for people to read."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class _Values:
    """The values of a file, each checked as it is read."""

    def __init__(self, file: pathlib.Path, values: Mapping[str, Any]):
        self.file, self.values = file, values

    def size(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.file}: {key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{self.file}: {key} must be a positive number, got {value!r}")
        return float(value)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ValueError(f"{self.file}: {key} must be true or false, got {value!r}")
        return value


def _check_keys(file: pathlib.Path, raw: Mapping[str, Any], family: str) -> None:
    architectures = raw.get("architectures") or [_ARCHITECTURES[family]]
    if not isinstance(architectures, list):
        raise ValueError(f"{file}: architectures must be a list of names, got {architectures!r}")
    if _ARCHITECTURES[family].lower() not in [
        str(name).lower() for name in architectures
    ]:  # old files: LLaMAForCausalLM
        raise ValueError(f"{file}: architectures is {architectures}; supported is {_ARCHITECTURES[family]}")
    for key, supported in _ONLY_VALUES.items():
        if raw.get(key) not in (None, supported):
            raise ValueError(f"{file}: {key} is {raw[key]!r}; supported is {supported!r}")
    understood = {*_REQUIRED, *_FAMILIES[family], *_ONLY_VALUES, *_WITHOUT_EFFECT}
    unknown = [key for key in raw if key not in understood and not key.startswith("_")]
    if unknown:
        raise ValueError(
            f"{file}: {unknown[0]} ({raw[unknown[0]]!r}) is not understood, and it may change what the model computes; "
            f"supported for {family} are {', '.join(sorted(understood - _WITHOUT_EFFECT))}"
        )


def _rope_parameters(file: pathlib.Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary settings as transformers 5 writes them; 4 writes the base beside them."""
    key = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    parameters = raw.get(key)
    if not isinstance(parameters, dict | None):
        raise ValueError(f"{file}: {key} must be an object, got {parameters!r}")
    theta = raw.get("rope_theta")
    return {"rope_theta": _SHARED["rope_theta"] if theta is None else theta} | (parameters or {})


def _read_rope(rope: _Values, values: _Values) -> tuple[Scaling | None, int]:
    """Returns the scaling, and how many positions the model reads with it."""
    file = rope.file
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise ValueError(f"{file}: rope_type is {kind!r}; supported are {', '.join(_ROPE_KEYS)}")
    understood = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_ROPE_KEYS[kind]}
    unknown = [key for key in rope.values if key not in understood]
    if unknown:
        raise ValueError(
            f"{file}: {unknown[0]} is not understood in {kind!r} rotary settings; supported are "
            f"{', '.join(sorted(understood))}"
        )
    if rope.values.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(f"{file}: partial_rotary_factor must be 1.0, got {rope.values['partial_rotary_factor']!r}")
    max_positions = values.size("max_position_embeddings")
    match kind:
        case "linear":
            # Some files give the length before scaling here, and the one after it under the other name.
            return LinearScaling(rope.number("factor")), max(max_positions, values.size("max_sequence_length", 1))
        case "llama3":
            llama3 = Llama3Scaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_positions=rope.size("original_max_position_embeddings"),
            )
            if llama3.high_freq_factor <= llama3.low_freq_factor:
                raise ValueError(
                    f"{file}: high_freq_factor ({llama3.high_freq_factor}) must exceed low_freq_factor "
                    f"({llama3.low_freq_factor})"
                )
            return llama3, max_positions
        case "yarn":
            original = rope.size("original_max_position_embeddings", max_positions)
            factor = rope.number("factor", max_positions / original)
            yarn = YarnScaling(
                factor=factor,
                beta_fast=rope.number("beta_fast", 32.0),
                beta_slow=rope.number("beta_slow", 1.0),
                attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
                original_max_positions=original,
                truncate=rope.boolean("truncate", True),
            )
            return yarn, max(max_positions, int(original * factor))
        case "dynamic":
            # Up to this length it changes nothing. Beyond, cached keys would depend on when they were computed, so that
            # no two ways of decoding would agree.
            return None, min(max_positions, rope.size("original_max_position_embeddings", max_positions))
    return None, max_positions


def _yarn_attention_factor(rope: _Values, factor: float) -> float:
    """Returns what arXiv 2309.00071, section 3.4, multiplies queries and keys with, as transformers computes it."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)


def _write_rope_scaling(scaling: Scaling | None) -> dict[str, Any] | None:
    match scaling:
        case None:
            return None
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
        case YarnScaling():
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "attention_factor": scaling.attention_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
                "truncate": scaling.truncate,
            }


def _read_windows(values: _Values, num_layers: int) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer, () when no layer has one."""
    if values.values.get("sliding_window") is None or not values.boolean("use_sliding_window", True):
        return ()
    window = values.size("sliding_window")
    kinds = values.values.get("layer_types")
    if kinds is None:
        first = values.size("max_window_layers") if values.values.get("max_window_layers") else 0
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
    file = directory / "generation_config.json"
    generation = read_json(file) if file.exists() else {}
    if generation.get("eos_token_id") is None:
        file, generation = directory / "config.json", dict(raw)
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
