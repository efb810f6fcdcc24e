"""The metadata of GGUF files, read as the config.json that they were made from, by their architectures."""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from jlade.conversion.families import FAMILIES
from jlade.conversion.family import SIZES, Family
from jlade.conversion.gguf_architectures import (
    HEADS,
    HEADS_OF_KEYS,
    LONG_FACTORS,
    PATTERN,
    ROPE_FACTORS,
    SHORT_FACTORS,
    WINDOW,
    Architecture,
    Metadata,
    architecture_of,
    name_of,
)
from jlade.conversion.hf_config import parse
from jlade.conversion.hf_rotary import DEFAULT_THETA, FULL, SLIDING, write_scaling
from jlade.conversion.json_files import Values, refuse_or_warn
from jlade.models.llama import LlamaConfig
from jlade.models.rotary import (
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    Scaling,
    YarnScaling,
    inverse_frequencies,
)

SIZE, COUNT, NUMBER, FLAG = "size", "count", "number", "boolean"  # kinds of values; a count may be 0
_ANY = object()


class Key(NamedTuple):
    """A key of a file, which follows "llama." or the name of another architecture.

    Attributes:
      names: in config.json, of which a family reads one or none.
      kind: of the value.
      neutral: the value that changes nothing in families that do not read the key, which take no other.
      default: of llama.cpp, where transformers has another for a missing key of some family.
    """

    names: tuple[str, ...] = ()
    kind: str = SIZE
    neutral: Any = _ANY
    default: Any = _ANY


_EPSILON = Key(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"), NUMBER)
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_SIZES = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
# All keys that llama.cpp reads for these architectures. Those without names are read elsewhere, or change no text.
KEYS = {
    "attention.causal": Key(neutral=True),
    "attention.clamp_kqv": Key(neutral=0.0),
    HEADS: Key(),
    HEADS_OF_KEYS: Key(),
    "attention.key_length": Key(),
    "attention.key_length_mla": Key(),
    "attention.key_length_swa": Key(),
    "attention.kv_lora_rank": Key(("kv_lora_rank",)),
    "attention.layer_norm_epsilon": _EPSILON,
    "attention.layer_norm_rms_epsilon": _EPSILON,
    "attention.max_alibi_bias": Key(neutral=0.0),
    "attention.q_lora_rank": Key(("q_lora_rank",), default=None),
    "attention.recurrent_layers": Key(),
    "attention.scale": Key(("attention_multiplier",), NUMBER, neutral=0.0),
    "attention.shared_kv_layers": Key(("num_kv_shared_layers",), COUNT),
    WINDOW: Key(("sliding_window",), neutral=0, default=None),
    PATTERN: Key(("sliding_window_pattern",)),
    "attention.temperature_length": Key(),
    "attention.temperature_scale": Key(),
    "attention.value_length": Key(),
    "attention.value_length_mla": Key(("v_head_dim",)),
    "attention.value_length_swa": Key(),
    "attn_logit_softcapping": Key(("attn_logit_softcapping",), NUMBER, neutral=0.0),
    "block_count": Key(),
    "context_length": Key(("max_position_embeddings",)),
    "embedding_length": Key(("hidden_size",)),
    "embedding_length_per_layer_input": Key(("hidden_size_per_layer_input",), COUNT),
    "embedding_scale": Key(("embedding_multiplier",), NUMBER, neutral=0.0),
    "expert_count": Key(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), COUNT, neutral=0),
    "expert_feed_forward_length": Key(("moe_intermediate_size", "intermediate_size")),
    "expert_gating_func": Key(),
    "expert_group_count": Key(("n_group",), default=1),
    "expert_group_used_count": Key(("topk_group",), default=1),
    "expert_shared_count": Key(_SHARED_EXPERTS, COUNT),
    "expert_shared_feed_forward_length": Key(_SHARED_SIZES, neutral=0),
    "expert_used_count": Key(("num_experts_per_tok", "moe_k", "top_k_experts"), neutral=0),
    "expert_weights_norm": Key(("norm_topk_prob", "route_norm"), FLAG, neutral=False, default=False),
    "expert_weights_scale": Key(
        ("routed_scaling_factor", "route_scale", "router_scaling_factor"), NUMBER, neutral=1.0, default=1.0
    ),
    "feed_forward_length": Key(("intermediate_size_mlp", "intermediate_size")),
    "final_logit_softcapping": Key(("final_logit_softcapping",), NUMBER, neutral=0.0),
    "full_attention_interval": Key(("full_attention_interval",)),
    "interleave_moe_layer_step": Key(("interleave_moe_layer_step", "moe_layer_interval")),
    "leading_dense_block_count": Key(
        ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), COUNT, default=0
    ),
    "logit_scale": Key(("logit_scale", "logits_scaling"), NUMBER, neutral=0.0),
    "moe_latent_size": Key(("moe_latent_size",)),
    "nextn_predict_layers": Key(),
    "residual_scale": Key(("residual_multiplier",), NUMBER, neutral=0.0),
    "rope.dimension_count": Key(),
    "rope.dimension_count_swa": Key(),
    "rope.dimension_sections": Key(),  # of positions in images
    "rope.freq_base": Key(),
    "rope.freq_base_swa": Key(),
    "rope.scale_linear": Key(),  # of old files
    "rope.scaling.alpha": Key(neutral=0.0),
    "rope.scaling.attn_factor": Key(),
    "rope.scaling.factor": Key(),
    "rope.scaling.finetuned": Key(),
    "rope.scaling.original_context_length": Key(),
    "rope.scaling.type": Key(),
    "rope.scaling.yarn_attn_factor": Key(),  # without effect, as in llama.cpp
    "rope.scaling.yarn_beta_fast": Key(),
    "rope.scaling.yarn_beta_slow": Key(),
    "rope.scaling.yarn_ext_factor": Key(),
    "rope.scaling.yarn_log_multiplier": Key(),
    "shortconv.l_cache": Key(("conv_L_cache",)),
    "ssm.conv_kernel": Key(("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim")),
    "ssm.group_count": Key(("mamba_n_groups", "n_groups", "linear_num_key_heads")),
    "ssm.inner_size": Key(),
    "ssm.state_size": Key(("mamba_d_state", "ssm_state_size", "linear_key_head_dim")),
    "ssm.time_step_rank": Key(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads")),
    "tensor_data_layout": Key(),
    "use_parallel_residual": Key(("use_parallel_residual", "parallel_attn"), FLAG, neutral=False),
    "vocab_size": Key(),
}
# Fields of `LlamaConfig` that follow from tensors of which one is there, where a family has a key for them.
_TENSORS = {
    "attention_output_bias": ("attn_output.bias",),
    "qkv_bias": ("attn_q.bias", "attn_qkv.bias"),
    "mlp_bias": ("ffn_up.bias",),
    "output_bias": ("output.bias",),
    "qk_norm": ("attn_q_norm.weight",),
    "selection_bias": ("exp_probs_b.bias",),
}
_GATES = {"sigmoids": 2}  # values of expert_gating_func, by the routing of a family; 1 for others
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
UNROTATED = float(np.float32(1e30))  # a divisor that leaves no rotation
SAMPLING = "general.sampling."
# Of the settings of sampling, the key of generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def read_config(file: Metadata) -> LlamaConfig:
    """Returns the configuration that a file describes."""
    values, shapes = file.values, file.shapes
    if (kind := values.get("general.type", "model")) != "model":  # an adapter, the part of a model that reads images
        raise ValueError(f"{values.file}: general.type is {kind!r}; supported is 'model'")
    name_of(values)
    num_layers = file.num_layers
    if num_layers > len(shapes):
        raise ValueError(
            f"{values.file}: {file.prefix}block_count is {num_layers}, but there are {len(shapes)} tensors"
        )
    architecture = architecture_of(file)
    family = FAMILIES[architecture.family]
    # Files without the key have a token for each row of the embedding.
    rows = shapes.get("token_embd.weight", (0,))[0] or None
    heads = _read_heads(file, architecture, family)
    content: dict[str, Any] = heads | {
        "vocab_size": file.size("vocab_size", rows),
        "num_hidden_layers": num_layers,
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    content |= _read_keys(file, architecture, family)
    content |= {
        family.keys[field]: any(map(file.has, names)) for field, names in _TENSORS.items() if field in family.keys
    }
    content |= {key: value(file) if callable(value) else value for key, value in architecture.values.items()}
    content |= _read_rotations(file, architecture, family, heads.get("head_dim", 0))
    config = parse(values.file, content, architecture.family)
    return dataclasses.replace(config, eos_ids=_read_eos_ids(values, config.vocab_size))


def _read_keys(file: Metadata, architecture: Architecture, family: Family) -> dict[str, Any]:
    """Returns the keys of config.json that the family reads and that have one in the file.

    Raises:
      ValueError: names a key that changes the output of the model in a way that the family does not know.
    """
    reads, content = {*SIZES, *family.reads}, dict[str, Any]()
    for key, known in KEYS.items():
        name = next((name for name in known.names if name in reads), None)
        value = file.get(key)
        if name in architecture.values or (key == PATTERN and isinstance(value, list)):
            continue  # a function reads it
        if name is not None and value is not None:
            content[name] = _value(file, key, known.kind)
        elif name is not None and known.default is not _ANY:
            content[name] = known.default
        elif name is None and known.neutral is not _ANY and not (known.names == _SHARED_SIZES and _counts(family)):
            _check(file, key, known.neutral, *(of for one in known.names for of in family.only.get(one, ())))
    for key, value in architecture.only.items():
        _check(file, key, value)
    if file.get("attention.temperature_scale"):
        _check(file, "attention.temperature_length", file.get("rope.scaling.original_context_length"))
    _check(file, "expert_gating_func", _GATES.get(family.fixed.get("routing", ""), 1), 0)
    return content


def _counts(family: Family) -> bool:
    """Whether the family has a number of shared experts, which says their size."""
    return any(name in family.reads for name in _SHARED_EXPERTS)


def _value(file: Metadata, key: str, kind: str) -> Any:
    """Returns the value of a key that is in the file; 0 stands for no window and no bound of logits."""
    name, is_none = file.prefix + key, file.get(key) == 0
    if kind == FLAG:
        return file.values.boolean(name)
    if kind == COUNT:
        return file.values.count(name)
    if is_none and (kind == NUMBER or key == WINDOW):
        return None
    return file.number(key) if kind == NUMBER else file.size(key)


def _check(file: Metadata, key: str, *accepted: Any) -> None:
    """Raises unless a key has one of some values, or the file lacks it."""
    if (value := file.get(key, accepted[0])) not in accepted:
        supported = " or ".join(map(repr, dict.fromkeys(accepted)))
        raise ValueError(f"{file.values.file}: {file.prefix}{key} is {value!r}; supported is {supported}")


def unknown_keys(values: Values) -> dict[str, Any]:
    """Returns the keys of the architecture that `read_config` does not know, with their values."""
    prefix = f"{values.get('general.architecture')}."
    read_keys = {prefix + key for key in KEYS}
    return {key: value for key, value in values.values.items() if key.startswith(prefix) and key not in read_keys}


def check_keys(values: Values, strict: bool) -> None:
    """Warns of what is ignored, unknown keys of the architecture and further layers, or refuses it if `strict`."""
    if count := values.get(f"{values.get('general.architecture')}.nextn_predict_layers"):
        said = f"{count} layers that predict further tokens"
        refuse_or_warn(strict, values.file, said, f"{values.file}: ignored {said}")
    if named := ", ".join(unknown_keys(values)):
        warning = f"{values.file}: ignored unknown keys, which strict=True refuses: {named}"
        refuse_or_warn(strict, values.file, f"unknown keys: {named}", warning)


def _read_heads(file: Metadata, architecture: Architecture, family: Family) -> dict[str, Any]:
    """Returns the keys of config.json for heads, of which only a part is rotated if the family allows it."""
    num_heads = file.size(HEADS)
    if "kv_lora_rank" in family.reads:
        return {"num_attention_heads": num_heads}
    has_own = "num_key_value_heads" in architecture.values or not any(file.of_layers(HEADS_OF_KEYS))
    num_kv_heads = num_heads if has_own else file.size(HEADS_OF_KEYS)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{file.values.file}: {file.prefix}attention.head_count ({num_heads}) must be a multiple of "
            f"{file.prefix}attention.head_count_kv ({num_kv_heads})"
        )
    head_dim = file.head_dim
    rotary_dim = file.size("rope.dimension_count", head_dim)
    sizes = {"attention.value_length": file.size("attention.value_length", head_dim)}
    if not {"partial_rotary_factor", "rotary_dim"} & family.reads.keys():
        sizes["rope.dimension_count"] = rotary_dim
    for key, size in sizes.items():
        if size != head_dim or head_dim % 2:
            raise ValueError(
                f"{file.values.file}: {file.prefix}{key} must be the length of a head, an even number, got {size} for "
                f"{head_dim}"
            )
    return {
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


def _read_rotations(file: Metadata, architecture: Architecture, family: Family, head_dim: int) -> dict[str, Any]:
    """Returns the keys of config.json for rotations."""
    theta = file.number("rope.freq_base", DEFAULT_THETA)
    scaling = _read_scaling(file, head_dim, theta) or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn" and (own := architecture.scaling(file)):
        scaling |= own
        if "mscale_all_dim" in own:
            del scaling["attention_factor"]
    if family.rotary != "type":
        _check(file, "rope.freq_base_swa", theta)
        return {"rope_theta": theta, "rope_scaling": scaling}
    local = file.number("rope.freq_base_swa", architecture.local_theta or theta)
    return {
        "rope_parameters": {
            FULL: scaling | {"rope_theta": theta},
            SLIDING: {"rope_type": "default", "rope_theta": local},
        }
    }


def _read_scaling(file: Metadata, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Returns the value of rope_scaling for the keys and the tensors of a file, with llama.cpp's defaults."""
    factors = file.factors
    if SHORT_FACTORS in factors or LONG_FACTORS in factors:
        if SHORT_FACTORS not in factors:
            raise ValueError(f"{file.values.file}: 1 tensors are missing: {SHORT_FACTORS}")
        attention_factor = file.number("rope.scaling.attn_factor")
        return {
            "rope_type": "longrope",
            "short_factor": factors[SHORT_FACTORS].tolist(),
            "attention_factor": attention_factor,
            "short_mscale": attention_factor,  # its name in Phi-MoE
        }
    scaling = _scaling_of_keys(file)
    if ROPE_FACTORS in factors:
        if scaling is not None:
            raise ValueError(f"{file.values.file}: {ROPE_FACTORS} is not supported with {file.prefix}rope.scaling.type")
        scaling = _scaling_of(file.values, factors[ROPE_FACTORS], head_dim, theta)
    return write_scaling(scaling)


def _scaling_of_keys(file: Metadata) -> Scaling | None:
    """Returns the scaling that the keys describe, with llama.cpp's defaults."""
    kind, values = file.get("rope.scaling.type", "linear"), file.values
    factor = file.get("rope.scaling.factor") or file.get("rope.scale_linear") or 1.0
    factor = Values(values.file, {f"{file.prefix}rope.scaling.factor": factor}).number(
        f"{file.prefix}rope.scaling.factor"
    )
    attention_factor = file.number("rope.scaling.attn_factor", 1.0)
    if kind == "yarn":
        _check(file, "rope.scaling.yarn_ext_factor", 1.0)
        return YarnScaling(
            factor=factor,
            beta_fast=file.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=file.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=attention_factor * (1 + 0.1 * math.log(factor)),
            original_max_positions=file.size("rope.scaling.original_context_length", file.size("context_length")),
        )
    if kind not in ("none", "linear"):
        raise ValueError(f"{values.file}: {file.prefix}rope.scaling.type is {kind!r}; supported are none, linear, yarn")
    if attention_factor != 1.0:
        raise ValueError(f"{values.file}: {file.prefix}rope.scaling.attn_factor is supported with the type yarn alone")
    return LinearScaling(factor) if kind == "linear" and factor != 1.0 else None


def _scaling_of(values: Values, factors: np.ndarray, head_dim: int, theta: float) -> Scaling | None:
    """Returns the scaling that divides the rotary frequencies by `factors` [head_dim / 2].

    Files of LLaMA 3.1 and later store the divisors that follow from the settings, which are found again here.
    """
    if factors.shape == (head_dim // 2,):
        plain = inverse_frequencies(head_dim, theta)
        if np.all(factors == 1):
            return None
        if set(factors.tolist()) <= {1.0, UNROTATED}:
            return ProportionalScaling(float(np.mean(factors == 1)))
        for high, exponent in itertools.product((4.0, 1.0), range(5, 21)):  # those of Llama 3 and 4
            scaling = Llama3Scaling(float(np.max(factors)), 1.0, high, original_max_positions=2**exponent)
            expected = plain / inverse_frequencies(head_dim, theta, scaling)
            if np.allclose(factors, expected, rtol=1e-5, atol=0):
                return scaling
    raise ValueError(f"{values.file}: {ROPE_FACTORS} is not supported: it is not the scaling of LLaMA 3")
