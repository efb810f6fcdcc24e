"""Mixtures of experts in configurations: layers without experts, and the shared experts and groups of DeepSeek."""

from typing import Any

from jlade.conversion.family import Family
from jlade.conversion.json_files import Values
from jlade.models.llama import LlamaConfig

SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts")  # names of a key
FIRST_DENSE, MLP_TYPES = "first_k_dense_replace", "mlp_layer_types"
DENSE, SPARSE = "dense", "sparse"
SPARSE_LAYERS, STEP, DENSE_SIZE = "moe_layers", "interleave_moe_layer_step", "intermediate_size_mlp"  # Llama 4


def read_mixture(values: Values, family: Family, num_layers: int) -> dict[str, Any]:
    """Returns the fields of `LlamaConfig` for these keys, none for families that do not read them.

    Raises:
      ValueError: names the file, the key and the accepted values.
    """
    if SPARSE_LAYERS in family.reads:
        dense = _dense_between(values, num_layers)
        return {"dense_layers": dense, "dense_size": values.size(DENSE_SIZE) if dense else 0}
    shared = _shared_key(family)
    if shared is None:
        return {}
    number, groups, chosen = (values.size(key) for key in (family.keys["num_experts"], "n_group", "topk_group"))
    if number % groups or (groups > 1 and number // groups < 2):
        raise ValueError(
            f"{values.file}: n_group must divide {number} experts into groups of two or more, got {groups}"
        )
    if not values.size("num_experts_per_tok") <= chosen * (number // groups) <= number:
        raise ValueError(
            f"{values.file}: topk_group must be up to n_group, {groups}, with as many experts as num_experts_per_tok, "
            f"got {chosen}"
        )
    dense = _dense_layers(values, family, num_layers)
    return {
        "intermediate_size": _count(values, shared) * values.size("moe_intermediate_size"),
        "dense_layers": dense,
        "dense_size": values.size("intermediate_size") if dense else 0,
        "expert_groups": groups,
        "groups_per_token": chosen,
    }


def write_mixture(config: LlamaConfig, family: Family) -> dict[str, Any]:
    """Returns the keys that `read_mixture` reads."""
    if SPARSE_LAYERS in family.reads:
        sparse = list(filter(config.has_experts, range(config.num_layers)))
        return {SPARSE_LAYERS: sparse, DENSE_SIZE: config.dense_size or config.intermediate_size}
    shared = _shared_key(family)
    if shared is None:
        return {}
    found: dict[str, Any] = {
        shared: config.intermediate_size // config.expert_size,
        "intermediate_size": config.dense_size or config.expert_size,
        "n_group": config.expert_groups,
        "topk_group": config.groups_per_token,
    }
    if FIRST_DENSE in family.reads:
        found[FIRST_DENSE] = len(config.dense_layers)
    if MLP_TYPES in family.reads:
        found[MLP_TYPES] = [SPARSE if config.has_experts(i) else DENSE for i in range(config.num_layers)]
    return found


def _shared_key(family: Family) -> str | None:
    return next((key for key in SHARED_EXPERTS if key in family.reads), None)


def _dense_layers(values: Values, family: Family, num_layers: int) -> tuple[int, ...]:
    """Returns the layers without experts."""
    kinds = values.get(MLP_TYPES) if MLP_TYPES in family.reads else None
    if kinds is None:
        number = _count(values, FIRST_DENSE) if FIRST_DENSE in family.reads else 0
        return tuple(range(min(number, num_layers)))
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (DENSE, SPARSE) for kind in kinds):
        raise ValueError(
            f"{values.file}: {MLP_TYPES} must name dense or sparse for each of {num_layers} layers, got {kinds!r}"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == DENSE)


def _dense_between(values: Values, num_layers: int) -> tuple[int, ...]:
    """Returns the layers without experts of Llama 4."""
    sparse = values.get(SPARSE_LAYERS)
    if sparse is None:
        step = values.size(STEP)
        sparse = list(range(step - 1, num_layers, step))
    if not isinstance(sparse, list) or any(type(i) is not int or not 0 <= i < num_layers for i in sparse):
        raise ValueError(f"{values.file}: {SPARSE_LAYERS} must list some of {num_layers} layers, got {sparse!r}")
    return tuple(i for i in range(num_layers) if i not in sparse)


def _count(values: Values, key: str) -> int:
    """Returns an integer that may be 0, for which null stands too."""
    return values.size(key) if values.get(key, 0) != 0 else 0
