"""Prompts are read one at a time, each from the longest beginning that an earlier text has left."""

import dataclasses

import jax
import numpy as np

from jlade.decoding.sampling import LogProbs
from jlade.decoding.state import DecodeConfig, DecodeState, Prefix
from jlade.engine import copies, rows, scoring
from jlade.engine.job import Job
from jlade.engine.prefixes import Prefixes
from jlade.engine.programs import Programs
from jlade.engine.scoring import PromptLogProbs
from jlade.models.base import Params, divisible


@dataclasses.dataclass
class PromptReading:
    """A request whose prompt is being read."""

    job: Job
    prefix: Prefix | None = None
    num_read: int = 0
    parting: int = 0  # tokens that it shares with another text, whose reading is kept
    scores: list[LogProbs] = dataclasses.field(default_factory=list)  # of chunks, if the request asks for them

    @property
    def tokens(self) -> np.ndarray:
        """The tokens to read, all but the last of the prompt."""
        return np.asarray(self.job.row.inputs.prompts[0, : self.job.length - 1])

    @property
    def is_done(self) -> bool:
        """Whether the prompt has been read."""
        return self.prefix is not None and self.num_read == self.job.length - 1


class PromptReader:
    """Reads prompts, and keeps what has been read of prompts and texts.

    Args:
      params, config: of the engine.
      num_rows, capacity: B and C.
      memory: bytes on all devices together for what is kept; by default as many as the rows take.
      programs: those that are there.

    Attributes:
      capacity: C.
      num_tokens: tokens of all prompts whose reading has begun.
      num_cached: how many of these were not read, as an earlier text began with them.
      row_bytes: of what has been read in a row, on all devices together.
    """

    def __init__(
        self, params: Params, config: DecodeConfig, num_rows: int, capacity: int, memory: int | None, programs: Programs
    ):
        self._params, self._config, self.capacity, self._programs = params, config, capacity, programs
        self.num_tokens = self.num_cached = 0
        row = jax.eval_shape(self._unread)
        self.row_bytes = copies.num_bytes(row) // len(row.cache.length)
        if memory is None:
            memory = self.row_bytes * num_rows
        self._sizes = copies.sizes(capacity) if memory else []
        # A shorter beginning saves no pass over the weights.
        least, longest = config.chunks[-1][0], divisible(row.cache)
        self._prefixes: Prefixes[Prefix] = Prefixes(memory, least=least, divisible=longest)

    def read(self, reading: PromptReading) -> None:
        """Reads a chunk of a prompt."""
        tokens = reading.tokens
        if reading.prefix is None:
            # Tokens that are not read have no log-probabilities.
            kept, reading.num_read = (None, 0) if reading.job.scores_prompt else self._prefixes.find(tokens)
            reading.prefix = self._unread() if kept is None else self._restore(kept, reading.num_read)
            reading.parting = self._prefixes.parting(tokens)
            reading.job.request.num_cached = reading.num_read
            self.num_tokens += reading.job.length
            self.num_cached += reading.num_read
        if reading.num_read < len(tokens):
            until = reading.parting if reading.num_read < reading.parting else len(tokens)
            row = reading.job.row
            if reading.job.scores_prompt:
                reading.scores.append(
                    scoring.score(self._params, reading.prefix.cache, row.inputs.prompts, until, self._config)
                )
            reading.prefix, reading.num_read = rows.read(
                self._params, reading.prefix, row, reading.num_read, until, self._config
            )
            if reading.num_read == until:
                self._keep(tokens[:until], reading.prefix, 0)
            if reading.is_done and reading.scores:
                reading.job.request.prompt_logprobs = PromptLogProbs.join(reading.scores, reading.job.num_alternatives)

    def keep_row(self, state: DecodeState, index: int, text: np.ndarray) -> None:
        """Keeps the text of a row, for a prompt that continues it: all but its last token, which has not been read."""
        self._keep(text[:-1], copies.prefix_of(state, self._config), index)

    def clear(self) -> None:
        """Drops all prefixes."""
        self._prefixes.clear()

    def _unread(self) -> Prefix:
        return rows.unread(self._params, config=self._config, capacity=self.capacity)

    def _restore(self, kept: Prefix, length: int) -> Prefix:
        return copies.restore(self._params, kept, length, self._config, self.capacity)

    def _keep(self, tokens: np.ndarray, prefix: Prefix, index: int) -> None:
        if self._prefixes.is_new(tokens) and self._programs.may_keep(len(prefix.cache.length)):
            size = next(size for size in self._sizes if size >= len(tokens))
            kept = copies.keep(self._params, prefix, index, size, self._config)
            self._prefixes.add(tokens, kept, copies.num_bytes(kept))
