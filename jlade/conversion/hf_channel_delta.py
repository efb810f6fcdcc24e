"""Recurrent layers with a decay for each channel in Hugging Face configurations: those of Kimi Linear and Ling 3."""

from typing import Any

from jlade.conversion.hf_rotary import FULL, LINEAR
from jlade.conversion.json_files import Values
from jlade.models.architecture import CHANNEL_DELTA, LlamaConfig, Recurrence

HEADS, SIZE, TAPS = "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"  # keys of transformers
OBJECT, OF_KDA, OF_ATTENTION = "linear_attn_config", "kda_layers", "full_attn_layers"  # of Kimi Linear
OF_OBJECT = {HEADS: "num_heads", SIZE: "head_dim", TAPS: "short_conv_kernel_size"}  # which transformers prefers
GROUP, IS_BOUNDED, BOUND = "layer_group_size", "kda_safe_gate", "kda_lower_bound"  # of Ling 3
OF_LING = {HEADS: "num_attention_heads", SIZE: "head_dim", TAPS: "short_conv_kernel_size"}  # where those are missing


def read(values: Values) -> tuple[Recurrence, list[str]]:
    """Returns the sizes of the recurrent layers, and the type of each layer.

    Raises:
      ValueError: names what is wrong.
    """
    number, kinds = values.size("num_hidden_layers"), values.get("layer_types")
    if GROUP in values.values:
        bound = values.get(BOUND)
        if values.boolean(IS_BOUNDED) and (not isinstance(bound, int | float) or not -1e4 < bound < 0):
            raise ValueError(f"{values.file}: {BOUND} must be a negative number with {IS_BOUNDED}, got {bound!r}")
        gates: dict[str, Any] = {"least_decay": float(bound) if values.boolean(IS_BOUNDED) else None}
        period = values.size(GROUP)
        by_default = [FULL if (i + 1) % period == 0 else LINEAR for i in range(number)]
    else:
        values, by_default = _read_object(values, number)
        gates = {"gate_rank": values.size(SIZE)}
    heads, size, taps = (values.size(key) for key in (HEADS, SIZE, TAPS))
    return Recurrence(CHANNEL_DELTA, heads, heads, size, size, taps, **gates), by_default if kinds is None else kinds


def _read_object(values: Values, number: int) -> tuple[Values, list[str]]:
    """Returns the values with those of Kimi Linear's object, and the types of layers, which it counts from 1."""
    own, known = values.get(OBJECT, {}), {*OF_OBJECT.values(), OF_KDA, OF_ATTENTION}
    if not isinstance(own, dict) or not own.keys() <= known:
        raise ValueError(
            f"{values.file}: {OBJECT} must be an object with some of {', '.join(sorted(known))}, got {own}"
        )
    flat = {key: own[name] for key, name in OF_OBJECT.items() if name in own}
    kinds = [FULL if i and i % 4 == 0 else LINEAR for i in range(number)]
    if own.keys() >= {OF_KDA, OF_ATTENTION}:
        kda, attention = own[OF_KDA], own[OF_ATTENTION]
        are_lists = isinstance(kda, list) and isinstance(attention, list)
        if not are_lists or sorted([*kda, *attention], key=str) != sorted(range(1, number + 1), key=str):
            raise ValueError(
                f"{values.file}: {OF_KDA} and {OF_ATTENTION} must list each of {number} layers once, from 1, got "
                f"{kda!r} and {attention!r}"
            )
        kinds = [LINEAR if i + 1 in kda else FULL for i in range(number)]
    return Values(values.file, dict(values.values) | flat), kinds


def write(config: LlamaConfig, has_object: bool) -> dict[str, Any]:
    """Returns the keys that `read` reads, in the object of Kimi Linear or as those of Ling 3."""
    sizes, recurrent = config.recurrence, config.recurrent_layers
    of_sizes: dict[str, Any] = {} if sizes is None else {HEADS: sizes.key_heads, SIZE: sizes.key_size, TAPS: sizes.taps}
    if has_object:
        written = {OF_OBJECT[key]: value for key, value in of_sizes.items()}
        for key, layers in ((OF_KDA, recurrent), (OF_ATTENTION, config.attention_layers)):
            written[key] = [i + 1 for i in layers]
        return {OBJECT: written}
    written = of_sizes | {OF_LING[key]: value for key, value in of_sizes.items() if key != HEADS}
    if sizes is not None:
        written[IS_BOUNDED] = sizes.least_decay is not None
    if sizes is not None and sizes.least_decay is not None:
        written[BOUND] = sizes.least_decay
    return written | {"layer_types": [LINEAR if i in recurrent else FULL for i in range(config.num_layers)]}
