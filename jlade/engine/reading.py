"""Prompts are read from the longest beginning that an earlier text has left: alone, or beside the steps of rows.

A chunk of one prompt is read by a program of its own. Rows read their prompts in the steps of the others. A pass then
has a chunk of each row, also of those that make steps, for which an accelerator hardly takes longer than for the steps.
On CPUs, whose passes take as long as their tokens, prompts are read alone.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jlade import mesh as mesh_lib
from jlade.decoding.sampling import LogProbs
from jlade.decoding.state import DecodeConfig, DecodeState, Prefix
from jlade.engine import copies, rows, scoring
from jlade.engine.job import Job
from jlade.engine.pages import PagePool
from jlade.engine.prefixes import Prefixes
from jlade.engine.programs import Programs
from jlade.engine.scoring import PromptLogProbs
from jlade.generation.prompts import num_shared
from jlade.mesh import LOOKAHEAD
from jlade.models.base import Params, divisible


class Kept(NamedTuple):
    """What is kept of a text."""

    rest: Prefix  # all that does not lie in pages
    pages: list[int]


@dataclasses.dataclass
class PromptReading:
    """A request whose prompt is being read."""

    job: Job
    prefix: Prefix | None = None  # None before the first chunk, and once a row has it
    num_read: int = 0
    parting: int = 0  # tokens that it shares with another text, whose reading is kept
    scores: list[LogProbs] = dataclasses.field(default_factory=list)  # of chunks, if the request asks for them

    @property
    def tokens(self) -> np.ndarray:
        """The tokens to read, all but the last of the prompt."""
        return self.job.prompt[:-1]

    @property
    def is_done(self) -> bool:
        """Whether the prompt has been read."""
        return self.num_read == len(self.tokens)

    @property
    def until(self) -> int:
        """The tokens after which what has been read is kept."""
        return self.parting if self.num_read < self.parting else len(self.tokens)


# Where prompts are read alone
APART = frozenset({"cpu"})


def may_read_beside(config: DecodeConfig, device: jax.Device) -> bool:
    """Returns whether rows may read their prompts in the steps of the others."""
    return device.platform not in APART and mesh_lib.size(config.mesh, LOOKAHEAD) == 1


class PromptReader:
    """Reads prompts, and keeps what has been read of prompts and texts.

    Args:
      num_rows, capacity: B and C.
      memory: bytes on all devices together for what is kept; by default as many as the rows take.

    Attributes:
      capacity: C.
      num_tokens: tokens of all prompts whose reading has begun.
      num_cached: how many of these were not read, as an earlier text began with them.
      row_bytes: of what has been read in a row, on all devices together.
    """

    def __init__(
        self,
        params: Params,
        config: DecodeConfig,
        num_rows: int,
        capacity: int,
        memory: int | None,
        programs: Programs,
        pool: PagePool,
    ):
        self._params, self._config, self.capacity, self._programs = params, config, capacity, programs
        self._pool = pool
        self.num_tokens = self.num_cached = 0
        row = jax.eval_shape(self._unread)
        rest = copies.num_bytes(row)  # of all groups of devices
        self.row_bytes = rest // len(row.cache.length) + pool.row_bytes
        if memory is None:  # what does not lie in pages is kept by all groups
            memory = (rest + pool.row_bytes) * num_rows
        self._sizes = copies.sizes(capacity) if memory else []
        # A shorter beginning saves no pass over the weights.
        self._least = config.chunks[-1][0]

        def prefixes_of(group: int) -> Prefixes[Kept]:
            return Prefixes(
                memory // pool.num_groups,
                least=self._least,
                divisible=divisible(row.cache),
                on_drop=lambda kept: pool.drop(kept.pages, group),
            )

        self._prefixes = [prefixes_of(group) for group in range(pool.num_groups)]
        pool.make_room = lambda group: self._prefixes[group].drop_oldest()

    def choose(self, job: Job, groups: Sequence[int]) -> int:
        """Returns the one of these groups of devices that has most of a prompt, and of equal ones most free pages."""
        if len(groups) == 1:  # without a search of all that is kept
            return groups[0]
        served = {group: self._prefixes[group].num_served(job.prompt[:-1], job.prefix_key) for group in groups}
        return max(groups, key=lambda group: (served[group], self._pool.num_free(group)))

    def begin(self, job: Job) -> PromptReading | None:
        """Returns the reading of a prompt with what is kept of its beginning; None if there are too few pages."""
        reading, prefixes = PromptReading(job), self._prefixes[job.group]
        # Tokens that are not read have no log-probabilities.
        kept, reading.num_read = (None, 0) if job.scores_prompt else prefixes.find(reading.tokens, job.prefix_key)
        shared = [] if kept is None else self._pool.share(kept.pages, reading.num_read, job.group)
        if shared is None or not self._pool.grow(shared, job.length, job.group):
            # The pages of what is kept may be those that are missing; room was made of all else.
            self._pool.drop(shared or [], job.group)
            kept, reading.num_read, shared = None, 0, []
            if not self._pool.grow(shared, job.length, job.group):
                return None
        job.pages = shared
        if kept is None:
            reading.prefix = self._unread()
        else:
            reading.prefix = copies.restore(self._params, kept.rest, reading.num_read, self._config, self.capacity)
        reading.parting = prefixes.parting(reading.tokens, job.prefix_key)
        job.request.num_cached = reading.num_read
        self.num_tokens += job.length
        self.num_cached += reading.num_read
        return reading

    def read(self, reading: PromptReading) -> None:
        """Reads a chunk of a prompt that no row reads."""
        assert reading.prefix is not None
        row, until = reading.job.row, reading.until
        pool, job = self._pool, reading.job
        cache = pool.attach(reading.prefix.cache, {job.group: job.pages})
        if job.scores_prompt:
            reading.scores.append(scoring.score(self._params, cache, row.inputs.prompts, until, self._config))
        prefix = dataclasses.replace(reading.prefix, cache=cache)
        prefix, num_read = rows.read(self._params, prefix, row, reading.num_read, until, self._config)
        reading.prefix = dataclasses.replace(prefix, cache=pool.detach(prefix.cache))
        self._advance(reading, num_read, reading.prefix, 0)
        if reading.is_done and reading.scores:
            reading.job.request.prompt_logprobs = PromptLogProbs.join(reading.scores, reading.job.num_alternatives)

    def advance(self, reading: PromptReading, num_read: int, state: DecodeState, index: int) -> None:
        """Takes note of the tokens that a row has read."""
        self._advance(reading, num_read, copies.prefix_of(state, self._config), index)

    def _advance(self, reading: PromptReading, num_read: int, prefix: Prefix, index: int) -> None:
        until, reading.num_read = reading.until, num_read
        if num_read == until:
            self._keep(reading.job, reading.tokens[:until], prefix, index)

    def is_read(self, job: Job, readings: Iterable[PromptReading]) -> bool:
        """Returns whether a beginning of a prompt is being read that will be kept: it need not be read again."""
        tokens = job.prompt[:-1]
        alike = (other for other in readings if other.job.prefix_key == job.prefix_key)
        shared = ((num_shared(tokens, other.tokens), other.job.request.num_cached) for other in alike)
        return bool(self._sizes) and any(number > max(self._least - 1, cached) for number, cached in shared)

    def keep_row(self, job: Job, state: DecodeState, index: int, text: np.ndarray) -> None:
        """Keeps the text of a row, for a prompt that continues it: all but its last token, which has not been read."""
        self._keep(job, text[:-1], copies.prefix_of(state, self._config), index)

    def clear(self) -> None:
        """Drops all prefixes."""
        for prefixes in self._prefixes:
            prefixes.clear()

    def _unread(self) -> Prefix:
        return rows.unread(self._params, config=self._config, capacity=self.capacity)

    def _keep(self, job: Job, tokens: np.ndarray, prefix: Prefix, index: int) -> None:
        kept = self._prefixes[job.group]
        if kept.is_new(tokens, job.prefix_key) and self._programs.may_keep(len(prefix.cache.length)):
            size = next(size for size in self._sizes if size >= len(tokens))
            rest = copies.keep(self._params, prefix, index, size, self._config)
            pages = self._pool.keep(job.pages, len(tokens), job.group)
            num_bytes = copies.num_bytes(rest) + len(pages) * self._pool.page_bytes
            kept.add(tokens, job.prefix_key, Kept(rest, pages), num_bytes)
