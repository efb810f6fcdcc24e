"""Rotary settings of Hugging Face configurations, and `jlade.models.rotary.Scaling`."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jlade.conversion.json_files import Values
from jlade.models.rotary import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    QueryScaling,
    Rotary,
    Scaling,
    YarnScaling,
)

DEFAULT_THETA = 10000.0
MAX_ALPHA = 1e9  # far above that of any model; its power must be a float
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # types of layers
ATTENTION = "attention"  # the name of the first beside recurrent layers, which transformers 4 and 5 read
SETTINGS = ("rope_scaling", "rope_parameters")  # transformers takes the first that is not empty
ORIGINAL = "original_max_position_embeddings"
_KEYS: dict[str, set[str]] = {  # of each kind
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", ORIGINAL},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", ORIGINAL},
    "yarn": {
        "factor",
        ORIGINAL,
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "longrope": {"short_factor", "long_factor", "factor", "attention_factor", ORIGINAL},
    "proportional": {"factor"},
}
PARTIAL = "partial_rotary_factor"
_KEYS_OF_ALL = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KEYS_OF_FAMILIES = {
    "alpha": {"alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"},  # all but the first do nothing
    "beta": {"llama_4_scaling_beta", "max_position_embeddings"},
    "mscale": {"short_mscale", "long_mscale"},
    "sections": {"mrope_section", "mrope_interleaved"},
}


class Read(NamedTuple):
    """The rotations of a configuration."""

    kind: Rotary
    dim: int  # rotated elements of a head
    max_positions: int  # that the model supports with it
    query_scaling: QueryScaling | None = None  # of all layers


def read_rotary(values: Values, head_dim: int, family: str = "all", layer_type: str = FULL) -> Read:
    """Returns the rotations of the layers, or of those with a `layer_type` where types have their own (Gemma 3).

    `family` is `jlade.conversion.family.Family.rotary`.
    """
    parameters = _parameters(values, family, layer_type)
    kind = parameters["rope_type"]
    if family == "alpha" and parameters.get("alpha") and kind == "dynamic":
        theta, alpha = (Values(values.file, parameters).number(key) for key in ("rope_theta", "alpha"))
        if head_dim == 2 or alpha > MAX_ALPHA:
            raise ValueError(f"{values.file}: alpha must be up to {MAX_ALPHA:g}, for heads above 2, got {alpha}")
        parameters = {"rope_type": "default", "rope_theta": theta * alpha ** (head_dim / (head_dim - 2))}
    if family == "mscale" and kind != "default":
        parameters["attention_factor"] = Values(values.file, parameters).number("short_mscale")
    if family != "type" and values.get(ORIGINAL) is not None:  # transformers prefers the outer one
        parameters[ORIGINAL] = values.get(ORIGINAL)
    rotary = Values(values.file, parameters)
    query_scaling = _read_query_scaling(rotary, values) if family == "beta" else None
    scaling, max_positions = _read_scaling(rotary, values)
    dim = _read_dim(rotary, values, head_dim)
    if isinstance(scaling, LongRopeScaling) and len(scaling.factors) != dim // 2:
        raise ValueError(f"{rotary.file}: short_factor must have {dim // 2} numbers, got {len(scaling.factors)}")
    return Read(Rotary(rotary.number("rope_theta"), scaling), dim, max_positions, query_scaling)


def read_sharpness(values: Values, family: str) -> float:
    """Returns the factor of scores besides the rotations' own, which DeepSeek adds to YaRN; see `read_rotary`."""
    rotary = Values(values.file, _parameters(values, family, FULL))
    kind = rotary.get("rope_type")
    if kind == "default" or not rotary.get("mscale_all_dim"):
        return 1.0
    if kind != "yarn":
        raise ValueError(f"{rotary.file}: mscale_all_dim needs the rope_type yarn, got {kind!r}")
    return _sharpness(_yarn_factor(rotary, values), rotary.number("mscale_all_dim")) ** 2


def mscale_all_dim(sharpness: float, scaling: YarnScaling) -> float:
    """Returns the setting for which `read_sharpness` is `sharpness`, 0 for 1."""
    if scaling.factor <= 1:
        return 0.0
    exact = (math.sqrt(sharpness) - 1) / (0.1 * math.log(scaling.factor))
    return float(f"{exact:.12g}")  # without the error of the roots


def of_text(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rotary settings without M-RoPE, which rotates by three positions of a token: for text they are equal."""
    sections = ("mrope_section", "mrope_interleaved")
    return {key: "default" if value == "mrope" else value for key, value in settings.items() if key not in sections}


def unread_keys(raw: Mapping[str, Any], family: str) -> list[str]:
    """Returns the rotary settings in config.json that have no effect, as in transformers, such as "rope_scaling.beta".

    `read_rotary` refuses settings that are no objects, and those of unknown kinds.
    """
    unread: list[str] = []
    for key in SETTINGS:
        settings = raw.get(key)
        if not isinstance(settings, dict):
            continue
        of_layers = {
            f"{key}.{name}": settings[name] for name in (FULL, SLIDING) if isinstance(settings.get(name), dict)
        }
        for path, one in (of_layers or {key: settings}).items():
            read = _KEYS_OF_ALL | _KEYS.get(str(_kind(one, family)), set(one)) | _KEYS_OF_FAMILIES.get(family, set())
            unread += [f"{path}.{name}" for name in one if name not in read]
    return unread


def write_scaling(scaling: Scaling | None) -> dict[str, Any] | None:
    """Returns the value of rope_scaling."""
    match scaling:
        case None:
            return None
        case LongRopeScaling():
            return {
                "rope_type": "longrope",
                "attention_factor": scaling.attention_factor,
                "short_factor": list(scaling.factors),
                "long_factor": list(scaling.factors),  # never used: the model ends where they would begin
            }
        case ProportionalScaling():
            settings = {"rope_type": "proportional", PARTIAL: scaling.fraction}
            return settings if scaling.factor == 1 else settings | {"factor": scaling.factor}
    kind = {LinearScaling: "linear", Llama3Scaling: "llama3", YarnScaling: "yarn"}[type(scaling)]
    keys = {"original_max_positions": ORIGINAL}
    return {"rope_type": kind} | {keys.get(field, field): value for field, value in vars(scaling).items()}


def _parameters(values: Values, family: str, layer_type: str) -> dict[str, Any]:
    """Returns the rotary settings as one object, as in transformers 5; transformers 4 keeps the base outside of it."""
    theta = values.get("rope_theta", DEFAULT_THETA)
    by_key: dict[str, dict[str, Any]] = {}
    for key in SETTINGS:
        settings = values.get(key, {})
        if not isinstance(settings, dict):
            raise ValueError(f"{values.file}: {key} must be an object, got {settings!r}")
        by_layers = family == "type" and key == "rope_parameters"
        if settings and by_layers != (not {FULL, SLIDING}.isdisjoint(settings)):
            accepted = "an object for each type of layers" if by_layers else "one object for all layers"
            raise ValueError(f"{values.file}: {key} must be {accepted}, got {settings!r}")
        if family == "type" and "type" in settings and "rope_type" not in settings:  # transformers 5 does not read it
            raise ValueError(f"{values.file}: {key} must have rope_type in the place of type, got {settings!r}")
        if by_layers:
            settings = settings.get(layer_type) or {}
        elif layer_type == SLIDING:
            settings = {}  # transformers 4 scales the layers without a window alone
        if not isinstance(settings, dict):
            raise ValueError(f"{values.file}: {layer_type} of {key} must be an object, got {settings!r}")
        if settings:
            by_key[key] = {"rope_theta": theta} | settings | {"rope_type": _kind(settings, family)}
            by_key[key].pop("type", None)
    if len(by_key) == 2 and by_key[SETTINGS[0]] != by_key[SETTINGS[1]]:
        raise ValueError(
            f"{values.file}: rope_scaling is {values.get(SETTINGS[0])!r} and rope_parameters is "
            f"{values.get(SETTINGS[1])!r}: remove one of them, or make them equal"
        )
    return next(iter(by_key.values()), {"rope_theta": theta, "rope_type": "default"})


def _kind(settings: Mapping[str, Any], family: str) -> Any:
    """Returns the kind of scaling."""
    kind = settings.get("rope_type") or settings.get("type") or "default"
    return "longrope" if family == "phi" and kind in ("su", "yarn") else kind  # its names in early files of Phi-3


def _read_query_scaling(rotary: Values, values: Values) -> QueryScaling | None:
    if not rotary.get("llama_4_scaling_beta"):
        return None
    default = values.size("max_position_embeddings") if rotary.get("rope_type") in ("llama3", "yarn") else None
    return QueryScaling(rotary.number("llama_4_scaling_beta"), rotary.size(ORIGINAL, default))


def _read_dim(rotary: Values, values: Values, head_dim: int) -> int:
    """Returns the number of rotated elements of a head, all in families without `partial_rotary_factor`."""
    fraction = Values(values.file, {"partial_rotary_factor": 1.0} | dict(values.values)).number("partial_rotary_factor")
    if values.get("rotary_dim") is not None:  # MiniMax M2
        fraction = values.size("rotary_dim") / head_dim
    if rotary.get("rope_type") == "proportional":  # all are, some of them by nothing
        return head_dim
    fraction = rotary.number("partial_rotary_factor", fraction)
    if "partial_rotary_factor" not in values.values and fraction != 1.0:
        raise ValueError(f"{rotary.file}: partial_rotary_factor must be 1.0, got {fraction!r}")
    dim = int(head_dim * min(fraction, 2.0))
    if dim % 2 or not 0 < dim <= head_dim:
        raise ValueError(
            f"{rotary.file}: partial_rotary_factor must be a fraction that gives an even number of a head's {head_dim} "
            f"elements, got {fraction!r}"
        )
    return dim


def _read_scaling(rotary: Values, values: Values) -> tuple[Scaling | None, int]:
    """Returns the scaling and the number of positions."""
    max_positions = values.size("max_position_embeddings")
    match rotary.get("rope_type"):
        case "default":
            return None, max_positions
        case "linear":
            # Some files store the length before scaling here, and the length after it as max_sequence_length.
            return LinearScaling(rotary.number("factor")), max(max_positions, values.size("max_sequence_length", 1))
        case "llama3":
            llama3 = Llama3Scaling(
                factor=rotary.number("factor"),
                low_freq_factor=rotary.number("low_freq_factor"),
                high_freq_factor=rotary.number("high_freq_factor"),
                original_max_positions=rotary.size(ORIGINAL, max_positions),
            )
            if llama3.high_freq_factor < llama3.low_freq_factor:
                raise ValueError(
                    f"{rotary.file}: high_freq_factor ({llama3.high_freq_factor}) must be at least low_freq_factor "
                    f"({llama3.low_freq_factor})"
                )
            return llama3, max_positions
        case "yarn":
            original, factor = rotary.size(ORIGINAL, max_positions), _yarn_factor(rotary, values)
            yarn = YarnScaling(
                factor=factor,
                beta_fast=rotary.number("beta_fast", 32.0),
                beta_slow=rotary.number("beta_slow", 1.0),
                attention_factor=rotary.number("attention_factor", _yarn_attention_factor(rotary, factor)),
                original_max_positions=original,
                truncate=rotary.boolean("truncate", "truncate" not in rotary.values),  # null is false
            )
            return yarn, max(max_positions, int(original * factor))
        case "dynamic":
            # Up to this length dynamic scaling changes nothing. Beyond it a cached key depends on when it was computed,
            # so no two ways of decoding agree.
            return None, min(max_positions, rotary.size(ORIGINAL, max_positions))
        case "longrope":
            original = rotary.size(ORIGINAL, max_positions)
            if original < 2:
                raise ValueError(f"{values.file}: {ORIGINAL} must be at least 2, got {original}")
            factor = rotary.number("factor", max_positions / original)
            root = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            scaling = LongRopeScaling(_read_factors(rotary), rotary.number("attention_factor", root))
            return scaling, min(max_positions, original)
        case "proportional" if PARTIAL not in values.values:  # otherwise the family leaves out the rest of a head
            fraction = rotary.number(PARTIAL, 1.0)
            if fraction > 1:
                raise ValueError(f"{rotary.file}: {PARTIAL} must be up to 1, got {fraction}")
            return ProportionalScaling(fraction, rotary.number("factor", 1.0)), max_positions
        case kind:
            raise ValueError(f"{rotary.file}: rope_type is {kind!r}; supported are {', '.join(_KEYS)}")


def _read_factors(rotary: Values) -> tuple[float, ...]:
    """Returns the factors of LongRoPE for texts up to the original length."""
    factors = rotary.get("short_factor")
    is_list = isinstance(factors, list) and all(isinstance(x, int | float) and 0 < x < math.inf for x in factors)
    if not is_list:
        raise ValueError(f"{rotary.file}: short_factor must be a list of positive numbers, got {factors!r}")
    return tuple(map(float, factors))


def _yarn_attention_factor(rotary: Values, factor: float) -> float:
    """Returns the factor of queries and keys in arXiv 2309.00071, section 3.4, as transformers computes it."""
    if rotary.values.get("mscale") and rotary.values.get("mscale_all_dim"):
        return _sharpness(factor, rotary.number("mscale")) / _sharpness(factor, rotary.number("mscale_all_dim"))
    return _sharpness(factor, 1.0)


def _yarn_factor(rotary: Values, values: Values) -> float:
    max_positions = values.size("max_position_embeddings")
    return rotary.number("factor", max_positions / rotary.size(ORIGINAL, max_positions))


def _sharpness(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
