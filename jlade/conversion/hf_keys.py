"""The keys of config.json: those that change the output of some model, and those that change no output."""

import pathlib
from collections.abc import Mapping
from typing import Any

from jlade.conversion import generation_settings, hf_quantization
from jlade.conversion.families import FAMILIES
from jlade.conversion.family import SIZES, Family
from jlade.conversion.hf_rotary import ATTENTION, FULL, unread_keys
from jlade.conversion.json_files import refuse_or_warn

# Keys that change the output of models that read them, with the one value besides null and {} that does not. Those that
# a family reads are in its entry.
ONLY_VALUES: dict[str, Any] = {
    "clip_qkv": None,  # OLMo
    "hidden_act": "silu",
    "hidden_activation": "silu",  # Gemma
    "is_causal": True,
    "mlp_layer_types": None,  # mixtures of experts
    "per_layer_config": None,  # transformers 5
    "pruned_heads": None,  # transformers 4
    "qk_layernorm": False,  # Phi
    "qk_norm": False,
    "rope_interleaved": False,
    "rope_traditional": False,  # MLX
    "scale_depth": None,  # MiniCPM
    "scale_emb": 1.0,  # MiniCPM
    "transformers_weights": None,  # other files
    "use_bidirectional_attention": False,  # Gemma
    "use_mrope": False,
} | {key: value for family in FAMILIES.values() for key, value in family.elsewhere.items()}
WITHOUT_EFFECT = {  # on the output of the model
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
    "cls_token_id", "dtype", "embd_pdrop", "embedding_dropout", "eod_token_id", "for_llm_compressor", "hidden_dropout",
    "id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "is_llama_config", "label2id", "mask_token_id",
    "model_type", "name_or_path", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "pretraining_tp", "problem_type", "resid_pdrop", "residual_dropout", "return_dict", "router_aux_loss_coef",
    "sep_token_id", "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_cache",
} | {key for family in FAMILIES.values() for key in family.without_effect}  # fmt: skip


def check_keys(file: pathlib.Path, raw: Mapping[str, Any], family: Family, strict: bool) -> None:
    """Raises if a key, or the value of a key, is not supported, and warns of unknown keys unless `strict`."""
    architectures = raw.get("architectures") or [family.architecture]
    if not isinstance(architectures, list):
        raise ValueError(f"{file}: architectures must be a list of names, got {architectures!r}")
    lower = [str(name).lower() for name in architectures]  # old files: LLaMAForCausalLM
    if family.architecture.lower() not in lower:
        raise ValueError(f"{file}: architectures is {architectures}; supported is {family.architecture}")
    accepted = {key: (value,) for key, value in ONLY_VALUES.items() if key not in family.reads} | dict(family.only)
    kinds = raw.get("layer_types")
    if "layer_types" in accepted and isinstance(kinds, list) and not raw.get("sliding_window"):
        whole = [FULL] * len(kinds), [ATTENTION] * len(kinds)
        accepted["layer_types"] += whole if len(kinds) == raw.get("num_hidden_layers") else ()
    hf_quantization.check(file, raw, family)
    for key, values in sorted(accepted.items()):
        if raw.get(key) not in (None, {}, *values):
            raise ValueError(f"{file}: {key} is {raw[key]!r}; supported is {' or '.join(map(repr, values))}")
    known = {*SIZES, *family.reads, *ONLY_VALUES, *family.only, *hf_quantization.KEYS, *WITHOUT_EFFECT}
    implied = dict(family.reads) | {"num_key_value_heads": raw.get("num_attention_heads")}
    known -= {key for key in family.ignored if raw.get(key) not in (None, implied[key])}
    unknown = [key for key in raw if key not in known | generation_settings.KEYS and not key.startswith("_")]
    if named := ", ".join(unknown + unread_keys(raw, family.rotary)):
        warning = f"{file}: ignored unknown keys, which strict=True refuses: {named}"
        refuse_or_warn(strict, file, f"unknown keys: {named}", warning)
