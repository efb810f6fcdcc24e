"""The metadata of GGUF files, read as the config.json that they were made from, by their architectures."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jlade.conversion.families import FAMILIES
from jlade.conversion.hf_config import parse
from jlade.conversion.hf_rotary import DEFAULT_THETA, FULL, SLIDING, write_scaling
from jlade.conversion.json_files import Values, refuse_or_warn
from jlade.conversion.parts import Shape
from jlade.models.llama import LlamaConfig
from jlade.models.rotary import LinearScaling, Llama3Scaling, Scaling, YarnScaling, inverse_frequencies

# Tensors with divisors of the rotary frequencies: of LLaMA 3, and of LongRoPE up to the original length and beyond.
ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"

# The keys below follow "llama.", or the name of another architecture.
_READ = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",  # of old files
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",  # without effect, as in llama.cpp
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "tensor_data_layout",
    "vocab_size",
}
# Keys that change the output, with the one value that does not.
_ONLY_VALUES: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attention.sliding_window": 0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 0.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "use_parallel_residual": False,
}
# Names of tokens that end a text in llama.cpp (llama_vocab::impl::load), whatever the keys and the types say.
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<eos>",
    "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<\uff5cend▁of▁sentence\uff5c>", "<end_of_utterance>", "<|return|>",
    "<|call|>", "<|calls|>", "<|flush|>", "<turn|>", "<|tool_response>", "[e~[",
)  # fmt: skip
# The tokens of fill-in-the-middle that end a text too: the one with a key, else the first with a name.
_MIDDLE_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# With a token of each, "<|end|>" ends one of several messages.
_CALL_ENDS, _OTHER_ENDS = {"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"}
SAMPLING = "general.sampling."
# Of the settings of sampling, the key of generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
      family: the `model_type` of transformers.
      keys: of config.json, by the key of the file after "gemma2." and the like; besides those of all architectures.
      derived: keys of config.json that files lack, at least some, with a value or a function from the other keys.
      norm_offset: the converter adds it to the weights of norms.
      is_permuted: whether the converter reorders the rows of queries and keys, for rotations that turn neighbours.
    """

    family: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    derived: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    norm_offset: float = 0.0
    is_permuted: bool = False


def _query_scale(layers_of_27b: int) -> dict[str, Callable[[Values], int]]:
    """Returns the key for the scale of the queries of Gemma 2 and 3, where one size differs from all others."""

    def scalar(config: Values) -> int:
        if config.size("num_hidden_layers") == layers_of_27b:
            return config.size("hidden_size") // config.size("num_attention_heads")
        return config.size("head_dim")

    return {"query_pre_attn_scalar": scalar}


def _phi3_window(config: Values) -> int | None:
    """Returns the window of models whose files are older than the key for it."""
    return 2047 if config.size("max_position_embeddings") == 4096 else None


_EXPERTS = {"expert_used_count": "num_experts_per_tok"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_GEMMA_2 = _WINDOW | {
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "final_logit_softcapping": "final_logit_softcapping",
}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", is_permuted=True),  # also Mistral, and Mixtral: see `architecture_of`
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _EXPERTS | {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        derived={"norm_topk_prob": True},
    ),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture(
        "gemma2",
        _GEMMA_2 | {"attn_logit_softcapping": "attn_logit_softcapping"},
        derived=_query_scale(layers_of_27b=46),
        norm_offset=1.0,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _GEMMA_2 | {"rope.freq_base_swa": "rope_local_base_freq"},
        derived={"sliding_window": None} | _query_scale(layers_of_27b=62),
        norm_offset=1.0,
    ),
    "phi3": Architecture(
        "phi3",
        _WINDOW | {"rope.scaling.original_context_length": "original_max_position_embeddings"},
        derived={"sliding_window": _phi3_window},
    ),
}
MIXTRAL = Architecture("mixtral", _EXPERTS | {"expert_count": "num_local_experts"}, is_permuted=True)


def architecture_of(values: Values) -> Architecture:
    """Returns the architecture that the metadata of a file name."""
    name = values.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"{values.file}: general.architecture is {name!r}; supported are {', '.join(ARCHITECTURES)}")
    return MIXTRAL if name == "llama" and values.get("llama.expert_count") else ARCHITECTURES[name]


def read_config(values: Values, shapes: Mapping[str, Shape], factors: Mapping[str, np.ndarray]) -> LlamaConfig:
    """Returns the configuration in the metadata of a file.

    Args:
      shapes: of the tensors, by their names in the file.
      factors: the tensors of `ROPE_FACTORS`, `SHORT_FACTORS` and `LONG_FACTORS` that there are.
    """
    if (kind := values.get("general.type", "model")) != "model":  # an adapter, the part of a model that reads images
        raise ValueError(f"{values.file}: general.type is {kind!r}; supported is 'model'")
    architecture = architecture_of(values)
    prefix = f"{values.get('general.architecture')}."
    for key, supported in _ONLY_VALUES.items():
        if key not in architecture.keys and (value := values.get(prefix + key, supported)) != supported:
            raise ValueError(f"{values.file}: {prefix}{key} is {value!r}; supported is {supported!r}")
    num_layers = values.size(f"{prefix}block_count")
    if num_layers > len(shapes):
        raise ValueError(f"{values.file}: {prefix}block_count is {num_layers}, but there are {len(shapes)} tensors")
    # Files without the key have a token for each row of the embedding.
    rows = shapes.get("token_embd.weight", (0,))[0] or None
    theta = values.number(f"{prefix}rope.freq_base", DEFAULT_THETA)
    heads = _read_heads(values, prefix, is_partial="partial_rotary_factor" in FAMILIES[architecture.family].reads)
    content: dict[str, Any] = heads | {
        "vocab_size": values.size(f"{prefix}vocab_size", rows),
        "intermediate_size": values.size(f"{prefix}feed_forward_length"),
        "num_hidden_layers": num_layers,
        "max_position_embeddings": values.size(f"{prefix}context_length"),
        "rms_norm_eps": values.number(f"{prefix}attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _read_scaling(values, prefix, factors, heads["head_dim"], theta) or {"rope_type": "default"},
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
    }
    known = Values(values.file, content)
    content |= {key: value(known) if callable(value) else value for key, value in architecture.derived.items()}
    stored = {name: values.get(prefix + key) for key, name in architecture.keys.items()}
    content |= {name: value or None for name, value in stored.items() if value is not None}  # 0 stands for none
    if isinstance(pattern := content.get("sliding_window_pattern"), list):
        content["layer_types"] = [SLIDING if has_window else FULL for has_window in pattern]
    config = parse(values.file, content, architecture.family)
    return dataclasses.replace(config, eos_ids=_read_eos_ids(values, config.vocab_size))


def unknown_keys(values: Values) -> dict[str, Any]:
    """Returns the keys of the architecture that `read_config` does not know, with their values."""
    prefix = f"{values.get('general.architecture')}."
    read_keys = {prefix + key for key in _READ | _ONLY_VALUES.keys() | architecture_of(values).keys.keys()}
    return {key: value for key, value in values.values.items() if key.startswith(prefix) and key not in read_keys}


def check_keys(values: Values, strict: bool) -> None:
    """Warns of unknown keys of the architecture, or refuses them if `strict`."""
    if named := ", ".join(unknown_keys(values)):
        warning = f"{values.file}: ignored unknown keys, which strict=True refuses: {named}"
        refuse_or_warn(strict, values.file, f"unknown keys: {named}", warning)


def _read_heads(values: Values, prefix: str, is_partial: bool) -> dict[str, Any]:
    """Returns the keys of config.json for heads, of which only a part is rotated if `is_partial` allows it."""
    hidden_size, num_heads = values.size(f"{prefix}embedding_length"), values.size(f"{prefix}attention.head_count")
    num_kv_heads = values.size(f"{prefix}attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{values.file}: {prefix}attention.head_count ({num_heads}) must be a multiple of "
            f"{prefix}attention.head_count_kv ({num_kv_heads})"
        )
    head_dim = values.size(f"{prefix}attention.key_length", hidden_size // num_heads)
    rotary_dim = values.size(f"{prefix}rope.dimension_count", head_dim)
    sizes = {"attention.value_length": values.size(f"{prefix}attention.value_length", head_dim)}
    if not is_partial:
        sizes["rope.dimension_count"] = rotary_dim
    for key, size in sizes.items():
        if size != head_dim or head_dim % 2:
            raise ValueError(
                f"{values.file}: {prefix}{key} must be the length of a head, an even number, got {size} for {head_dim}"
            )
    return {
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "partial_rotary_factor": rotary_dim / head_dim,
    }


def generation_config(values: Values, config: LlamaConfig) -> dict[str, Any]:
    """Returns the content of generation_config.json, with unknown settings of sampling under their own keys."""
    unread = {key: value for key, value in values.values.items() if key.startswith(SAMPLING)}
    content = {name: unread.pop(SAMPLING + key) for key, name in _SAMPLING.items() if SAMPLING + key in unread}
    if content.get("temperature") == 0:
        content["do_sample"] = False
        del content["temperature"]
    elif content.keys() - {"repetition_penalty"}:  # a file does not say whether to sample
        content["do_sample"] = True
    suppressed = values.get("tokenizer.ggml.suppress_tokens") or []
    if not isinstance(suppressed, list) or not all(isinstance(token_id, int) for token_id in suppressed):
        raise ValueError(f"{values.file}: tokenizer.ggml.suppress_tokens must be an array of integers")
    if inside := [token_id for token_id in suppressed if 0 <= token_id < config.vocab_size]:
        content["suppress_tokens"] = inside
    return content | unread


def _read_eos_ids(values: Values, vocab_size: int) -> tuple[int, ...]:
    """Returns the tokens that end a text, a turn or a message, by the keys of a file and by their names."""
    tokens = values.get("tokenizer.ggml.tokens")
    names = _ENDS + tuple(name for names in _MIDDLE_ENDS.values() for name in names)
    present = set(names).intersection(tokens[:vocab_size] if isinstance(tokens, list) else ())
    named = {name: tokens.index(name) for name in names if name in present}
    ids: dict[int, None] = {}
    for kind in ("eos", "eot", "eom", *_MIDDLE_ENDS):
        key = f"tokenizer.ggml.{kind}_token_id"
        token_id = values.get(key, next((named[name] for name in _MIDDLE_ENDS.get(kind, ()) if name in named), None))
        if token_id is not None:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise ValueError(f"{values.file}: {key} must be a token id below {vocab_size}, got {token_id!r}")
            ids[token_id] = None
    if values.get("tokenizer.ggml.eos_token_id") is not None:
        named.pop("</s>", None)  # in Gemma's vocabulary a tag of HTML
    ids |= {named[name]: None for name in _ENDS if name in named}
    if named.keys() & _CALL_ENDS and named.keys() & _OTHER_ENDS:
        ids.pop(named.get("<|end|>", -1), None)
    return tuple(ids)


def _read_scaling(
    values: Values, prefix: str, factors: Mapping[str, np.ndarray], head_dim: int, theta: float
) -> dict[str, Any] | None:
    """Returns the value of rope_scaling for the keys and the tensors of a file, with llama.cpp's defaults."""
    if SHORT_FACTORS in factors or LONG_FACTORS in factors:
        if SHORT_FACTORS not in factors:
            raise ValueError(f"{values.file}: 1 tensors are missing: {SHORT_FACTORS}")
        return {
            "rope_type": "longrope",
            "short_factor": factors[SHORT_FACTORS].tolist(),
            "attention_factor": values.number(f"{prefix}rope.scaling.attn_factor"),
        }
    scaling = _scaling_of_keys(values, prefix)
    if ROPE_FACTORS in factors:
        if scaling is not None:
            raise ValueError(f"{values.file}: {ROPE_FACTORS} is not supported with {prefix}rope.scaling.type")
        scaling = _scaling_of(values, factors[ROPE_FACTORS], head_dim, theta)
    return write_scaling(scaling)


def _scaling_of_keys(values: Values, prefix: str) -> Scaling | None:
    """Returns the scaling that the keys describe, with llama.cpp's defaults."""
    kind = values.get(f"{prefix}rope.scaling.type", "linear")
    factor = values.get(f"{prefix}rope.scaling.factor") or values.get(f"{prefix}rope.scale_linear") or 1.0
    factor = Values(values.file, {f"{prefix}rope.scaling.factor": factor}).number(f"{prefix}rope.scaling.factor")
    attention_factor = values.number(f"{prefix}rope.scaling.attn_factor", 1.0)
    if kind == "yarn":
        if (mix := values.get(f"{prefix}rope.scaling.yarn_ext_factor", 1.0)) != 1.0:
            raise ValueError(f"{values.file}: {prefix}rope.scaling.yarn_ext_factor is {mix!r}; supported is 1.0")
        return YarnScaling(
            factor=factor,
            beta_fast=values.number(f"{prefix}rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=values.number(f"{prefix}rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=attention_factor * (1 + 0.1 * math.log(factor)),
            original_max_positions=values.size(
                f"{prefix}rope.scaling.original_context_length", values.size(f"{prefix}context_length")
            ),
        )
    if kind not in ("none", "linear"):
        raise ValueError(f"{values.file}: {prefix}rope.scaling.type is {kind!r}; supported are none, linear, yarn")
    if attention_factor != 1.0:
        raise ValueError(f"{values.file}: {prefix}rope.scaling.attn_factor is supported with the type yarn alone")
    return LinearScaling(factor) if kind == "linear" and factor != 1.0 else None


def _scaling_of(values: Values, factors: np.ndarray, head_dim: int, theta: float) -> Scaling | None:
    """Returns the scaling that divides the rotary frequencies by `factors` [head_dim / 2].

    Files of LLaMA 3.1 and later store the divisors that follow from the settings, which are found again here.
    """
    if factors.shape == (head_dim // 2,):
        plain = inverse_frequencies(head_dim, theta)
        if np.all(factors == 1):
            return None
        for exponent in range(5, 21):
            scaling = Llama3Scaling(float(np.max(factors)), 1.0, 4.0, original_max_positions=2**exponent)
            expected = plain / inverse_frequencies(head_dim, theta, scaling)
            if np.allclose(factors, expected, rtol=1e-5, atol=0):
                return scaling
    raise ValueError(f"{values.file}: {ROPE_FACTORS} is not supported: it is not the scaling of LLaMA 3")
