"""The arguments of `generate` and `stream`: checked, and in the form that `jlade.decoding` takes."""

import dataclasses
import itertools
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.choosing import choice
from jlade.config import PLAIN, LookaheadConfig, SamplingConfig, check_int
from jlade.decoding import sampling as sampling_lib
from jlade.decoding.sampling import Sampling
from jlade.decoding.state import CHUNKS, CHUNKS_ON_CPU, DecodeState, Inputs, Program
from jlade.decoding.stopping import Stopping
from jlade.generation import continuation, stop_strings, text
from jlade.generation import corpus as corpus_lib
from jlade.generation import prompts as prompts_lib
from jlade.generation.corpus import Corpus
from jlade.generation.prompts import Prompts
from jlade.generation.text import Tokenizer
from jlade.lookahead.ngram_pool import NGramPool
from jlade.mesh import DATA, LOOKAHEAD, MODEL
from jlade.models import sharding
from jlade.models.base import Decoder, Params
from jlade.models.llama import Llama, LlamaParams

HostArray = Any  # of NumPy; the device makes it a jax.Array, which the fields of `Inputs` are declared as

MOST_NEW_TOKENS = 256  # by default
SMALLEST_CAPACITY = 1024  # tokens; capacities are this times a power of two, so that few programs are compiled
EOS_SLOTS = 32  # end tokens, or this times a power of two, for the same reason


class TextOptions(TypedDict, total=False):
    """The options that decide the text; see `jlade.generate`."""

    max_new_tokens: int | Sequence[int] | None
    min_new_tokens: int | Sequence[int]
    sampling: SamplingConfig | Sequence[SamplingConfig]
    tokenizer: Tokenizer | None
    attention_mask: Any
    parse_special: bool
    eos_ids: int | Sequence[int] | Sequence[Sequence[int]] | None
    stop: str | Sequence[str] | Sequence[Sequence[str]] | None
    key: jax.Array | None
    decoder: Decoder | None
    mesh: Mesh | None


class Options(TextOptions, total=False):
    """The options of `jlade.generate` and `jlade.stream`; see `jlade.generate`."""

    lookahead: LookaheadConfig | Literal["auto"] | None
    state: DecodeState | None
    pool: NGramPool | None
    corpus: Corpus | None
    logprobs: bool
    with_statistics: bool
    keep_state: bool


@dataclasses.dataclass(frozen=True)
class Request:
    """Checked arguments for B sequences: what the device needs, and what the host makes of the result."""

    inputs: Inputs
    program: Program
    tokenizer: Tokenizer | None
    stop: tuple[tuple[str, ...], ...]  # [B], the stop strings of each sequence
    with_statistics: bool
    keep_state: bool


def prepare(params: Params, prompt: Prompts, **options: Unpack[Options]) -> tuple[Inputs, Program]:
    """Returns the arguments of `jlade.decode`, `jlade.prefill` and `jlade.start`, made from those of `jlade.generate`.

    Raises:
      TypeError, ValueError: as `jlade.generate` does.
    """
    request = check(params, prompt, options)
    return request.inputs, request.program


def check(params: Params, prompt: Prompts, options: Options, batch_size: int | None = None) -> Request:
    """Checks the arguments of `jlade.generate`; absent options get their defaults here.

    Args:
      params, prompt, options: of `jlade.generate`.
      batch_size: number of sequences that are decoded at once; by default all.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted.
    """
    check_names(options, Options)
    decoder, mesh = _check_decoder(params, options.get("decoder"), options.get("mesh"))
    tokenizer = options.get("tokenizer")
    if tokenizer is not None:
        text.token_bytes(tokenizer)
    parse_special = _check_bool("parse_special", options.get("parse_special", True))
    mask = options.get("attention_mask")
    prompts = prompts_lib.read(prompt, tokenizer, decoder.vocab_size, mask, parse_special)
    _check_batch(len(prompts) if batch_size is None else batch_size, mesh)
    batch_size = len(prompts)
    state = options.get("state")
    # "auto" continues with the setting of the state, which may have one sequence for all prompts.
    num_sequences = state.tokens.shape[0] if isinstance(state, DecodeState) else batch_size
    lookahead = _check_lookahead(options.get("lookahead", "auto"), params, decoder, num_sequences, mesh)
    if lookahead.tree_size is not None and mesh_lib.size(mesh, LOOKAHEAD) > 1:
        raise ValueError(
            f"lookahead has tree_size={lookahead.tree_size}, and a tree is not divided among the devices of the mesh's "
            f"lookahead={mesh_lib.size(mesh, LOOKAHEAD)}: use these devices for data or model, or tree_size=None"
        )
    lengths: HostArray = np.array([len(ids) for ids in prompts], np.int32)
    limits = _check_limits(options.get("max_new_tokens"), lengths, decoder.max_positions)
    fewest = _check_ints("min_new_tokens", options.get("min_new_tokens", 0), 0, batch_size)
    for most, least in zip(limits, fewest, strict=True):
        if least > most:
            raise ValueError(f"min_new_tokens must be at most max_new_tokens={most}, got {least}")
    stop = _check_stop(options.get("stop"), batch_size)
    eos_ids = options.get("eos_ids")
    strings = None
    if any(stop):
        if tokenizer is None:
            raise TypeError(f"stop={options.get('stop')!r} needs the tokenizer: pass tokenizer= with it")
        strings = stop_strings.build(tokenizer, decoder.vocab_size, stop)
    stopping = Stopping(
        max_new_tokens=limits,
        eos_ids=_check_eos_ids(decoder.eos_ids if eos_ids is None else eos_ids, batch_size, decoder.vocab_size),
        min_new_tokens=fewest if fewest.any() else None,
        strings=strings,
    )
    logprobs, with_statistics, keep_state = (
        _check_bool(name, options.get(name, False)) for name in ("logprobs", "with_statistics", "keep_state")
    )
    key = _check_key(options.get("key"), batch_size)
    sampling = _check_sampling(options.get("sampling", SamplingConfig()), batch_size, decoder.vocab_size)

    capacity = min(prompts_lib.round_up(int(max(lengths + limits)), SMALLEST_CAPACITY), decoder.max_positions)
    corpus, recycled = options.get("corpus"), None
    corpus_tokens: HostArray = None
    if corpus is not None:
        corpus_tokens = corpus_lib.read(corpus, tokenizer, decoder.vocab_size)
        if "suffix" not in lookahead.reach:
            if options.get("lookahead", "auto") != "auto":
                raise ValueError(f"corpus needs a lookahead with 'suffix' among its candidates, got {lookahead}")
            corpus_tokens = None  # the setting for this device has no use for it
        elif "recycled" in lookahead.reach:
            recycled = corpus_lib.recycled(corpus, corpus_tokens, batch_size, decoder.vocab_size)
    cache, pool = None, _check_pool(options.get("pool"), batch_size, decoder.vocab_size, lookahead)
    if state is not None:
        if pool is not None:
            raise ValueError("pool and state cannot both be given: the state has a pool of its own")
        continuation.check(state, batch_size, params, decoder, lookahead)
        state = continuation.for_each_sequence(state, batch_size)
        capacity = max(capacity, state.tokens.shape[1])
        cache, pool = continuation.reuse(state, prompts, capacity), state.pool
        recycled = recycled if state.drafts is None else state.drafts.table
    padded: HostArray = np.zeros((batch_size, capacity), np.int32)
    for tokens, ids in zip(padded, prompts, strict=True):
        tokens[: len(ids)] = ids
    # Plain decoding has no narrower level to fall back to.
    cost = lookahead.step_cost if lookahead.block_size > 1 else None
    step_cost: HostArray = None if cost is None else np.float32(cost)
    return Request(
        inputs=Inputs(
            prompts=padded,
            lengths=lengths,
            stopping=stopping,
            key=key,
            sampling=sampling,
            step_cost=step_cost,
            cache=cache,
            pool=pool,
            recycled=recycled,
            corpus=corpus_tokens,
        ),
        program=Program(
            decoder=decoder,
            lookahead=dataclasses.replace(lookahead, step_cost=None),
            logprobs=logprobs,
            chunks=CHUNKS_ON_CPU if mesh_lib.device_of(params, mesh).platform == "cpu" else CHUNKS,
            mesh=mesh,
        ),
        tokenizer=tokenizer,
        stop=stop,
        with_statistics=with_statistics,
        keep_state=keep_state,
    )


def check_names(options: Mapping[str, Any], accepted: type) -> None:
    """Raises a TypeError that names an option that is not a field of the TypedDict `accepted`."""
    for name in options:
        if name not in accepted.__annotations__:
            raise TypeError(f"{name} is not an argument; accepted are {', '.join(sorted(accepted.__annotations__))}")


def check_single(request: Request) -> None:
    """Raises a ValueError for a batch."""
    batch_size = len(request.inputs.lengths)
    if batch_size != 1:
        raise ValueError(f"prompt must be a single prompt, got a batch of {batch_size}")


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
    lookahead: Any, params: Params, decoder: Decoder, batch_size: int, mesh: Mesh | None
) -> LookaheadConfig:
    if isinstance(lookahead, str) and lookahead == "auto":
        return choice.choose(params, decoder, batch_size, mesh)
    if not isinstance(lookahead, LookaheadConfig | None):
        raise TypeError(f'lookahead must be a LookaheadConfig, "auto", or None for plain decoding, got {lookahead!r}')
    if lookahead is None:
        return PLAIN
    choice.log_if_slow(lookahead, params, decoder, batch_size, mesh)
    return lookahead


def _check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def _check_limits(max_new_tokens: Any, lengths: HostArray, max_positions: int) -> HostArray:
    """Returns the most new tokens of each sequence [B], by default those that fit, up to `MOST_NEW_TOKENS`."""
    if max_new_tokens is None:
        limits: HostArray = np.clip(max_positions - lengths, 1, MOST_NEW_TOKENS)
    else:
        limits = _check_ints("max_new_tokens", max_new_tokens, 1, len(lengths))
    for length, most in zip(lengths, limits, strict=True):
        if length >= max_positions:
            raise ValueError(
                f"prompt of {length} tokens leaves no room for a new one; the model reads at most {max_positions} "
                f"positions"
            )
        if length + most > max_positions:
            raise ValueError(
                f"prompt of {length} tokens and max_new_tokens={most} make {length + most} tokens; the model reads at "
                f"most {max_positions} positions"
            )
    return limits


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
    if isinstance(eos_ids, numbers.Integral):
        eos_ids = (eos_ids,)
    if isinstance(eos_ids, str) or not isinstance(eos_ids, Iterable):
        raise TypeError(wrong)
    sets = list(eos_ids)
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


def _check_stop(stop: Any, batch_size: int) -> tuple[tuple[str, ...], ...]:
    """Returns the stop strings of each sequence, given those of all or of each."""
    if stop is None or isinstance(stop, str):
        stop = () if stop is None else (stop,)
    if not isinstance(stop, Sequence):
        raise TypeError(f"stop must be a string, a sequence of them, or one for each prompt, got {stop!r}")
    sets = [stop] * batch_size if all(isinstance(string, str) for string in stop) else stop
    if any(isinstance(strings, str) or not isinstance(strings, Sequence) for strings in sets):
        raise TypeError(f"stop must be a string, a sequence of them, or one for each prompt, got {stop!r}")
    if len(sets) != batch_size:
        raise ValueError(f"stop must be strings for all prompts or {batch_size} sequences of them, got {len(sets)}")
    for string in itertools.chain.from_iterable(sets):
        if not isinstance(string, str):
            raise TypeError(f"stop must hold strings, got {string!r}")
        if not string:
            raise ValueError("stop must hold strings of at least one character, got ''")
        text.check_utf8("stop must hold", string)
    return tuple(tuple(strings) for strings in sets)


def _check_key(key: Any, batch_size: int) -> jax.Array:
    if key is None:
        return jax.random.key(0)
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.ndim > 0:
        key = jax.random.wrap_key_data(key)  # the form that jax.random.PRNGKey makes
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape in ((), (batch_size,)):
            return key
        raise ValueError(f"key must be one key or one for each of {batch_size} prompts, got keys of shape {key.shape}")
    raise TypeError(f"key must be a key made by jax.random.key, or an array of them, got {key!r}")


def _check_sampling(sampling: Any, batch_size: int, vocab_size: int) -> Sampling:
    configs = [sampling] * batch_size if isinstance(sampling, SamplingConfig) else sampling
    if not isinstance(configs, Sequence) or not all(isinstance(config, SamplingConfig) for config in configs):
        raise TypeError(f"sampling must be a SamplingConfig, or a sequence of one for each prompt, got {sampling!r}")
    if len(configs) != batch_size:
        raise ValueError(
            f"sampling must be one SamplingConfig or {batch_size}, one for each prompt, got {len(configs)}"
        )
    outside = [token for config in configs for token in dict(config.logit_bias or ()) if token >= vocab_size]
    if outside:
        raise ValueError(f"logit_bias names token id {outside[0]}; accepted are 0 to {vocab_size - 1}")
    return sampling_lib.to_arrays(configs, vocab_size)


def _check_pool(pool: Any, batch_size: int, vocab_size: int, lookahead: LookaheadConfig) -> NGramPool | None:
    """Returns pools [B, V, G, N-1], given one for all sequences or one for each."""
    if pool is None:
        return None
    if not isinstance(pool, NGramPool):
        raise TypeError(f"pool must be an NGramPool, got {type(pool).__name__}")
    shape = (vocab_size, lookahead.guess_set_size, lookahead.ngram_size - 1)
    if pool.shape not in (shape, (batch_size, *shape)):
        raise ValueError(
            f"pool must have the shape [V, G, N-1] = {list(shape)} of this model and setting, or that for each of "
            f"{batch_size} prompts, got {list(pool.shape)}"
        )
    return NGramPool(jnp.broadcast_to(pool.rows, (batch_size, *pool.rows.shape[-2:])), pool.ngram_size)
