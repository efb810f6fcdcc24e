"""The three layouts of Falcon in Hugging Face configurations: one KV head (7B), groups of heads (40B), and neither."""

from typing import Any

from jlade.conversion.json_files import Values
from jlade.models.architecture import LlamaConfig

GROUPS, ONE, PARALLEL = "new_decoder_architecture", "multi_query", "parallel_attn"
NORMS, KV_HEADS, MLP = "num_ln_in_parallel_attn", "num_kv_heads", "ffn_hidden_size"


def kv_heads(values: Values) -> int:
    """Returns the number of KV heads."""
    num_heads, has_groups = values.size("num_attention_heads"), _is_set(values, GROUPS)
    if _is_set(values, ONE) and not has_groups:
        return 1
    number = values.size(KV_HEADS, num_heads)
    if num_heads % number or (number != num_heads and not has_groups):
        accepted = f"divide num_attention_heads, {num_heads}"
        if not has_groups:
            accepted = f"be num_attention_heads, {num_heads}, unless {GROUPS} or {ONE} is true"
        raise ValueError(f"{values.file}: {KV_HEADS} must {accepted}, got {number}")
    return number


def mlp_size(values: Values) -> int:
    """Returns the inner size of the MLPs."""
    return values.size(MLP, 4 * values.size("hidden_size"))


def is_parallel(values: Values) -> bool:
    """Whether attention and MLP of a layer read the same hidden states."""
    if _is_set(values, GROUPS) and not _is_set(values, PARALLEL):
        raise ValueError(f"{values.file}: {PARALLEL} must be true with {GROUPS}, got {values.get(PARALLEL)}")
    return _is_set(values, PARALLEL)


def has_two_norms(values: Values) -> bool:
    """Whether attention and MLP of a parallel layer have a norm each."""
    if not is_parallel(values):
        return False
    has_groups = _is_set(values, GROUPS)
    number = values.size(NORMS, 2 if has_groups else 1)
    if number != 1 and not (has_groups and number == 2):
        accepted = "1 or 2" if has_groups else f"1 unless {GROUPS} is true"
        raise ValueError(f"{values.file}: {NORMS} must be {accepted}, got {number}")
    return number == 2


def layout(config: LlamaConfig) -> dict[str, Any]:
    """Returns the keys that the functions above read."""
    has_groups = config.parallel_norm or config.num_kv_heads not in (1, config.num_heads)
    return {
        GROUPS: has_groups,
        ONE: config.num_kv_heads == 1,
        PARALLEL: config.parallel,
        NORMS: 2 if config.parallel_norm else 1,
        KV_HEADS: config.num_kv_heads,
        MLP: config.intermediate_size,
    }


def _is_set(values: Values, key: str) -> bool:
    """Whether a flag is true: null is false in transformers, also where a missing key is true."""
    return values.values[key] is not None and values.boolean(key)
