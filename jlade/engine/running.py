"""The requests that run: the rows of one decode state, which has as few rows as hold them."""

import time
from collections.abc import Collection, Mapping

from jlade.decoding.state import DecodeConfig, DecodeState, Prefix
from jlade.engine import rows
from jlade.engine.job import Job
from jlade.engine.programs import Programs, Steps
from jlade.engine.rows import Controls
from jlade.engine.width import Width
from jlade.models.base import Params


class Running:
    """Requests in the rows of a decode state. A step takes time for each row of its state, with a request or without.

    Args:
      params, config: of the engine.
      widths: of the steps of a state, by its number of rows. There are states of these sizes alone.
      programs: those that are there.

    Attributes:
      jobs: the requests, by their rows.
      state: None before the first request.
      least: rows of the state, at least.
    """

    def __init__(self, params: Params, config: DecodeConfig, widths: Mapping[int, Width], programs: Programs):
        self._params, self._config, self._widths, self._programs = params, config, widths, programs
        self.clear()
        self.least = 1

    def clear(self) -> None:
        """Forgets all requests, and the state."""
        self.jobs: dict[int, Job] = {}
        self.state: DecodeState | None = None
        self._stepped: DecodeState | None = None  # the state after the last steps

    def may_take(self, job: Job) -> bool:
        """Returns whether the steps of another request beside those that run are there."""
        return self._programs.find(self._number(1), self._controls(job)) is not None

    def insert(self, prefix: Prefix, job: Job) -> None:
        """Puts a request whose prompt has been read into a row."""
        if self.state is None:
            self.state = self._programs.empty(self._params, job.row)
        state = self._resize(self._programs.get(self._number(1), self._controls(job)))
        row = next(row for row in range(len(state.done)) if row not in self.jobs)
        self.state = rows.insert(state, prefix, job.row, row, self._config)
        if job.table is not None:
            self.state = rows.put_table(self.state, job.table, row, self._config)
        self.jobs[row] = job

    def keep(self, jobs: Collection[Job | None]) -> None:
        """Ends all requests but these."""
        ended = {row for row, job in self.jobs.items() if job not in jobs}
        if ended:
            assert self.state is not None
            self.state = rows.end(self.state, ended)
            self.jobs = {row: job for row, job in self.jobs.items() if row not in ended}

    def step(self, max_steps: int, another: bool) -> rows.Shown:
        """Makes steps up to the end of a request, and returns what the host reads of the rows.

        Args:
          max_steps: most steps.
          another: whether another request is about to be inserted: it keeps its row, and the device has other work than
            these steps.
        """
        controls, programs = self._controls(), self._programs
        steps = programs.find(self._number(another), controls) or programs.get(self._number(), controls)
        state = self._resize(steps)
        is_timed = state is self._stepped and not another
        width, begin = self._widths[len(state.done)], time.perf_counter()
        state = rows.run(self._params, width.put(state), self._config, steps.controls, max_steps, len(self.jobs) - 1)
        self.state = self._stepped = width.take(state)
        shown = rows.show(self.state, any(job.logprobs for job in self.jobs.values()))
        if is_timed:
            width.learn(time.perf_counter() - begin)
        return shown

    def _number(self, others: int = 0) -> int:
        """Returns the rows that the requests and others need."""
        return max(len(self.jobs) + others, self.least)

    def _controls(self, *others: Job) -> Controls:
        """Returns the controls that the requests and others need."""
        return max(job.controls for job in (*self.jobs.values(), *others))

    def _resize(self, steps: Steps) -> DecodeState:
        """Gives the state as many rows as the steps have, and returns it."""
        state, sizes = self.state, sorted(self._widths)
        assert state is not None
        wanted = sizes.index(steps.num_rows)
        # It moves through neighbouring sizes, so that there are few programs.
        while (place := sizes.index(len(state.done))) != wanted:
            size = sizes[place + 1 if place < wanted else place - 1]
            state = rows.resize(state, [*self.jobs, *[-1] * (size - len(self.jobs))], self._config)
            self.jobs = dict(enumerate(self.jobs.values()))
        self.state = state
        return state
