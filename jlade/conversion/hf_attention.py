"""Attention in Hugging Face configurations: windows, rotations and scales of layers, heads, latents and multipliers."""

import dataclasses
from typing import Any, NamedTuple

from jlade.conversion.family import Family
from jlade.conversion.hf_mixtures import DENSE_PERIOD, sparse_layers
from jlade.conversion.hf_recurrent import CONV, TAPS
from jlade.conversion.hf_rotary import (
    FULL,
    ORIGINAL,
    SLIDING,
    Read,
    mscale_all_dim,
    read_rotary,
    read_sharpness,
    write_scaling,
)
from jlade.conversion.json_files import Values, shown
from jlade.models.architecture import Heads, IndexSizes, Latent, LlamaConfig, Multipliers
from jlade.models.rotary import LongRopeScaling, QueryScaling, Rotary, YarnScaling

Windows = tuple[int | None, ...]
Rotations = tuple[Rotary | None, ...]
QueryScalings = tuple[QueryScaling | None, ...]
OF_WINDOWS = ("windows", "local")  # kinds of `Family.rotary`
GLOBAL_SIZE, GLOBAL_NUMBER, TIED = "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"
BY_LAYER = "per_layer_config"  # the newer form: an object with the numbers of each layer that differs
SHARED = "num_kv_shared_layers"
THETAS = "layer_rope_theta"
QUERY_HEADS = "num_attention_heads_per_layer"
VALUE_SCALE = "attention_value_scale"
_KEYS = ("num_key_value_heads", "head_dim")
QUERY_RANK, FRACTION = "q_lora_rank", "partial_rotary_factor"
LATENT = {
    "rank": "kv_lora_rank",
    "rotated": "qk_rope_head_dim",
    "unrotated": "qk_nope_head_dim",
    "value_size": "v_head_dim",
}
INDEX = {"heads": "index_n_heads", "size": "index_head_dim", "chosen": "index_topk"}
INDEX_KINDS = OWN, OF_LAYER_BEFORE = "full", "shared"
KINDS, PATTERN, PERIOD, OFFSET = "indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"
# Keys, and fields of `Multipliers`
MULTIPLIERS = {
    "attention_in_multiplier": "attention_input",
    "key_multiplier": "key",
    "attention_out_multiplier": "attention_output",
    "ssm_in_multiplier": "recurrent_input",
    "ssm_out_multiplier": "recurrent_output",
}
LISTS = {
    "ssm_multipliers": ("recurrent_gate", "recurrent_value", "recurrent_key", "recurrent_query", "decay"),
    "mlp_multipliers": ("gate", "down"),
}
MULTIPLIER_DEFAULTS = dict.fromkeys(MULTIPLIERS, 1.0) | dict.fromkeys(LISTS)


def read_layers(
    values: Values, family: Family, read: Read, windows: Windows, num_layers: int, head_dim: int
) -> tuple[Rotations, QueryScalings]:
    """Returns the fields `layer_rotary` and `query_scalings` of `LlamaConfig`.

    Args:
      read: the rotation of layers without a window, or of all.
      head_dim: of layers with a window.
    """
    rotary, turned = read.kind, [False] * num_layers if family.rotary == "none" else _read_turned(values, num_layers)
    layers: Rotations = tuple(rotary if is_turned else None for is_turned in turned)
    if family.rotary == "type":
        # transformers 5 takes the rope_theta of OLMo 3 for the layers without a window alone.
        theta = values.get("rope_local_base_freq", family.reads["rope_theta"])
        of_windows = Values(values.file, dict(values.values) | {"rope_theta": theta})
        of_type = read_rotary(of_windows, head_dim, family.rotary, SLIDING)
        has_own = FRACTION in family.reads and of_type.dim != read.dim
        local = dataclasses.replace(of_type.kind, dim=of_type.dim) if has_own else of_type.kind
        layers = tuple(local if window else rotary for window in windows or (None,) * num_layers)
    if values.get(THETAS) is not None:
        layers = _read_thetas(values, rotary, num_layers)
    if family.rotary == "local":
        values.size("sliding_window")
    if family.rotary in OF_WINDOWS and values.get("sliding_window") is not None:
        others = [] if values.get(DENSE_PERIOD) != 1 else range(num_layers)  # Cohere rotates those without experts
        turned_too = set(others) - set(sparse_layers(values, family, num_layers))
        layers = tuple(
            rotary if window or i in turned_too else None for i, window in enumerate(windows or (None,) * num_layers)
        )
    scalings: QueryScalings = () if read.query_scaling is None else (read.query_scaling,) * num_layers
    if values.get("attn_temperature_tuning"):  # Llama 4, in layers without a rotation
        scaling = QueryScaling(values.number("attn_scale"), values.size("floor_scale"), offset=1)
        scalings = tuple(None if kind else scaling for kind in layers)
    return layers if set(layers) != {rotary} else (), scalings if any(scalings) else ()


def write(config: LlamaConfig, family: Family) -> dict[str, Any]:
    """Returns the keys for attention that the family reads."""
    written = _write_layers(config, family) | _write_heads(config, family) | _write_multipliers(config, family)
    return written | _write_latent(config, family, written.get("rope_scaling"))


def _write_layers(config: LlamaConfig, family: Family) -> dict[str, Any]:
    """Returns the keys for windows and rotations that the family reads."""
    reads, windows = family.reads, config.windows_by_layer
    window = max((size for size in windows if size is not None), default=None)
    # Null would be the scaling of the family, where it has one.
    unscaled = {"rope_type": "default"} if reads["rope_scaling"] else None
    result: dict[str, Any] = {"rope_theta": config.rope_theta}
    if family.rotary != "none":
        result["rope_scaling"] = write_scaling(config.rope_scaling) or unscaled
    if "partial_rotary_factor" in reads:
        result["partial_rotary_factor"] = (config.rotary_dim or config.head_dim) / config.head_dim
    if family.rotary in ("phi", "mscale"):
        result[ORIGINAL] = config.max_positions
    if family.rotary == "mscale" and isinstance(config.rope_scaling, LongRopeScaling):
        scales = dict.fromkeys(("short_mscale", "long_mscale"), config.rope_scaling.attention_factor)
        result["rope_scaling"] |= {ORIGINAL: config.max_positions} | scales
    if family.rotary == "beta" and config.query_scalings and result["rope_scaling"]:
        result["rope_scaling"]["llama_4_scaling_beta"] = next(filter(None, config.query_scalings)).rate
    if "attn_temperature_tuning" in reads:
        result |= {"attn_temperature_tuning": False, "attention_chunk_size": config.max_positions}
        if scaling := next(filter(None, config.query_scalings), None):
            tuned = {"attn_scale": scaling.rate, "floor_scale": scaling.length}
            result |= tuned | {"attn_temperature_tuning": True}
    if "use_sliding_window" in reads:
        result["use_sliding_window"] = window is not None
    if "sliding_window" in reads:
        # Where windows say which layers are rotated, null would say that all are.
        needs_window = window is None and not reads.keys().isdisjoint((GLOBAL_SIZE, QUERY_HEADS, VALUE_SCALE))
        is_listed = window is None and family.rotary in OF_WINDOWS and None in config.layer_rotary
        result["sliding_window"] = config.max_positions if is_listed or needs_window else window
    if "layer_types" in reads and "sliding_window" in reads:
        result["layer_types"] = [FULL if size is None else SLIDING for size in windows]
    if "position_embedding_type" in reads:
        result["position_embedding_type"] = "rope" if any(config.rotary_by_layer) else None
    if THETAS in reads:
        result[THETAS] = [kind.theta if kind else 0 for kind in config.rotary_by_layer]
    if "no_rope_layers" in reads:
        result["no_rope_layers"] = [int(kind is not None) for kind in config.rotary_by_layer]
    if family.rotary == "type":
        local = next((k for k, w in zip(config.rotary_by_layer, windows, strict=True) if k and w), None)
        if base := reads.get("rope_local_base_freq"):
            result["rope_local_base_freq"] = local.theta if local else base
        else:  # OLMo 3, Gemma 4
            full = Rotary(config.rope_theta, config.rope_scaling)
            kinds = {FULL: full, SLIDING: local or full}
            result["rope_parameters"] = {
                name: {"rope_type": "default", "rope_theta": kind.theta} | (write_scaling(kind.scaling) or {})
                for name, kind in kinds.items()
            }
            if FRACTION in reads:
                for name, kind in kinds.items():
                    dim = kind.dim or config.rotary_dim or config.head_dim
                    result["rope_parameters"][name][FRACTION] = dim / config.head_dim
    return result


def _read_turned(values: Values, num_layers: int) -> list[bool]:
    """Returns whether queries and keys of each layer are rotated: Granite 4 has one key for all, others a list."""
    if values.values.get("position_embedding_type", "rope") != "rope":
        return [False] * num_layers
    if "no_rope_layers" not in values.values:
        return [True] * num_layers
    listed = values.get("no_rope_layers")
    if listed is None or ("moe_layers" in values.values and listed == []):  # early files of Llama 4
        interval = values.size("no_rope_layer_interval")
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(listed, list) or len(listed) != num_layers or any(flag not in (0, 1) for flag in listed):
        raise ValueError(
            f"{values.file}: no_rope_layers must have 0 or 1 for each of {num_layers} layers, got {listed!r}"
        )
    return [bool(flag) for flag in listed]


def _read_thetas(values: Values, rotary: Rotary, num_layers: int) -> Rotations:
    """Returns the rotation of each layer by its own base, which is 0 for none."""
    bases = values.elements(THETAS, values.get(THETAS), num_layers, f"a base for each of {num_layers} layers")
    return tuple(
        None if theta == 0 else Rotary(bases.number(key), rotary.scaling) for key, theta in bases.values.items()
    )


def read_windows(values: Values, num_layers: int) -> Windows:
    """Returns the sliding window of each layer, () if no layer has one."""
    kinds = values.get("layer_types")
    is_used = values.boolean("use_sliding_window", True)
    if "no_rope_layers" in values.values and kinds is not None:  # SmolLM3: its layer_types alone decide
        is_used = True
    if values.get("sliding_window") is None or not is_used:
        if isinstance(kinds, list) and SLIDING in kinds:
            needed = "use_sliding_window" if values.get("sliding_window") is not None else "sliding_window"
            raise ValueError(f"{values.file}: layer_types is {kinds!r}, which needs {needed}")
        return ()
    window = values.size("sliding_window")
    if kinds is None:
        is_divided = "layer_types" in values.values and values.get("max_window_layers")
        first = values.size("max_window_layers") if is_divided else 0
        period = values.size("sliding_window_pattern") if "sliding_window_pattern" in values.values else None
        offset = values.size("sliding_window_offset", 1)
        is_full = [i < first or (period is not None and (i + offset) % period == 0) for i in range(num_layers)]
        if "no_rope_layers" in values.values:  # SmolLM3: windows where nothing is rotated
            is_full = _read_turned(values, num_layers)
        kinds = [FULL if full else SLIDING for full in is_full]
    recurrent = (CONV,) if TAPS in values.values else ()
    values.check_layers("layer_types", kinds, (FULL, SLIDING, *recurrent), num_layers)
    if GLOBAL_SIZE in values.values:  # in Gemma 4 the last layer has none, whatever is written
        kinds = [*kinds[:-1], FULL]
    windows = tuple(window if kind == SLIDING else None for kind in kinds)
    return windows if any(windows) else ()


def read_global_heads(values: Values, kinds: list[str], heads: Heads) -> Heads | None:
    """Returns the field `global_heads` of `LlamaConfig`, given the kinds of layers and the heads where windows are."""
    if VALUE_SCALE in values.values:  # MiMo V2, whose layers with windows have twice as many
        return Heads(heads.number // 2, heads.size)
    if GLOBAL_SIZE not in values.values:
        return None
    if values.get(BY_LAYER) is None:
        number = values.size(GLOBAL_NUMBER, heads.number) if values.boolean(TIED) else heads.number
        whole = Heads(number, values.size(GLOBAL_SIZE))
    else:
        whole = _read_by_layer(values, kinds, heads)
    num_heads = values.size("num_attention_heads")
    if num_heads % whole.number:
        raise ValueError(
            f"{values.file}: num_attention_heads ({num_heads}) must be a multiple of {GLOBAL_NUMBER} ({whole.number})"
        )
    if whole.size % 2:
        raise ValueError(f"{values.file}: {GLOBAL_SIZE} must be even, got {whole.size}")
    return None if whole == heads else whole


def _read_by_layer(values: Values, kinds: list[str], heads: Heads) -> Heads:
    """Returns the heads of the layers without a window, where each layer has its own object of numbers."""
    layers = values.get(BY_LAYER)
    if not isinstance(layers, dict) or not all(
        place.isdecimal() and int(place) < len(kinds) and isinstance(own, dict) and own.keys() <= {*_KEYS}
        for place, own in layers.items()
    ):
        raise ValueError(
            f"{values.file}: {BY_LAYER} must have objects with {' and '.join(_KEYS)} for some of {len(kinds)} layers, "
            f"got {layers!r}"
        )
    by_kind: dict[str, set[Heads]] = {FULL: set(), SLIDING: {heads}}
    numbers = {int(place): own for place, own in layers.items()}  # "05" in models of more than ten layers
    for i, kind in enumerate(kinds):
        own = Values(values.file, numbers.get(i, {}))
        by_kind[kind].add(Heads(*(own.size(key, default) for key, default in zip(_KEYS, heads, strict=True))))
    if any(len(found) > 1 for found in by_kind.values()):
        raise ValueError(f"{values.file}: {BY_LAYER} must be equal for all layers without a window, and none of others")
    return next(iter(by_kind[FULL]), heads)


def read_query_heads(values: Values) -> tuple[int, ...]:
    """Returns the field `query_heads` of `LlamaConfig`."""
    listed, num_layers = values.get(QUERY_HEADS), values.size("num_hidden_layers")
    kv_heads = values.size("num_key_value_heads")
    if listed is None:
        return ()
    elements = values.elements(QUERY_HEADS, listed, num_layers, f"a number for each of {num_layers} layers")
    numbers = tuple(map(elements.size, elements.values))
    if any(each % kv_heads for each in numbers):
        raise ValueError(
            f"{values.file}: {QUERY_HEADS} must have multiples of num_key_value_heads ({kv_heads}), got {shown(listed)}"
        )
    return () if set(numbers) == {values.size("num_attention_heads")} else numbers


def read_value_size(values: Values) -> int | None:
    """Returns the field `value_size` of `LlamaConfig`."""
    size, head_dim = values.size("v_head_dim"), values.size("head_dim")
    if size > head_dim:
        raise ValueError(f"{values.file}: v_head_dim must be up to head_dim, {head_dim}, got {size}")
    return None if size == head_dim else size


def read_shared_layers(values: Values, kinds: list[str]) -> int:
    """Returns the field `shared_kv_layers` of `LlamaConfig`, given the kinds of layers."""
    number = values.count(SHARED)
    if number >= len(kinds) or not set(kinds[len(kinds) - number :]) <= set(kinds[: len(kinds) - number]):
        raise ValueError(
            f"{values.file}: {SHARED} must leave layers of each kind in layer_types before the last {number} of "
            f"{len(kinds)}, got {number}"
        )
    return number


def _write_heads(config: LlamaConfig, family: Family) -> dict[str, Any]:
    """Returns the keys that `read_global_heads` reads."""
    if GLOBAL_SIZE not in family.reads:
        return {}
    heads = config.global_heads or Heads(config.num_kv_heads, config.head_dim)
    written: dict[str, Any] = {GLOBAL_SIZE: heads.size, GLOBAL_NUMBER: heads.number, SHARED: config.shared_kv_layers}
    if heads.number != config.num_kv_heads and not config.values_from_keys:  # transformers reads no other form
        numbers = dict(zip(_KEYS, heads, strict=True))
        written[BY_LAYER] = {str(i): numbers for i, window in enumerate(config.windows_by_layer) if window is None}
    return written


class LatentAttention(NamedTuple):
    """The fields of `LlamaConfig` for a latent, and the rotations."""

    sizes: Latent
    attention_scale: float | None
    rotary: Read


def read_latent(values: Values, family: Family) -> LatentAttention | None:
    """Returns latent attention, None for families without."""
    if LATENT["rank"] not in family.reads:
        return None
    has_index = INDEX["chosen"] in family.reads
    query_rank = values.size(QUERY_RANK) if has_index or values.get(QUERY_RANK) is not None else None
    read: dict[str, Any] = {field: values.size(key) for field, key in LATENT.items()}
    sizes = Latent(query_rank, **read, index=_read_index(values, family) if has_index else None)
    if sizes.rotated % 2:
        raise ValueError(f"{values.file}: {LATENT['rotated']} must be even, got {sizes.rotated}")
    size, num_heads = _head_size(sizes, family), values.size("num_attention_heads")
    for key, wanted in {"num_key_value_heads": num_heads, "head_dim": size}.items():
        if values.size(key, wanted) != wanted:
            raise ValueError(f"{values.file}: {key} must be {wanted}, as the other sizes imply, got {values.get(key)}")
    if FRACTION in family.reads and values.get(FRACTION) is None:
        values = Values(values.file, dict(values.values) | {FRACTION: sizes.rotated / size})
    rotary = read_rotary(values, size, family.rotary)
    if rotary.dim != sizes.rotated:
        raise ValueError(
            f"{values.file}: {FRACTION} must give the {sizes.rotated} elements of {LATENT['rotated']}, not {rotary.dim}"
        )
    sharpness = read_sharpness(values, family.rotary)
    return LatentAttention(sizes, None if sharpness == 1 else sizes.query_size**-0.5 * sharpness, rotary)


def _read_index(values: Values, family: Family) -> IndexSizes:
    """Returns the index of the tokens that are seen, whose rotated elements are as many as those of attention."""
    heads, size, chosen = (values.size(key) for key in INDEX.values())
    rotated = values.size(LATENT["rotated"])
    if size < rotated:
        raise ValueError(f"{values.file}: {INDEX['size']} must be at least {LATENT['rotated']}, {rotated}, got {size}")
    if KINDS not in family.reads:
        return IndexSizes(heads, size, chosen)
    num_layers, kinds, pattern = values.size("num_hidden_layers"), values.get(KINDS), values.get(PATTERN)
    if kinds is None and isinstance(pattern, str):
        kinds = [{"F": OWN, "S": OF_LAYER_BEFORE}.get(letter, letter) for letter in pattern]
    elif kinds is None and pattern is None:
        period, offset = values.size(PERIOD), values.count(OFFSET)
        kinds = [OWN if max(i - offset + 1, 0) % period == 0 else OF_LAYER_BEFORE for i in range(num_layers)]
    kinds = pattern if kinds is None else kinds
    values.check_layers(KINDS, kinds, INDEX_KINDS, num_layers)
    if kinds[0] != OWN:
        raise ValueError(f"{values.file}: {KINDS} must begin with {OWN}, got {kinds!r}")
    shared = tuple(i for i, kind in enumerate(kinds) if kind == OF_LAYER_BEFORE)
    return IndexSizes(heads, size, chosen, interleaved=True, shared_layers=shared)


def _write_latent(config: LlamaConfig, family: Family, scaling: Any) -> dict[str, Any]:
    """Returns the keys that `read_latent` reads, given the rotary `scaling` that is written for other models."""
    sizes = config.latent
    if sizes is None:
        return {}
    size = _head_size(sizes, family)
    written: dict[str, Any] = {key: getattr(sizes, field) for field, key in LATENT.items()}
    written |= {QUERY_RANK: sizes.query_rank, "num_key_value_heads": config.num_heads, "head_dim": size}
    if FRACTION in family.reads:
        written[FRACTION] = sizes.rotated / size
    if sizes.index is not None:
        written |= {key: getattr(sizes.index, field) for field, key in INDEX.items()}
    if KINDS in family.reads:
        written[KINDS] = [OWN if config.has_index(i) else OF_LAYER_BEFORE for i in range(config.num_layers)]
    if config.attention_scale is not None and isinstance(config.rope_scaling, YarnScaling):
        sharpness = config.attention_scale * sizes.query_size**0.5
        written["rope_scaling"] = scaling | {"mscale_all_dim": mscale_all_dim(sharpness, config.rope_scaling)}
    return written


def _head_size(sizes: Latent, family: Family) -> int:
    """Returns the elements of a head as transformers counts them for the rotations, of which some may be rotated."""
    return sizes.query_size if FRACTION in family.reads else sizes.rotated


def read_multipliers(values: Values, family: Family) -> dict[str, Multipliers]:
    """Returns the field `multipliers` of `LlamaConfig`. A family without their keys has none."""
    if not MULTIPLIER_DEFAULTS.keys() <= family.reads.keys():
        return {}
    read = {field: values.number(key) for key, field in MULTIPLIERS.items()}
    for key, fields in LISTS.items():
        listed = values.get(key, [1.0] * len(fields))
        elements = values.elements(key, listed, len(fields), f"{len(fields)} positive numbers")
        read |= zip(fields, map(elements.number, elements.values), strict=True)
    return {"multipliers": Multipliers(**read)}


def _write_multipliers(config: LlamaConfig, family: Family) -> dict[str, Any]:
    """Returns the keys that `read_multipliers` reads."""
    if not MULTIPLIER_DEFAULTS.keys() <= family.reads.keys():
        return {}
    written: dict[str, Any] = {key: getattr(config.multipliers, field) for key, field in MULTIPLIERS.items()}
    return written | {key: [getattr(config.multipliers, field) for field in fields] for key, fields in LISTS.items()}
