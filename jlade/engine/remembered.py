"""Texts that have ended, whose answers are drafts for later requests. Plain Python and NumPy that knows no model.

Each text is in a compartment, that of its request's key, and serves the requests with this key alone: how fast a
request is shows whether its text resembles an earlier one. A request without a key has none of it.
"""

import dataclasses
import hashlib
import threading
from typing import Any, NamedTuple

import numpy as np

from jlade.drafts.prediction import TRUSTED, Reading
from jlade.drafts.suffix import LONGEST
from jlade.drafts.tree import NONE

NGRAM = 3  # tokens by which texts are compared
BUCKETS = 2**20  # of n-grams; those that share one count as the same
FACTORS = 2_654_435_761, 2_246_822_519, 3_266_489_917  # odd, of their hash
RECALLED = 2048  # tokens of answers that a request searches
OVERHEAD = 512  # bytes of a text beside its arrays


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
    """Texts by the keys of their requests, as many as fit into a memory. Any thread may use it.

    Those that were made or found least recently are dropped first, whatever their keys.

    Args:
      memory: bytes of all texts.

    Attributes:
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
        """Adds a text, unless it has no answer or exceeds the memory alone.

        Args:
          key: of its request.
          tokens: [n] int32, of the prompt and the answer.
          begin: tokens of the prompt.
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

        Args:
          key: of the request.
          prompt: [n] int32.
          size: tokens of the result, more than `LONGEST`.

        Returns:
          A reading of one row [1, size], which begins with the best answer.
        """
        wanted = np.zeros(BUCKETS, bool)
        wanted[buckets(prompt)] = True
        with self._lock:
            names = self._of_key.get(key, set())
            found = [(name, text) for name, text in self._texts.items() if name in names]
            shared = _num_wanted(wanted, [text.ngrams for _, text in found])
            similar = (i for i, number in enumerate(shared) if 2 * number >= np.count_nonzero(wanted))
            order = sorted(similar, key=lambda i: (shared[i], i), reverse=True)
            parts, left = list[np.ndarray](), size
            for number, index in enumerate(order):
                text = found[index][1]
                part = text.tokens[max(0, text.begin - LONGEST) :][: max(0, left - 1)]
                if len(part) <= min(text.begin, LONGEST):  # no room for an answer
                    order = order[:number]
                    break
                parts.append(np.append(part, NONE))
                left -= len(part) + 1
            for index in reversed(order):
                name, text = found[index]
                self._texts[name] = self._texts.pop(name)
        tokens = np.full((1, size), NONE, np.int32)
        tokens[0, : size - left] = np.concatenate([np.zeros(0, np.int32), *parts])
        reading: Any = Reading.begin(tokens)
        if not order:
            return reading
        best = found[order[0]][1]
        agree = num_equal(prompt[::-1][:LONGEST], best.tokens[: best.begin][::-1][:LONGEST])
        reading.matched[0, 0] = max(TRUSTED, agree)
        place = np.array([min(best.begin, LONGEST)], np.int32)
        reading.places[0, 0] = place[0]
        found_reading: Reading = dataclasses.replace(reading, anchor=place)
        return found_reading

    def _drop(self, name: tuple[str, bytes]) -> None:
        text = self._texts.pop(name, None)
        if text is not None:
            self.num_bytes -= text.num_bytes
            names = self._of_key[name[0]]
            names.remove(name)
            if not names:
                del self._of_key[name[0]]


class Compartment(NamedTuple):
    """The texts that a request may see.

    Attributes:
      remembered: of all requests.
      key: of the request.
      keeps: whether its own text is added.
    """

    remembered: Remembered
    key: str
    keeps: bool


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


def num_equal(one: np.ndarray, other: np.ndarray) -> int:
    """Returns how many tokens two texts have in common from their beginnings on."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size
