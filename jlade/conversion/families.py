"""The families of transformers that jlade runs: what is in their config.json and in their files.

A family is one entry of `DENSE`, `MIXTURES` or `RECURRENT`: the keys that it reads, and what distinguishes its models
from LLaMA. "Adding a family" in docs/models.md shows one.
"""

import difflib
from collections.abc import Iterable
from typing import Any

from jlade.conversion.dense_families import DENSE
from jlade.conversion.expert_families import MIXTURES
from jlade.conversion.family import Family
from jlade.conversion.recurrent_families import RECURRENT

FAMILIES = DENSE | MIXTURES | RECURRENT
# The `model_type` of models with a text part -> their class, and the `model_type` of the part unless it names its own.
WITH_TEXT = {
    model_type: (architecture, name)
    for name, family in FAMILIES.items()
    for model_type, architecture in family.of_parts.items()
}

OTHER_NAMES = {other: name for name, family in FAMILIES.items() for other in family.other_names}


def family_of(model_type: str) -> Family:
    """Returns the family of a `model_type`."""
    if model_type not in FAMILIES:
        raise ValueError(unknown(model_type, FAMILIES))
    return FAMILIES[model_type]


def unknown(model_type: Any, known: Iterable[str]) -> str:
    """Returns the message for a `model_type` that is not `known`, with the nearest of those if one is near."""
    known = list(known)
    nearest = difflib.get_close_matches(str(model_type), known, n=1, cutoff=0.75)
    return (
        f"model_type is {model_type!r}; supported are {', '.join(known)}"
        + "".join(f", of which {name} has the nearest name" for name in nearest)
        + ". Another causal model runs with a decoder of your own, see docs/own_model.md"
    )
