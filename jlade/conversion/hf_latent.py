"""Multi-head latent attention in configurations: its sizes, and the scale of its scores."""

from typing import Any, NamedTuple

from jlade.conversion.family import Family
from jlade.conversion.hf_rotary import Read, mscale_all_dim, read_rotary, read_sharpness
from jlade.conversion.json_files import Values
from jlade.models.architecture import Latent
from jlade.models.llama import LlamaConfig
from jlade.models.rotary import YarnScaling

QUERY_RANK, FRACTION = "q_lora_rank", "partial_rotary_factor"
KEYS = {
    "rank": "kv_lora_rank",
    "rotated": "qk_rope_head_dim",
    "unrotated": "qk_nope_head_dim",
    "value_size": "v_head_dim",
}


class LatentAttention(NamedTuple):
    """The fields of `LlamaConfig` for a latent, and the rotations."""

    sizes: Latent
    attention_scale: float | None
    rotary: Read


def read_latent(values: Values, family: Family) -> LatentAttention | None:
    """Returns latent attention, None for families without.

    Raises:
      ValueError: names the file, the key and the accepted values.
    """
    if KEYS["rank"] not in family.reads:
        return None
    query_rank = None if values.get(QUERY_RANK) is None else values.size(QUERY_RANK)
    sizes = Latent(query_rank, **{field: values.size(key) for field, key in KEYS.items()})
    if sizes.rotated % 2:
        raise ValueError(f"{values.file}: {KEYS['rotated']} must be even, got {sizes.rotated}")
    size, num_heads = _head_size(sizes, family), values.size("num_attention_heads")
    for key, wanted in {"num_key_value_heads": num_heads, "head_dim": size}.items():
        if values.size(key, wanted) != wanted:
            raise ValueError(f"{values.file}: {key} must be {wanted}, as the other sizes imply, got {values.get(key)}")
    if FRACTION in family.reads and values.get(FRACTION) is None:
        values = Values(values.file, dict(values.values) | {FRACTION: sizes.rotated / size})
    rotary = read_rotary(values, size, family.rotary)
    if rotary.dim != sizes.rotated:
        raise ValueError(
            f"{values.file}: {FRACTION} must give the {sizes.rotated} elements of {KEYS['rotated']}, not {rotary.dim}"
        )
    sharpness = read_sharpness(values, family.rotary)
    return LatentAttention(sizes, None if sharpness == 1 else sizes.query_size**-0.5 * sharpness, rotary)


def write_latent(config: LlamaConfig, family: Family, scaling: Any) -> dict[str, Any]:
    """Returns the keys that `read_latent` reads, given the rotary `scaling` that is written for other models."""
    sizes = config.latent
    if sizes is None:
        return {}
    size = _head_size(sizes, family)
    found: dict[str, Any] = {QUERY_RANK: sizes.query_rank} | {key: getattr(sizes, field) for field, key in KEYS.items()}
    found |= {"num_key_value_heads": config.num_heads, "head_dim": size}
    if FRACTION in family.reads:
        found[FRACTION] = sizes.rotated / size
    if config.attention_scale is not None and isinstance(config.rope_scaling, YarnScaling):
        sharpness = config.attention_scale * sizes.query_size**0.5
        found["rope_scaling"] = scaling | {"mscale_all_dim": mscale_all_dim(sharpness, config.rope_scaling)}
    return found


def _head_size(sizes: Latent, family: Family) -> int:
    """Returns the elements of a head as transformers counts them for the rotations, of which some may be rotated."""
    return sizes.query_size if FRACTION in family.reads else sizes.rotated
