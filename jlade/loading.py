"""A checkpoint's parameters and tokenizer, in one call."""

import os
import pathlib
from typing import Any

import jax
from tokenizers import Tokenizer

from jlade.conversion import load_hf
from jlade.models.llama import LlamaParams
from jlade.text import load_tokenizer


def load(
    path: str | os.PathLike[str], dtype: jax.typing.DTypeLike | None = None
) -> tuple[LlamaParams, Tokenizer | None]:
    """Loads a Hugging Face LLaMA checkpoint: its parameters and its tokenizer, None without a tokenizer.json.

    For the arguments and errors see `jlade.conversion.load_hf`.
    """
    return load_hf(path, dtype), load_tokenizer(path)


def demo(dtype: jax.typing.DTypeLike | None = None) -> tuple[LlamaParams, Any]:
    """Loads the small checkpoint that ships with jlade; jlade/demo/README.md says what it is."""
    return load(pathlib.Path(__file__).parent / "demo", dtype)
