"""The arguments of `generate` and `stream`, checked, in the form that `decoding` takes."""

import dataclasses
import functools
import itertools
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade import automatic, text
from jlade import sampling as sampling_lib
from jlade import stopping as stopping_lib
from jlade.config import PLAIN, LookaheadConfig, SamplingConfig, check_int
from jlade.decoding import DecodeState
from jlade.lookahead.ngram_pool import NGramPool
from jlade.models.base import Decoder, KVCache, Params, resize
from jlade.sampling import Sampling
from jlade.stopping import Stopping

SMALLEST_CAPACITY = 1024  # tokens; capacities are this times a power of two, so that few programs are compiled
EOS_SLOTS = 8  # end tokens are padded to a multiple of this, likewise


@dataclasses.dataclass(frozen=True)
class Request:
    """Checked arguments for B rows, in the form that `decoding` takes."""

    prompts: np.ndarray  # [B, C] int32
    prompt_lengths: np.ndarray  # [B] int32
    stop: tuple[tuple[str, ...], ...]  # per row
    stopping: Stopping
    key: jax.Array
    sampling: Sampling
    cache: KVCache | None
    pool: NGramPool | None
    decoder: Decoder
    lookahead: LookaheadConfig
    tokenizer: Any
    logprobs: bool
    with_statistics: bool
    keep_state: bool

    @property
    def arrays(self) -> tuple[Any, ...]:
        return (self.prompts, self.prompt_lengths, self.stopping, self.key, self.sampling, self.cache, self.pool)

    @property
    def static(self) -> dict[str, Any]:
        return {"decoder": self.decoder, "lookahead": self.lookahead, "logprobs": self.logprobs}


def check(
    params: Params,
    prompt: Any,
    *,
    max_new_tokens: Any,
    min_new_tokens: Any,
    lookahead: Any,
    sampling: Any,
    tokenizer: Any,
    eos_ids: Any,
    stop: Any,
    key: Any,
    decoder: Any,
    state: Any,
    pool: Any,
    logprobs: bool,
    with_statistics: bool,
    keep_state: bool,
) -> Request:
    """Checks the arguments of `generate`.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted.
    """
    decoder = _check_decoder(params, decoder)
    is_auto = isinstance(lookahead, str) and lookahead == "auto"
    if not is_auto and not isinstance(lookahead, LookaheadConfig | None):
        raise TypeError(f'lookahead must be a LookaheadConfig, "auto", or None for plain decoding, got {lookahead!r}')
    if tokenizer is not None:
        text.token_bytes(tokenizer)
    prompts = _check_prompts(prompt, tokenizer, decoder.vocab_size)
    if is_auto:
        lookahead = automatic.choose(params, decoder, len(prompts))
    lookahead = PLAIN if lookahead is None else lookahead
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    stops = _check_stop(stop, len(prompts))
    limits = _check_ints("max_new_tokens", max_new_tokens, 1, len(prompts))
    least_new_tokens = _check_ints("min_new_tokens", min_new_tokens, 0, len(prompts))
    for length, most, least in zip(lengths, limits, least_new_tokens, strict=True):
        if least > most:
            raise ValueError(f"min_new_tokens must be at most max_new_tokens={most}, got {least}")
        if length + most > decoder.max_positions:
            raise ValueError(
                f"prompt of {length} tokens and max_new_tokens={most} make {length + most} tokens; the model reads at "
                f"most {decoder.max_positions} positions"
            )
    if any(stops) and tokenizer is None:
        raise TypeError(f"stop={stop!r} needs the tokenizer: pass tokenizer= with it")
    stopping = Stopping(
        max_new_tokens=limits,
        eos_ids=_check_eos_ids(decoder.eos_ids if eos_ids is None else eos_ids, len(prompts), decoder.vocab_size),
        min_new_tokens=least_new_tokens if least_new_tokens.any() else None,
        strings=stopping_lib.stop_strings(tokenizer, decoder.vocab_size, stops) if any(stops) else None,
    )
    for name, value in {"logprobs": logprobs, "with_statistics": with_statistics, "keep_state": keep_state}.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    key = _check_key(key, len(prompts))
    sampling = _check_sampling(sampling, len(prompts), decoder.vocab_size)

    capacity = min(_capacity(int(max(lengths + limits))), decoder.max_positions)
    cache, pool = None, _check_pool(pool, len(prompts), decoder.vocab_size, lookahead)
    if state is not None:
        if pool is not None:
            raise ValueError("pool and state cannot both be given: the state has a pool of its own")
        _check_state(state, len(prompts), params, decoder, lookahead)
        state = _for_each_row(state, len(prompts))
        capacity = max(capacity, state.tokens.shape[1])
        cache, pool = _reuse(state, prompts, capacity), state.pool
    padded = np.zeros((len(prompts), capacity), np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    return Request(
        prompts=padded,
        prompt_lengths=lengths,
        stop=stops,
        stopping=stopping,
        key=key,
        sampling=sampling,
        cache=cache,
        pool=pool,
        decoder=decoder,
        lookahead=lookahead,
        tokenizer=tokenizer,
        logprobs=logprobs,
        with_statistics=with_statistics,
        keep_state=keep_state,
    )


def check_single(request: Request) -> None:
    """Refuses a batch."""
    if len(request.prompts) != 1:
        raise ValueError(f"prompt must be a single prompt, got a batch of {len(request.prompts)}")


def check_streamer(streamer: Any, request: Request) -> None:
    """Refuses what does not take tokens as transformers' streamers do."""
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(f"streamer must have the methods put and end of transformers' streamers, got {streamer!r}")
    check_single(request)


def _capacity(num_tokens: int) -> int:
    """Rounds up to `SMALLEST_CAPACITY` times a power of two."""
    return next(c for c in (SMALLEST_CAPACITY << i for i in itertools.count()) if c >= num_tokens)


def _check_decoder(params: Params, decoder: Decoder | None) -> Decoder:
    if decoder is not None:
        return decoder
    if not hasattr(params, "decoder"):
        raise TypeError(
            f"params of type {type(params).__name__} do not say which model they belong to: pass decoder=, or "
            f"parameters made by jlade.load"
        )
    return params.decoder


def _check_prompts(prompt: Any, tokenizer: Any, vocab_size: int) -> list[np.ndarray]:
    """Returns the token ids of every prompt in the batch."""
    check = functools.partial(_check_prompt, tokenizer=tokenizer, vocab_size=vocab_size)
    is_array = isinstance(prompt, np.ndarray | jax.Array)
    if isinstance(prompt, str) or (is_array and prompt.ndim < 2):
        return [check("prompt", prompt)]
    if not is_array and not isinstance(prompt, Sequence):
        raise TypeError(f"prompt must be a string, token ids, or a list of these, got {type(prompt).__name__}")
    if len(prompt) == 0:
        raise ValueError("prompt is empty; at least one token is needed")
    if not is_array and isinstance(prompt[0], numbers.Number):
        return [check("prompt", prompt)]
    return [check(f"prompt[{i}]", row) for i, row in enumerate(prompt)]


def _check_prompt(name: str, prompt: Any, tokenizer: Any, vocab_size: int) -> np.ndarray:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError(f"{name} is a string, {prompt[:40]!r}: pass tokenizer= with it, or token ids instead")
        prompt = text.encode(tokenizer, prompt)
    try:
        ids = np.asarray(prompt)
    except ValueError as error:  # rows of different lengths
        raise TypeError(f"{name} must be a string or a flat sequence of token ids, got {prompt!r}") from error
    if ids.ndim != 1:
        raise TypeError(f"{name} must be a string or a flat sequence of token ids, got {type(prompt).__name__}")
    if len(ids) == 0:
        raise ValueError(f"{name} is empty; at least one token is needed")
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"{name} must hold integer token ids, got {ids.dtype} ({ids[0]!r}, ...)")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"{name} holds token id {outside[0]}; accepted are 0 to {vocab_size - 1}")
    return ids.astype(np.int32)


def _check_ints(name: str, values: Any, least: int, batch_size: int) -> Any:
    """Returns one integer for each row, given one for all or one for each."""
    if isinstance(values, numbers.Number) or not isinstance(values, Sequence | np.ndarray):
        values = [values] * batch_size
    if len(values) != batch_size:
        raise ValueError(f"{name} must be one integer or {batch_size}, one for each prompt, got {values!r}")
    return np.array([check_int(name, value, least) for value in values], np.int32)


def _check_eos_ids(eos_ids: Any, batch_size: int, vocab_size: int) -> Any:
    """Returns the end tokens of each row [B, K], given some for all rows or some for each."""
    wrong = f"eos_ids must be a token id, a sequence of them, or one for each of {batch_size} prompts, got {eos_ids!r}"
    if isinstance(eos_ids, numbers.Integral):
        eos_ids = (eos_ids,)
    if isinstance(eos_ids, str) or not isinstance(eos_ids, Iterable):
        raise TypeError(wrong)
    rows = list(eos_ids)
    if not rows or isinstance(rows[0], numbers.Number):
        rows = [rows] * batch_size
    if any(isinstance(row, str) or not isinstance(row, Iterable) for row in rows):
        raise TypeError(wrong)
    if len(rows) != batch_size:
        raise ValueError(wrong)
    rows = [[check_int("eos_ids", i, 0) for i in row] for row in rows]
    outside = [i for row in rows for i in row if i >= vocab_size]
    if outside:
        raise ValueError(f"eos_ids holds {outside[0]}; accepted are 0 to {vocab_size - 1}")
    slots = EOS_SLOTS * max(1, -(-max(map(len, rows)) // EOS_SLOTS))
    padded = np.full((batch_size, slots), -1, np.int32)
    for ids, row in zip(rows, padded, strict=True):
        row[: len(ids)] = ids
    return padded


def _check_stop(stop: Any, batch_size: int) -> tuple[tuple[str, ...], ...]:
    """Returns the stop strings of each row, given some for all rows or some for each."""
    if stop is None or isinstance(stop, str):
        stop = () if stop is None else (stop,)
    if not isinstance(stop, Sequence):
        raise TypeError(f"stop must be a string, a sequence of them, or one for each prompt, got {stop!r}")
    rows = [stop] * batch_size if all(isinstance(string, str) for string in stop) else stop
    if any(isinstance(row, str) or not isinstance(row, Sequence) for row in rows):
        raise TypeError(f"stop must be a string, a sequence of them, or one for each prompt, got {stop!r}")
    if len(rows) != batch_size:
        raise ValueError(f"stop must be strings for all prompts or {batch_size} sequences of them, got {len(rows)}")
    for string in (string for row in rows for string in row):
        if not isinstance(string, str):
            raise TypeError(f"stop must hold strings, got {string!r}")
        if not string:
            raise ValueError("stop must hold strings of at least one character, got ''")
        try:
            string.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"stop must hold text that UTF-8 can write, got {string!r}") from error
    return tuple(tuple(row) for row in rows)


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
    """Returns one pool for each row [B, V, G, N-1], given one for all or one for each."""
    if pool is None:
        return None
    if not isinstance(pool, NGramPool):
        raise TypeError(f"pool must be an NGramPool, got {type(pool).__name__}")
    shape = (vocab_size, lookahead.guess_set_size, lookahead.ngram_size - 1)
    if pool.ngrams.shape not in (shape, (batch_size, *shape)):
        raise ValueError(
            f"pool must have the shape [V, G, N-1] = {list(shape)} of this model and setting, or that for each of "
            f"{batch_size} prompts, got {list(pool.ngrams.shape)}"
        )
    return NGramPool(jnp.broadcast_to(pool.ngrams, (batch_size, *shape)))


def _check_state(state: Any, batch_size: int, params: Params, decoder: Decoder, lookahead: LookaheadConfig) -> None:
    if not isinstance(state, DecodeState):
        raise TypeError(
            f"state must be the `state` of a Generation made with keep_state=True, got {type(state).__name__}"
        )
    num_rows, capacity = state.tokens.shape
    if num_rows not in (1, batch_size):
        raise ValueError(
            f"state is of {num_rows} rows; accepted are as many as there are prompts, {batch_size}, or one for all"
        )
    expected = jax.eval_shape(lambda params: decoder.init_cache(params, num_rows, capacity), params)
    of_state, of_model = (
        [f"{array.dtype}{list(array.shape)}" for array in jax.tree.leaves(cache)] for cache in (state.cache, expected)
    )
    if of_state != of_model:
        raise ValueError(
            f"state is of another model: its cache has {len(of_state)} arrays like {of_state[0]}, accepted are "
            f"{len(of_model)} like {of_model[0]}"
        )
    shape = (num_rows, decoder.vocab_size, lookahead.guess_set_size, lookahead.ngram_size - 1)
    if state.pool.ngrams.shape != shape:
        raise ValueError(
            f"state is of another lookahead setting: its pool has shape {list(state.pool.ngrams.shape)}, accepted is "
            f"[B, V, G, N-1] = {list(shape)}"
        )


def _for_each_row(state: DecodeState, batch_size: int) -> DecodeState:
    """Returns what is reused of a state with as many rows as there are prompts, given one of so many or of one."""

    def repeat(array: jax.Array) -> jax.Array:
        return jnp.broadcast_to(array, (batch_size, *array.shape[1:]))

    fields = {name: getattr(state, name) for name in ("tokens", "num_tokens", "cache", "pool")}
    return dataclasses.replace(state, **jax.tree.map(repeat, fields))


def _reuse(state: DecodeState, prompts: list[np.ndarray], capacity: int) -> KVCache:
    """Returns the cache of `state`, cut to what it shares with the prompts, with room for `capacity` tokens."""
    tokens, num_tokens = jax.device_get((state.tokens, state.num_tokens))
    shared = []
    for row, length, ids in zip(tokens, num_tokens, prompts, strict=True):
        most = min(length, len(ids)) - 1  # the last token of either is not in the cache, and must not be
        differs = np.flatnonzero(row[:most] != ids[:most])
        shared.append(differs[0] if len(differs) else most)
    return resize(state.cache, np.array(shared, np.int32), capacity)
