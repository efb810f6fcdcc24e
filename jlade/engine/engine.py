"""`Engine`: many requests over the rows of one decode state, each exactly as if it were alone."""

import atexit
import collections
import dataclasses
import functools
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Literal, Self, Unpack

from jax.sharding import Mesh

from jlade.config import LookaheadConfig, SamplingConfig, check_int
from jlade.decoding import sharding
from jlade.engine import job as job_lib
from jlade.engine import options as options_lib
from jlade.engine import rows, width
from jlade.engine.job import Job
from jlade.engine.options import RequestOptions
from jlade.engine.programs import Programs
from jlade.engine.reading import Reader, Reading
from jlade.engine.request import Request
from jlade.engine.rows import Controls
from jlade.engine.running import Running
from jlade.engine.scheduler import Scheduler
from jlade.engine.width import Width
from jlade.generation import lookahead as lookahead_lib
from jlade.generation import memory, results, stop_strings
from jlade.generation import request as request_lib
from jlade.generation.options import GREEDY, Options
from jlade.generation.prompts import Prompt, Prompts
from jlade.generation.results import Generation
from jlade.generation.text import Tokenizer
from jlade.mesh import device_of, transfers
from jlade.models.base import Decoder, Params

# Of a round: a request that is cancelled keeps its row for no more, and the reading of a prompt waits as long.
STEPS = 2
MORE_STEPS = 16  # of a round that nobody can wish to be shorter, unless a request comes; it ends when a row does


class Engine:
    """Decodes requests side by side, in rows. A row takes the next request as soon as its text has ended.

    A request's text is that of `jlade.generate` alone with its key, whatever else runs. With
    `verification="rejection"`, steps of adaptive width and prefixes give another text of the same distribution.

    A thread of the engine makes rounds: it reads a chunk of one prompt, and makes a few steps of all rows that run.
    Any thread may submit. Use it in a `with` statement, or call `close`.

    Args:
      params: the model's parameters, as `jlade.load` returns them.
      tokenizer: turns string prompts into tokens, and tokens into text; by default that of the parameters, see
        `jlade.load`. Without one there are token ids alone.
      max_sequences: rows, requests that are decoded at once, up to 4096. Each holds the memory of `capacity` tokens.
      capacity: most tokens of a prompt and its text; by default 4096, or as many as the model reads.
      lookahead: as in `jlade.generate`; "auto" has costs of steps for each number of rows.
      max_waiting: requests that may wait for a row.
      prefix_memory: bytes, on all devices together, in which prompts and texts are kept for the prompts that begin as
        they do; by default as many as the rows take. With 0 every prompt is read from its first token.
      max_prediction: most tokens of a prediction, at most 2^20; with 0 requests have none, and steps search for none.
      max_top_logprobs: most of `top_logprobs` that a request may ask for.
      decoder: the model that `params` belong to; needed when they are not jlade's own.
      mesh: the devices to run on, those of the parameters by default. Its axis `data` must divide the rows.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted.
    """

    def __init__(
        self,
        params: Params,
        tokenizer: Tokenizer | None = None,
        *,
        max_sequences: int = 8,
        capacity: int | None = None,
        lookahead: LookaheadConfig | Literal["auto"] | None = "auto",
        max_waiting: int = 1024,
        prefix_memory: int | None = None,
        max_prediction: int = 0,
        max_top_logprobs: int = 0,
        decoder: Decoder | None = None,
        mesh: Mesh | None = None,
    ):
        options_lib.check_sizes(max_sequences, max_waiting, prefix_memory, max_prediction)
        self.max_sequences, self._max_prediction = max_sequences, max_prediction
        self._scheduler: Scheduler[Job] = Scheduler(max_sequences, max_waiting)
        # The arguments of a batch of all rows have what the engine needs.
        prompts = [[0]] * self.max_sequences
        options = Options(
            max_new_tokens=1,
            lookahead=lookahead,
            tokenizer=tokenizer,
            prediction=prompts if max_prediction else None,
            logprobs=True,
            top_logprobs=check_int("max_top_logprobs", max_top_logprobs, 0),
            stop=(),
            decoder=decoder,
            mesh=mesh,
        )
        batch = request_lib.make(params, prompts, options)
        self._config, self._sizes = batch.config, width.sizes(self.max_sequences, batch.config.mesh)
        widths = {size: Width(batch.inputs.costs) for size in self._sizes}
        if lookahead == "auto":
            setting = lookahead_lib.with_prediction(width.choose(params, self._config, self._sizes), options)
            self._config = dataclasses.replace(self._config, lookahead=setting)
            widths = width.learned_widths(params, self._config, self._sizes)
        self._options = Options(lookahead=self._config.lookahead, tokenizer=batch.tokenizer, decoder=decoder, mesh=mesh)
        capacity = self.capacity = rows.check_capacity(capacity, self._config.decoder.max_positions)
        self._params = sharding.put_params(params, self._config.mesh)
        self._device = device_of(params, self._config.mesh)
        predicts = "prediction" in self._config.lookahead.sources
        self._size = rows.Size(capacity, max_prediction if predicts else 0, max_top_logprobs)
        self._programs = Programs(self._params, self._config, widths, self._size)
        self._reader = Reader(self._params, self._config, self.max_sequences, capacity, prefix_memory, self._programs)

        self._changed = threading.Condition()  # its lock guards the scheduler and the next two fields
        self._thread: threading.Thread | None = None
        self._closed = False
        self._usual = Controls.GREEDY  # of most requests
        # The thread's own:
        self._reading: Reading | None = None
        self._running = Running(self._params, self._config, widths, self._programs)

    @property
    def prompt_tokens(self) -> tuple[int, int]:
        """Tokens of all prompts whose reading has begun, and how many of these were not read; see `prefix_memory`."""
        return self._reader.num_tokens, self._reader.num_cached

    def warm_up(self) -> None:
        """Compiles all programs and waits for them. Afterwards nothing compiles, whatever is submitted.

        Without it a program compiles when a request first needs it: few do where all requests are of one kind.

        Raises:
          RuntimeError: the engine is closed.
          Exception: the error of a program.
        """
        for _ in self.compile():
            pass
        self._running.least = self.max_sequences  # for the memory of all rows
        self.submit([0, 0], max_new_tokens=1, with_statistics=True).result()
        self._running.least = 1

    def compile(self, usual: SamplingConfig = GREEDY) -> Iterator[int]:
        """Yields how many parts of the programs are left, and compiles one before the next number.

        From the call on, before the first number, requests wait for their programs, which compile before those that no
        request waits for; requests whose programs are there run meanwhile. A thread of its own should iterate, and does
        so until the engine is closed.

        Args:
          usual: of most requests, whose programs compile first.

        Raises:
          Exception: the error of a program, when the others are there. A request that needs this one meets it again.
        """
        checked = self._check([0, 0], {"sampling": usual, "max_new_tokens": 1})
        job = Job(job_lib.split(checked, 0), 0, Request(lambda: None), self._size)
        self._usual = job.controls
        self._programs.begin(job.row, job.controls)
        return self._compile()

    def _compile(self) -> Iterator[int]:
        error = None
        try:
            while (left := self._programs.num_left) and not self._closed:
                yield left
                with self._changed:
                    self._programs.want_nothing()
                    for job in self._scheduler.placeable:
                        self._may_run(job)
                try:
                    self._programs.compile_next()
                except Exception as of_program:
                    error = error or of_program
                self._notify()
        finally:  # also if the caller has stopped
            self._programs.end()
            self._notify()
        if error is not None:
            raise error
        yield 0

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @property
    def num_left(self) -> int:
        """Parts of the programs that `compile` has not made yet."""
        return self._programs.num_left

    @property
    def is_ready(self) -> bool:
        """Whether a usual request runs at once: `compile` has made its programs, or was not called."""
        return self._programs.find(1, self._usual) is not None

    def submit(
        self, prompt: Prompt, *, priority: int = 0, prompt_logprobs: bool = False, **options: Unpack[RequestOptions]
    ) -> Request:
        """Adds a request to those that wait, and returns it at once.

        Args:
          prompt: a string, or token ids.
          priority: requests with higher numbers get rows first, those with equal numbers in the order of arrival.
          prompt_logprobs: whether `Request.prompt_logprobs` are computed, with `top_logprobs` alternatives.
          options: `max_new_tokens`, `min_new_tokens`, `sampling`, `parse_special`, `eos_ids`, `stop`, `key`,
            `prediction`, `logprobs`, `top_logprobs` and `with_statistics` of `jlade.generate`; at most 32 `eos_ids`.

        Raises:
          TypeError, ValueError: as `jlade.generate` does, or the prompt and its new tokens exceed the capacity.
          queue.Full: as many requests wait as may wait.
          RuntimeError: the engine is closed.
        """
        options_lib.check_priority(priority)
        checked = self._check(prompt, options)
        request_lib.check_single(checked)
        if checked.errors:
            raise checked.errors[0]
        return self._add(checked, 0, priority, scores=prompt_logprobs)

    def generate(self, prompts: Prompts, **options: Unpack[RequestOptions]) -> list[Generation | Exception]:
        """Returns the results of all prompts, in their order.

        A wrong prompt fails alone: the TypeError or ValueError that `submit` raises for it takes its result's place.

        Args:
          prompts: of `jlade.generate`, any number of them, 0 included.
          options: of `submit`, for all prompts or one for each. Of one key each prompt draws noise of its own, as in a
            batch of `jlade.generate`.

        Raises:
          TypeError, ValueError: an option is wrong, or there is text and the engine has no tokenizer.
          RuntimeError: the engine is closed.
          Exception: the error of the first request that failed after its checks; the others are cancelled.
        """
        return list(self.map(prompts, **options))

    def map(self, prompts: Prompts, **options: Unpack[RequestOptions]) -> Iterator[Generation | Exception]:
        """Yields the results of `generate`, each as soon as it and those before it are there."""
        if isinstance(prompts, list | tuple) and not prompts:
            options_lib.check_names(options)
            return iter(())
        return self._map_all(self._check(prompts, options))

    def _map_all(self, checked: request_lib.DecodeRequest) -> Iterator[Generation | Exception]:
        results = self._map(checked)
        for index in range(len(checked.inputs.lengths)):
            yield checked.errors[index] if index in checked.errors else next(results)

    def _map(self, checked: request_lib.DecodeRequest) -> Iterator[Generation]:
        requests: collections.deque[Request] = collections.deque()
        try:
            # Where the limits differ, the longest texts begin first, so that rows end at about the same time.
            for index, limit in enumerate(checked.inputs.stopping.max_new_tokens.tolist()):
                if index in checked.errors:
                    continue
                requests.append(self._add(checked, index, limit, of_list=True))
                while requests and requests[0].done:
                    yield requests.popleft().result()
            while requests:
                yield requests[0].result()
                requests.popleft()
        finally:
            for request in requests:
                request.cancel()

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

    def close(self) -> None:
        """Cancels all requests and ends the thread. Afterwards no requests are accepted."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        atexit.unregister(self.close)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self, prompts: Prompts, options: RequestOptions) -> request_lib.DecodeRequest:
        options_lib.check_names(options)
        predicts = options.get("prediction") is not None
        if predicts and not self._max_prediction:
            raise ValueError("prediction needs an engine that was made with max_prediction, the most tokens of one")
        if predicts and not self._size.prediction:  # the setting for this device has no use for it
            options = options | {"prediction": None}
        # Stop strings are the host's to find: the device gets no table of them.
        given = dataclasses.replace(self._options, **(options | {"stop": ()}))
        checked = request_lib.make(self._params, prompts, given, self.max_sequences, self.capacity)
        rows.check(checked.inputs, self._size, checked.config.top_logprobs)
        stop = stop_strings.check(options.get("stop"), len(checked.stop), given.tokenizer, checked.config.decoder)
        return dataclasses.replace(checked, stop=stop)

    @transfers()
    def _add(
        self, checked: request_lib.DecodeRequest, index: int, priority: int, of_list: bool = False, scores: bool = False
    ) -> Request:
        """Adds the request of a sequence of a batch. One of a list waits until it may, where others are refused."""
        request = Request(lambda: self._remove(job))
        place = 0 if checked.inputs.key.ndim else index
        job = Job(job_lib.split(checked, index), place, request, self._size)
        job.of_list, job.scores_prompt = of_list, scores
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not (of_list and self._scheduler.is_full))
            if self._closed:
                raise RuntimeError("the engine is closed; it accepts no requests")
            self._scheduler.add(job, priority)
            self._start()
            self._changed.notify_all()
        return request

    def _remove(self, job: Job) -> None:
        """Removes a request that waits. One with a row loses it at the end of the round."""
        with self._changed:
            if job not in self._scheduler.rows:
                self._scheduler.remove(job)
            self._changed.notify_all()

    def _start(self) -> None:
        """Starts the thread if it does not run."""
        if self._thread is None:
            atexit.register(self.close)  # a program that runs at the exit of Python may crash
            self._thread = threading.Thread(target=self._work, name="jlade engine", daemon=True)
            self._thread.start()

    # What follows runs in the engine's thread.

    def _work(self) -> None:
        explain = functools.partial(memory.of_rows, self._reader.row_bytes, self.max_sequences, self.capacity)
        while self._has_work():
            try:
                with memory.explained(self._device, explain):
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

    def _has_work(self) -> bool:
        """Waits for requests that may run, and returns whether there are any; otherwise the engine is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or any(self._scheduler.rows) or self._scheduler.can_place(self._may_run)
            )
            return not self._closed

    def _forget(self) -> None:
        """Drops the state, which a failed program may have taken with it, and all prefixes."""
        self._running.clear()
        self._reader.clear()
        self._reading = None

    def _round(self) -> None:
        """Reads a chunk of a prompt, of a list whole prompts, and makes steps of the rows that run."""
        self._free_rows()
        while self._read() and self._is_patient():
            pass
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

    def _read(self) -> bool:
        """Reads a chunk of a prompt, and puts it into its row at the end; returns whether there was one to read.

        It is the prompt of the next request if none is being read.
        """
        reading = self._reading = self._reading or self._next()
        if reading is None:
            return False
        job = reading.job
        if not job.request.done:
            try:
                with memory.explained(self._device, lambda _: "to read a prompt takes a row's memory, in addition"):
                    self._reader.read(reading)
            except Exception as error:
                job.request._end(error)
                self._reader.clear()
        if job.request.done:  # failed or cancelled
            self._reading = None
        elif reading.is_done:
            assert reading.prefix is not None
            self._running.insert(reading.prefix, job)
            self._reading = None
        return True

    def _next(self) -> Reading | None:
        """Gives the next request that may run a free row; None if there is no row or no such request."""
        with self._changed:
            placed = self._scheduler.place(self._may_run)
            self._changed.notify_all()
        if placed is None:
            return None
        job = placed[1]
        job.request._start()
        return Reading(job)

    def _may_run(self, job: Job) -> bool:
        """Whether the programs of a request that waits are there. If they are not, they are wanted."""
        return self._running.may_take(job) and (not job.scores_prompt or self._programs.may_score())

    def _step(self) -> None:
        """Makes steps of the rows that run, up to the end of one, and hands on what they added."""
        with self._changed:
            reads = self._reading is not None or self._scheduler.can_place(self._may_run)
        max_steps = MORE_STEPS if self._is_patient() and not reads else STEPS
        shown = self._running.step(max_steps, another=reads)
        state = self._running.state
        assert state is not None
        for index, job in self._running.jobs.items():
            try:
                piece = job.read(shown.row(index))
                if piece.generation is not None and job.with_statistics:
                    statistics = results.statistics(rows.take(state, index), self._config.lookahead)
                    generation = dataclasses.replace(piece.generation, statistics=statistics)
                    piece = dataclasses.replace(piece, generation=generation)
                job.request._add(piece)
                # Texts of a list are seldom continued. An error from here on changes no result.
                if piece.generation is not None and piece.generation.finish_reason != ("error",) and not job.of_list:
                    self._reader.keep_row(state, index, shown.tokens[index, : shown.num_tokens[index]])
            except Exception as error:
                job.request._end(error)
