"""Recurrent layers in Hugging Face configurations, and those with attention among them."""

from typing import Any

from jlade.conversion.family import Family
from jlade.conversion.hf_rotary import FULL
from jlade.conversion.json_files import Values
from jlade.models.architecture import DeltaRule, LlamaConfig

LINEAR, INTERVAL = "linear_attention", "full_attention_interval"
SIZES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_size": "linear_key_head_dim",
    "value_size": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}


def read_recurrent(values: Values, family: Family, num_layers: int) -> dict[str, Any]:
    """Returns the fields of `LlamaConfig` for the keys of `SIZES`. A family that does not read them has none.

    Raises:
      ValueError: names the file, the key and the accepted values.
    """
    if INTERVAL not in family.reads:
        return {}
    kinds = values.get("layer_types")
    if kinds is None:
        interval = values.size(INTERVAL)
        kinds = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (FULL, LINEAR) for kind in kinds):
        raise ValueError(
            f"{values.file}: layer_types must name {FULL} or {LINEAR} for each of {num_layers} layers, got {kinds!r}"
        )
    if FULL not in kinds:
        raise ValueError(f"{values.file}: layer_types must name {FULL} for one of {num_layers} layers, got {kinds!r}")
    sizes = DeltaRule(**{field: values.size(key) for field, key in SIZES.items()})
    if sizes.value_heads % sizes.key_heads:
        raise ValueError(
            f"{values.file}: {SIZES['value_heads']} ({sizes.value_heads}) must be a multiple of {SIZES['key_heads']} "
            f"({sizes.key_heads})"
        )
    if sizes.taps < 2:
        raise ValueError(f"{values.file}: {SIZES['taps']} must be 2 or more, got {sizes.taps}")
    layers = tuple(i for i in range(num_layers) if kinds[i] == LINEAR)
    return {"recurrent_layers": layers, "delta_rule": sizes}


def write_recurrent(config: LlamaConfig, family: Family) -> dict[str, Any]:
    """Returns the keys that `read_recurrent` reads."""
    if INTERVAL not in family.reads or config.delta_rule is None:
        return {}
    kinds = [LINEAR if i in config.recurrent_layers else FULL for i in range(config.num_layers)]
    return {"layer_types": kinds} | {key: getattr(config.delta_rule, field) for field, key in SIZES.items()}
