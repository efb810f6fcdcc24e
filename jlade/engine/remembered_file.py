"""Remembered texts in a file, which is written whole or not at all."""

import hashlib
import json
import os
import pathlib
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialized

from jlade.engine.remembered import Remembered
from jlade.files import written_whole
from jlade.generation.text import Tokenizer, token_bytes

FORMAT = "jlade remembered texts 1"
ARRAYS = ("tokens", "lengths", "begins")  # of all texts one after the other, and of each


def identity(tokenizer: Tokenizer | None, vocab_size: int) -> str:
    """Returns the digest of what token ids mean: the same for all models that share a vocabulary."""
    tokens = [] if tokenizer is None else [token_bytes(tokenizer)[token].hex() for token in range(vocab_size)]
    return hashlib.sha256(json.dumps([vocab_size, tokens]).encode()).hexdigest()


def save(remembered: Remembered, path: str | os.PathLike[str], vocabulary: str) -> None:
    """Writes texts to a file that its owner alone may read. A file that is there is replaced.

    Args:
      remembered: the texts.
      path: of the file.
      vocabulary: the `identity` of their tokens.

    Raises:
      OSError: names the file.
    """
    texts = remembered.texts()
    arrays = {
        "tokens": np.concatenate([np.zeros(0, np.int32), *(text.tokens for text in texts)]),
        "lengths": np.array([len(text.tokens) for text in texts], np.int64),
        "begins": np.array([text.begin for text in texts], np.int64),
    }
    metadata = {"format": FORMAT, "vocabulary": vocabulary, "keys": json.dumps([text.key for text in texts])}
    with written_whole(path, replace=True) as file:
        file.touch(mode=0o600)
        file.write_bytes(serialized(arrays, metadata))


def load(remembered: Remembered, path: str | os.PathLike[str], vocabulary: str, vocab_size: int) -> None:
    """Adds the texts of a file in their order of use. Those that exceed the memory are dropped.

    Args:
      remembered, path, vocabulary: of `save`.
      vocab_size: of the model.

    Raises:
      ValueError: names the file, which is missing, broken, or of another version or vocabulary. No text is added.
    """
    name = os.fspath(path)
    try:
        with safe_open(pathlib.Path(path), framework="np") as file:
            metadata: dict[str, str] = file.metadata() or {}
            arrays: dict[str, Any] = {each: file.get_tensor(each) for each in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{name} holds no remembered texts: {error}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{name} is no file of {FORMAT!r}, but of {metadata.get('format')!r}: remove it, or use another"
        )
    if metadata.get("vocabulary") != vocabulary:
        raise ValueError(f"{name} has texts of another tokenizer than this model's: remove it, or use another file")
    try:
        keys, (tokens, lengths, begins) = json.loads(metadata["keys"]), (arrays[each] for each in ARRAYS)
        fits = (
            len(keys) == len(lengths) == len(begins)
            and all(isinstance(key, str) for key in keys)
            and lengths.sum() == len(tokens)
            and np.all((begins >= 0) & (begins <= lengths))
            and np.all((tokens >= 0) & (tokens < vocab_size))
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} holds no remembered texts: {error!r}") from error
    if not fits:
        raise ValueError(f"{name} holds no remembered texts: its arrays do not belong together")
    texts = np.split(tokens, np.cumsum(lengths)[:-1])
    for key, text, begin in zip(keys, texts, begins.tolist(), strict=False):  # one empty part for no texts
        remembered.add(key, text, begin)
