"""The architectures of GGUF files that jlade reads: what llama.cpp's converter makes of a family.

An architecture is one entry of `ARCHITECTURES`. The names of its tensors are those that the package gguf has for the
names of the family.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jlade.conversion.json_files import Values


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
      family: the `model_type` of transformers.
      keys: of config.json, by the key of the file after "gemma2." and the like; besides those of all architectures.
      derived: keys of config.json that files lack, at least some, with a value or a function from the other keys.
      norm_offset: the converter adds it to the weights of norms.
      is_permuted: whether the converter reorders the rows of queries and keys, for rotations that turn neighbours.
    """

    family: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    derived: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    norm_offset: float = 0.0
    is_permuted: bool = False


def _query_scale(layers_of_27b: int) -> dict[str, Callable[[Values], int]]:
    """Returns the key for the scale of the queries of Gemma 2 and 3, where one size differs from all others."""

    def scalar(config: Values) -> int:
        if config.size("num_hidden_layers") == layers_of_27b:
            return config.size("hidden_size") // config.size("num_attention_heads")
        return config.size("head_dim")

    return {"query_pre_attn_scalar": scalar}


def _phi3_window(config: Values) -> int | None:
    """Returns the window of models whose files are older than the key for it."""
    return 2047 if config.size("max_position_embeddings") == 4096 else None


_EXPERTS = {"expert_used_count": "num_experts_per_tok"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_GEMMA_2 = _WINDOW | {
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "final_logit_softcapping": "final_logit_softcapping",
}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", is_permuted=True),  # also Mistral, and Mixtral: see `architecture_of`
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _EXPERTS | {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        derived={"norm_topk_prob": True},
    ),
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture(
        "gemma2",
        _GEMMA_2 | {"attn_logit_softcapping": "attn_logit_softcapping"},
        derived=_query_scale(layers_of_27b=46),
        norm_offset=1.0,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _GEMMA_2 | {"rope.freq_base_swa": "rope_local_base_freq"},
        derived={"sliding_window": None} | _query_scale(layers_of_27b=62),
        norm_offset=1.0,
    ),
    "phi3": Architecture(
        "phi3",
        _WINDOW | {"rope.scaling.original_context_length": "original_max_position_embeddings"},
        derived={"sliding_window": _phi3_window},
    ),
}
MIXTRAL = Architecture("mixtral", _EXPERTS | {"expert_count": "num_local_experts"}, is_permuted=True)


def architecture_of(values: Values) -> Architecture:
    """Returns the architecture that the metadata of a file name.

    Raises:
      ValueError: names the file and the supported architectures.
    """
    name = values.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"{values.file}: general.architecture is {name!r}; supported are {', '.join(ARCHITECTURES)}")
    return MIXTRAL if name == "llama" and values.get("llama.expert_count") else ARCHITECTURES[name]
