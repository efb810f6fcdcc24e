"""A prediction of each answer: a text that it is expected to resemble."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jlade.drafts.prediction import Reading
from jlade.drafts.tree import NONE
from jlade.generation import prompts as prompts_lib
from jlade.generation import text
from jlade.generation.text import Tokenizer


def read(prediction: Any, tokenizer: Tokenizer | None, batch_size: int, vocab_size: int) -> Reading:
    """Returns the predictions of B answers before their beginning, with texts [B, S].

    Raises:
      TypeError, ValueError: name the text, the value and what is accepted.
    """
    is_one = batch_size == 1 and _is_text(prediction)
    texts = {"prediction": prediction} if is_one else _of_batch(prediction, batch_size)
    ids = [_tokens(name, one, tokenizer, vocab_size) for name, one in texts.items()]
    padded = np.full(
        (batch_size, prompts_lib.round_up(max(map(len, ids)), prompts_lib.SMALLEST_CAPACITY)), NONE, np.int32
    )
    for row, tokens in zip(padded, ids, strict=True):
        row[: len(tokens)] = tokens
    return Reading.begin(padded)


def _is_text(one: Any) -> bool:
    """Returns whether a value stands for one text: a string, or something that holds token ids."""
    if isinstance(one, str) or getattr(one, "ndim", None) == 1:
        return True
    return isinstance(one, Sequence) and not any(isinstance(each, str) or hasattr(each, "__len__") for each in one)


def _of_batch(prediction: Any, batch_size: int) -> dict[str, Any]:
    if isinstance(prediction, str) or not (isinstance(prediction, Sequence) or np.ndim(prediction)):
        raise TypeError(
            f"prediction must be a string or token ids, in a list of one for each of {batch_size} prompts, "
            f"got {prediction!r}"
        )
    if len(prediction) != batch_size:
        raise ValueError(f"prediction must hold a text for each of {batch_size} prompts, got {len(prediction)}")
    return {f"prediction[{i}]": one for i, one in enumerate(prediction)}


def _tokens(name: str, one: Any, tokenizer: Tokenizer | None, vocab_size: int) -> np.ndarray:
    """Returns the token ids of a text, without the special tokens with which the tokenizer begins a prompt."""
    ids = prompts_lib.token_ids(name, one, tokenizer, vocab_size)
    if isinstance(one, str) and tokenizer is not None:
        begin = text.encode(tokenizer, "")
        ids = ids[len(begin) :] if ids[: len(begin)].tolist() == begin else ids
    return ids
