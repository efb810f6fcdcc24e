"""The arguments of `generate` and `stream`: checked, and in the form that `jlade.decoding` takes."""

import dataclasses
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.config import PLAIN, LookaheadConfig, check_int
from jlade.costs import attached, choice, learned
from jlade.costs.learned import Learned
from jlade.decoding.state import CHUNKS, CHUNKS_ON_CPU, DecodeConfig, DecodeState, Inputs
from jlade.decoding.stopping import Stopping
from jlade.drafts import pool as ngram_pool
from jlade.drafts.index import TextIndex
from jlade.drafts.pool import NGramPool
from jlade.drafts.source import State
from jlade.generation import continuation, drawing, stop_strings, text
from jlade.generation import corpus as corpus_lib
from jlade.generation import prediction as prediction_lib
from jlade.generation import prompts as prompts_lib
from jlade.generation.options import Options, keywords
from jlade.generation.prompts import Prompts
from jlade.generation.text import Tokenizer
from jlade.lookahead import adaptive
from jlade.mesh import DATA, MODEL
from jlade.models import sharding
from jlade.models.base import Decoder, Params
from jlade.models.llama import Llama, LlamaParams

HostArray = Any  # of NumPy; the device makes it a jax.Array, which the fields of `Inputs` are declared as

MOST_NEW_TOKENS = 256  # by default
SMALLEST_CAPACITY = 1024  # tokens; capacities are this times a power of two, so that few programs are compiled
EOS_SLOTS = 32  # end tokens, or this times a power of two, for the same reason


@dataclasses.dataclass(frozen=True)
class Request:
    """Checked arguments for B sequences: inputs of the device, and those with which the host makes the result."""

    inputs: Inputs
    config: DecodeConfig
    tokenizer: Tokenizer | None
    stop: tuple[tuple[str, ...], ...]  # [B], the stop strings of each sequence
    learned: Learned | None  # the costs of steps, where calls are to learn them
    with_statistics: bool
    keep_state: bool
    errors: dict[int, Exception]  # of the prompts, by their index, that an engine cannot decode


@keywords(Options)
def prepare(params: Params, prompt: Prompts, options: Options) -> tuple[Inputs, DecodeConfig]:
    """Returns the arguments of `jlade.decode`, `jlade.prefill` and `jlade.start`, made from those of `jlade.generate`.

    Raises:
      TypeError, ValueError: as `jlade.generate` does.
    """
    request = check(params, prompt, options)
    return request.inputs, request.config


@mesh_lib.transfers()
def check(
    params: Params, prompt: Prompts, options: Options, batch_size: int | None = None, capacity: int | None = None
) -> Request:
    """Checks the arguments of `jlade.generate`.

    Args:
      params, prompt, options: of `jlade.generate`.
      batch_size: number of sequences that are decoded at once; by default all.
      capacity: tokens of a row of the engine that decodes each prompt alone. What is wrong with one is then in
        `Request.errors`, and not raised. By default the prompts are a batch.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted.
    """
    attached.log_unseen()
    if options.tokenizer is None:
        options = dataclasses.replace(options, tokenizer=text.tokenizer_of(params))
    decoder, mesh = _check_decoder(params, options.decoder, options.mesh)
    errors: dict[int, Exception] = {}
    prompts = _check_prompts(prompt, options, decoder, None if capacity is None else errors)
    _check_batch(len(prompts) if batch_size is None else batch_size, mesh)
    lookahead = with_prediction(_check_lookahead(options, params, decoder, len(prompts), mesh), options)
    stopping, stop = _check_stopping(options, prompts, decoder, capacity)
    least = 0 if stopping.min_new_tokens is None else stopping.min_new_tokens
    fewest, most = np.broadcast_arrays(least, stopping.max_new_tokens)
    if capacity is None:
        bound = f"the model reads at most {decoder.max_positions} positions"
        prompts_lib.check_room(prompts, fewest, most, decoder.max_positions, bound)
    else:
        prompts_lib.check_room(prompts, fewest, most, capacity, f"the engine was made with capacity={capacity}", errors)
    key = drawing.check_key(options.key, len(prompts))
    sampling = drawing.check_sampling(options.sampling, len(prompts), decoder.vocab_size)
    drawing.check_bans(sampling, stopping, decoder.vocab_size)
    known = _check_known(options, params, decoder, prompts, lookahead)
    for name in ("learn", "logprobs", "with_statistics", "keep_state"):
        _check_bool(name, getattr(options, name))
    if check_int("top_logprobs", options.top_logprobs, 0) and not options.logprobs:
        raise ValueError(f"top_logprobs={options.top_logprobs} needs logprobs=True")
    chunks = CHUNKS_ON_CPU if mesh_lib.device_of(params, mesh).platform == "cpu" else CHUNKS
    is_auto = options.lookahead == "auto"
    so_far = learned.find(params, decoder, len(prompts), mesh, lookahead, chunks) if is_auto else None
    costs: HostArray = adaptive.costs(lookahead) if so_far is None else so_far.costs(options.learn)

    if known.corpus is not None and "corpus" not in lookahead.sources:
        lookahead = dataclasses.replace(lookahead, sources=(*lookahead.sources, "corpus"))
    tokens, lengths = _pad(prompts, stopping.max_new_tokens, known.capacity, decoder.max_positions)
    state, num_padded, sources = known.state, tokens.shape[1], known.sources
    if capacity is None:  # the rows of an engine have no place for an index of their prompts
        sources = sources | corpus_lib.of_prompts(prompts, num_padded, lookahead)
    return Request(
        inputs=Inputs(
            prompts=tokens,
            lengths=lengths,
            stopping=stopping,
            key=key,
            sampling=sampling,
            costs=costs,
            cache=None if state is None else continuation.reuse(state, prompts, params, decoder, num_padded),
            sources=sources,
            corpus=known.corpus,
        ),
        config=DecodeConfig(
            decoder=decoder,
            lookahead=dataclasses.replace(lookahead, relative_step_time=None),
            logprobs=options.logprobs,
            top_logprobs=options.top_logprobs,
            chunks=chunks,
            mesh=mesh,
        ),
        tokenizer=options.tokenizer,
        stop=stop,
        learned=so_far if options.learn else None,
        with_statistics=options.with_statistics,
        keep_state=options.keep_state,
        errors=errors,
    )


def check_single(request: Request) -> None:
    """Raises a ValueError for a batch."""
    if (size := len(request.inputs.lengths)) != 1:
        raise ValueError(f"prompt must be a single prompt, got a batch of {size}")


def check_streamer(streamer: Any, request: Request) -> None:
    """Raises an error for a batch, or if the streamer lacks `put` and `end`."""
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(f"streamer must have the methods put and end of transformers' streamers, got {streamer!r}")
    check_single(request)


def _check_decoder(params: Params, decoder: Decoder | None, mesh: Mesh | None) -> tuple[Decoder, Mesh | None]:
    """Returns the decoder for its devices, and the mesh with the axes of `MODEL`: that of the parameters by default."""
    if decoder is None and isinstance(params, LlamaParams):
        decoder = Llama(params.config)
    if decoder is None:
        if not hasattr(params, "decoder"):
            raise TypeError(
                f"params of type {type(params).__name__} do not say which model they belong to: pass decoder=, or "
                f"parameters made by jlade.load"
            )
        decoder = params.decoder
    mesh = mesh_lib.mesh_of(params) if mesh is None else mesh
    if isinstance(decoder, Llama):
        mesh = None if mesh is None else sharding.mesh_for(decoder.config, mesh)
        return decoder.on(params, mesh), mesh
    mesh = None if mesh is None else mesh_lib.split(mesh, None)
    if mesh_lib.size(mesh, *MODEL) > 1:
        raise ValueError(
            f"mesh has model={mesh_lib.size(mesh, *MODEL)}, and only jlade's own models can be divided, not "
            f"{type(decoder).__name__}: use these devices for data or lookahead"
        )
    return decoder, mesh


def _check_prompts(
    prompt: Prompts, options: Options, decoder: Decoder, errors: dict[int, Exception] | None
) -> list[np.ndarray]:
    if options.tokenizer is not None:
        text.token_bytes(options.tokenizer)
    parse_special = _check_bool("parse_special", options.parse_special)
    return prompts_lib.read(
        prompt, options.tokenizer, decoder.vocab_size, options.attention_mask, parse_special, errors
    )


def _check_batch(batch_size: int, mesh: Mesh | None) -> None:
    """Raises a ValueError if the axis `data` of the mesh does not divide the batch."""
    groups = mesh_lib.size(mesh, DATA)
    if batch_size % groups:
        accepted = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        raise ValueError(
            f"mesh has data={groups}, which does not divide a batch of {batch_size}: make the batch a multiple of "
            f"{groups}, or data one of {', '.join(map(str, accepted))}"
        )


def _check_lookahead(
    options: Options, params: Params, decoder: Decoder, batch_size: int, mesh: Mesh | None
) -> LookaheadConfig:
    lookahead: Any = options.lookahead
    if isinstance(options.state, DecodeState):
        # "auto" continues with the setting of the state, which may have one sequence for all prompts.
        batch_size = options.state.tokens.shape[0]
    if isinstance(lookahead, str) and lookahead == "auto":
        return choice.choose(params, decoder, batch_size, mesh)
    if not isinstance(lookahead, LookaheadConfig | None):
        raise TypeError(f'lookahead must be a LookaheadConfig, "auto", or None for plain decoding, got {lookahead!r}')
    if lookahead is None:
        return PLAIN
    choice.log_if_slow(lookahead, params, decoder, batch_size, mesh)
    return lookahead


def with_prediction(lookahead: LookaheadConfig, options: Options) -> LookaheadConfig:
    """Returns the setting with drafts from a prediction if there is one."""
    if options.prediction is None or "prediction" in lookahead.sources:
        return lookahead
    if lookahead.num_drafted == 0 or lookahead.tree_size is None:
        if options.lookahead != "auto":
            raise ValueError(
                f"prediction needs a lookahead with a tree, such as LookaheadConfig.tree(63), got "
                f"lookahead={options.lookahead}"
            )
        return lookahead  # the setting for this device has no use for it
    return dataclasses.replace(lookahead, sources=("prediction", *lookahead.sources))


def _check_stopping(
    options: Options, prompts: list[np.ndarray], decoder: Decoder, capacity: int | None
) -> tuple[Stopping, tuple[tuple[str, ...], ...]]:
    """Returns when the texts end, as arrays, and the stop strings of each."""
    lengths: HostArray = np.array([len(ids) for ids in prompts], np.int32)
    if options.max_new_tokens is None:
        most = decoder.max_positions if capacity is None else capacity
        limits: HostArray = np.clip(most - lengths, 1, MOST_NEW_TOKENS)
    else:
        limits = _check_ints("max_new_tokens", options.max_new_tokens, 1, len(prompts))
    fewest = _check_ints("min_new_tokens", options.min_new_tokens, 0, len(prompts))
    stop = stop_strings.check(options.stop, len(prompts), options.tokenizer, decoder)
    eos_ids = decoder.eos_ids if options.eos_ids is None else options.eos_ids
    stopping = Stopping(
        max_new_tokens=limits,
        eos_ids=_check_eos_ids(eos_ids, len(prompts), decoder.vocab_size),
        min_new_tokens=fewest if fewest.any() else None,
        strings=stop_strings.build(options.tokenizer, decoder.vocab_size, stop) if any(stop) else None,
    )
    return stopping, stop


class _Known(NamedTuple):
    """What earlier texts contribute to a request."""

    state: DecodeState | None  # to continue from, with one sequence for each prompt
    capacity: int  # of the state, 0 without one
    sources: dict[str, State]  # initial states of sources
    corpus: TextIndex | None


def _check_known(
    options: Options, params: Params, decoder: Decoder, prompts: list[np.ndarray], lookahead: LookaheadConfig
) -> _Known:
    """Checks `state`, `pool`, `corpus` and `prediction` of the options."""
    batch_size, vocab_size = len(prompts), decoder.vocab_size
    sources: dict[str, State] = {}
    corpus: TextIndex | None = None
    if options.corpus is not None:
        texts = corpus_lib.check(options.corpus, options.tokenizer, vocab_size)
        if "suffix" in lookahead.reach:
            corpus = texts.on_device
            if "recycled" in lookahead.reach:
                sources["recycled"] = corpus_lib.recycled(options.corpus, texts, batch_size, vocab_size)
        elif options.lookahead != "auto":  # which may have no use for it
            raise ValueError(
                f"corpus needs a lookahead with 'suffix' among its sources, such as LookaheadConfig.tree(63), got "
                f"lookahead={options.lookahead}"
            )
    elif "corpus" in lookahead.sources:
        raise ValueError(f"lookahead has 'corpus' among its sources, {lookahead.sources}, and corpus is None")
    pool = _check_pool(options.pool, batch_size, vocab_size, lookahead)
    predicted: dict[str, State] = {}
    if options.prediction is not None:
        reading = prediction_lib.read(options.prediction, options.tokenizer, batch_size, vocab_size)
        predicted = {"prediction": reading} if "prediction" in lookahead.reach else {}
    state = options.state
    if state is None:
        return _Known(None, 0, sources | predicted | ({} if pool is None else {"pool": pool}), corpus)
    if pool is not None:
        raise ValueError("pool and state cannot both be given: the state has a pool of its own")
    continuation.check(state, batch_size, params, decoder, lookahead)
    state = continuation.for_each_sequence(state, batch_size)
    of_state = {name: each for name, each in state.memory.drafts.states.items() if each is not None}
    of_state.pop("prediction", None)  # of an earlier answer
    return _Known(state, state.tokens.shape[1], sources | of_state | predicted, corpus)


def _pad(prompts: list[np.ndarray], limits: HostArray, least: int, max_positions: int) -> tuple[HostArray, HostArray]:
    """Returns the prompts [B, C] with room for new tokens, C at least `least`, and their lengths [B]."""
    lengths: HostArray = np.array([len(ids) for ids in prompts], np.int32)
    capacity = min(prompts_lib.round_up(int(max(lengths + limits)), SMALLEST_CAPACITY), max_positions)
    padded: HostArray = np.zeros((len(prompts), max(capacity, least)), np.int32)
    for tokens, ids in zip(padded, prompts, strict=True):
        tokens[: len(ids)] = ids
    return padded, lengths


def _check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def _check_ints(name: str, values: Any, least: int, batch_size: int) -> HostArray:
    """Returns integers [B], given one for all sequences or one for each."""
    if isinstance(values, numbers.Number) or not isinstance(values, Sequence | np.ndarray):
        values = [values] * batch_size
    if len(values) != batch_size:
        raise ValueError(f"{name} must be one integer or {batch_size}, one for each prompt, got {values!r}")
    return np.array([check_int(name, value, least) for value in values], np.int32)


def _check_eos_ids(eos_ids: Any, batch_size: int, vocab_size: int) -> HostArray:
    """Returns the end tokens of each sequence [B, K], padded with -1, given those of all or of each."""
    wrong = f"eos_ids must be a token id, a sequence of them, or one for each of {batch_size} prompts, got {eos_ids!r}"
    if hasattr(eos_ids, "__array__"):
        eos_ids = np.asarray(eos_ids).tolist()
    if isinstance(eos_ids, numbers.Integral):
        eos_ids = (eos_ids,)
    if isinstance(eos_ids, str) or not isinstance(eos_ids, Iterable):
        raise TypeError(wrong)
    sets = [np.asarray(ids).tolist() if hasattr(ids, "__array__") else ids for ids in eos_ids]
    if not sets or isinstance(sets[0], numbers.Number):
        sets = [sets] * batch_size
    if any(isinstance(ids, str) or not isinstance(ids, Iterable) for ids in sets):
        raise TypeError(wrong)
    if len(sets) != batch_size:
        raise ValueError(wrong)
    sets = [[check_int("eos_ids", i, 0) for i in ids] for ids in sets]
    outside = [i for ids in sets for i in ids if i >= vocab_size]
    if outside:
        raise ValueError(f"eos_ids holds {outside[0]}; accepted are 0 to {vocab_size - 1}")
    padded = np.full((batch_size, prompts_lib.round_up(max(map(len, sets)), EOS_SLOTS)), -1, np.int32)
    for padded_ids, ids in zip(padded, sets, strict=True):
        padded_ids[: len(ids)] = ids
    return padded


def _check_pool(pool: Any, batch_size: int, vocab_size: int, lookahead: LookaheadConfig) -> NGramPool | None:
    """Returns pools of B sequences, given one for all or one for each."""
    if pool is None:
        return None
    if not isinstance(pool, NGramPool):
        raise TypeError(f"pool must be an NGramPool, got {type(pool).__name__}")
    shape = ngram_pool.shape(vocab_size, lookahead.ngram_size, lookahead.guess_set_size)
    if pool.vocab_size != vocab_size or pool.shape not in (shape, (batch_size, *shape)):
        raise ValueError(
            f"pool must be for a vocabulary of {vocab_size} tokens and have the shape [R, S, N] = {list(shape)} of "
            f"this setting, or that for each of {batch_size} prompts, got {pool.vocab_size} and {list(pool.shape)}"
        )
    return dataclasses.replace(pool, rows=jnp.broadcast_to(pool.rows, (batch_size, *pool.rows.shape[-2:])))
