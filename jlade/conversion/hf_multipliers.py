"""Factors of numbers in all layers, in Hugging Face configurations (Falcon-H1)."""

from typing import Any

from jlade.conversion.family import Family
from jlade.conversion.json_files import Values, shown
from jlade.models.architecture import LlamaConfig, Multipliers

# Keys, and fields of `Multipliers`
KEYS = {
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
DEFAULTS = dict.fromkeys(KEYS, 1.0) | dict.fromkeys(LISTS)


def read_multipliers(values: Values, family: Family) -> dict[str, Multipliers]:
    """Returns the field `multipliers` of `LlamaConfig`. A family without their keys has none.

    Raises:
      ValueError: names the file, the key and the accepted values.
    """
    if not DEFAULTS.keys() <= family.reads.keys():
        return {}
    read = {field: values.number(key) for key, field in KEYS.items()}
    for key, fields in LISTS.items():
        listed = values.get(key, [1.0] * len(fields))
        if not isinstance(listed, list) or len(listed) != len(fields):
            raise ValueError(f"{values.file}: {key} must list {len(fields)} positive numbers, got {shown(listed)}")
        elements = Values(values.file, {f"{key}[{i}]": number for i, number in enumerate(listed)})
        read |= zip(fields, map(elements.number, elements.values), strict=True)
    return {"multipliers": Multipliers(**read)}


def write_multipliers(config: LlamaConfig, family: Family) -> dict[str, Any]:
    """Returns the keys that `read_multipliers` reads."""
    if not DEFAULTS.keys() <= family.reads.keys():
        return {}
    found: dict[str, Any] = {key: getattr(config.multipliers, field) for key, field in KEYS.items()}
    return found | {key: [getattr(config.multipliers, field) for field in fields] for key, fields in LISTS.items()}
