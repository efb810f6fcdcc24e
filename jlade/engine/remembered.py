"""Texts that have ended, whose answers are drafts for later requests. Plain Python and NumPy that knows no model.

Each text is in a compartment, that of its request's key, and serves the requests with this key alone: how fast a
request is shows whether its text resembles an earlier one. A request without a key has none of it.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import threading
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialized

from jlade.drafts.prediction import TRUSTED, Reading
from jlade.drafts.suffix import LONGEST
from jlade.drafts.tree import NONE
from jlade.files import written_whole
from jlade.generation.prompts import num_shared
from jlade.generation.text import Tokenizer, token_bytes

NGRAM = 3  # tokens by which texts are compared
BUCKETS = 2**20  # of n-grams; those that share one count as the same
FACTORS = 2_654_435_761, 2_246_822_519, 3_266_489_917  # odd, of their hash
RECALLED = 2048  # tokens of answers that a request searches
OVERHEAD = 512  # bytes of a text beside its arrays
FORMAT = "jlade remembered texts 1"  # of files
ARRAYS = ("tokens", "lengths", "begins")  # of all texts one after the other, and of each


class Text(NamedTuple):
    """A prompt and its answer."""

    key: str  # of the compartment
    tokens: np.ndarray  # [n] int32
    begin: int  # tokens of the prompt
    ngrams: np.ndarray  # [g] int32, the different buckets of the text's n-grams

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return self.tokens.nbytes + self.ngrams.nbytes + 4 * len(self.key) + OVERHEAD


class Remembered:
    """Texts by the keys of their requests, as many as fit into `memory` bytes. Any thread may use it.

    Those that were made or found least recently are dropped first, whatever their keys.

    Attributes:
      num_bytes: of all texts.
      num_changes: texts that were added.
    """

    def __init__(self, memory: int):
        self._memory = memory
        self._texts: dict[tuple[str, bytes], Text] = {}  # the most recently used last
        self._of_key: dict[str, set[tuple[str, bytes]]] = {}
        self._lock = threading.Lock()
        self.num_bytes: int = 0
        self.num_changes: int = 0

    def __len__(self) -> int:
        """Returns the number of texts."""
        return len(self._texts)

    def texts(self) -> list[Text]:
        """Returns all texts, the most recently used last."""
        with self._lock:
            return list(self._texts.values())

    def add(self, key: str, tokens: np.ndarray, begin: int) -> None:
        """Adds a text [n] int32, which begins with `begin` tokens of its prompt, under the key of its request.

        A text without an answer is left out, and so is one that exceeds the memory alone.
        """
        tokens = np.array(tokens, np.int32)
        text = Text(key, tokens, begin, np.unique(buckets(tokens)))
        if begin == len(tokens) or text.num_bytes > self._memory:
            return
        name = key, hashlib.blake2b(tokens.tobytes()).digest()
        with self._lock:
            self._drop(name)
            self._texts[name] = text
            self._of_key.setdefault(key, set()).add(name)
            self.num_bytes += text.num_bytes
            self.num_changes += 1
            while self.num_bytes > self._memory:
                self._drop(next(iter(self._texts)))

    def find(self, key: str, prompt: np.ndarray, size: int) -> Reading:
        """Returns the answers of the texts with a key that have most n-grams of a prompt, of equal ones the latest.

        Each has a half of them at least: drafts from other answers would take the place of better ones. Each answer
        follows the last `LONGEST` tokens of its prompt, by which its place is found.

        Returns:
          A reading of one row [1, size], more than `LONGEST` tokens, which begins with the best answer.
        """
        wanted = np.zeros(BUCKETS, bool)
        wanted[buckets(prompt)] = True
        with self._lock:
            names = self._of_key.get(key, set())
            texts = [(name, text) for name, text in self._texts.items() if name in names]
            shared = _num_wanted(wanted, [text.ngrams for _, text in texts])
            similar = (i for i, number in enumerate(shared) if 2 * number >= np.count_nonzero(wanted))
            order = sorted(similar, key=lambda i: (shared[i], i), reverse=True)
            parts, left = list[np.ndarray](), size
            for number, index in enumerate(order):
                text = texts[index][1]
                part = text.tokens[max(0, text.begin - LONGEST) :][: max(0, left - 1)]
                if len(part) <= min(text.begin, LONGEST):  # no room for an answer
                    order = order[:number]
                    break
                parts.append(np.append(part, NONE))
                left -= len(part) + 1
            for index in reversed(order):
                name, text = texts[index]
                self._texts[name] = self._texts.pop(name)
        tokens = np.full((1, size), NONE, np.int32)
        tokens[0, : size - left] = np.concatenate([np.zeros(0, np.int32), *parts])
        reading: Any = Reading.begin(tokens)
        if not order:
            return reading
        best = texts[order[0]][1]
        agree = num_shared(prompt[::-1][:LONGEST], best.tokens[: best.begin][::-1][:LONGEST])
        reading.matched[0, 0] = max(TRUSTED, agree)
        place = np.array([min(best.begin, LONGEST)], np.int32)
        reading.places[0, 0] = place[0]
        found_reading: Reading = dataclasses.replace(reading, anchor=place)
        return found_reading

    def save(self, path: str | os.PathLike[str], vocabulary: str) -> None:
        """Writes all texts to a file that its owner alone may read. A file that is there is replaced as a whole.

        `vocabulary` is the `identity` of their tokens.

        Raises:
          OSError: names the file.
        """
        texts = self.texts()
        arrays = {
            "tokens": np.concatenate([np.zeros(0, np.int32), *(text.tokens for text in texts)]),
            "lengths": np.array([len(text.tokens) for text in texts], np.int64),
            "begins": np.array([text.begin for text in texts], np.int64),
        }
        metadata = {"format": FORMAT, "vocabulary": vocabulary, "keys": json.dumps([text.key for text in texts])}
        with written_whole(path, replace=True) as file:
            file.touch(mode=0o600)
            file.write_bytes(serialized(arrays, metadata))

    def load(self, path: str | os.PathLike[str], vocabulary: str, vocab_size: int) -> None:
        """Adds the texts of a file in their order of use. Those that exceed the memory are dropped.

        Raises:
          ValueError: names the file, which is missing, broken, or of another version or vocabulary. No text is added.
        """
        name = os.fspath(path)
        try:
            with safe_open(pathlib.Path(path), framework="np") as file:
                metadata: dict[str, str] = file.metadata() or {}
                arrays: dict[str, Any] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{name} holds no remembered texts: {error}") from error
        if metadata.get("format") != FORMAT:
            raise ValueError(
                f"{name} is no file of {FORMAT!r}, but of {metadata.get('format')!r}: remove it, or use another"
            )
        if metadata.get("vocabulary") != vocabulary:
            raise ValueError(f"{name} has texts of another tokenizer than this model's: remove it, or use another file")
        try:
            keys, (tokens, lengths, begins) = json.loads(metadata["keys"]), (arrays[key] for key in ARRAYS)
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
            self.add(key, text, begin)

    def _drop(self, name: tuple[str, bytes]) -> None:
        text = self._texts.pop(name, None)
        if text is not None:
            self.num_bytes -= text.num_bytes
            names = self._of_key[name[0]]
            names.remove(name)
            if not names:
                del self._of_key[name[0]]


class Compartment(NamedTuple):
    """The texts that a request may see."""

    remembered: Remembered  # of all requests
    key: str  # of the request
    keeps: bool  # whether its own text is added


def identity(tokenizer: Tokenizer | None, vocab_size: int) -> str:
    """Returns the digest of what token ids mean: the same for all models that share a vocabulary."""
    tokens = [] if tokenizer is None else [token_bytes(tokenizer)[token].hex() for token in range(vocab_size)]
    return hashlib.sha256(json.dumps([vocab_size, tokens]).encode()).hexdigest()


def buckets(tokens: np.ndarray) -> np.ndarray:
    """Returns the bucket of each n-gram of a text [n] int32: [n - 2] int32."""
    if len(tokens) < NGRAM:
        return np.zeros(0, np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint32), NGRAM)
    hashes = np.sum(windows * np.array(FACTORS, np.uint32), axis=1, dtype=np.uint32)
    return np.asarray(hashes // (2**32 // BUCKETS), np.int32)  # the highest bits, which depend on all of a token's


def _num_wanted(wanted: np.ndarray, texts: list[np.ndarray]) -> list[int]:
    """Returns how many of the buckets of each text are wanted, all at once: a call for each text takes longer."""
    ends = np.cumsum([0, *map(len, texts)])
    number = np.append(0, np.cumsum(wanted[np.concatenate([np.zeros(0, np.int32), *texts])]))
    counts: list[int] = np.diff(number[ends]).tolist()
    return counts
