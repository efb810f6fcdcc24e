"""The families of transformers that jlade runs: what is in their config.json and in their files.

A family is one entry of `DENSE` or `MIXTURES`: the keys that it reads, and what distinguishes its models from LLaMA.
The text of docs/models.md, "Adding a family", shows one.
"""

from jlade.conversion.dense_families import DENSE
from jlade.conversion.expert_families import MIXTURES
from jlade.conversion.family import Family, WithText

FAMILIES = DENSE | MIXTURES
WITH_TEXT = {
    "gemma3": WithText("Gemma3ForConditionalGeneration", "gemma3_text"),
    "llama4": WithText("Llama4ForConditionalGeneration", "llama4_text"),
    "mistral3": WithText("Mistral3ForConditionalGeneration", "mistral"),
}


def family_of(model_type: str) -> Family:
    """Returns the family of a `model_type`.

    Raises:
      ValueError: there is none; the message names those that there are.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"model_type is {model_type!r}; supported are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
