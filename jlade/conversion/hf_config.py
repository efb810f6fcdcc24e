"""config.json of Hugging Face checkpoints, as transformers 4 and 5 write it, and `LlamaConfig`."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from jlade.conversion import families, generation_settings, hf_attention, hf_quantization
from jlade.conversion.adapter_config import refuse_as_model
from jlade.conversion.families import FAMILIES, OTHER_NAMES, WITH_TEXT
from jlade.conversion.family import ALIASES, INVERSE, INVERSE_ROOT, OPTIONAL, ROOT_OF_WIDTH, SIZES, Family
from jlade.conversion.hf_mixtures import read_mixture, write_mixture
from jlade.conversion.hf_recurrent import count_layers, read_recurrent, write_recurrent
from jlade.conversion.hf_rotary import ATTENTION, FULL, SETTINGS, SLIDING, of_text, read_rotary, unread_keys
from jlade.conversion.json_files import Values, refuse_or_warn, write_json
from jlade.models.architecture import Heads
from jlade.models.llama import LlamaConfig

UNNAMED = ("llama", "mistral", "qwen2", "qwen3")  # `LlamaConfig.family` tells them apart
MAY_BE_ZERO = ("per_layer_size", "per_layer_vocab_size")  # fields that are read as integers
COUNTS = ("intermediate_size", "expert_size", "num_experts", "experts_per_token", *MAY_BE_ZERO)
MAX_LAYERS, MAX_EXPERTS = 2**12, 2**17  # several times those of any model; the names of their tensors are listed
WITHIN = ("qwen2_vl", "qwen2_5_vl")  # models whose early files have the keys of the text part beside the other parts
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # read the hidden states and keys of another model
UNSCALED = ("aya_vision", "cohere2_vision")  # whose classes leave out the scale of logits that their text part has
# Sizes that text parts of early models with images omit: those of transformers' classes.
CLASS_SIZES = {
    "llama": dict(zip(SIZES, (32000, 4096, 11008, 32, 32), strict=True)),
    "mistral": dict(zip(SIZES, (32000, 4096, 14336, 32, 32), strict=True)) | {"num_key_value_heads": 8},
    "qwen2": dict(zip(SIZES, (151936, 4096, 22016, 32, 32), strict=True)),
}
CHUNK = "attention_chunk_size"  # beyond which tokens of Llama 4 no longer see those of the chunk before
_KEYS = {"norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings"}
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


def read_config(directory: pathlib.Path, strict: bool = False) -> LlamaConfig:
    """Returns the configuration in config.json, with the end tokens and stop strings of generation_config.json.

    A key that is known to change the model's output is never ignored.

    Warns:
      UserWarning: names the unknown keys, the settings of generation that are ignored, the parts of the model that are
        left out, or the end tokens outside the vocabulary.
    """
    file = directory / "config.json"
    refuse_as_model(directory)
    raw = hf_quantization.read(directory)
    config = check(file, raw, strict)
    settings = generation_settings.read(directory)
    generation_settings.check(settings, strict)
    return dataclasses.replace(
        config,
        eos_ids=_read_eos_ids(settings, raw, config.vocab_size, strict),
        media_ids=_read_media_ids(raw),
        stop_strings=generation_settings.stop_strings(settings),
    )


def check(file: pathlib.Path, raw: Mapping[str, Any], strict: bool = False) -> LlamaConfig:
    """Returns the configuration in the whole content of config.json, without end tokens; `file` is for messages."""
    if raw.get("model_type") in list(WITH_TEXT) or _is_wrapper(raw):
        raw = _text_part(file, raw, strict)
    name = raw.get("model_type")
    name = OTHER_NAMES.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"{file}: {families.unknown(name, [*FAMILIES, *sorted([*OTHER_NAMES, *WITH_TEXT])])}")
    raw = _with_own_keys(file, raw, FAMILIES[name])
    check_keys(file, raw, FAMILIES[name], strict)
    return parse(file, {key: value for key, value in raw.items() if key not in FAMILIES[name].ignored}, name)


def check_with_ends(file: pathlib.Path, raw: Mapping[str, Any]) -> LlamaConfig:
    """Returns the configuration in the content of config.json, with the end tokens that it names."""
    config = check(file, raw)
    return dataclasses.replace(config, eos_ids=_read_eos_ids(Values(file, raw), raw, config.vocab_size, strict=False))


def _with_own_keys(file: pathlib.Path, raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the content with the keys that are read in the place of their other names."""
    reads, aliases = {*SIZES, *family.reads}, ALIASES | dict(family.aliases)
    keys: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, value in raw.items():
        own = aliases[key] if key not in reads and aliases.get(key) in reads else key
        if None not in (value, keys.get(own)) and value != keys[own]:
            raise ValueError(
                f"{file}: {names[own]} is {keys[own]!r} and {key} is {value!r}: remove one of them, or make them equal"
            )
        if keys.get(own) is None:
            keys[own], names[own] = value, key
    return keys


def write_configs(config: LlamaConfig, dtype: str, directory: pathlib.Path) -> None:
    """Writes config.json and generation_config.json."""
    content = to_hf(config, dtype)
    write_json(directory / "config.json", content)
    stop_strings = {"stop_strings": list(config.stop_strings)} if config.stop_strings else {}
    write_json(directory / "generation_config.json", {"eos_token_id": content["eos_token_id"]} | stop_strings)


def to_hf(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Returns the content of config.json, with the keys that transformers 4 and 5 both read.

    Raises:
      ValueError: if no family of transformers has this combination of settings.
    """
    family = families.family_of(config.family)
    result: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size or config.expert_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "eos_token_id": _one_or_list(config.eos_ids),
        "pad_token_id": None,  # some families have one by default, which a small vocabulary lacks
        "torch_dtype": dtype,
    }
    result |= {key: values[0] for key, values in family.only.items() if values[0] is not None}
    result |= {key: _written(key, field, config) for field, key in (_KEYS | dict(family.keys)).items()}
    result |= hf_attention.write(config, family) | write_mixture(config, family) | write_recurrent(config, family)
    result |= family.written(config)
    result |= {alias: result[key] for alias, key in family.aliases.items() if key in result}
    result = {
        key: value for key, value in result.items() if family.only.get(key) != (None,) and key not in family.ignored
    }
    if not _are_equal(parse(pathlib.Path("config.json"), result, config.family), config):
        raise ValueError(f"no model of transformers has the settings of {config}")
    return result


def parse(file: pathlib.Path, raw: Mapping[str, Any], name: str) -> LlamaConfig:
    """Returns the configuration in the content of config.json, without end tokens.

    Keys that the family of this name does not read are ignored.
    """
    family = FAMILIES[name]
    keys = {*SIZES, *family.reads}
    read_values = {key: value for key, value in raw.items() if key in keys}
    if not raw.get("rope_scaling"):  # null is the scaling of the family, unless there are rope_parameters
        is_default = raw.get("rope_parameters") is None
        read_values["rope_scaling"] = family.reads["rope_scaling"] if is_default else None
    if not raw.get("rope_parameters"):
        read_values["rope_parameters"] = family.reads["rope_parameters"]
    values = Values(file, family.reads | read_values)
    values = Values(file, dict(values.values) | {key: value(values) for key, value in family.derived.items()})
    num_heads = values.size("num_attention_heads")
    num_layers = values.size("num_hidden_layers", count_layers(values, family))
    if num_layers > MAX_LAYERS:
        raise ValueError(f"{file}: num_hidden_layers must be up to {MAX_LAYERS}, got {num_layers}")
    num_kv_heads = values.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{file}: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    windows = hf_attention.read_windows(values, num_layers)
    kinds = [SLIDING if window else FULL for window in windows or [None] * num_layers]
    latent, global_heads = hf_attention.read_latent(values, family), None
    if latent is None:
        head_dim = values.size("head_dim", values.size("hidden_size") // num_heads)
        if head_dim % 2:
            raise ValueError(f"{file}: head_dim must be even, got {head_dim}")
        heads = Heads(num_kv_heads, head_dim)
        global_heads = hf_attention.read_global_heads(values, kinds, heads)
        full_dim = (global_heads or heads).size
        rotary = read_rotary(values, full_dim, family.rotary)
    else:
        num_kv_heads, full_dim, rotary = 1, latent.sizes.cached_size, latent.rotary
        head_dim = full_dim
    layer_rotary, query_scalings = hf_attention.read_layers(values, family, rotary, windows, num_layers, head_dim)
    keys_of_fields = {"intermediate_size": "intermediate_size"} | _KEYS | dict(family.keys)
    read = {field: key for field, key in keys_of_fields.items() if field not in family.fixed}
    fields = {field: _read(values, key, field, family) for field, key in read.items()}
    fields |= {field: value(values) if callable(value) else value for field, value in family.fixed.items()}
    fields |= read_mixture(values, family, num_layers) | read_recurrent(values, family, num_layers)
    fields |= hf_attention.read_multipliers(values, family)
    if fields.get("experts_per_token", 0) > fields.get("num_experts", 0):
        raise ValueError(
            f"{file}: num_experts_per_tok must be up to the number of experts, {fields['num_experts']}, got "
            f"{fields['experts_per_token']}"
        )
    if num_layers * fields.get("num_experts", 0) > MAX_EXPERTS:
        raise ValueError(
            f"{file}: {num_layers} layers of {fields['num_experts']} experts are more than {MAX_EXPERTS} experts"
        )
    if fields.get("per_layer_size") and fields["per_layer_vocab_size"] < values.size("vocab_size"):
        raise ValueError(
            f"{file}: vocab_size_per_layer_input must be at least vocab_size, {values.size('vocab_size')}, got "
            f"{fields['per_layer_vocab_size']}"
        )
    if fields.get("attention_scale") == head_dim**-0.5:
        fields["attention_scale"] = None
    if latent is not None:
        fields |= {"latent": latent.sizes, "attention_scale": latent.attention_scale}
    return LlamaConfig(
        vocab_size=values.size("vocab_size"),
        hidden_size=values.size("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=min(rotary.max_positions, values.size(CHUNK, rotary.max_positions)),
        rope_theta=rotary.kind.theta,
        rope_scaling=rotary.kind.scaling,
        rotary_dim=rotary.dim if rotary.dim < full_dim else None,
        sliding_windows=windows,
        layer_rotary=layer_rotary,
        query_scalings=query_scalings,
        global_heads=global_heads,
        shared_kv_layers=hf_attention.read_shared_layers(values, kinds),
        model_type=None if name in UNNAMED else name,
        **fields,
    )


def _read(values: Values, key: str, field: str, family: Family) -> Any:
    """Returns the value of a field of `LlamaConfig` that is read from `key`."""
    if field in COUNTS:
        return values.count(key) if field in MAY_BE_ZERO else values.size(key)
    if isinstance(family.reads[key], bool):
        is_set = values.boolean(key)
        return (values.size("hidden_size") ** 0.5 if is_set else 1.0) if key in ROOT_OF_WIDTH else is_set
    if key in OPTIONAL and values.get(key) is None:
        return None
    number = values.number(key)
    if key in INVERSE_ROOT:
        return number**-0.5
    return 1 / number if key in INVERSE else number


def _written(key: str, field: str, config: LlamaConfig) -> Any:
    """Returns the value of `key` for a field of a configuration."""
    value = getattr(config, field)
    if field == "attention_scale" and value is None:
        value = config.head_dim**-0.5
    if key in INVERSE | INVERSE_ROOT:
        value = float(f"{1 / value if key in INVERSE else value**-2:.12g}")  # without the error of the inverse
        return int(value) if value.is_integer() else value
    return value != 1 if key in ROOT_OF_WIDTH else value


def _are_equal(config: LlamaConfig, other: LlamaConfig) -> bool:
    """Whether two configurations are equal but for ends of texts, rounding, and positions, which scaling may add to."""
    return all(
        math.isclose(value, getattr(other, name), rel_tol=1e-9)
        if isinstance(value, float) and isinstance(getattr(other, name), float)
        else value == getattr(other, name)
        for name, value in vars(config).items()
        if name not in ("eos_ids", "media_ids", "stop_strings", "max_positions")
    )


def _is_wrapper(raw: Mapping[str, Any]) -> bool:
    """Whether a model of an unknown type has a text part of a known one."""
    name, text, known = raw.get("model_type"), raw.get("text_config"), [*FAMILIES, *OTHER_NAMES]
    if not isinstance(name, str) or not isinstance(text, dict) or name in (*known, *WITH_TEXT, *ASSISTANTS):
        return False
    return text.get("model_type") in known


def _text_part(file: pathlib.Path, raw: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """Returns the configuration of the text part of a model with other parts."""
    text, is_listed = raw.get("text_config"), raw["model_type"] in WITH_TEXT
    architecture, name = WITH_TEXT[raw["model_type"]] if is_listed else (None, raw["text_config"]["model_type"])
    if text is None and raw["model_type"] in WITHIN:
        of_others = ("model_type", "image_", "video_", "vision_")
        text = {key: value for key, value in raw.items() if not key.startswith(of_others)}
    if not isinstance(text, dict):
        raise ValueError(f"{file}: text_config must be an object, got {text!r}")
    architectures = raw.get("architectures") or [architecture]
    if is_listed and architectures != [architecture]:
        raise ValueError(f"{file}: architectures is {architectures}; supported is {architecture}")
    shared = {key: raw[key] for key in ("eos_token_id", "quantization_config", "tie_word_embeddings") if key in raw}
    parts = [key for key in raw if key.endswith("_config") and key not in ("text_config", *shared)]
    if left_out := ", ".join(key for key in parts if raw[key]):
        warning = f"{file}: only the text part of the model is read; left out are {left_out}"
        refuse_or_warn(strict, file, f"models of more than text: {left_out}", warning)
    family, model_type = FAMILIES[OTHER_NAMES.get(name, name)], text.get("model_type", name)
    defaults, only = (family.part_defaults, family.part_only) if is_listed else (CLASS_SIZES.get(name, {}), {})
    text = _with_own_keys(file, text, family)
    for key, value in only.items():
        if text.get(key) not in (None, value):
            raise ValueError(f"{file}: text_config has {key} {text[key]!r}; supported is {value!r}")
    content = dict(defaults) | {key: text[key] for key in text if key != "architectures"} | shared | dict(only)
    content |= {key: of_text(text[key]) for key in SETTINGS if isinstance(text.get(key), dict)}
    if raw["model_type"] in UNSCALED:
        content["logit_scale"] = 1.0
    return content | {"model_type": name if model_type == f"{raw['model_type']}_text" else model_type}


def _read_eos_ids(settings: Values, raw: Mapping[str, Any], vocab_size: int, strict: bool) -> tuple[int, ...]:
    """Returns the end tokens of the settings of generation if they name any, else those of config.json.

    Warns:
      UserWarning: names those that are not in the vocabulary, and are left out: no text has them; or those of
        config.json, which transformers does not take where there is a generation_config.json.
    """
    file, value = settings.file, settings.get("eos_token_id")
    if value is None and (value := _own_end(raw)) is not None:
        warning = f"{file} has no eos_token_id: texts end with {value!r}, that of config.json"
        refuse_or_warn(strict, file, "settings without eos_token_id beside one in config.json", warning)
        file = file.with_name("config.json")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ValueError(f"{file}: eos_token_id must be a token id or a list of them, got {value!r}")
    inside = tuple(i for i in ids if 0 <= i < vocab_size)
    if len(inside) < len(ids):
        said = f"end tokens that no text has: eos_token_id is {value!r}, and the vocabulary ends with {vocab_size - 1}"
        refuse_or_warn(strict, file, said, f"{file}: ignored {said}")
    return inside


def _own_end(raw: Mapping[str, Any]) -> Any:
    """Returns the end token, or tokens, in the content of config.json, or else in that of its text part."""
    text = raw.get("text_config")
    parts = raw, text if isinstance(text, dict) else {}
    return next((part["eos_token_id"] for part in parts if part.get("eos_token_id") is not None), None)


def _read_media_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the tokens in whose place a model with other parts reads what these make of images, videos and sounds."""
    if "text_config" not in raw and raw.get("model_type") not in WITHIN:
        return ()
    keys = (f"{kind}_token_{name}" for kind in ("image", "video", "audio") for name in ("id", "index"))
    values = {raw[key] for key in keys if isinstance(raw.get(key), int)}
    return tuple(sorted(values))


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return (ids[0] if len(ids) == 1 else list(ids)) if ids else None


def check_keys(file: pathlib.Path, raw: Mapping[str, Any], family: Family, strict: bool) -> None:
    """Raises if a key, or the value of a key, is not supported, and warns of unknown keys unless `strict`."""
    architectures = raw.get("architectures") or [family.architecture]
    if not isinstance(architectures, list):
        raise ValueError(f"{file}: architectures must be a list of names, got {architectures!r}")
    lower = [str(name).lower() for name in architectures]  # old files: LLaMAForCausalLM
    if not any(name.lower() in lower for name in (family.architecture, *family.other_architectures)):
        raise ValueError(f"{file}: architectures is {architectures}; supported is {family.architecture}")
    accepted = {key: (value,) for key, value in ONLY_VALUES.items() if key not in family.reads} | dict(family.only)
    kinds = raw.get("layer_types")
    if "layer_types" in accepted and isinstance(kinds, list) and not raw.get("sliding_window"):
        of_index = ("indexed_attention",) if "index_topk" in family.reads else ()
        whole = tuple([name] * len(kinds) for name in (FULL, ATTENTION, *of_index))
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
