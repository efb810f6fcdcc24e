"""Earlier texts that serve a request: a state to continue from, a pool, a corpus, a prior, predictions."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlade import mesh as mesh_lib
from jlade.config import LookaheadConfig
from jlade.decoding.state import DecodeState, Inputs
from jlade.drafts import pool as ngram_pool
from jlade.drafts.pool import NGramPool
from jlade.drafts.prediction import Reading
from jlade.drafts.source import State
from jlade.drafts.tree import NONE
from jlade.generation import corpus as corpus_lib
from jlade.generation import prior as prior_lib
from jlade.generation import text as text_lib
from jlade.generation.options import Options
from jlade.generation.prompts import SMALLEST_CAPACITY, num_shared, round_up, token_ids
from jlade.generation.text import Tokenizer
from jlade.models.base import Cache, Decoder, Params, cache_shapes, divisible, resize


class Earlier(NamedTuple):
    """The arrays of `state`, `pool`, `corpus`, `prior` and `prediction` of the options."""

    state: DecodeState | None  # to continue from, with one sequence for each prompt
    sources: dict[str, State]  # those of `Inputs`
    shared: dict[str, Any]  # those of `Inputs`


# For each source that reads an option for all sequences: the option, its check, and the source without which a setting
# has no use for it.
_SHARED = {"corpus": ("corpus", corpus_lib.check, "suffix"), "recycled": ("prior", prior_lib.check, "recycled")}


def check(options: Options, params: Params, decoder: Decoder, batch_size: int, lookahead: LookaheadConfig) -> Earlier:
    """Checks `state`, `pool`, `corpus`, `prior` and `prediction` of the options."""
    vocab_size = decoder.vocab_size
    of_sources = searched(options, vocab_size, lookahead)
    sources: dict[str, State] = {}
    if options.corpus is not None and "corpus" in of_sources and "recycled" in lookahead.reach:
        sources["recycled"] = corpus_lib.recycled(options.corpus, of_sources["corpus"], batch_size, vocab_size)
    if options.pool is not None:
        sources["pool"] = _check_pool(options.pool, batch_size, vocab_size, lookahead)
    state = options.state
    if state is not None:
        if options.pool is not None:
            raise ValueError("pool and state cannot both be given: the state has a pool of its own")
        _check_state(state, batch_size, params, decoder, lookahead)
        state = _for_each_sequence(state, batch_size)
        sources |= _sources(state)
    if options.prediction is not None:
        reading = read_prediction(options.prediction, options.tokenizer, batch_size, vocab_size)
        if "prediction" in lookahead.reach:
            sources["prediction"] = reading
    return Earlier(state, sources, {source: one.on_device for source, one in of_sources.items()})


def searched(options: Options, vocab_size: int, lookahead: LookaheadConfig) -> dict[str, Any]:
    """Checks `corpus` and `prior` of the options, and returns those that the setting has use for, by the sources."""
    found = {}
    for source, (name, check, needed) in _SHARED.items():
        if (value := getattr(options, name)) is None:
            continue
        checked = check(value, options.tokenizer, vocab_size)
        if needed in lookahead.reach:
            found[source] = checked
        elif options.lookahead != "auto":  # the setting for this device may have no use for it
            raise ValueError(
                f"{name} needs a lookahead with {needed!r} among its sources, such as LookaheadConfig.tree(63), got "
                f"lookahead={options.lookahead}"
            )
    if "corpus" in lookahead.sources and "corpus" not in found:
        raise ValueError(f"lookahead has 'corpus' among its sources, {lookahead.sources}, and corpus is None")
    return found


def continued(inputs: Inputs, state: DecodeState) -> Inputs:
    """Returns inputs of the same shapes for a call that begins with the state of an earlier one."""
    return dataclasses.replace(inputs, cache=state.cache, sources=inputs.sources | _sources(state))


def _sources(state: DecodeState) -> dict[str, State]:
    """Returns the states of sources that a later call continues with."""
    found = {name: each for name, each in state.sources.items() if each is not None}
    found.pop("prediction", None)  # of an earlier answer
    return found


def _check_state(state: Any, batch_size: int, params: Params, decoder: Decoder, lookahead: LookaheadConfig) -> None:
    """Raises an error unless `state` can be continued by this model, setting and number of prompts."""
    if not isinstance(state, DecodeState):
        raise TypeError(
            f"state must be the `state` of a Generation made with keep_state=True, got {type(state).__name__}"
        )
    num_sequences, capacity = state.tokens.shape
    if num_sequences not in (1, batch_size):
        raise ValueError(
            f"state has {num_sequences} sequences; accepted are one for each of {batch_size} prompts, or one for all"
        )
    expected = cache_shapes(decoder, params, num_sequences, capacity)
    of_state, of_model = (
        [f"{array.dtype}{list(array.shape)}" for array in jax.tree.leaves(cache)] for cache in (state.cache, expected)
    )
    if of_state != of_model:
        raise ValueError(
            f"state is of another model or kv_dtype: its cache has {len(of_state)} arrays like {of_state[0]}, accepted "
            f"are {len(of_model)} like {of_model[0]}"
        )
    shape = ngram_pool.shape(decoder.vocab_size, lookahead.ngram_size, lookahead.ngrams.guess_set_size)
    pool = state.sources["pool"].shape if "pool" in state.sources else None
    accepted = (num_sequences, *shape) if "pool" in lookahead.reach else None
    if pool != accepted:
        found, wanted = ("none" if each is None else str(list(each)) for each in (pool, accepted))
        raise ValueError(
            f"state is of another lookahead setting: its pool has shape [B, R, S, N] = {found}, accepted is {wanted}"
        )


def _for_each_sequence(state: DecodeState, batch_size: int) -> DecodeState:
    """Returns the state with its reused parts repeated for each of `batch_size` prompts if it has one sequence."""

    def repeat(array: jax.Array) -> jax.Array:
        return jnp.broadcast_to(array, (batch_size, *array.shape[1:]))

    fields = {name: getattr(state, name) for name in ("tokens", "num_tokens", "memory")}
    return dataclasses.replace(state, **jax.tree.map(repeat, fields))


def _check_pool(pool: Any, batch_size: int, vocab_size: int, lookahead: LookaheadConfig) -> NGramPool:
    """Returns pools of B sequences, given one for all or one for each."""
    if not isinstance(pool, NGramPool):
        raise TypeError(f"pool must be an NGramPool, got {type(pool).__name__}")
    shape = ngram_pool.shape(vocab_size, lookahead.ngram_size, lookahead.ngrams.guess_set_size)
    if pool.vocab_size != vocab_size or pool.shape not in (shape, (batch_size, *shape)):
        raise ValueError(
            f"pool must be for a vocabulary of {vocab_size} tokens and have the shape [R, S, N] = {list(shape)} of "
            f"this setting, or that for each of {batch_size} prompts, got {pool.vocab_size} and {list(pool.shape)}"
        )
    return dataclasses.replace(pool, rows=jnp.broadcast_to(pool.rows, (batch_size, *pool.rows.shape[-2:])))


def reuse(
    state: DecodeState, prompts: list[np.ndarray], params: Params, decoder: Decoder, capacity: int
) -> Cache | None:
    """Returns the cache of `state`, cut to the tokens that it shares with the prompts, for `capacity` tokens.

    It is empty for a prompt that leaves an earlier text that cannot be shortened, as after a ring has lost tokens:
    those before the place are gone. None if no text can be shortened, and a prompt leaves its own; and after a text
    without a token, as its prompt may have left NaN.
    """
    cache = state.cache
    tokens, num_tokens, prompt_lengths = mesh_lib.fetch((state.tokens, state.num_tokens, state.inputs.lengths))
    if np.any(num_tokens == prompt_lengths):
        return None
    longest = divisible(cache)
    shared = []
    for text, length, ids in zip(tokens, num_tokens, prompts, strict=True):
        cached = length - 1
        number = num_shared(text[:cached], ids[:-1])  # the last token of either is left to the first step
        if number < cached and not longest:
            return None
        shared.append(number if number == cached or cached <= longest else 0)
    return resize(cache, np.array(shared, np.int32), cache_shapes(decoder, params, len(prompts), capacity))


def read_prediction(prediction: Any, tokenizer: Tokenizer | None, batch_size: int, vocab_size: int) -> Reading:
    """Checks the predictions of B answers, and returns them before these begin, with texts [B, S]."""
    is_one = batch_size == 1 and _is_text(prediction)
    texts = {"prediction": prediction} if is_one else _texts_of_batch(prediction, batch_size)
    ids = [_tokens(name, one, tokenizer, vocab_size) for name, one in texts.items()]
    padded = np.full((batch_size, round_up(max(map(len, ids)), SMALLEST_CAPACITY)), NONE, np.int32)
    for row, tokens in zip(padded, ids, strict=True):
        row[: len(tokens)] = tokens
    return Reading.begin(padded)


def _is_text(one: Any) -> bool:
    """Returns whether a value stands for one text: a string, or something that holds token ids."""
    if isinstance(one, str) or getattr(one, "ndim", None) == 1:
        return True
    return isinstance(one, Sequence) and not any(isinstance(each, str) or hasattr(each, "__len__") for each in one)


def _texts_of_batch(prediction: Any, batch_size: int) -> dict[str, Any]:
    if isinstance(prediction, str) or not (isinstance(prediction, Sequence) or np.ndim(prediction)):
        raise TypeError(
            f"prediction must be a string or token ids, in a list of one for each of {batch_size} prompts, "
            f"got {prediction!r}"
        )
    if len(prediction) != batch_size:
        raise ValueError(f"prediction must hold a text for each of {batch_size} prompts, got {len(prediction)}")
    return {f"prediction[{i}]": one for i, one in enumerate(prediction)}


def _tokens(name: str, one: Any, tokenizer: Tokenizer | None, vocab_size: int) -> np.ndarray:
    """Returns the token ids of a text, without the special tokens with which the tokenizer begins a prompt."""
    ids = token_ids(name, one, tokenizer, vocab_size)
    if isinstance(one, str) and tokenizer is not None:
        begin = text_lib.encode(tokenizer, "")
        ids = ids[len(begin) :] if ids[: len(begin)].tolist() == begin else ids
    return ids
