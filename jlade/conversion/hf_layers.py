"""Windows, rotations and scales of the layers in Hugging Face configurations, where layers differ."""

from typing import Any

from jlade.conversion import hf_kv_heads
from jlade.conversion.family import Family
from jlade.conversion.hf_rotary import FULL, ORIGINAL, SLIDING, Read, read_rotary, write_scaling
from jlade.conversion.json_files import Values
from jlade.models.llama import LlamaConfig
from jlade.models.rotary import LongRopeScaling, QueryScaling, Rotary

Windows = tuple[int | None, ...]
Rotations = tuple[Rotary | None, ...]
QueryScalings = tuple[QueryScaling | None, ...]
OF_WINDOWS = ("windows", "local")  # kinds of `Family.rotary`


def read_layers(
    values: Values, family: Family, read: Read, windows: Windows, num_layers: int, head_dim: int
) -> tuple[Rotations, QueryScalings]:
    """Returns the fields `layer_rotary` and `query_scalings` of `LlamaConfig`.

    Args:
      values: the configuration.
      family: the family that it is of.
      read: the rotation of layers without a window, or of all.
      num_layers: of the model.
      head_dim: of layers with a window.

    Raises:
      ValueError: names the file, the key and the supported values.
    """
    rotary, turned = read.kind, [False] * num_layers if family.rotary == "none" else _read_turned(values, num_layers)
    layers: Rotations = tuple(rotary if is_turned else None for is_turned in turned)
    if family.rotary == "type":
        # transformers 5 takes the rope_theta of OLMo 3 for the layers without a window alone.
        theta = values.get("rope_local_base_freq", family.reads["rope_theta"])
        of_windows = Values(values.file, dict(values.values) | {"rope_theta": theta})
        local = read_rotary(of_windows, head_dim, family.rotary, SLIDING).kind
        layers = tuple(local if window else rotary for window in windows or (None,) * num_layers)
    if family.rotary == "local":
        values.size("sliding_window")
    if family.rotary in OF_WINDOWS and values.get("sliding_window") is not None:
        layers = tuple(rotary if window else None for window in windows or (None,) * num_layers)
    scalings: QueryScalings = () if read.query_scaling is None else (read.query_scaling,) * num_layers
    if values.get("attn_temperature_tuning"):  # Llama 4, in layers without a rotation
        scaling = QueryScaling(values.number("attn_scale"), values.size("floor_scale"), offset=1)
        scalings = tuple(None if kind else scaling for kind in layers)
    return layers if set(layers) != {rotary} else (), scalings if any(scalings) else ()


def write_layers(config: LlamaConfig, family: Family) -> dict[str, Any]:
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
        needs_window = window is None and hf_kv_heads.SIZE in reads
        is_listed = window is None and family.rotary in OF_WINDOWS and None in config.layer_rotary
        result["sliding_window"] = config.max_positions if is_listed or needs_window else window
    if "layer_types" in reads and "sliding_window" in reads:
        result["layer_types"] = [FULL if size is None else SLIDING for size in windows]
    if "position_embedding_type" in reads:
        result["position_embedding_type"] = "rope" if any(config.rotary_by_layer) else None
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
    supported = (FULL, SLIDING)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in supported for kind in kinds):
        raise ValueError(
            f"{values.file}: layer_types must name full_attention or sliding_attention for each of {num_layers} "
            f"layers, got {kinds!r}"
        )
    if hf_kv_heads.SIZE in values.values:  # in Gemma 4 the last layer has none, whatever is written
        kinds = [*kinds[:-1], FULL]
    windows = tuple(window if kind == SLIDING else None for kind in kinds)
    return windows if any(windows) else ()
