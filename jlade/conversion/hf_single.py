"""Layers that are a mixer, an MLP or experts alone in Hugging Face configurations (Nemotron H)."""

from typing import Any

from jlade.conversion.family import Family
from jlade.conversion.hf_mixtures import read_groups
from jlade.conversion.hf_recurrent import LINEAR, MAMBA, checked
from jlade.conversion.hf_rotary import ATTENTION, FULL
from jlade.conversion.json_files import Values
from jlade.models.architecture import STATE_SPACE, LlamaConfig, Recurrence

TYPES, PATTERN = "layers_block_type", "hybrid_override_pattern"  # a list, or a letter for each layer
MLP, EXPERTS = "mlp", "moe"
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
OTHER_NAMES = {MAMBA: LINEAR, ATTENTION: FULL}
DEFAULT = [LINEAR, EXPERTS, FULL, MLP]
SIZES = {
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


def count_layers(values: Values, family: Family) -> int | None:
    """Returns the number of layers that a list names, None for families without such lists."""
    return len(_read_types(values)) if TYPES in family.reads else None


def read_single(values: Values, family: Family, num_layers: int) -> dict[str, Any]:
    """Returns the fields of `LlamaConfig` for such layers. Families without have none.

    Raises:
      ValueError: names the file, the key and the accepted values.
    """
    if TYPES not in family.reads:
        return {}
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
        sizes: dict[str, Any] = {field: values.size(key) for field, key in SIZES.items()}
        recurrence = Recurrence(STATE_SPACE, **sizes, filter_bias=values.boolean(FILTER_BIAS))
        fields["recurrence"] = checked(values, recurrence, SIZES)
    if EXPERTS in kinds:
        fields |= {field: values.size(key) for field, key in EXPERT_SIZES.items()} | read_groups(values, family)
        fields["expert_latent"] = 0 if values.get(EXPERTS_LATENT) is None else values.size(EXPERTS_LATENT)
    return fields


def write_single(config: LlamaConfig, family: Family) -> dict[str, Any]:
    """Returns the keys that `read_single` reads."""
    if TYPES not in family.reads:
        return {}
    sizes, attend = config.recurrence, set(config.attention_layers)

    def kind(layer: int) -> str:
        if config.has_mlp(layer):
            return EXPERTS if config.has_experts(layer) else MLP
        return FULL if layer in attend else LINEAR

    found: dict[str, Any] = {TYPES: [kind(i) for i in range(config.num_layers)], MIN_STEP: UNBOUNDED}
    if sizes is not None:
        found |= {key: getattr(sizes, field) for field, key in SIZES.items()} | {FILTER_BIAS: sizes.filter_bias}
    if config.num_experts:
        found |= {key: getattr(config, field) for field, key in EXPERT_SIZES.items()}
        found[EXPERTS_LATENT] = config.expert_latent or None
    return found


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
