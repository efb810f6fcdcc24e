"""The generation settings of a checkpoint: which change the text, which jlade supports, and their values."""

import pathlib
from typing import Any

from jlade.config import CONTROLS
from jlade.conversion.json_files import Values, read_json, refuse_or_warn, shown

OF_SAMPLING = [name for name, control in CONTROLS.items() if control.of_transformers is not None]
OF_BANS = {"bad_words_ids", "no_repeat_ngram_size"}
READ = {"do_sample", "eos_token_id", "stop_strings", "suppress_tokens", *OF_SAMPLING, *OF_BANS}
# Keys that change the text where they have another value than this one or null; those of beam search first.
BEAMS: dict[str, Any] = {"num_beams": 1, "num_beam_groups": 1, "constraints": [], "force_words_ids": []}
NOT_SUPPORTED: dict[str, Any] = BEAMS | {
    "begin_suppress_tokens": [],
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_bos_token_to_be_generated": False,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_return_sequences": 1,
    "penalty_alpha": 0.0,
    "remove_invalid_values": False,
    "sequence_bias": {},
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}
WITHOUT_EFFECT = {  # on the text of one beam, but for the caller's limit of tokens
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind",
    "bos_token_id", "cache_config", "cache_implementation", "compile_config", "continuous_batching_config",
    "decoder_start_token_id", "disable_compile", "diversity_penalty", "early_stopping", "generation_kwargs",
    "is_assistant", "length_penalty", "low_memory", "max_cache_len", "max_length", "max_matching_ngram_size",
    "max_new_tokens", "num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions",
    "output_hidden_states", "output_logits", "output_scores", "pad_token_id", "prefill_chunk_size",
    "prompt_lookup_num_tokens", "renormalize_logits", "return_dict_in_generate", "return_legacy_cache",
    "speculation_type", "target_lookbehind", "transformers_version", "use_cache", "use_mtp",
}  # fmt: skip
# Settings of which greedy texts depend, with the values that change nothing.
OF_GREEDY: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "suppress_tokens": [],
    "bad_words_ids": [],
    "no_repeat_ngram_size": 0,
}
KEYS = READ | NOT_SUPPORTED.keys() | WITHOUT_EFFECT


def read(directory: pathlib.Path) -> Values:
    """Returns the settings in generation_config.json, or those in config.json if that file is missing."""
    file = directory / "generation_config.json"
    if not file.exists():
        file = directory / "config.json"
        raw = read_json(file) if file.exists() else {}
        return Values(file, {key: raw[key] for key in raw if key in KEYS})
    return Values(file, read_json(file))


def check(settings: Values, strict: bool) -> None:
    """Warns of settings that are unknown, or change the text and are not supported."""
    unknown = [key for key in settings.values if key not in KEYS and not key.startswith("_")]
    if ignored := ", ".join([*changing(settings, NOT_SUPPORTED), *unknown]):
        warning = f"{settings.file}: ignored settings of generation, which strict=True refuses: {ignored}"
        refuse_or_warn(strict, settings.file, f"settings of generation: {ignored}", warning)


def refuse_beams(settings: Values) -> None:
    """Raises a ValueError if texts are to be searched with several beams."""
    for key in changing(settings, BEAMS):
        raise ValueError(
            f"{settings.file}: {key} is {shown(settings.get(key))}; beam search is not supported: remove the key, or "
            "give a sampling of your own"
        )


def changing(settings: Values, neutral: dict[str, Any]) -> list[str]:
    """Returns the keys of `neutral` that are set to another value."""
    return [key for key, value in neutral.items() if settings.get(key, value) != value]


def stop_strings(settings: Values) -> tuple[str, ...]:
    """Returns the strings that end a text by default."""
    value = settings.get("stop_strings", [])
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"{settings.file}: stop_strings must be a string or a list of them, got {shown(value)}")
    return tuple(strings)


def suppressed_tokens(settings: Values) -> list[int]:
    """Returns the tokens that are never generated."""
    ids = settings.get("suppress_tokens", [])
    if not _are_ids(ids):
        raise ValueError(f"{settings.file}: suppress_tokens must be a list of token ids, got {shown(ids)}")
    return ids


def banned_sequences(settings: Values) -> list[list[int]]:
    """Returns the sequences of tokens that no text has; as in transformers, no end token alone is one of them."""
    sequences = settings.get("bad_words_ids", [])
    if not isinstance(sequences, list) or not all(_are_ids(sequence) and sequence for sequence in sequences):
        raise ValueError(f"{settings.file}: bad_words_ids must be a list of lists of token ids, got {shown(sequences)}")
    ends = settings.get("eos_token_id", [])
    ends_alone = [[end] for end in (ends if isinstance(ends, list) else [ends])]
    return [sequence for sequence in sequences if sequence not in ends_alone]


def repeated_size(settings: Values) -> int:
    """Returns the length of the sequences of tokens that no text has twice; 0 for none."""
    size = settings.get("no_repeat_ngram_size", 0)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ValueError(f"{settings.file}: no_repeat_ngram_size must be an integer of at least 0, got {shown(size)}")
    return size


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, list) and not any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids)
