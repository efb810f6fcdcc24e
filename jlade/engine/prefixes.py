"""Beginnings of texts that later prompts may share. Plain Python that knows no model.

Each text is in a compartment, that of its request's key, and serves the prompts with this key alone: their number of
tokens that are not read shows with which tokens the text begins.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jlade.generation.prompts import num_shared

T = TypeVar("T")


class _Entry(NamedTuple, Generic[T]):
    key: str  # of the compartment
    tokens: np.ndarray  # [n] int32
    head: bytes  # its first `least` tokens
    value: T
    num_bytes: int


class Prefixes(Generic[T]):
    """Values of texts, as many as fit into a memory. Those used least recently are dropped first.

    Args:
      memory: bytes that the values take at most; 0 for no values.
      least: tokens that a text has at least, and that a longer text shares with it at least.
      divisible: tokens of the longest text whose value serves a part of it. The value of a longer one serves the texts
        that begin with all of it.
      on_drop: called with each value that is dropped.
    """

    def __init__(self, memory: int, least: int, divisible: int, on_drop: Callable[[T], None] = lambda _: None):
        self._memory, self._least, self._divisible, self._on_drop = memory, least, divisible, on_drop
        self._entries: list[_Entry[T]] = []  # the most recently used last

    @property
    def num_bytes(self) -> int:
        """Bytes that the values take."""
        return sum(entry.num_bytes for entry in self._entries)

    def find(self, tokens: np.ndarray, key: str) -> tuple[T | None, int]:
        """Returns the value that serves most tokens of a text, and their number; None and 0 if it is below `least`."""
        number, index = self._best(tokens, key)
        if number < self._least:
            return None, 0
        self._entries.append(self._entries.pop(index))
        return self._entries[-1].value, number

    def num_served(self, tokens: np.ndarray, key: str) -> int:
        """Returns the number of tokens that `find` would."""
        number, _ = self._best(tokens, key)
        return number if number >= self._least else 0

    def _best(self, tokens: np.ndarray, key: str) -> tuple[int, int]:
        """Returns the most tokens that a value serves, and the index of its entry."""
        return max(((self._served(tokens, key, entry), i) for i, entry in enumerate(self._entries)), default=(0, 0))

    def parting(self, tokens: np.ndarray, key: str) -> int:
        """Returns how many tokens a text shares with another, served by a value or not; 0 if it is below `least`."""
        return max((self._num_shared(tokens, key, entry) for entry in self._entries), default=0)

    def is_new(self, tokens: np.ndarray, key: str) -> bool:
        """Whether a value would be kept, and none serves the whole text yet."""
        is_served = any(self._served(tokens, key, entry) == len(tokens) for entry in self._entries)
        return self._memory > 0 and len(tokens) >= self._least and not is_served

    def add(self, tokens: np.ndarray, key: str, value: T, num_bytes: int) -> None:
        """Adds the value of a text. It takes the place of the values that serve no more texts than it does."""
        new = _Entry(key, tokens.copy(), self._head(tokens), value, num_bytes)
        replaced = [old for old in self._entries if self._served(old.tokens, old.key, new) == len(old.tokens)]
        self._entries = [entry for entry in self._entries if not any(entry is old for old in replaced)]
        self._entries.append(new)
        for old in replaced:
            self._on_drop(old.value)
        while self.num_bytes > self._memory:
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Drops the value that was used least recently; returns whether there was one."""
        if not self._entries:
            return False
        self._on_drop(self._entries.pop(0).value)
        return True

    def clear(self) -> None:
        """Drops all values."""
        while self.drop_oldest():
            pass

    def _served(self, tokens: np.ndarray, key: str, entry: _Entry[T]) -> int:
        number, length = self._num_shared(tokens, key, entry), len(entry.tokens)
        return number if number == length or length <= self._divisible else 0

    def _num_shared(self, tokens: np.ndarray, key: str, entry: _Entry[T]) -> int:
        """Returns how many tokens a text shares with that of an entry; 0 if fewer than `least`, or of another key."""
        if key != entry.key or self._head(tokens) != entry.head:  # of most entries, and quick
            return 0
        return num_shared(tokens, entry.tokens)

    def _head(self, tokens: np.ndarray) -> bytes:
        return tokens[: self._least].astype(np.int32).tobytes()
