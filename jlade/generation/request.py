"""A request: the arguments of `generate` and `stream`, checked, and in the form that `jlade.decoding` takes."""

import dataclasses
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlade import mesh as mesh_lib
from jlade.config import PLAIN, SamplingConfig
from jlade.constraints.tokens import Table
from jlade.costs import devices
from jlade.costs.learned import Learned
from jlade.decoding.sampling import Sampling, to_arrays
from jlade.decoding.state import CHUNKS, CHUNKS_ON_CPU, DecodeConfig, Inputs
from jlade.decoding.stopping import Stopping
from jlade.errors import ArgumentTypeError, ArgumentValueError, check_int
from jlade.generation import constraining, earlier, placement, saved_programs, stop_strings, text
from jlade.generation import corpus as corpus_lib
from jlade.generation import prompts as prompts_lib
from jlade.generation.lookahead import choose_setting, with_sources
from jlade.generation.options import Options, keywords
from jlade.generation.prompts import NO_PROMPT, HostArray, Prompts, Room, round_up
from jlade.generation.saved_programs import SavedPrograms
from jlade.generation.text import Tokenizer
from jlade.lookahead import adaptive
from jlade.models.base import Decoder, Params

EOS_SLOTS = 32  # end tokens, or this times a power of two, so that few programs are compiled


class Setup(NamedTuple):
    """What parameters and options decide for calls with B prompts, before there are any."""

    config: DecodeConfig  # of which a request may need more sources of drafts
    costs: HostArray | None  # of steps; see `Inputs.costs`
    tokenizer: Tokenizer | None
    learned: Learned | None  # the costs of steps, where calls are to learn them
    programs: SavedPrograms | None  # to run instead of compiling


@dataclasses.dataclass(frozen=True)
class DecodeRequest:
    """B sequences to decode: inputs of the device, and those with which the host makes the result."""

    inputs: Inputs
    config: DecodeConfig
    tokenizer: Tokenizer | None
    tables: list[Table | None] | None  # [B], of the sequences' grammars; None if no sequence has one
    stop: tuple[tuple[str, ...], ...]  # [B], the stop strings of each sequence
    with_statistics: bool
    keep_state: bool = False
    learned: Learned | None = None  # of `Setup`
    programs: SavedPrograms | None = None  # of `Setup`
    reading: DecodeConfig | None = None  # for reading the prompts, with the sources of a later call; None for `config`

    def plain(self) -> "DecodeRequest":
        """Returns the request with plain steps. Its prompts are read by the program that reads them for this one."""
        return dataclasses.replace(
            self,
            inputs=dataclasses.replace(self.inputs, costs=None, sources={}),
            config=dataclasses.replace(self.config, lookahead=PLAIN),
            learned=None,
            reading=self.config,
        )


@keywords(Options)
def prepare(params: Params, prompt: Prompts, options: Options) -> tuple[Inputs, DecodeConfig]:
    """Returns the arguments of `jlade.decode`, `jlade.prefill` and `jlade.start`, made from those of `jlade.generate`.

    Raises:
      TypeError, ValueError: as `jlade.generate` does.
    """
    request = make(mesh_lib.with_auto_axes(params), prompt, options)
    return request.inputs, request.config


@mesh_lib.without_ambient_mesh()
def make(params: Params, prompt: Prompts, options: Options, batch_size: int | None = None) -> DecodeRequest:
    """Makes a request from the arguments of `jlade.generate`.

    Args:
      params, prompt, options: of `jlade.generate`.
      batch_size: sequences that are decoded at once, for the choice of a setting and the check of the mesh; by default
        all.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted.
    """
    setup = resolve(params, options, prompts_lib.count(prompt) if batch_size is None else batch_size)
    vocab_size = setup.config.decoder.vocab_size
    ids = prompts_lib.read(prompt, setup.tokenizer, vocab_size, options.attention_mask, options.parse_special)
    return fill(params, setup, ids, options)


def resolve(params: Params, options: Options, batch_size: int) -> Setup:
    """Returns what the parameters and the options decide for calls with B prompts. Errors are those of `make`.

    Of the options it reads those that say which model runs where, with which setting, and what is recorded.
    """
    devices.log_unseen()
    tokenizer = text.tokenizer_of(params) if options.tokenizer is None else options.tokenizer
    decoder, mesh = placement.check(params, options.decoder, options.mesh, options.kv_dtype)
    if tokenizer is not None:
        text.token_bytes(tokenizer)
    _check_flags(options, "parse_special", "learn", "logprobs", "with_statistics", "keep_state")
    _check_top_logprobs(options)
    placement.check_batch(batch_size, mesh)
    device = mesh_lib.device_of(params, mesh)
    chunks = CHUNKS_ON_CPU if device.platform == "cpu" else CHUNKS
    lookahead, learned = choose_setting(options, params, decoder, batch_size, mesh, chunks)
    return Setup(
        config=DecodeConfig(
            decoder=decoder,
            lookahead=dataclasses.replace(lookahead, relative_step_time=None),
            logprobs=options.logprobs,
            top_logprobs=options.top_logprobs,
            chunks=chunks,
            mesh=mesh,
        ),
        # As an array, costs compile nothing. What "auto" has learned takes the place of `relative_step_time`.
        costs=adaptive.costs(lookahead) if learned is None else learned.costs(options.learn),
        tokenizer=tokenizer,
        learned=learned if options.learn else None,
        programs=None if options.programs is None else saved_programs.find(options.programs, device),
    )


def fill(params: Params, setup: Setup, prompts: list[np.ndarray], options: Options) -> DecodeRequest:
    """Makes a request from the token ids of prompts and what `resolve` has returned. Errors are those of `make`."""
    options = dataclasses.replace(options, tokenizer=setup.tokenizer)
    decoder, lookahead = setup.config.decoder, setup.config.lookahead
    number, vocab_size = len(prompts), decoder.vocab_size
    prompts_lib.check_no_media(prompts, getattr(decoder, "media_ids", ()))  # which other decoders may lack
    room = Room(decoder.max_positions, f"the model reads at most {decoder.max_positions} positions")
    limits, minimums = prompts_lib.limits(prompts, options.max_new_tokens, options.min_new_tokens, room)
    for ids, limit, minimum in zip(prompts, limits, minimums, strict=True):
        prompts_lib.check_room(len(ids), limit, minimum, room)
    rules = _check_rules(options, decoder, limits, minimums)
    if rules.tables is not None:
        _check_tags(rules.tables, rules.stop)
    known = earlier.check(options, params, decoder, number, lookahead)

    names = [*known.shared, *([] if rules.tables is None else ["grammar"])]
    lookahead = with_sources(lookahead, *names)
    state = known.state
    capacity = prompts_lib.capacity(prompts, limits, decoder.max_positions)
    if state is not None:
        capacity = max(capacity, state.tokens.shape[1])
    tokens, lengths = prompts_lib.pad(prompts, capacity)
    strings = stop_strings.build(options.tokenizer, vocab_size, rules.stop) if any(rules.stop) else None
    inputs = Inputs(
        prompts=tokens,
        lengths=lengths,
        stopping=dataclasses.replace(rules.stopping, strings=strings),
        key=rules.key,
        sampling=rules.sampling,
        costs=setup.costs,
        cache=None if state is None else earlier.reuse(state, prompts, params, decoder, capacity),
        sources=known.sources | corpus_lib.of_prompts(prompts, capacity, lookahead),
        shared=known.shared,
        constraint=constraining.check(options.constraint, rules.tables, number, vocab_size),
    )
    return DecodeRequest(
        inputs=mesh_lib.with_auto_axes(inputs),  # a key may be on a mesh of the caller's
        config=dataclasses.replace(setup.config, lookahead=lookahead),
        tokenizer=setup.tokenizer,
        tables=rules.tables,
        stop=rules.stop,
        with_statistics=options.with_statistics,
        keep_state=options.keep_state,
        learned=setup.learned,
        programs=setup.programs,
    )


@mesh_lib.without_ambient_mesh()
def make_each(
    prompt: Prompts, options: Options, config: DecodeConfig, capacity: int
) -> tuple[DecodeRequest, dict[int, Exception]]:
    """Makes a request from prompts that an engine takes one by one, each as a row of its own.

    Stop strings and grammars are checked. The engine builds their automata, in tables of a size of its own.

    Args:
      prompt: of `jlade.generate`.
      options: those of a text, `prediction`, `logprobs`, `top_logprobs` and `with_statistics`.
      config: of the engine.
      capacity: most tokens of a prompt and its text.

    Returns:
      The request, and the errors of wrong prompts by their index, in whose place it has `NO_PROMPT`.

    Raises:
      TypeError, ValueError: as `make` does, but for a wrong prompt.
    """
    decoder = config.decoder
    _check_flags(options, "parse_special", "logprobs", "with_statistics")
    _check_top_logprobs(options)
    prompts, errors = prompts_lib.read_each(
        prompt, options.tokenizer, decoder.vocab_size, options.attention_mask, options.parse_special
    )
    room = Room(capacity, f"the engine was made with capacity={capacity}")
    limits, minimums = prompts_lib.limits(prompts, options.max_new_tokens, options.min_new_tokens, room)
    for index, (ids, limit, minimum) in enumerate(zip(prompts, limits, minimums, strict=True)):
        try:
            prompts_lib.check_room(len(ids), limit, minimum, room)
        except ArgumentValueError as error:
            errors.setdefault(index, error)
            prompts[index] = NO_PROMPT
    tokens, lengths = prompts_lib.pad(prompts, max(map(len, prompts)))
    rules = _check_rules(options, decoder, limits, minimums)
    sources = {}
    if options.prediction is not None:
        sources["prediction"] = earlier.read_prediction(
            options.prediction, options.tokenizer, len(prompts), decoder.vocab_size
        )
    inputs = Inputs(tokens, lengths, rules.stopping, rules.key, rules.sampling, sources=sources)
    request = DecodeRequest(
        inputs=mesh_lib.with_auto_axes(inputs),  # a key may be on a mesh of the caller's
        config=dataclasses.replace(config, logprobs=options.logprobs, top_logprobs=options.top_logprobs),
        tokenizer=options.tokenizer,
        tables=rules.tables,
        stop=rules.stop,
        with_statistics=options.with_statistics,
    )
    return request, errors


def check_single(request: DecodeRequest) -> None:
    """Raises a ValueError for a batch."""
    if (size := len(request.inputs.lengths)) != 1:
        raise ArgumentValueError("prompt", f"must be a single prompt, got a batch of {size}")


def check_streamer(streamer: Any, request: DecodeRequest) -> None:
    """Raises an error for a batch, or if the streamer lacks `put` and `end`."""
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(f"streamer must have the methods put and end of transformers' streamers, got {streamer!r}")
    check_single(request)


def _check_flags(options: Options, *names: str) -> None:
    for name in names:
        if not isinstance(value := getattr(options, name), bool):
            raise ArgumentTypeError(name, f"must be True or False, got {value!r}")


def _check_top_logprobs(options: Options) -> None:
    if check_int("top_logprobs", options.top_logprobs, 0) and not options.logprobs:
        raise ValueError(f"top_logprobs={options.top_logprobs} needs logprobs=True")


class _Rules(NamedTuple):
    """When B texts end, and how their tokens are drawn."""

    stopping: Stopping  # without the automaton of the stop strings
    stop: tuple[tuple[str, ...], ...]  # [B], the stop strings
    key: jax.Array  # of all texts, or of each [B]
    sampling: Sampling
    tables: list[Table | None] | None  # [B], of grammars; None if no text has one


def _check_rules(options: Options, decoder: Decoder, limits: HostArray, minimums: HostArray) -> _Rules:
    """Checks the options that decide texts of `minimums` [B] to `limits` [B] tokens."""
    batch_size, vocab_size = len(limits), decoder.vocab_size
    eos_ids = decoder.eos_ids if options.eos_ids is None else options.eos_ids
    stopping = Stopping(
        max_new_tokens=limits,
        eos_ids=_check_eos_ids(eos_ids, batch_size, vocab_size),
        min_new_tokens=minimums if minimums.any() else None,
        strings=None,
    )
    stop = stop_strings.check(options.stop, batch_size, options.tokenizer, decoder)
    sampling = _check_sampling(options.sampling, batch_size, vocab_size)
    _check_bans(sampling, stopping, vocab_size)
    tables = constraining.tables(options.grammar, options.tokenizer, stopping, vocab_size)
    return _Rules(stopping, stop, _check_key(options.key, batch_size), sampling, tables)


def _check_eos_ids(eos_ids: Any, batch_size: int, vocab_size: int) -> HostArray:
    """Returns the end tokens of each sequence [B, K], padded with -1, given those of all or of each."""
    wrong = f"must be a token id, a sequence of them, or one for each of {batch_size} prompts, got {eos_ids!r}"
    if hasattr(eos_ids, "__array__"):
        eos_ids = np.asarray(eos_ids).tolist()
    if isinstance(eos_ids, numbers.Integral):
        eos_ids = (eos_ids,)
    if isinstance(eos_ids, str) or not isinstance(eos_ids, Iterable):
        raise ArgumentTypeError("eos_ids", wrong)
    sets = [np.asarray(ids).tolist() if hasattr(ids, "__array__") else ids for ids in eos_ids]
    if not sets or isinstance(sets[0], numbers.Number):
        sets = [sets] * batch_size
    if any(isinstance(ids, str) or not isinstance(ids, Iterable) for ids in sets):
        raise ArgumentTypeError("eos_ids", wrong)
    if len(sets) != batch_size:
        raise ArgumentValueError("eos_ids", wrong)
    sets = [[check_int("eos_ids", i, 0) for i in ids] for ids in sets]
    outside = [i for ids in sets for i in ids if i >= vocab_size]
    if outside:
        raise ArgumentValueError("eos_ids", f"holds {outside[0]}; accepted are 0 to {vocab_size - 1}")
    padded = np.full((batch_size, round_up(max(map(len, sets)), EOS_SLOTS)), -1, np.int32)
    for padded_ids, ids in zip(padded, sets, strict=True):
        padded_ids[: len(ids)] = ids
    return padded


def _check_tags(tables: Sequence[Table | None], stop: Sequence[Sequence[str]]) -> None:
    """Raises a ValueError for stop strings beside tagged parts: the device would let them end a text within these."""
    for table, strings in zip(tables, stop, strict=True):
        if table is not None and table.is_tagged and strings:
            raise ArgumentValueError(
                "stop",
                f"must be empty beside a grammar of tags, within which no string ends a text, got {strings!r}; "
                "a jlade.Engine takes both",
            )


def _check_key(key: Any, batch_size: int) -> jax.Array:
    """Returns the key of all sequences, or those of each [B]."""
    if key is None:
        return make_key(0)
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.ndim > 0:
        return _check_key(_wrap(key), batch_size)
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape in ((), (batch_size,)):
            return key
        raise ArgumentValueError(
            "key", f"must be one key or one for each of {batch_size} prompts, got keys of shape {key.shape}"
        )
    raise ArgumentTypeError("key", f"must be a key made by jax.random.key, or an array of them, got {key!r}")


def make_key(seed: int) -> jax.Array:
    """Returns `jax.random.key(seed)` for a seed from 0 to 2**32 - 1.

    It is made from its words where that is the same key: JAX would compile a program, which takes longer than a step.
    """
    if jax.config.values["jax_default_prng_impl"] != "threefry2x32" or jax.config.values["jax_random_seed_offset"]:
        return jax.random.key(seed)
    words = jax.device_put(np.array([0, seed], np.uint32))
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _wrap(words: jax.Array) -> jax.Array:
    """Returns the keys of the form that `jax.random.PRNGKey` makes."""
    try:
        return jax.random.wrap_key_data(words)
    except TypeError as error:
        size = jax.random.key_data(jax.random.key(0)).size
        raise ArgumentValueError(
            "key", f"must hold {size} words, as those of jax.random.PRNGKey, got {words!r}"
        ) from error


def _check_sampling(sampling: Any, batch_size: int, vocab_size: int) -> Sampling:
    """Returns the settings of B sequences as arrays, given one for all or one for each."""
    configs = [sampling] * batch_size if isinstance(sampling, SamplingConfig) else sampling
    if not isinstance(configs, Sequence) or not all(isinstance(config, SamplingConfig) for config in configs):
        raise ArgumentTypeError(
            "sampling", f"must be a SamplingConfig, or a sequence of one for each prompt, got {sampling!r}"
        )
    if len(configs) != batch_size:
        raise ArgumentValueError(
            "sampling", f"must be one or {batch_size}, one for each prompt, got {len(configs)} configs"
        )
    outside = [token for config in configs for token in dict(config.logit_bias or ()) if token >= vocab_size]
    if outside:
        raise ArgumentValueError("logit_bias", f"names token id {outside[0]}; accepted are 0 to {vocab_size - 1}")
    return to_arrays(configs, vocab_size)


def _check_bans(sampling: Sampling, stopping: Stopping, vocab_size: int) -> None:
    """Raises a ValueError if no token is left for the text of a sequence."""
    if sampling.logit_bias is None and stopping.min_new_tokens is None:
        return
    banned = np.zeros((len(stopping.eos_ids), vocab_size), bool)
    if sampling.logit_bias is not None:
        banned |= sampling.logit_bias == -np.inf
    if stopping.min_new_tokens is not None:
        for row, ids, minimum in zip(banned, stopping.eos_ids, stopping.min_new_tokens, strict=True):
            row[ids[(ids >= 0) & (minimum > 0)]] = True
    if banned.all(axis=1).any():
        also = "" if stopping.min_new_tokens is None else ", as the minimum of new tokens bans end tokens too"
        raise ArgumentValueError("logit_bias", f"leaves none of {vocab_size} tokens to draw{also}")
