"""Keys and values of layers in Hugging Face configurations, where layers differ or share them (Gemma 4)."""

from typing import Any

from jlade.conversion.family import Family
from jlade.conversion.hf_rotary import FULL, SLIDING
from jlade.conversion.json_files import Values
from jlade.models.architecture import Heads, LlamaConfig

SIZE, NUMBER, TIED = "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"
BY_LAYER = "per_layer_config"  # the newer form: an object with the numbers of each layer that differs
SHARED = "num_kv_shared_layers"
_KEYS = ("num_key_value_heads", "head_dim")


def read_global_heads(values: Values, kinds: list[str], heads: Heads) -> Heads | None:
    """Returns the field `global_heads` of `LlamaConfig`.

    Args:
      values: the configuration.
      kinds: of the layers, as in layer_types.
      heads: of the layers with a window.

    Raises:
      ValueError: names the file, the key and the accepted values.
    """
    if SIZE not in values.values:
        return None
    if values.get(BY_LAYER) is None:
        number = values.size(NUMBER, heads.number) if values.boolean(TIED) else heads.number
        found = Heads(number, values.size(SIZE))
    else:
        found = _read_by_layer(values, kinds, heads)
    num_heads = values.size("num_attention_heads")
    if num_heads % found.number:
        raise ValueError(
            f"{values.file}: num_attention_heads ({num_heads}) must be a multiple of {NUMBER} ({found.number})"
        )
    if found.size % 2:
        raise ValueError(f"{values.file}: {SIZE} must be even, got {found.size}")
    return None if found == heads else found


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


def read_shared_layers(values: Values, kinds: list[str]) -> int:
    """Returns the field `shared_kv_layers` of `LlamaConfig`; see `read_global_heads` for arguments and errors."""
    number = values.size(SHARED) if values.get(SHARED, 0) != 0 else 0
    if number >= len(kinds) or not set(kinds[len(kinds) - number :]) <= set(kinds[: len(kinds) - number]):
        raise ValueError(
            f"{values.file}: {SHARED} must leave layers of each kind in layer_types before the last {number} of "
            f"{len(kinds)}, got {number}"
        )
    return number


def write_heads(config: LlamaConfig, family: Family) -> dict[str, Any]:
    """Returns the keys that `read_global_heads` reads."""
    if SIZE not in family.reads:
        return {}
    heads = config.global_heads or Heads(config.num_kv_heads, config.head_dim)
    written: dict[str, Any] = {SIZE: heads.size, NUMBER: heads.number, SHARED: config.shared_kv_layers}
    if heads.number != config.num_kv_heads and not config.values_from_keys:  # transformers reads no other form
        own = dict(zip(_KEYS, heads, strict=True))
        written[BY_LAYER] = {str(i): own for i, window in enumerate(config.windows_by_layer) if window is None}
    return written
