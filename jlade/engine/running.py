"""The requests that run: the rows of one decode state, which has as few rows as hold them."""

import collections
import time
from collections.abc import Collection, Mapping

import numpy as np

from jlade.constraints.tokens import Table
from jlade.decoding.state import DecodeConfig
from jlade.engine import rows
from jlade.engine.job import Job
from jlade.engine.pages import PagePool
from jlade.engine.programs import Kind, Programs
from jlade.engine.reading import PromptReading
from jlade.engine.rows import EngineState
from jlade.engine.width import Width
from jlade.generation.prompts import HostArray
from jlade.models.base import Params

MORE = 2  # plain steps in the place of one that may accept several tokens


class Running:
    """Requests in the rows of a decode state. A step takes time for each row of its state, with a request or without.

    Args:
      widths: of the steps of a state, by its number of rows. There are states of these sizes alone.

    Attributes:
      jobs: the requests, by their rows.
      readings: of the requests whose rows read their prompts.
      state: None before the first request.
      min_rows: rows of the state, at least.
    """

    def __init__(
        self, params: Params, config: DecodeConfig, widths: Mapping[int, Width], programs: Programs, pool: PagePool
    ):
        self._params, self._config, self._widths, self._programs = params, config, widths, programs
        self._pool = pool
        self.clear()
        self.min_rows = 1

    def clear(self) -> None:
        """Forgets all requests, and the state with its pages."""
        self._pool.clear()
        self.jobs: dict[int, Job] = {}
        self.readings: dict[Job, PromptReading] = {}
        self._tables: dict[int, Table] = {}  # of the grammars that rows have, also from requests that have ended
        self.state: EngineState | None = None
        self._stepped: EngineState | None = None  # the state after the last steps, if no row read in them
        self._num_steps: HostArray = np.zeros(0, np.int32)  # of its rows

    @property
    def is_lost(self) -> bool:
        """Whether a failed program has taken the pages with it."""
        return self._pool.is_lost

    def may_take(self) -> bool:
        """Returns whether the steps of another request beside those that run are there."""
        return self._programs.may_step(self._number(1)) and (not self.readings or self.may_read())

    def may_read(self) -> bool:
        """Returns whether the steps in which another request reads its prompt are there."""
        return self._programs.find(self._number(1), "reading") is not None

    def insert(self, reading: PromptReading) -> None:
        """Puts a request into a row, which reads what is left of its prompt."""
        prefix, job = reading.prefix, reading.job
        assert prefix is not None
        state, row = self._free_row(job)
        self.state = rows.insert(state, prefix, job.row, row, self._config)
        self.state = self._put_table(self.state, job, row)
        self.jobs[row] = job
        if not reading.is_done:
            reading.prefix, self.readings[job] = None, reading

    def take_out(self, job: Job) -> None:
        """Takes a request out of its row, and all that it has there to the host."""
        assert self.state is not None
        row = next(row for row, other in self.jobs.items() if other is job)
        state = rows.take_out(self.state, row, self._config)
        job.taken = state, self._pool.take_out(job.pages, job.group), self.readings.pop(job, None)
        self._pool.drop(job.pages, job.group)
        self.state, job.pages = rows.end(self.state, {row}), []
        job.request.num_taken_out += 1
        del self.jobs[row]

    def put_in(self, job: Job) -> bool:
        """Puts a request that was taken out into a row; returns whether there are the pages for it, and one more."""
        if not self._pool.grow(job.pages, min(job.max_length, job.length + self._pool.page_size), job.group):
            return False
        (taken, contents, reading), job.taken = job.taken, None
        state, row = self._free_row(job)
        state = self._put_table(state, job, row)
        self.state = rows.put_in(state, taken, row, self._config)
        self._pool.put_in(contents, job.pages, job.group)
        self.jobs[row] = job
        if reading is not None:
            self.readings[job] = reading
        return True

    def release(self, job: Job) -> None:
        """Takes its pages from a request that has ended."""
        self._pool.drop(job.pages, job.group, is_spoiled=not job.is_sound)
        job.pages = []

    def grow(self, job: Job, max_steps: int) -> bool:
        """Gives a request the pages for the tokens of steps; returns whether there were enough."""
        added = max_steps * max(self._config.lookahead.max_accepted, MORE)  # `MORE` steps of one token each
        most = min(job.max_length, job.length + added)
        return self._pool.grow(job.pages, most, job.group)

    @property
    def usage(self) -> float:
        """The share of the pages that requests hold, or that of the rows if there are no pages."""
        jobs = list(self.jobs.values())
        if not self._pool.is_used:
            return len(jobs) / max(self._widths)
        return len({(job.group, page) for job in jobs for page in list(job.pages)}) / self._pool.num_pages

    @property
    def free_groups(self) -> list[int]:
        """The groups of devices along `data` that have a free row."""
        number = self._pool.num_groups
        if number == 1:
            return [0]
        rows_per_group = max(self._widths) // number
        taken = collections.Counter(row // rows_per_group for row in self.jobs)
        return [group for group in range(number) if taken[group] < rows_per_group]

    def _free_row(self, job: Job) -> tuple[EngineState, int]:
        """Returns the state with a free row for a request, in its group of devices, and its place."""
        if self.state is None:
            self.state = self._programs.empty(self._params, job.row)
        state = self._resize(self._programs.get(self._number(1)))
        rows_per_group = len(state.rows.done) // self._pool.num_groups
        of_group = range(job.group * rows_per_group, (job.group + 1) * rows_per_group)
        return state, next(row for row in of_group if row not in self.jobs)

    def _put_table(self, state: EngineState, job: Job, row: int) -> EngineState:
        """Gives a row the table of its request's grammar, if it has one."""
        if job.table is None:
            return state
        state = rows.put_table(state, job.table, row, self._config, is_there=self._tables.get(row) is job.table)
        self._tables[row] = job.table
        return state

    def keep(self, jobs: Collection[Job | None]) -> None:
        """Ends all requests but these."""
        ended = {row for row, job in self.jobs.items() if job not in jobs}
        if ended:
            assert self.state is not None
            self.state = rows.end(self.state, ended)
            for row in ended:
                self.release(self.jobs[row])
            self.jobs = {row: job for row, job in self.jobs.items() if row not in ended}
            self.readings = {job: reading for job, reading in self.readings.items() if job in jobs}

    def step(self, max_steps: int, another: bool) -> rows.RowView:
        """Makes steps up to the end of a request, and returns what the host reads of the rows.

        Args:
          max_steps: most steps that accept drafts, which hold up others as long as more of plain ones.
          another: whether another request is about to be inserted: it keeps its row, and the device has other work than
            these steps.
        """
        kind: Kind = "reading" if self.readings else "steps"
        programs = self._programs
        state = self._resize(programs.find(self._number(another), kind) or programs.get(self._number(), kind))
        goes_on = state is self._stepped and kind == "steps"
        num_rows, begin, stop_at = len(state.rows.done), time.perf_counter(), len(self.jobs) - 1
        width, config = self._widths[num_rows], self._config
        stands_in = kind == "steps" and programs.stands_in(num_rows)
        rests = bool(goes_on and not another and width.rests) and programs.may_rest(num_rows)
        before = self._pool.attach_to(state.whole(), {row: job.pages for row, job in self.jobs.items()})
        if stands_in or rests:
            max_steps = MORE * max_steps if stands_in else min(MORE * max_steps, width.rests)
            after = rows.rest(self._params, before, config, max_steps, stop_at)
        else:
            until = self._until(num_rows) if kind == "reading" else None
            before = width.put(before)
            after = rows.run(self._params, before, config, max_steps, stop_at, until)
        self.state = state.after(self._pool.detach_from(after))
        self._stepped = self.state if kind == "steps" and not stands_in else None
        if not (stands_in or rests):
            width.keep(after.pace)
        shown = rows.show(self.state.rows, any(job.logprobs for job in self.jobs.values()))
        if rests:
            width.rest(int(np.max(shown.num_steps - self._num_steps)))
        self._num_steps = shown.num_steps
        if goes_on and not another:
            width.learn(int(shown.num_tokens[[*self.jobs]].max()), time.perf_counter() - begin)
        return shown

    def _until(self, num_rows: int) -> HostArray:
        """Returns `until` of `run_steps`."""
        until: HostArray = np.zeros(num_rows, np.int32)
        for row, job in self.jobs.items():
            if job in self.readings:
                until[row] = self.readings[job].until + 1
        return until

    def _number(self, others: int = 0) -> int:
        """Returns the rows that the requests and others need."""
        return max(len(self.jobs) + others, self.min_rows)

    def _resize(self, num_rows: int) -> EngineState:
        """Gives the state so many rows, and returns it."""
        state, sizes = self.state, sorted(self._widths)
        assert state is not None
        wanted = sizes.index(num_rows)
        # It moves through neighbouring sizes, so that there are few programs.
        while (place := sizes.index(len(state.rows.done))) != wanted:
            size = sizes[place + 1 if place < wanted else place - 1]
            state = rows.resize(state, [*self.jobs, *[-1] * (size - len(self.jobs))], self._config)
            self._tables = {place: self._tables[row] for place, row in enumerate(self.jobs) if row in self._tables}
            self.jobs = dict(enumerate(self.jobs.values()))
        self.state = state
        return state
