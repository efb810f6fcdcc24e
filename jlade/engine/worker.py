"""The thread of an engine: rounds, in which prompts are read and steps are made, as long as there are requests."""

import atexit
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import jax

from jlade.decoding.state import DecodeConfig
from jlade.engine import rows
from jlade.engine.job import Job
from jlade.engine.programs import Programs
from jlade.engine.reading import PromptReader, PromptReading
from jlade.engine.running import Running
from jlade.engine.scheduler import Scheduler
from jlade.generation import memory, results

# Steps of a round. A request that is cancelled keeps its row for no more, and the reading of a prompt waits as long.
STEPS = 2
MORE_STEPS = 16  # where nobody can wish for a shorter round, unless a request comes; a row that ends ends it

Context = Callable[[], contextlib.AbstractContextManager[None]]


class Worker:
    """A thread that gives requests their rows and makes rounds, from the first request until it is closed.

    Args:
      scheduler, reader, running, programs, config: of the engine. The thread alone uses `reader` and `running`.
      device: one of those that it runs on.
      beside: whether rows read their prompts in the steps of the others.
      answered: returns contexts in which programs run; see `jlade.decoding.ahead`.

    Attributes:
      closed: whether `close` was called.
    """

    def __init__(
        self,
        scheduler: Scheduler[Job],
        reader: PromptReader,
        running: Running,
        programs: Programs,
        config: DecodeConfig,
        device: jax.Device,
        beside: bool,
        answered: Context,
    ):
        self._reader, self._running, self._programs, self._config = reader, running, programs, config
        self._device, self._beside, self._answered = device, beside, answered
        self._reading: PromptReading | None = None
        self._changed = threading.Condition()  # its lock guards the next three fields
        self._scheduler = scheduler
        self._thread: threading.Thread | None = None
        self.closed = False

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted, and the thread that takes them has not died."""
        return not self.closed and (self._thread is None or self._thread.is_alive())

    @property
    def num_running(self) -> int:
        """Number of requests that have rows."""
        with self._changed:
            return sum(job is not None for job in self._scheduler.rows)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a row."""
        with self._changed:
            return self._scheduler.num_waiting

    def add(self, job: Job, priority: int) -> None:
        """Adds a request to those that wait, and starts the thread. One of a list waits until it may be added.

        Raises:
          queue.Full: as many requests wait as may wait.
          RuntimeError: the engine is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.closed or not (job.of_list and self._scheduler.is_full))
            if self.closed:
                raise RuntimeError("the engine is closed; it accepts no requests")
            self._scheduler.add(job, priority)
            if self._thread is None:
                atexit.register(self.close)  # a program that runs at the exit of Python may crash
                self._thread = threading.Thread(target=self._work, name="jlade engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def remove(self, job: Job) -> None:
        """Removes a request that waits. One with a row loses it at the end of the round."""
        with self._changed:
            if job not in self._scheduler.rows:
                self._scheduler.remove(job)
            self._changed.notify_all()

    def want_programs(self) -> None:
        """Tells the programs which of them requests wait for."""
        with self._changed:
            self._programs.want_nothing()
            for job in self._scheduler.placeable:
                self._may_run(job)

    def wake(self) -> None:
        """Lets the thread look for requests that may run: a program that they wait for may be there."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Cancels all requests and ends the thread. Afterwards no requests are accepted."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        atexit.unregister(self.close)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # What follows runs in the thread.

    def _work(self) -> None:
        while self._has_work():
            try:
                with memory.explained(self._device, self._explain), self._answered():
                    try:
                        self._round()
                    except Exception:
                        self._forget()
                        raise
            except Exception as error:
                for job in filter(None, self._scheduler.rows):
                    job.request._end(error)
                self._free_rows()
        with self._changed:
            for job in self._scheduler.clear():
                job.request._end(CancelledError("the engine was closed"))
        self._forget()

    def _explain(self, free: int) -> str:
        return memory.of_rows(self._reader.row_bytes, len(self._scheduler.rows), self._reader.capacity, free)

    def _has_work(self) -> bool:
        """Waits for requests that may run, and returns whether there are any; otherwise the engine is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.closed or any(self._scheduler.rows) or self._scheduler.can_place(self._may_run)
            )
            return not self.closed

    def _forget(self) -> None:
        """Drops the state, which a failed program may have taken with it, and all prefixes."""
        self._reader.clear()
        self._running.clear()
        self._reading = None

    def _round(self) -> None:
        """Reads a chunk of a prompt, of a list whole prompts, and makes steps of the rows that run or read."""
        self._free_rows()
        self._place()
        while self._read() and self._is_patient():
            self._place()
        if self._running.jobs:
            self._step()
        self._free_rows()

    def _free_rows(self) -> None:
        """Takes requests that have ended out of their rows."""
        with self._changed:
            for job in self._scheduler.rows:
                if job is not None and job.request.done:
                    self._scheduler.remove(job)
            self._running.keep(self._scheduler.rows)  # together, as `_may_run` looks at both
            self._changed.notify_all()

    def _is_patient(self) -> bool:
        """Whether nobody watches the texts that run, so that they may wait for prompts that are read."""
        return all(job.of_list for job in self._scheduler.rows if job is not None)

    def _place(self) -> None:
        """Gives rows to requests that wait: to those that read beside others, up to one whose prompt is read alone."""
        while self._reading is not None or self._begin():
            reading = self._reading
            if reading is None:  # it failed, or goes on with its text
                continue
            if not (reading.is_done or self._reads_beside(reading.job)):
                break
            self._reading = None
            if reading.job.request.done:
                self._running.release(reading.job)
            else:
                self._running.insert(reading)

    def _begin(self) -> bool:
        """Begins to read the prompt of the next request that may run; returns whether there is one and a row."""
        with self._changed:
            placed = self._scheduler.place(self._may_run)
            self._changed.notify_all()
        if placed is None:
            return False
        job = placed[1]
        job.group = self._reader.choose(job, self._running.free_groups)
        has_pages = True
        with self._guarded(job):
            if job.taken is not None:
                has_pages = self._running.put_in(job)
            else:
                self._reading = self._reader.begin(job)
                has_pages = self._reading is not None
                job.request.started = time.monotonic()
        if not has_pages:  # nor for those behind it, which would take them for ever
            with self._changed:
                self._scheduler.put_back(job)
        return has_pages

    def _read(self) -> bool:
        """Reads a chunk of a prompt alone, at the end into its row; returns whether there was one to read."""
        reading = self._reading
        if reading is None:
            return False
        if not reading.job.request.done:
            with self._guarded(reading.job):
                self._reader.read(reading)
        if reading.job.request.done:  # failed or cancelled
            self._running.release(reading.job)
            self._reading = None
        elif reading.is_done:
            self._running.insert(reading)
            self._reading = None
        return True

    @contextlib.contextmanager
    def _guarded(self, job: Job) -> Iterator[None]:
        """Ends a request whose prompt cannot be read."""
        try:
            with memory.explained(self._device, lambda _: "to read a prompt takes a row's memory, in addition"):
                yield
        except Exception as error:
            job.request._end(error)
            if self._running.is_lost:
                raise
            self._reader.clear()
            self._running.release(job)

    def _reads_beside(self, job: Job) -> bool:
        """Whether a row reads a prompt in the steps of others. Nobody waits for large chunks of a lone prompt."""
        if not self._beside or job.scores_prompt or not self._running.may_read():
            return False
        with self._changed:
            return bool(self._running.jobs) or self._scheduler.can_place(self._may_run)

    def _may_run(self, job: Job) -> bool:
        """Whether a request that waits may run: its programs are there, otherwise wanted, and so is what it shares."""
        if not self._running.may_take() or (job.scores_prompt and not self._programs.may_score()):
            return False
        if not self._beside or job.scores_prompt:
            return True
        reading = [] if self._reading is None else [self._reading]
        return not self._reader.is_read(job, [*self._running.readings.values(), *reading])

    def _step(self) -> None:
        """Makes steps of the rows that run, up to the end of one, and hands on what they added."""
        with self._changed:
            reads = self._reading is not None or self._scheduler.can_place(self._may_run)
        max_steps = MORE_STEPS if self._is_patient() and not reads else STEPS
        self._give_pages(max_steps)
        if not self._running.jobs:  # a prompt that is read alone has the pages
            return
        shown = self._running.step(max_steps, another=reads)
        state = self._running.state
        assert state is not None
        for index, job in self._running.jobs.items():
            if job in self._running.readings:
                self._advance(job, int(shown.num_tokens[index]) - 1, index)
                continue
            try:
                piece = job.read(shown.row(index))
                if piece.generation is not None and job.with_statistics:
                    statistics = results.statistics(rows.take(state.rows, index), self._config.lookahead)
                    generation = dataclasses.replace(piece.generation, statistics=statistics)
                    piece = dataclasses.replace(piece, generation=generation)
                job.request._add(piece)
                # Texts of a list are seldom continued. An error from here on changes no result.
                out = piece.generation
                if out is not None and out.finish_reason[0] not in results.FAILURES and not job.of_list:
                    self._reader.keep_row(job, state.rows, index, shown.tokens[index, : shown.num_tokens[index]])
            except Exception as error:
                job.request._end(error)

    def _give_pages(self, max_steps: int) -> None:
        """Gives every row the pages for its next tokens. While there are too few, the last in the order lose theirs."""
        with self._changed:
            order = [job for job in self._scheduler.placed if job in self._running.jobs.values()]
        while order:
            if self._running.grow(order[0], max_steps):
                del order[0]
                continue
            job = next(job for job in reversed(order) if job.group == order[0].group)
            order.remove(job)
            self._running.take_out(job)
            with self._changed:
                self._scheduler.put_back(job)

    def _advance(self, job: Job, num_read: int, index: int) -> None:
        """Takes note of the tokens that a row has read of its prompt."""
        reading, state = self._running.readings[job], self._running.state
        assert state is not None
        try:
            self._reader.advance(reading, num_read, state.rows, index)
        except Exception as error:
            job.request._end(error)
        if reading.is_done:
            del self._running.readings[job]
