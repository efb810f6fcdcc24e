"""A checkpoint's parameters and tokenizer, in one call."""

import os
import pathlib
from typing import Any

import jax
from tokenizers import Tokenizer

from jlade import conversion
from jlade.conversion import checkpoint, hub
from jlade.conversion.huggingface import Sharding
from jlade.models.llama import LlamaParams
from jlade.text import load_tokenizer


def load(
    path: str | os.PathLike[str],
    dtype: jax.typing.DTypeLike | None = None,
    *,
    sharding: Sharding | None = None,
    revision: str | None = None,
    int8: bool = False,
) -> tuple[LlamaParams, Tokenizer | None]:
    """Loads a checkpoint: its parameters and its tokenizer, None without a tokenizer.json.

    Args:
      path: a Hugging Face directory, one written by `jlade.conversion.save`, or an id of the Hugging Face Hub. No code
        from it is ever run.
      dtype, sharding: see `jlade.conversion.load_hf`.
      int8: whether to hold the matrices in int8: half the memory of bfloat16, and half of what a step reads. `dtype` is
        then that of the rest and of the computation. See `jlade.models.quantization`.
      revision: branch, tag or commit of a Hub id.

    Raises:
      ValueError: names the file, and the config key or the tensor, that is missing, broken or not supported.
    """
    directory = hub.find(path, revision)
    read = conversion.load if checkpoint.is_checkpoint(directory) else conversion.load_hf
    return read(directory, dtype, sharding, int8=int8), load_tokenizer(directory)


def demo(dtype: jax.typing.DTypeLike | None = None) -> tuple[LlamaParams, Any]:
    """Loads the small checkpoint that ships with jlade; jlade/demo/README.md says what it is."""
    return load(pathlib.Path(__file__).parent / "demo", dtype)
