"""A request as the engine sees it: its arrays, and its text so far."""

import dataclasses
import functools
from typing import Any

import numpy as np

from jlade.engine import rows
from jlade.engine.remembered import Compartment
from jlade.engine.request import Request
from jlade.generation import results
from jlade.generation.request import DecodeRequest
from jlade.generation.results import FAILURES, Generation, Piece
from jlade.generation.text import Detokenizer, find_stop, token_bytes


class Job:
    """A request of one sequence in its row.

    Stop strings are searched here, in the text that the host has anyway, and not by an automaton on the device: a table
    of all tokens for the strings of each row is large, and to build it takes longer than many requests. After the text
    has ended, the row makes steps until its round ends; the result leaves these out.
    """

    def __init__(self, checked: DecodeRequest, index: int, request: Request, size: rows.Size, shared: dict[str, Any]):
        """Makes the job of sequence `index` of a batch that `rows.check` accepts; `request` is the caller's side."""
        self.request = request
        self.of_list = False  # whether the caller waits for the result alone, and cannot cancel it
        self.scores_prompt = False  # whether the log-probabilities of the prompt are asked for
        self.group = 0  # of devices along `data`, whose row it has
        self.pages: list[int] = []  # of its text, in that group
        self.taken: Any = None  # what `Running.take_out` has taken out of its row
        self.compartment: Compartment | None = None  # of earlier texts, None for a request that sees none
        self.prefix_key = ""  # of the texts with which it may share what has been read
        self._place = 0 if checked.inputs.key.ndim else index  # in the batch whose key it shares
        inputs, stop = checked.inputs.rows(np.array([index])), checked.stop[index : index + 1]
        tables = None if checked.tables is None else checked.tables[index : index + 1]
        checked = dataclasses.replace(checked, inputs=inputs, stop=stop, tables=tables)
        self.logprobs, self.num_alternatives = checked.config.logprobs, checked.config.top_logprobs
        self.with_statistics = checked.with_statistics
        self.table = None if tables is None else tables[0]  # of its grammar
        self.length = int(checked.inputs.lengths[0])  # tokens, with the prompt
        self._checked, self._size, self._shared = checked, size, shared
        self._begin, self._num_steps = self.length, 0
        self.prompt = np.asarray(checked.inputs.prompts[0, : self.length])  # its tokens
        stopping = checked.inputs.stopping
        self.max_length = self.length + int(stopping.max_new_tokens[0])  # tokens of the text, with the prompt
        self._min_new_tokens = 0 if stopping.min_new_tokens is None else int(stopping.min_new_tokens[0])
        self._stop = [string.encode() for string in checked.stop[0]]
        self._end = b""  # of the text, where a stop string may have begun
        self._state = 0  # of the text in its table, if that has tagged parts
        self._has_stopped = False  # by a stop string
        self._detokenizer = None
        if checked.tokenizer is not None:
            self._token_bytes = token_bytes(checked.tokenizer)
            self._detokenizer = Detokenizer(checked.tokenizer, checked.stop[0])

    @property
    def is_sound(self) -> bool:
        """Whether it has ended as it should: all numbers that it has left in its pages are finite."""
        future = self.request._future
        return future.done() and future.exception() is None and future.result().finish_reason[0] not in FAILURES

    @functools.cached_property
    def row(self) -> rows.Row:
        """The arrays of the request."""
        inputs, vocab_size = self._checked.inputs, self._checked.config.decoder.vocab_size
        if self.compartment is not None and "prediction" not in inputs.sources:
            remembered, key, _ = self.compartment
            expected = remembered.find(key, self.prompt, self._size.expected)
            inputs = dataclasses.replace(inputs, sources={"prediction": expected})
        return rows.Row.of(inputs, self._place, vocab_size, self._size, self._shared, self.logprobs)

    def read(self, row: rows.RowView) -> Piece:
        """Returns the tokens that steps added, up to the end of the text, given its row after them."""
        begin, end = self.length, int(row.num_tokens[0])
        new = row.tokens[0, begin:end]
        length = self._find_end(new)
        new = new[:length]
        ended = bool(row.done[0]) or length is not None
        self.length += len(new)
        steps = row.accepted[:, self._num_steps : int(row.num_steps[0])]
        accepted = results.cut(steps, np.array([len(new)]))[0]
        drafted = row.num_drafted[0, self._num_steps : self._num_steps + len(accepted)]
        self.request.num_drafted += int(drafted[accepted > 0].sum())
        self._num_steps += len(accepted)
        if ended and self.compartment is not None and self.compartment.keeps:  # before the caller may ask again
            remembered, key, _ = self.compartment
            remembered.add(key, row.tokens[0, : self.length], self._begin)
        logprobs = row.logprobs if self.logprobs else None
        if logprobs is not None:
            number = self.num_alternatives
            logprobs = logprobs.replace(top=logprobs.top[..., :number], top_tokens=logprobs.top_tokens[..., :number])
        return Piece(
            tokens=new,
            text=None
            if self._detokenizer is None
            else self._detokenizer.feed(new.tolist(), last=ended, cuts=self._has_stopped),
            accepted=accepted[accepted > 0],
            **results.of_piece(logprobs, slice(begin, self.length)),
            generation=self._generation(row, logprobs) if ended else None,
        )

    def _generation(self, row: rows.RowView, logprobs: Any) -> Generation:
        ends = np.array([self.length])
        checked = self._checked if self._has_stopped else dataclasses.replace(self._checked, stop=((),))
        return results.assemble(row.tokens, ends, row.num_steps, row.accepted, logprobs, checked)

    def _find_end(self, new: np.ndarray) -> int | None:
        """Returns the number of new tokens up to the one that completes a stop string; None if none does."""
        if not self._stop:
            return None
        longest = max(map(len, self._stop))
        for number, token in enumerate(new.tolist(), start=1):
            if self._is_in_tags(token):
                self._end = b""
                continue
            added = self._token_bytes[token]
            text = self._end + added
            self._end = text[-longest:]
            is_early = self.length - self._begin + number < self._min_new_tokens
            if not is_early and find_stop(text, len(text) - len(added), self._stop) is not None:
                self._has_stopped = True
                return number
        return None

    def _is_in_tags(self, token: int) -> bool:
        """Whether the next token is one of a tagged part of the grammar, where the text may not end."""
        if self.table is None or not self.table.is_tagged:
            return False
        was_outside = self.table.may_end(self._state)
        self._state = self.table.advance(self._state, token)
        return not (was_outside and self.table.may_end(self._state))
