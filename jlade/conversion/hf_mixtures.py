"""Mixtures of experts in configurations: layers without experts, and the shared experts and groups of DeepSeek."""

from collections.abc import Collection, Sequence
from typing import Any

from jlade.conversion.family import Family
from jlade.conversion.hf_rotary import FULL, SLIDING
from jlade.conversion.json_files import Values
from jlade.models.llama import LlamaConfig

# Names of a key
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers")
GROUPS, CHOSEN_GROUPS, MLP_TYPES = "n_group", "topk_group", "mlp_layer_types"
ERNIE_FIRST, ERNIE_LAST, ERNIE_STEP = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"
IS_MIXTURE = "enable_moe_block"
DENSE, SPARSE = "dense", "sparse"
SPARSE_LAYERS, LLAMA_STEP, LLAMA_DENSE_SIZE = "moe_layers", "interleave_moe_layer_step", "intermediate_size_mlp"
QWEN_STEP, QWEN_DENSE = "decoder_sparse_step", "mlp_only_layers"
METHOD, GREEDY, LIMITED = "topk_method", "greedy", "group_limited_greedy"  # the first has no groups (DeepSeek V2)
# Cohere's: how the weights of experts follow from scores, and how experts and shared ones are added
ROUTING, COMBINED, AVERAGE = "expert_selection_fn", "shared_expert_combination_strategy", "average"
ROUTINGS = {"softmax": "softmax", "sigmoid": "sigmoids"}
DENSE_SIZE, DENSE_PERIOD = "prefix_dense_intermediate_size", "prefix_dense_sliding_window_pattern"


def read_mixture(values: Values, family: Family, num_layers: int) -> dict[str, Any]:
    """Returns the fields of `LlamaConfig` for these keys. A family that reads none has no layers that differ."""
    sparse = sparse_layers(values, family, num_layers)
    dense = tuple(i for i in range(num_layers) if i not in sparse)
    size = values.size(LLAMA_DENSE_SIZE if SPARSE_LAYERS in family.reads else "intermediate_size") if dense else 0
    of_layers = {"dense_layers": dense, "dense_size": size}
    shared = _one_of(SHARED_EXPERTS, family)
    if shared is None:
        return of_layers
    shared_size = values.count(shared) * values.size("moe_intermediate_size")
    return of_layers | {"intermediate_size": shared_size} | read_groups(values, family)


def read_groups(values: Values, family: Family) -> dict[str, int]:
    """Returns the fields of `LlamaConfig` for groups of experts."""
    number = values.size(family.keys["num_experts"])
    method = values.get(METHOD) if METHOD in family.reads else LIMITED if GROUPS in family.reads else GREEDY
    if method not in (GREEDY, LIMITED):
        raise ValueError(f"{values.file}: {METHOD} must be {GREEDY} or {LIMITED}, got {method!r}")
    groups, chosen = (1, 1) if method == GREEDY else (values.size(GROUPS), values.size(CHOSEN_GROUPS))
    leaders = family.fixed.get("group_leaders", 2)
    if number % groups or (groups > 1 and number // groups < leaders):
        raise ValueError(
            f"{values.file}: n_group must divide {number} experts into groups of {leaders} or more, got {groups}"
        )
    per_token = family.keys["experts_per_token"]
    if GROUPS in family.reads and not values.size(per_token) <= chosen * (number // groups) <= number:
        raise ValueError(
            f"{values.file}: topk_group must be up to n_group, {groups}, with as many experts as {per_token}, "
            f"got {chosen}"
        )
    return {"expert_groups": groups, "groups_per_token": chosen}


def write_mixture(config: LlamaConfig, family: Family) -> dict[str, Any]:
    """Returns the keys that `read_mixture` reads."""
    reads, sparse = family.reads, list(filter(config.has_experts, range(config.num_layers)))
    written: dict[str, Any] = {}
    if SPARSE_LAYERS in reads:
        written |= {SPARSE_LAYERS: sparse, LLAMA_DENSE_SIZE: config.dense_size or config.intermediate_size}
    elif config.dense_size:
        written["intermediate_size"] = config.dense_size
    if QWEN_STEP in reads:
        written |= {QWEN_STEP: 1, QWEN_DENSE: list(config.dense_layers)}
    if IS_MIXTURE in reads:
        written[IS_MIXTURE] = config.num_experts > 0
    if first_dense := _one_of(FIRST_DENSE, family):
        written[first_dense] = len(config.dense_layers)
    if ERNIE_FIRST in reads:
        first, last = (sparse[0], sparse[-1]) if sparse else (config.num_layers, -1)
        written |= {ERNIE_FIRST: first, ERNIE_LAST: last, ERNIE_STEP: sparse[1] - first if len(sparse) > 1 else 1}
    if MLP_TYPES in reads:
        written[MLP_TYPES] = [SPARSE if i in sparse else DENSE for i in range(config.num_layers)]
    if shared := _one_of(SHARED_EXPERTS, family):
        written[shared] = config.intermediate_size // config.expert_size
        written.setdefault("intermediate_size", config.expert_size)
    if GROUPS in reads:
        written |= {GROUPS: config.expert_groups, CHOSEN_GROUPS: config.groups_per_token}
    if METHOD in reads:
        written[METHOD] = LIMITED if config.expert_groups > 1 else GREEDY
    return written


def averages(values: Values) -> bool:
    """Whether Cohere's experts and shared ones are averaged."""
    return values.count("num_shared_experts") > 0 and values.get(COMBINED) == AVERAGE


def cohere_layers(values: Values) -> Any:
    """Returns the types of Cohere's layers, which the first ones, without experts, have by a rule of their own."""
    first, period = values.count("first_k_dense_replace"), values.size("sliding_window_pattern")
    rest = values.size("num_hidden_layers") - first
    default = [
        FULL if (i + 1) % each == 0 else SLIDING
        for number, each in ((first, values.size(DENSE_PERIOD)), (rest, period))
        for i in range(number)
    ]
    return values.get("layer_types", default)


def write_cohere(config: LlamaConfig) -> dict[str, Any]:
    """Returns the keys of Cohere's mixture that `write_mixture` does not write."""
    by_layer = config.windows_by_layer, config.rotary_by_layer
    is_plain = any(all(of_layer[i] is None for of_layer in by_layer) for i in config.dense_layers)
    return {
        "intermediate_size": config.expert_size,
        "rms_norm_eps": config.norm_eps if config.norm == "rms" else None,
        ROUTING: next(name for name, routing in ROUTINGS.items() if routing == config.routing),
        COMBINED: AVERAGE if config.averages_mixture else "sum",
        DENSE_SIZE: config.dense_size or None,
        DENSE_PERIOD: 2 if is_plain else 1,
    }


def _one_of(names: tuple[str, ...], family: Family) -> str | None:
    """Returns the name of a key that the family reads, None if it reads none."""
    return next((key for key in names if key in family.reads), None)


def sparse_layers(values: Values, family: Family, num_layers: int) -> Collection[int]:
    """Returns the layers with experts, or all of a model without."""
    layers, reads = range(num_layers), family.reads
    if SPARSE_LAYERS in reads:
        step = values.size(LLAMA_STEP)
        return listed_layers(values, SPARSE_LAYERS, layers, layers[step - 1 :: step])
    if QWEN_STEP in reads:
        step = values.size(QWEN_STEP)
        return set(layers[step - 1 :: step]) - set(listed_layers(values, QWEN_DENSE, layers, []))
    if ERNIE_FIRST in reads:
        step, last = values.size(ERNIE_STEP), num_layers - 1
        last = last if values.get(ERNIE_LAST, -1) == -1 else values.count(ERNIE_LAST)
        return [i for i in layers[values.count(ERNIE_FIRST) : last + 1] if (i + 1) % step == 0]
    kinds = values.get(MLP_TYPES) if MLP_TYPES in reads else None
    if kinds is None:
        first_dense = _one_of(FIRST_DENSE, family)
        return layers[values.count(first_dense) :] if first_dense else layers
    values.check_layers(MLP_TYPES, kinds, (DENSE, SPARSE), num_layers)
    return [i for i in layers if kinds[i] == SPARSE]


def listed_layers(values: Values, key: str, layers: Sequence[int], default: Sequence[int]) -> Sequence[int]:
    """Returns the layers that a list names."""
    listed = values.get(key, default)
    if listed is not default and (not isinstance(listed, list) or any(i not in layers for i in listed)):
        raise ValueError(f"{values.file}: {key} must list some of {len(layers)} layers, got {listed!r}")
    return listed
