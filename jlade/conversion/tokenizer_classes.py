"""The classes of tokenizers of transformers 5 that build a tokenizer of their own.

From tokenizer.json they take the vocabulary, the merges and the post-processor alone.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jlade.conversion.gguf_splits import SPLITS
from jlade.conversion.gguf_tokenizer import SPACE

# The families for which AutoTokenizer takes a class, under "" those whose tokenizer.json it reads whatever class the
# files name. For other families it takes the class that they name.
FAMILIES = {
    "": "ernie4_5 ernie4_5_moe flex_olmo glm glm4 glm4_moe glm4_moe_lite glmasr got_ocr2 gpt_bigcode granite "
    "granitemoe granitemoehybrid granitemoeshared kimi_k25 kimi_linear llava llava_next mimo_v2_flash minicpm_ocr "
    "minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3 mistral mistral3 mixtral nemotron olmo2 olmo3 "
    "olmo_hybrid omniasr phi3 phimoe smolvlm stablelm vipllava voxtral",
    "CohereTokenizer": "aya_vision cohere cohere2",
    "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text shieldgemma2",
    "GPT2Tokenizer": "gpt2 phi starcoder2",
    "GPTNeoXTokenizer": "gpt_neox olmo olmoe",
    "LlamaTokenizer": "idefics2",
    "Qwen2Tokenizer": "audioflamingo3 fun_asr_nano internvl lighton_ocr moss_transcribe_diarize ovis2 qianfan_ocr "
    "qwen2 qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_asr qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe "
    "vibevoice",
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text",
}
CLASSES = {family: name for name, families in FAMILIES.items() for family in families.split()}
# Families whose files are known to name other classes
MISNAMED = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")


class Parts(NamedTuple):
    """What a class builds."""

    normalizer: Any
    pre_tokenizer: Any
    decoder: Any
    with_bytes: bool = False  # tokens <0x00> to <0xFF> spell what has no other


def class_of(tokenizer: Tokenizer, config: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """Returns the class in `PARTS` that AutoTokenizer makes of the files, or None where it reads tokenizer.json.

    The files are tokenizer.json, tokenizer_config.json (`config`) and config.json (`model`).
    """
    family = model.get("model_type")
    own = CLASSES.get(family) if isinstance(family, str) else None
    named = str(config.get("tokenizer_class") or model.get("tokenizer_class") or "").removesuffix("Fast")
    name = named or own or ""
    is_byte_level = any("ByteLevel" in str(_state(part)) for part in (tokenizer.pre_tokenizer, tokenizer.decoder))
    if own == "" or family in MISNAMED:
        name = own or ""
    elif named == "LlamaTokenizer" and is_byte_level:
        return None
    known = name in PARTS and isinstance(tokenizer.model, models.BPE) and "auto_map" not in config
    return name if known else None


def build(tokenizer: Tokenizer, name: str, config: Mapping[str, Any]) -> None:
    """Makes of `tokenizer` what the class `name` builds."""
    parts = PARTS[name](config)
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = parts[:3]
    model = tokenizer.model
    model.fuse_unk = model.byte_fallback = parts.with_bytes
    model.ignore_merges, model.dropout = False, None


def differences(tokenizer: Tokenizer, name: str, config: Mapping[str, Any]) -> list[str]:
    """Returns the names of what the class `name` builds otherwise than tokenizer.json says."""
    parts, model = PARTS[name](config), tokenizer.model
    pairs = {each: (getattr(tokenizer, each), getattr(parts, each)) for each in Parts._fields[:3]}
    others = [each.replace("_", "-") for each, (found, built) in pairs.items() if _state(found) != _state(built)]
    flags = model.fuse_unk, model.byte_fallback, model.ignore_merges, model.dropout
    if flags != (parts.with_bytes, parts.with_bytes, False, None):
        others.append("model")
    if name == "GPTNeoXTokenizer" and tokenizer.num_special_tokens_to_add(False):
        others.append("post-processor")
    return others


def _state(part: Any) -> Any:
    """Returns a part as JSON has it, without settings that change no token and no text."""
    state = {} if part is None else json.loads(part.__getstate__())
    is_decoder = isinstance(part, decoders.Decoder)
    for each in (state, *state.get("pretokenizers", ()), *state.get("decoders", ())):
        each.pop("trim_offsets", None)
        if is_decoder and each.get("type") == "ByteLevel":
            each.pop("add_prefix_space", None)
            each.pop("use_regex", None)
    return state


def _byte_level(config: Mapping[str, Any], normalizer: Any = None, **settings: Any) -> Parts:
    prefix = config.get("add_prefix_space") or False
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, **settings)
    return Parts(normalizer, pre_tokenizer, decoders.ByteLevel())


def _after(split: Any, parts: Parts) -> Parts:
    return parts._replace(pre_tokenizer=pre_tokenizers.Sequence([split, parts.pre_tokenizer]))


def _llama(config: Mapping[str, Any], is_code: bool = False) -> Parts:
    adds_space = config.get("add_prefix_space") is not False
    scheme = "never" if not adds_space else "always" if config.get("legacy") and not is_code else "first"
    strip = [decoders.Strip(" ", 1, 0)] if adds_space or is_code else []
    return Parts(None, pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False), _of_pieces(*strip), True)


def _of_pieces(*more: Any) -> Any:
    return decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *more])


def _gemma(config: Mapping[str, Any]) -> Parts:
    split = pre_tokenizers.Split(" ", "merged_with_previous")
    return Parts(normalizers.Replace(" ", SPACE), split, _of_pieces(), True)


def _qwen(config: Mapping[str, Any], words: str) -> Parts:
    split = pre_tokenizers.Split(Regex(words), "isolated")
    return _after(split, _byte_level(config, normalizers.NFC(), use_regex=False))


PARTS: dict[str, Callable[[Mapping[str, Any]], Parts]] = {
    "CodeLlamaTokenizer": lambda config: _llama(config, is_code=True),
    "CohereTokenizer": lambda config: _after(
        pre_tokenizers.Digits(individual_digits=True), _byte_level(config, normalizers.NFC())
    ),
    "GemmaTokenizer": _gemma,
    "GPT2Tokenizer": _byte_level,
    "GPTNeoXTokenizer": lambda config: _byte_level(config, normalizers.NFC()),
    "LlamaTokenizer": _llama,
    "Qwen2Tokenizer": lambda config: _qwen(config, SPLITS["qwen2"][0]),
    "Qwen3_5Tokenizer": lambda config: _qwen(config, SPLITS["qwen35"][0]),
}
