"""Text to tokens and back, with the tokenizer of the checkpoint."""

import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer | None:
    """Returns the tokenizer in `path`/tokenizer.json, or None when there is no such file.

    Raises:
      ValueError: when the file is not a tokenizer.
    """
    file = pathlib.Path(path) / "tokenizer.json"
    if not file.exists():
        return None
    try:
        return Tokenizer.from_file(os.fspath(file))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{file} is not a tokenizer: {error}") from error


def encode(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of `text`, with what the tokenizer itself puts before it.

    Args:
      tokenizer: a `tokenizers.Tokenizer`, or one of transformers' tokenizers.
    """
    encoded = tokenizer.encode(text)
    return list(getattr(encoded, "ids", encoded))


def decode(tokenizer: Any, ids: Iterable[int]) -> str:
    """Returns the text of the token ids, special tokens left out."""
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


class Detokenizer:
    """Turns tokens into text as they come; a character is held back until its last byte is there."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_emitted = 0

    def feed(self, ids: Sequence[int], last: bool = False) -> str:
        """Takes the next tokens and returns the text that is now certain; with `last`, all that is left."""
        self._ids.extend(ids)
        text = decode(self._tokenizer, self._ids)
        if not last:
            text = text.rstrip(REPLACEMENT)
        new = text[self._num_emitted :]
        self._num_emitted += len(new)
        return new
