"""Recurrent layers in Hugging Face configurations, those with attention among them, and layers of one part alone."""

from typing import Any

from jlade.conversion import hf_channel_delta
from jlade.conversion.family import Family
from jlade.conversion.hf_mixtures import listed_layers, read_groups
from jlade.conversion.hf_rotary import ATTENTION, FULL, LINEAR, SLIDING
from jlade.conversion.json_files import Values
from jlade.models.architecture import (
    AFTER_GATE,
    BEFORE_GATE,
    CONVOLUTION,
    DELTA,
    STATE_SPACE,
    LlamaConfig,
    Recurrence,
)

MAMBA, CONV = "mamba", "conv"  # types of layers
INTERVAL, MAMBA_HEADS, TAPS = "full_attention_interval", "mamba_n_heads", "conv_L_cache"  # each of one rule's families
HEAD_SIZE, WIDTH, AUTO = "mamba_d_head", "mamba_expand", "auto"
OWN_WIDTH = "mamba_d_ssm"  # of the families that have attention beside each recurrent mixer
HAS_NORM, IS_BEFORE = "mamba_rms_norm", "mamba_norm_before_gate"
ADJUSTS = "block_auto_adjust_ff_dim"
DELTA_SIZES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_size": "linear_key_head_dim",
    "value_size": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}
DOUBLES = "linear_allow_neg_eigval"  # of OLMo Hybrid
MAMBA_SIZES = {
    "key_heads": "mamba_n_groups",
    "value_heads": MAMBA_HEADS,
    "key_size": "mamba_d_state",
    "value_size": HEAD_SIZE,
    "taps": "mamba_d_conv",
}
TYPES, PATTERN = "layers_block_type", "hybrid_override_pattern"  # a list, or a letter for each layer
MLP, EXPERTS = "mlp", "moe"
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
OTHER_NAMES = {MAMBA: LINEAR, ATTENTION: FULL}
DEFAULT = [LINEAR, EXPERTS, FULL, MLP]
SINGLE_SIZES = {
    "key_heads": "n_groups",
    "value_heads": "mamba_num_heads",
    "key_size": "ssm_state_size",
    "value_size": "mamba_head_dim",
    "taps": "conv_kernel",
}
FILTER_BIAS, EXPERTS_LATENT = "use_conv_bias", "moe_latent_size"
# transformers bounds the time steps of prompts by it, and not those of the tokens that it generates.
MIN_STEP, UNBOUNDED = "time_step_min", 1e-30
EXPERT_SIZES = {
    "intermediate_size": "moe_shared_expert_intermediate_size",
    "num_experts": "n_routed_experts",
    "expert_size": "moe_intermediate_size",
    "experts_per_token": "num_experts_per_tok",
}


def read_recurrent(values: Values, family: Family, num_layers: int) -> dict[str, Any]:
    """Returns the fields of `LlamaConfig` for recurrent layers. A family without their keys has none."""
    if TYPES in family.reads:
        return _read_single(values, family, num_layers)
    if hf_channel_delta.SIZE in family.reads:
        sizes, kinds = hf_channel_delta.read(values)
        layers = _read_layers(Values(values.file, dict(values.values) | {"layer_types": kinds}), (LINEAR,), num_layers)
        keys = {"taps": hf_channel_delta.TAPS}
        return {"recurrent_layers": layers, "recurrence": _checked(values, sizes, keys) if layers else None}
    if INTERVAL in family.reads:
        return {"recurrent_layers": _read_layers(values, (LINEAR,), num_layers), "recurrence": _read_delta(values)}
    if OWN_WIDTH in family.reads:
        layers = tuple(range(num_layers))
        return {"recurrent_layers": layers, "recurrence": _read_state_space(values), "recurrent_attention": True}
    if MAMBA_HEADS in family.reads:
        layers = _read_layers(values, (MAMBA, LINEAR), num_layers)
        return {"recurrent_layers": layers, "recurrence": _read_state_space(values) if layers else None}
    if TAPS in family.reads:
        layers = _read_layers(values, (CONV,), num_layers)
        return {"recurrent_layers": layers, "recurrence": _read_convolution(values) if layers else None}
    return {}


def write_recurrent(config: LlamaConfig, family: Family) -> dict[str, Any]:
    """Returns the keys that `read_recurrent` reads."""
    sizes, reads = config.recurrence, family.reads
    if TYPES in reads:
        return _write_single(config)
    if hf_channel_delta.SIZE in reads:
        return hf_channel_delta.write(config, hf_channel_delta.OBJECT in reads)
    if INTERVAL in reads and sizes is not None:
        written = _types(config, LINEAR, FULL) | {key: getattr(sizes, field) for field, key in DELTA_SIZES.items()}
        return written | ({DOUBLES: sizes.beta_scale == 2} if DOUBLES in reads else {})
    if OWN_WIDTH in reads and sizes is not None:
        written = {key: getattr(sizes, field) for field, key in MAMBA_SIZES.items()}
        norm = {HAS_NORM: sizes.norm_place is not None, IS_BEFORE: sizes.norm_place == BEFORE_GATE}
        return written | norm | {OWN_WIDTH: sizes.values, "mamba_conv_bias": sizes.filter_bias}
    if MAMBA_HEADS in reads:
        types = _types(config, MAMBA, ATTENTION)
        if sizes is None:  # transformers checks that the heads divide the width even if there are none
            return types | {MAMBA_HEADS: 1}
        written = types | {key: getattr(sizes, field) for field, key in MAMBA_SIZES.items()}
        # `read_recurrent` refuses widths that are no multiple of the model's.
        return written | {WIDTH: sizes.values // config.hidden_size, "mamba_conv_bias": sizes.filter_bias}
    if TAPS in reads:
        written = {ADJUSTS: False} if ADJUSTS in reads else {}
        return written | _types(config, CONV, FULL) | {TAPS: 3 if sizes is None else sizes.taps}
    return {}


def mlp_size(values: Values) -> int:
    """Returns the inner size of the MLPs of LFM2, which is two thirds of that in its configuration."""
    size = values.size("block_ff_dim", values.get("intermediate_size"))
    if not values.boolean(ADJUSTS):
        return size
    multiple = values.size("block_multiple_of")
    scaled = int(values.number("block_ffn_dim_multiplier") * int(2 * size / 3))
    return -(-scaled // multiple) * multiple


def _types(config: LlamaConfig, recurrent: str, attention: str) -> dict[str, list[str]]:
    kinds = [
        recurrent if i in config.recurrent_layers else SLIDING if window else attention
        for i, window in enumerate(config.windows_by_layer)
    ]
    return {"layer_types": kinds}


def _read_layers(values: Values, names: tuple[str, ...], num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose type has one of these names. The others have attention."""
    kinds = values.get("layer_types")
    if kinds is None:
        kinds = _default_types(values, names[0], num_layers)
    accepted = (FULL, *names) if names != (MAMBA, LINEAR) else (ATTENTION, FULL, *names)
    accepted += (SLIDING,) if "sliding_window" in values.values else ()
    values.check_layers("layer_types", kinds, accepted, num_layers)
    if all(kind in names for kind in kinds):
        raise ValueError(f"{values.file}: layer_types must name {FULL} for one of {num_layers} layers, got {kinds!r}")
    return tuple(i for i in range(num_layers) if kinds[i] in names)


def _default_types(values: Values, recurrent: str, num_layers: int) -> list[str]:
    """Returns the types of layers in configurations that do not list them."""
    if INTERVAL in values.values:
        interval = values.size(INTERVAL)
        return [FULL if (i + 1) % interval == 0 else recurrent for i in range(num_layers)]
    layers = range(num_layers)
    attention = listed_layers(values, "full_attn_idxs", layers, layers if TAPS in values.values else [])
    return [FULL if i in attention else recurrent for i in range(num_layers)]


def _read_delta(values: Values) -> Recurrence:
    sizes: dict[str, Any] = {field: values.size(key) for field, key in DELTA_SIZES.items()}
    if DOUBLES in values.values:
        sizes |= {"beta_scale": 2.0 if values.boolean(DOUBLES) else 1.0, "norm_eps": 1e-5}
    return _checked(values, Recurrence(DELTA, **sizes), DELTA_SIZES)


def _read_state_space(values: Values) -> Recurrence:
    heads, is_own = values.size(MAMBA_HEADS), values.get(OWN_WIDTH) is not None
    width = values.size(OWN_WIDTH) if is_own else values.size(WIDTH) * values.size("hidden_size")
    size = width // heads if values.get(HEAD_SIZE, AUTO) == AUTO else values.size(HEAD_SIZE)
    if heads * size != width:
        raise ValueError(
            f"{values.file}: {MAMBA_HEADS} times {HEAD_SIZE} ({heads} times {size}) must be "
            f"{OWN_WIDTH if is_own else f'{WIDTH} times hidden_size'} ({width})"
        )
    sizes: dict[str, Any] = {field: values.size(key) for field, key in MAMBA_SIZES.items() if field != "value_size"}
    place: str | None = BEFORE_GATE if values.boolean(IS_BEFORE) else AFTER_GATE
    sizes |= {"filter_bias": values.boolean("mamba_conv_bias")}
    sizes |= {"norm_place": place if values.boolean(HAS_NORM, default=True) else None}
    return _checked(values, Recurrence(STATE_SPACE, value_size=size, **sizes), MAMBA_SIZES)


def _read_convolution(values: Values) -> Recurrence:
    width = values.size("hidden_size")
    return _checked(values, Recurrence(CONVOLUTION, width, width, 1, 1, values.size(TAPS)), {"taps": TAPS})


def _checked(values: Values, sizes: Recurrence, keys: dict[str, str]) -> Recurrence:
    """Returns sizes that are those of a recurrent layer, which were read from some keys, by their fields."""
    if sizes.value_heads % sizes.key_heads:
        raise ValueError(
            f"{values.file}: {keys['value_heads']} ({sizes.value_heads}) must be a multiple of {keys['key_heads']} "
            f"({sizes.key_heads})"
        )
    if sizes.taps < 2:
        raise ValueError(f"{values.file}: {keys['taps']} must be 2 or more, got {sizes.taps}")
    return sizes


def count_layers(values: Values, family: Family) -> int | None:
    """Returns the number of layers that a list names, None for families without such lists."""
    return len(_read_types(values)) if TYPES in family.reads else None


def _read_single(values: Values, family: Family, num_layers: int) -> dict[str, Any]:
    """Returns the fields of `LlamaConfig` for layers that are a mixer, an MLP or experts alone (Nemotron H)."""
    kinds = _read_types(values)
    if len(kinds) != num_layers:
        raise ValueError(
            f"{values.file}: num_hidden_layers must be {len(kinds)}, as {TYPES} or {PATTERN} has, got {num_layers}"
        )
    if FULL not in kinds:
        raise ValueError(f"{values.file}: {TYPES} must name {FULL} for one of {num_layers} layers, got {kinds!r}")

    def layers_of(*names: str) -> tuple[int, ...]:
        return tuple(i for i in range(num_layers) if kinds[i] in names)

    recurrent, dense = layers_of(LINEAR), layers_of(MLP)
    fields: dict[str, Any] = {
        "mlp_layers": layers_of(MLP, EXPERTS),
        "dense_layers": dense,
        "dense_size": values.size("intermediate_size") if dense else 0,
        "recurrent_layers": recurrent,
    }
    if recurrent:
        sizes: dict[str, Any] = {field: values.size(key) for field, key in SINGLE_SIZES.items()}
        recurrence = Recurrence(STATE_SPACE, **sizes, filter_bias=values.boolean(FILTER_BIAS))
        fields["recurrence"] = _checked(values, recurrence, SINGLE_SIZES)
    if EXPERTS in kinds:
        fields |= {field: values.size(key) for field, key in EXPERT_SIZES.items()} | read_groups(values, family)
        fields["expert_latent"] = 0 if values.get(EXPERTS_LATENT) is None else values.size(EXPERTS_LATENT)
    return fields


def _write_single(config: LlamaConfig) -> dict[str, Any]:
    """Returns the keys that `_read_single` reads."""
    sizes, attend = config.recurrence, set(config.attention_layers)

    def kind(layer: int) -> str:
        if config.has_mlp(layer):
            return EXPERTS if config.has_experts(layer) else MLP
        return FULL if layer in attend else LINEAR

    written: dict[str, Any] = {TYPES: [kind(i) for i in range(config.num_layers)], MIN_STEP: UNBOUNDED}
    if sizes is not None:
        written |= {key: getattr(sizes, field) for field, key in SINGLE_SIZES.items()}
        written[FILTER_BIAS] = sizes.filter_bias
    if config.num_experts:
        written |= {key: getattr(config, field) for field, key in EXPERT_SIZES.items()}
        written[EXPERTS_LATENT] = config.expert_latent or None
    return written


def _read_types(values: Values) -> list[str]:
    """Returns the type of each layer."""
    kinds: Any = values.get(TYPES)
    pattern = values.get(PATTERN)
    if kinds is None and pattern is not None:
        if not isinstance(pattern, str) or not pattern or any(letter not in LETTERS for letter in pattern):
            raise ValueError(f"{values.file}: {PATTERN} must be letters of {''.join(LETTERS)}, got {pattern!r}")
        return [LETTERS[letter] for letter in pattern]
    kinds = DEFAULT if kinds is None else kinds
    accepted = (*LETTERS.values(), *OTHER_NAMES)
    if not isinstance(kinds, list) or any(kind not in accepted for kind in kinds):
        raise ValueError(f"{values.file}: {TYPES} must list {', '.join(accepted)}, one for each layer, got {kinds!r}")
    return [str(OTHER_NAMES.get(kind, kind)) for kind in kinds]
