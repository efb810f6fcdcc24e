"""The model of a worker or of a replica, from arguments that Ray can send."""

from collections.abc import Mapping
from typing import Any, Literal

import jlade
from jlade import storage
from jlade.config import LookaheadConfig
from jlade.conversion import LoadOptions, formats, location
from jlade.generation.text import Tokenizer
from jlade.lookahead import names
from jlade.models.llama import LlamaParams


def load(
    model: str, dtype: str | None, revision: str | None, mesh: Mapping[str, int] | None
) -> tuple[LlamaParams, Tokenizer]:
    """Returns the parameters and the tokenizer of a model.

    Args:
      model, revision: as in `jlade.load`.
      dtype: of the weights; None for float32 on CPUs and bfloat16 elsewhere.
      mesh: sizes of `jlade.make_mesh`; None for one device.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted; the model has no tokenizer.
    """
    sizes: Any = mesh
    on_mesh = None if mesh is None else jlade.make_mesh(**sizes)
    checkpoint = formats.find(location.find(model, revision, weights=True))
    params, tokenizer = storage.read(checkpoint, LoadOptions(dtype, mesh=on_mesh))
    if tokenizer is None:
        raise ValueError(f"model {model!r} has no tokenizer, which prompts need")
    return params, tokenizer


def setting(lookahead: str | None) -> LookaheadConfig | Literal["auto"] | None:
    """Returns the setting of a name as `--lookahead` takes it, of "auto", or of None for plain decoding.

    Raises:
      ValueError: says what is accepted.
    """
    if lookahead is None:
        return None
    return "auto" if lookahead == "auto" else names.parse(lookahead)
