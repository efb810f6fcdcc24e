"""Rotary settings of Hugging Face configurations, and `jlade.models.rotary.Scaling`."""

import math
from typing import Any

from jlade.conversion.json_files import Values
from jlade.models.rotary import LinearScaling, Llama3Scaling, Scaling, YarnScaling

DEFAULT_THETA = 10000.0
_KEYS: dict[str, set[str]] = {  # of each kind, besides rope_type, type and rope_theta
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


def read_rotary(values: Values) -> tuple[float, Scaling | None, int]:
    """Returns the rotary base, the scaling and the number of positions that the model supports with it.

    Raises:
      ValueError: names the file, the key and the supported values.
    """
    rotary = Values(values.file, _parameters(values))
    scaling, max_positions = _read_scaling(rotary, values)
    return rotary.number("rope_theta"), scaling, max_positions


def write_scaling(scaling: Scaling | None) -> dict[str, Any] | None:
    """Returns the value of rope_scaling."""
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


def _parameters(values: Values) -> dict[str, Any]:
    """Returns the rotary settings as one object, as in transformers 5; transformers 4 keeps the base outside of it."""
    key = "rope_scaling" if values.get("rope_parameters") is None else "rope_parameters"
    parameters = values.get(key, {})
    if not isinstance(parameters, dict):
        raise ValueError(f"{values.file}: {key} must be an object, got {parameters!r}")
    return {"rope_theta": values.get("rope_theta", DEFAULT_THETA)} | parameters


def _read_scaling(rotary: Values, values: Values) -> tuple[Scaling | None, int]:
    """Returns the scaling and the number of positions."""
    kind = _check_keys(rotary)
    max_positions = values.size("max_position_embeddings")
    match kind:
        case "linear":
            # Some files store the length before scaling here, and the length after it as max_sequence_length.
            return LinearScaling(rotary.number("factor")), max(max_positions, values.size("max_sequence_length", 1))
        case "llama3":
            llama3 = Llama3Scaling(
                factor=rotary.number("factor"),
                low_freq_factor=rotary.number("low_freq_factor"),
                high_freq_factor=rotary.number("high_freq_factor"),
                original_max_positions=rotary.size("original_max_position_embeddings"),
            )
            if llama3.high_freq_factor <= llama3.low_freq_factor:
                raise ValueError(
                    f"{rotary.file}: high_freq_factor ({llama3.high_freq_factor}) must exceed low_freq_factor "
                    f"({llama3.low_freq_factor})"
                )
            return llama3, max_positions
        case "yarn":
            original = rotary.size("original_max_position_embeddings", max_positions)
            factor = rotary.number("factor", max_positions / original)
            yarn = YarnScaling(
                factor=factor,
                beta_fast=rotary.number("beta_fast", 32.0),
                beta_slow=rotary.number("beta_slow", 1.0),
                attention_factor=rotary.number("attention_factor", _yarn_attention_factor(rotary, factor)),
                original_max_positions=original,
                truncate=rotary.boolean("truncate", True),
            )
            return yarn, max(max_positions, int(original * factor))
        case "dynamic":
            # Up to this length dynamic scaling changes nothing. Beyond it a cached key depends on when it was computed,
            # so no two ways of decoding agree.
            return None, min(max_positions, rotary.size("original_max_position_embeddings", max_positions))
    return None, max_positions


def _check_keys(rotary: Values) -> str:
    """Returns the kind of scaling, and raises if a key or a value is not supported with it."""
    kind = rotary.values.get("rope_type") or rotary.values.get("type") or "default"
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ValueError(f"{rotary.file}: rope_type is {kind!r}; supported are {', '.join(_KEYS)}")
    supported = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_KEYS[kind]}
    if unknown := [key for key in rotary.values if key not in supported]:
        raise ValueError(
            f"{rotary.file}: {unknown[0]} is not supported in {kind!r} rotary settings; supported are "
            f"{', '.join(sorted(supported))}"
        )
    if (fraction := rotary.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"{rotary.file}: partial_rotary_factor must be 1.0, got {fraction!r}")
    return kind


def _yarn_attention_factor(rotary: Values, factor: float) -> float:
    """Returns the factor of queries and keys in arXiv 2309.00071, section 3.4, as transformers computes it."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rotary.values.get("mscale") and rotary.values.get("mscale_all_dim"):
        return scale(rotary.number("mscale")) / scale(rotary.number("mscale_all_dim"))
    return scale(1.0)
