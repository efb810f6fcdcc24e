"""`Engine`: many requests over the rows of one decode state, each exactly as if it were alone."""

import collections
import contextlib
import dataclasses
import functools
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, TypedDict, Unpack

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jlade import mesh as mesh_lib
from jlade.config import LookaheadConfig, SamplingConfig
from jlade.constraints.grammar import Grammar
from jlade.decoding import ahead, room, sharding
from jlade.engine import pages, reading, remembered, rows, width
from jlade.engine.job import Job
from jlade.engine.pages import PagePool
from jlade.engine.programs import Programs
from jlade.engine.reading import PromptReader
from jlade.engine.remembered import RECALLED, Compartment, Remembered
from jlade.engine.request import Request
from jlade.engine.running import Running
from jlade.engine.scheduler import Scheduler
from jlade.engine.worker import Context, Worker
from jlade.errors import ArgumentTypeError, ArgumentValueError, check_int
from jlade.generation import earlier
from jlade.generation import request as request_lib
from jlade.generation.corpus import Texts
from jlade.generation.lookahead import with_sources
from jlade.generation.options import Keywords, Options, unknown
from jlade.generation.prior import Prior
from jlade.generation.prompts import HostArray, Prompt, Prompts, whole
from jlade.generation.request import DecodeRequest
from jlade.generation.results import Generation
from jlade.generation.saved_programs import Facts
from jlade.generation.text import Tokenizer
from jlade.mesh import device_of
from jlade.models.base import Decoder, Params

# More than any engine needs: a slip is an error before it takes memory.
MAX_SEQUENCES = 4096
MAX_PREDICTION = 2**20
MAX_GRAMMAR = 2**26


class RequestOptions(TypedDict, total=False):
    """The options of a request; see `jlade.generate`."""

    max_new_tokens: int | Sequence[int] | None
    min_new_tokens: int | Sequence[int]
    sampling: SamplingConfig | Sequence[SamplingConfig]
    parse_special: bool
    eos_ids: int | Sequence[int] | Sequence[Sequence[int]] | None
    stop: str | Sequence[str] | Sequence[Sequence[str]] | None
    key: jax.Array | None
    lookahead: bool
    remember_key: str | None
    remember: bool
    prefix_key: str
    prediction: Prompts | None
    grammar: Grammar | Sequence[Grammar | None] | None
    logprobs: bool
    top_logprobs: int
    with_statistics: bool


# For programs, which are the same whatever the tokens are.
_ANY_PROMPT = whole([[0, 0]])

# Options that decide no text: which earlier requests serve one, and whether it has drafts.
_OF_ENGINE = ("remember", "remember_key", "prefix_key", "lookahead")


class _Shares(NamedTuple):
    """What a request has of earlier ones: the texts that are its drafts, and the key of those that begin as it does."""

    compartment: Compartment | None
    prefix_key: str


class Engine:
    """Decodes requests side by side, in rows. A row takes the next request as soon as its text has ended.

    A request's text is that of `jlade.generate` alone with its key, whatever else runs. With
    `verification="rejection"`, steps of adaptive width and prefixes give another text of the same distribution.

    A thread of the engine makes rounds: it reads a part of prompts, and makes a few steps of all rows that run.
    Any thread may submit. Use it in a `with` statement, or call `close`.

    Args:
      params: the model's parameters, as `jlade.load` returns them.
      tokenizer: turns string prompts into tokens, and tokens into text; by default that of the parameters, see
        `jlade.load`. Without one there are token ids alone.
      max_sequences: rows, requests that are decoded at once, up to 4096. Each holds the memory of `capacity` tokens.
      capacity: most tokens of a prompt and its text; by default 4096, or as many as the model reads.
      lookahead: as in `jlade.generate`; "auto" has costs of steps for each number of rows.
      max_waiting: requests that may wait for a row.
      cache_tokens: tokens whose keys and values are held at once, those of all rows and of what is kept; by default
        `capacity` for every row. With fewer, rows of short texts leave room for long ones. When none is left, kept
        texts are dropped, then requests wait on the host, those that came last first; their texts are the same.
      prefix_memory: bytes, on all devices together, in which prompts and texts are kept for the prompts that begin as
        they do, as long as no row needs these; by default as many as the rows take. With 0 every prompt is read from
        its first token.
      corpus: as in `jlade.generate`, other texts in which the drafts of all requests are searched too.
      prior: as in `jlade.generate`, for the drafts of all requests.
      remember: bytes of host memory in which texts that have ended are kept. Their answers are drafts for later
        requests with the same `remember_key`; the text is the same. With 0 none are kept, and steps search for none.
      max_prediction: most tokens of a prediction, at most 2^20; with 0 requests have none, and steps search for none.
      max_grammar: most entries of the table of a request's grammar, of 4 bytes in every row. A state has one for each
        class of tokens and 3 more, in multiples of 128. By default 2^22, at most 2^26; with 0 none.
      max_top_logprobs: most of `top_logprobs` that a request may ask for.
      kv_dtype: as in `jlade.generate`; with 8 bits, twice as many rows fit as in bfloat16, or more.
      decoder: the model that `params` belong to; needed when they are not jlade's own.
      mesh: the devices to run on, those of the parameters by default. Its axis `data` must divide the rows.
      programs: a directory that `jlade.compile_engine` wrote for such an engine, whose programs are loaded instead of
        compiled. It is trusted like code. What does not fit compiles as usual, and a warning says why.

    Attributes:
      remembered: texts that have ended; `len` returns their number, and `num_bytes` is their memory.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted.
    """

    @mesh_lib.without_ambient_mesh()
    def __init__(
        self,
        params: Params,
        tokenizer: Tokenizer | None = None,
        *,
        max_sequences: int = 8,
        capacity: int | None = None,
        lookahead: LookaheadConfig | Literal["auto"] | None = "auto",
        max_waiting: int = 1024,
        cache_tokens: int | None = None,
        prefix_memory: int | None = None,
        corpus: Texts | None = None,
        prior: Prior | None = None,
        remember: int = 0,
        max_prediction: int = 0,
        max_grammar: int = rows.GRAMMAR,
        max_top_logprobs: int = 0,
        kv_dtype: Literal["int8", "float8_e4m3fn"] | None = None,
        decoder: Decoder | None = None,
        mesh: Mesh | None = None,
        programs: str | os.PathLike[str] | None = None,
    ):
        check_int("max_sequences", max_sequences, 1, MAX_SEQUENCES)
        check_int("max_waiting", max_waiting, 1)
        check_int("prefix_memory", 0 if prefix_memory is None else prefix_memory, 0)
        check_int("remember", remember, 0)
        check_int("max_prediction", max_prediction, 0, MAX_PREDICTION)
        check_int("max_grammar", max_grammar, 0, MAX_GRAMMAR)
        if remember:
            _check_remembers(lookahead)
        params = mesh_lib.with_auto_axes(params)
        options = Options(
            lookahead=lookahead,
            tokenizer=tokenizer,
            corpus=corpus,
            prior=prior,
            logprobs=True,
            top_logprobs=check_int("max_top_logprobs", max_top_logprobs, 0),
            kv_dtype=kv_dtype,
            decoder=decoder,
            mesh=mesh,
            programs=programs,
        )
        setup = request_lib.resolve(params, options, max_sequences)
        model, mesh, device = setup.config.decoder, setup.config.mesh, device_of(params, setup.config.mesh)
        setting, widths = width.resolve(params, setup, lookahead, max_sequences, bool(max_prediction or remember))
        options = dataclasses.replace(options, tokenizer=setup.tokenizer)
        searched = earlier.searched(options, model.vocab_size, setting)
        sources = [*searched, *(["grammar"] if max_grammar else [])]
        capacity = rows.check_capacity(capacity, model.max_positions)
        config = dataclasses.replace(
            setup.config,
            lookahead=with_sources(setting, *sources),
            paged=pages.is_paged(params, model, device, cache_tokens),
        )
        num_tokens = pages.check_tokens(cache_tokens, max_sequences, capacity, config)
        predicts, beside = "prediction" in setting.sources, reading.may_read_beside(config, device)

        self.max_sequences: int = max_sequences
        self.capacity: int = capacity
        self.remembered: Remembered = Remembered(remember if predicts else 0)
        self._config, self._tokenizer, self._max_prediction = config, setup.tokenizer, max_prediction
        shared = {source: one.on_device for source, one in searched.items()}
        self._shared = shared if mesh is None else mesh_lib.put(shared, mesh, PartitionSpec())
        self._size = rows.Size(
            capacity=capacity,
            prediction=max_prediction if predicts else 0,
            grammar=max_grammar,
            top_logprobs=max_top_logprobs,
            recalled=RECALLED if remember and predicts else 0,
        )

        params = sharding.put_params(params, mesh)
        shapes, pool = (
            PagePool(arrays, config, max_sequences, capacity, num_tokens) for arrays in (ahead.shapes(params), params)
        )
        self._programs = Programs(params, config, widths, self._size, shapes, beside)
        self._keeper = room.Keeper()
        self._answered: Context = self._keeper.keeping
        # All or none: programs of both kinds would differ in where their results may go, and compile for each other.
        if setup.programs is not None and setup.programs.are_for(facts_of(self)):
            handler = setup.programs.handler(lambda: facts_of(self))
            self._answered = functools.partial(_kept_and_answered, self._keeper, handler)
        self._reader = PromptReader(params, config, max_sequences, capacity, prefix_memory, self._programs, pool)
        self._running = Running(params, config, widths, self._programs, pool)
        scheduler: Scheduler[Job] = Scheduler(max_sequences, max_waiting)
        self._worker = Worker(
            scheduler, self._reader, self._running, self._programs, config, device, beside, self._answered
        )

    @property
    def prompt_tokens(self) -> tuple[int, int]:
        """Tokens of all prompts whose reading has begun, and how many of these were not read; see `prefix_memory`."""
        return self._reader.num_tokens, self._reader.num_cached

    def warm_up(self) -> None:
        """Compiles all programs and waits for them. Afterwards nothing compiles, whatever is submitted.

        Without it a program compiles when a request first needs it; requests of one kind need few.

        Raises:
          RuntimeError: the engine is closed.
          Exception: the error of a program.
        """
        for _ in self.compile():
            pass
        self._running.min_rows = self.max_sequences  # for the memory of all rows
        self.submit(_ANY_PROMPT, max_new_tokens=1, with_statistics=True).result()
        self._running.min_rows = 1

    @mesh_lib.without_ambient_mesh()
    def compile(self) -> Iterator[int]:
        """Yields how many parts of the programs are left, and compiles one before the next number.

        After the call, before the first number, requests wait for their programs, and these compile before those that
        no request waits for. Requests whose programs are there run meanwhile. Iterate in a thread of its own; the
        iteration ends when the engine is closed.

        Raises:
          Exception: the error of a program, when the others are there. A request that needs this one meets it again.
        """
        checked, _ = self._check(_ANY_PROMPT, {"max_new_tokens": 1})
        self._programs.begin(Job(checked, 0, Request(lambda: None), self._size, self._shared).row)
        return self._compile()

    def _compile(self) -> Iterator[int]:
        error = None
        try:
            while (left := self._programs.num_left) and not self._worker.closed:
                yield left
                self._worker.want_programs()
                try:
                    with mesh_lib.without_ambient_mesh(), self._answered():
                        self._programs.compile_next()
                except Exception as of_program:
                    error = error or of_program
                self._worker.wake()
        finally:  # also if the caller has stopped
            self._programs.end()
            self._worker.wake()
        if error is not None:
            raise error
        yield 0

    @property
    def num_left(self) -> int:
        """Parts of the programs that `compile` has not made yet."""
        return self._programs.num_left

    @property
    def is_ready(self) -> bool:
        """Whether a request runs at once: `compile` has made its programs, or was not called."""
        return self._programs.may_step(1)

    def submit(
        self,
        prompt: Prompt | Mapping[str, Any],
        *,
        priority: int = 0,
        prompt_logprobs: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Adds a request to those that wait, and returns it at once.

        Args:
          prompt: a string, token ids int[L], or a mapping with the "input_ids" of one prompt, as in `jlade.generate`.
          priority: requests with higher numbers get rows first, those with equal numbers in the order of arrival.
          prompt_logprobs: whether `Request.prompt_logprobs` are computed, with `top_logprobs` alternatives.
          options: `max_new_tokens`, `min_new_tokens`, `sampling`, `parse_special`, `eos_ids`, `stop`, `key`,
            `prediction`, `grammar`, `logprobs`, `top_logprobs` and `with_statistics` of `jlade.generate`; at most 32
            `eos_ids`. With `lookahead=False` steps verify no drafts for the request. `remember_key` is a string, such
            as the name of a user: earlier answers of requests with this key are its drafts; without a key none are.
            With `remember=False` its own answer is not kept. `prefix_key` is a string too: the prompt is read from the
            beginnings that requests with the same key have left, by default those without one.

        Raises:
          TypeError, ValueError: as `jlade.generate` does, or the prompt and its new tokens exceed the capacity.
          queue.Full: as many requests wait as may wait.
          RuntimeError: the engine is closed.
        """
        if isinstance(priority, bool) or not isinstance(priority, numbers.Integral):
            raise ArgumentTypeError("priority", f"must be an integer, got {priority!r}")
        checked, errors = self._check(prompt, options)
        request_lib.check_single(checked)
        if errors:
            raise errors[0]
        return self._add(checked, 0, priority, self._shares(options), scores=prompt_logprobs)

    def generate(self, prompts: Prompts, **options: Unpack[RequestOptions]) -> list[Generation | Exception]:
        """Returns the results of all prompts, in their order.

        A wrong prompt fails alone: the TypeError or ValueError that `submit` raises for it takes its result's place.

        Args:
          prompts: of `jlade.generate`, any number of them, 0 included.
          options: of `submit`, for all prompts or one for each. With one key each prompt draws its own noise, as in a
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
            _check_names(options)
            return iter(())
        checked, errors = self._check(prompts, options)
        return self._map_all(checked, errors, self._shares(options))

    def _map_all(
        self, checked: DecodeRequest, errors: dict[int, Exception], shares: _Shares
    ) -> Iterator[Generation | Exception]:
        results = self._map(checked, errors, shares)
        for index in range(len(checked.inputs.lengths)):
            yield errors[index] if index in errors else next(results)

    def _map(self, checked: DecodeRequest, errors: dict[int, Exception], shares: _Shares) -> Iterator[Generation]:
        requests: collections.deque[Request] = collections.deque()
        try:
            # Where the limits differ, the longest texts begin first, so that rows end at about the same time.
            for index, limit in enumerate(checked.inputs.stopping.max_new_tokens.tolist()):
                if index in errors:
                    continue
                requests.append(self._add(checked, index, limit, shares, of_list=True))
                while requests and requests[0].done:
                    yield requests.popleft().result()
            while requests:
                yield requests[0].result()
                requests.popleft()
        finally:
            for request in requests:
                request.cancel()

    def save_remembered(self, path: str | os.PathLike[str]) -> None:
        """Writes the remembered texts to a file that its owner alone may read, whole or not at all.

        A file that is there is replaced.

        Raises:
          OSError: names the file.
        """
        self.remembered.save(path, self._vocabulary)

    def load_remembered(self, path: str | os.PathLike[str]) -> None:
        """Adds the texts of a file that `save_remembered` wrote, as many of the last ones as `remember` holds.

        Raises:
          ValueError: names the file, which is missing, broken, or of another version or tokenizer.
        """
        self.remembered.load(path, self._vocabulary, self._config.decoder.vocab_size)

    @functools.cached_property
    def _vocabulary(self) -> str:
        return remembered.identity(self._tokenizer, self._config.decoder.vocab_size)

    @property
    def is_alive(self) -> bool:
        """Whether it is open, and its thread works or waits for the first request."""
        return self._worker.is_alive

    @property
    def num_running(self) -> int:
        """Number of requests that have rows."""
        return self._worker.num_running

    @property
    def cache_usage(self) -> float:
        """Share of the pages that requests with rows hold, from 0 to 1; of the rows for a model without pages."""
        return self._running.usage

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a row."""
        return self._worker.num_waiting

    def close(self) -> None:
        """Cancels all requests and ends the thread. Afterwards no requests are accepted."""
        self._worker.close()
        self._keeper.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self, prompts: Prompts, options: RequestOptions) -> tuple[DecodeRequest, dict[int, Exception]]:
        """Returns what `generation.request.make_each` does, for options that the rows accept."""
        _check_names(options)
        predicts = options.get("prediction") is not None
        if predicts and not self._max_prediction:
            raise ArgumentValueError(
                "prediction", "needs an engine that was made with max_prediction, the most tokens of one"
            )
        if predicts and not self._size.prediction:  # the setting for this device has no use for it
            options = options | {"prediction": None}
        if options.get("grammar") is not None and not self._size.grammar:
            raise ArgumentValueError(
                "grammar", "needs an engine that was made with max_grammar, the most entries of a table"
            )
        has_drafts = options.get("lookahead", True)
        if not isinstance(has_drafts, bool):
            raise ArgumentTypeError(
                "lookahead", f"of a request must be True or False, got {has_drafts!r}: Engine has the setting"
            )
        of_text: Keywords = {name: value for name, value in options.items() if name not in _OF_ENGINE}
        checked, errors = request_lib.make_each(
            prompts, Options(tokenizer=self._tokenizer, **of_text), self._config, self.capacity
        )
        of_each: HostArray = np.full(len(checked.inputs.lengths), has_drafts)
        checked = dataclasses.replace(checked, inputs=dataclasses.replace(checked.inputs, has_drafts=of_each))
        rows.check(checked, self._size)
        return checked, errors

    def _shares(self, options: RequestOptions) -> _Shares:
        """Returns what a request has of earlier ones."""
        key, keeps = options.get("remember_key"), options.get("remember", True)
        prefix_key = options.get("prefix_key", "")
        if not isinstance(key, str | None):
            raise ArgumentTypeError(
                "remember_key", f"must be a string, or None for no drafts from earlier texts, got {key!r}"
            )
        if not isinstance(keeps, bool):
            raise ArgumentTypeError("remember", f"must be True or False, got {keeps!r}")
        if not isinstance(prefix_key, str):
            raise ArgumentTypeError("prefix_key", f"must be a string, got {prefix_key!r}")
        compartment = None if key is None or not self._size.recalled else Compartment(self.remembered, key, keeps)
        return _Shares(compartment, prefix_key)

    @mesh_lib.without_ambient_mesh()
    def _add(
        self,
        checked: DecodeRequest,
        index: int,
        priority: int,
        shares: _Shares,
        of_list: bool = False,
        scores: bool = False,
    ) -> Request:
        """Adds the request of a sequence of a batch. One of a list waits until it may, where others are refused."""
        request = Request(lambda: self._worker.remove(job))
        job = Job(checked, index, request, self._size, self._shared)
        job.compartment, job.prefix_key = shares
        job.of_list, job.scores_prompt = of_list, scores
        self._worker.add(job, priority)
        return request


@contextlib.contextmanager
def _kept_and_answered(keeper: room.Keeper, handler: ahead.Handler) -> Iterator[None]:
    with keeper.keeping(), ahead.intercept(handler):
        yield


def facts_of(engine: Engine) -> Facts:
    """Returns the facts that decide the programs of an engine, those that people name first."""
    return engine._programs.facts(engine._shared)


def _check_remembers(lookahead: Any) -> None:
    """Raises a ValueError for a setting without a tree."""
    has_tree = isinstance(lookahead, LookaheadConfig) and lookahead.has_tree
    if lookahead != "auto" and not has_tree:
        raise ValueError(
            f"remember needs a lookahead with a tree, such as LookaheadConfig.tree(63), got lookahead={lookahead}"
        )


def _check_names(options: RequestOptions) -> None:
    """Raises a TypeError for an option that requests do not have."""
    accepted = RequestOptions.__annotations__
    for name in options:
        if name not in accepted:
            raise unknown(name, "an option of a request", accepted)
