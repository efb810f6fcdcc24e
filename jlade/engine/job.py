"""A request as the engine sees it: its arrays, and its text so far."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from jlade.engine import rows
from jlade.engine.request import Request
from jlade.generation import request as checked_lib
from jlade.generation import results
from jlade.generation.results import Generation
from jlade.generation.text import Detokenizer, find_stop, token_bytes


class New(NamedTuple):
    """The tokens that steps added to a text."""

    tokens: np.ndarray  # [any] int32
    text: str | None  # None without a tokenizer
    ended: bool


class Job:
    """A request of one sequence in its row.

    Stop strings are searched here, in the text that the host has anyway, and not by an automaton on the device: a table
    of all tokens for the strings of each row is large, and to build it takes longer than many requests. The row makes
    the steps of a round at most after the text has ended, and `generation` leaves these out.
    """

    def __init__(self, checked: checked_lib.Request, place: int, request: Request, capacity: int):
        """Checks what an engine does not accept.

        Args:
          checked: the arguments, of one sequence.
          place: of the sequence in the batch whose key it shares.
          request: the caller's side.
          capacity: C, tokens of a row.

        Raises:
          ValueError: of `rows.check`.
        """
        rows.check(checked.inputs, capacity)
        self.request = request
        self.of_list = False  # whether the caller waits for the result alone, and cannot cancel it
        self.controls = rows.Controls.of(checked.inputs)
        self.length = int(checked.inputs.lengths[0])  # tokens, with the prompt
        self._checked, self._place, self._capacity = checked, place, capacity
        self._begin = self.length
        stopping = checked.inputs.stopping
        self._least = 0 if stopping.min_new_tokens is None else int(stopping.min_new_tokens[0])
        self._stop = [string.encode() for string in checked.stop[0]]
        self._end = b""  # of the text, where a stop string may have begun
        self._detokenizer = None
        if checked.tokenizer is not None:
            self._token_bytes = token_bytes(checked.tokenizer)
            self._detokenizer = Detokenizer(checked.tokenizer, checked.stop[0])

    @functools.cached_property
    def row(self) -> rows.Row:
        """The arrays of the request."""
        return rows.Row.of(self._checked.inputs, self._place, self._checked.config.decoder.vocab_size, self._capacity)

    def read(self, tokens: np.ndarray, length: int, done: bool) -> New:
        """Reads a text up to its end.

        Args:
          tokens: [C] int32, of the row.
          length: how many of them are the text.
          done: whether no more will come.
        """
        end = self._find_end(tokens[self.length : length])
        ended = done or end is not None
        new = tokens[self.length : length][:end]
        self.length += len(new)
        text = None if self._detokenizer is None else self._detokenizer.feed(new.tolist(), last=ended)
        return New(new, text, ended)

    def generation(self, tokens: np.ndarray, accepted: np.ndarray, logprobs: Any) -> Generation:
        """Returns the result of a text that has ended, given arguments of `results.assemble`."""
        return results.assemble(tokens, np.array([self.length]), accepted, logprobs, self._checked)

    def _find_end(self, new: np.ndarray) -> int | None:
        """Returns the number of new tokens up to the one that completes a stop string; None if none does."""
        if not self._stop:
            return None
        longest = max(map(len, self._stop))
        for number, token in enumerate(new.tolist(), start=1):
            added = self._token_bytes[token]
            text = self._end + added
            self._end = text[-longest:]
            is_early = self.length - self._begin + number < self._least
            if not is_early and find_stop(text, len(text) - len(added), self._stop) is not None:
                return number
        return None


def split(checked: checked_lib.Request, index: int) -> checked_lib.Request:
    """Returns the arguments of one sequence of a batch. A key for all sequences stays one."""
    inputs, own = checked.inputs, slice(index, index + 1)
    of_batch = inputs.prompts, inputs.lengths, inputs.sampling, inputs.stopping
    prompts, lengths, sampling, stopping = jax.tree.map(lambda array: array[own], of_batch)
    key = inputs.key
    if key.ndim:
        data = np.asarray(jax.random.key_data(key))[index]  # on the host: a slice on the device compiles a program
        key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
    inputs = dataclasses.replace(
        inputs, prompts=prompts, lengths=lengths, sampling=sampling, stopping=stopping, key=key
    )
    return dataclasses.replace(checked, inputs=inputs, stop=checked.stop[index : index + 1])
