"""A request: the arguments of `generate` and `stream`, checked, and in the form that `jlade.decoding` takes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jlade import mesh as mesh_lib
from jlade.constraints.tokens import Table
from jlade.costs import attached
from jlade.costs.learned import Learned
from jlade.decoding.state import CHUNKS, CHUNKS_ON_CPU, DecodeConfig, Inputs
from jlade.errors import check_int
from jlade.generation import constraining, drawing, earlier, placement, programs, text
from jlade.generation import corpus as corpus_lib
from jlade.generation import lookahead as lookahead_lib
from jlade.generation import prompts as prompts_lib
from jlade.generation import stopping as stopping_lib
from jlade.generation.options import Options, keywords
from jlade.generation.programs import Programs
from jlade.generation.prompts import HostArray, Prompts
from jlade.generation.text import Tokenizer
from jlade.lookahead import adaptive
from jlade.models.base import Params


@dataclasses.dataclass(frozen=True)
class DecodeRequest:
    """B sequences to decode: inputs of the device, and those with which the host makes the result."""

    inputs: Inputs
    config: DecodeConfig
    tokenizer: Tokenizer | None
    tables: list[Table | None] | None  # [B], of the sequences' grammars; None if no sequence has one
    stop: tuple[tuple[str, ...], ...]  # [B], the stop strings of each sequence
    learned: Learned | None  # the costs of steps, where calls are to learn them
    with_statistics: bool
    keep_state: bool
    programs: Programs | None  # to run instead of compiling
    errors: dict[int, Exception]  # of the prompts, by their index, that an engine cannot decode


@keywords(Options)
def prepare(params: Params, prompt: Prompts, options: Options) -> tuple[Inputs, DecodeConfig]:
    """Returns the arguments of `jlade.decode`, `jlade.prefill` and `jlade.start`, made from those of `jlade.generate`.

    Raises:
      TypeError, ValueError: as `jlade.generate` does.
    """
    request = make(mesh_lib.with_auto_axes(params), prompt, options)
    return request.inputs, request.config


@mesh_lib.without_ambient_mesh()
def make(
    params: Params, prompt: Prompts, options: Options, batch_size: int | None = None, capacity: int | None = None
) -> DecodeRequest:
    """Makes a request from the arguments of `jlade.generate`.

    Args:
      params, prompt, options: of `jlade.generate`.
      batch_size: number of sequences that are decoded at once; by default all.
      capacity: tokens of a row of the engine that decodes each prompt alone. The error of a wrong prompt is then in
        `DecodeRequest.errors`, and not raised. By default the prompts are a batch.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted.
    """
    attached.log_unseen()
    if options.tokenizer is None:
        options = dataclasses.replace(options, tokenizer=text.tokenizer_of(params))
    decoder, mesh = placement.check(params, options.decoder, options.mesh, options.kv_dtype)
    vocab_size, errors = decoder.vocab_size, None if capacity is None else dict[int, Exception]()
    if options.tokenizer is not None:
        text.token_bytes(options.tokenizer)
    _check_bool("parse_special", options.parse_special)
    prompts = prompts_lib.read(
        prompt, options.tokenizer, vocab_size, options.attention_mask, options.parse_special, errors
    )
    number = len(prompts)
    placement.check_batch(number if batch_size is None else batch_size, mesh)
    chunks = CHUNKS_ON_CPU if mesh_lib.device_of(params, mesh).platform == "cpu" else CHUNKS
    lookahead, so_far = lookahead_lib.choose(options, params, decoder, number, mesh, chunks)
    stopping, stop = stopping_lib.check(options, prompts, decoder, capacity)
    prompts_lib.check_room(prompts, stopping, decoder.max_positions, capacity, errors)
    key = drawing.check_key(options.key, number)
    sampling = drawing.check_sampling(options.sampling, number, vocab_size)
    drawing.check_bans(sampling, stopping, vocab_size)
    tables = constraining.tables(options.grammar, options.tokenizer, stopping, vocab_size)
    if capacity is None and tables is not None:
        _check_tags(tables, stop)
    known = earlier.check(options, params, decoder, prompts, lookahead)
    for name in ("learn", "logprobs", "with_statistics", "keep_state"):
        _check_bool(name, getattr(options, name))
    if check_int("top_logprobs", options.top_logprobs, 0) and not options.logprobs:
        raise ValueError(f"top_logprobs={options.top_logprobs} needs logprobs=True")

    lookahead = lookahead_lib.with_sources(lookahead, *known.shared, *([] if tables is None else ["grammar"]))
    state, sources = known.state, known.sources
    least = 0 if state is None else state.tokens.shape[1]
    tokens, lengths = prompts_lib.pad(prompts, stopping.max_new_tokens, least, decoder.max_positions)
    costs: HostArray = adaptive.costs(lookahead) if so_far is None else so_far.costs(options.learn)
    if capacity is None:  # the rows of an engine have no place for an index of their prompts
        sources = sources | corpus_lib.of_prompts(prompts, tokens.shape[1], lookahead)
    inputs = Inputs(
        prompts=tokens,
        lengths=lengths,
        stopping=stopping,
        key=key,
        sampling=sampling,
        costs=costs,
        cache=None if state is None else earlier.reuse(state, prompts, params, decoder, tokens.shape[1]),
        sources=sources,
        shared=known.shared,
        # The rows of an engine have tables of a size of their own.
        constraint=constraining.check(options.constraint, tables if capacity is None else None, number, vocab_size),
    )
    return DecodeRequest(
        inputs=mesh_lib.with_auto_axes(inputs),  # a key may be on a mesh of the caller's
        config=DecodeConfig(
            decoder=decoder,
            lookahead=dataclasses.replace(lookahead, relative_step_time=None),
            logprobs=options.logprobs,
            top_logprobs=options.top_logprobs,
            chunks=chunks,
            mesh=mesh,
        ),
        tokenizer=options.tokenizer,
        tables=tables,
        stop=stop,
        learned=so_far if options.learn else None,
        with_statistics=options.with_statistics,
        keep_state=options.keep_state,
        programs=None
        if options.programs is None
        else programs.find(options.programs, mesh_lib.device_of(params, mesh)),
        errors=errors or {},
    )


def check_single(request: DecodeRequest) -> None:
    """Raises a ValueError for a batch."""
    if (size := len(request.inputs.lengths)) != 1:
        raise ValueError(f"prompt must be a single prompt, got a batch of {size}")


def check_streamer(streamer: Any, request: DecodeRequest) -> None:
    """Raises an error for a batch, or if the streamer lacks `put` and `end`."""
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(f"streamer must have the methods put and end of transformers' streamers, got {streamer!r}")
    check_single(request)


def _check_tags(tables: Sequence[Table | None], stop: Sequence[Sequence[str]]) -> None:
    """Raises a ValueError for stop strings beside tagged parts: the device would let them end a text within these."""
    for table, strings in zip(tables, stop, strict=True):
        if table is not None and table.is_tagged and strings:
            raise ValueError(
                f"stop must be empty beside a grammar of tags, within which no string ends a text, got {strings!r}; "
                "a jlade.Engine takes both"
            )


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
