"""The state of an earlier call, from which a request continues."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade import mesh as mesh_lib
from jlade.config import LookaheadConfig
from jlade.decoding.state import DecodeState
from jlade.drafts import pool as ngram_pool
from jlade.models.base import Cache, Decoder, Params, cache_shapes, divisible, resize


def check(state: Any, batch_size: int, params: Params, decoder: Decoder, lookahead: LookaheadConfig) -> None:
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
        [f"{array.dtype}{list(array.shape)}" for array in jax.tree.leaves(cache)]
        for cache in (state.memory.cache, expected)
    )
    if of_state != of_model:
        raise ValueError(
            f"state is of another model: its cache has {len(of_state)} arrays like {of_state[0]}, accepted are "
            f"{len(of_model)} like {of_model[0]}"
        )
    shape = ngram_pool.shape(decoder.vocab_size, lookahead.ngram_size, lookahead.guess_set_size)
    pool = None if state.pool is None else state.pool.shape
    accepted = (num_sequences, *shape) if "pool" in lookahead.reach else None
    if pool != accepted:
        raise ValueError(
            "state is of another lookahead setting: its pool has shape [B, R, S, N] = "
            f"{_shown(pool)}, accepted is {_shown(accepted)}"
        )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))


def for_each_sequence(state: DecodeState, batch_size: int) -> DecodeState:
    """Returns the state with its reused parts repeated for each of `batch_size` prompts if it has one sequence."""

    def repeat(array: jax.Array) -> jax.Array:
        return jnp.broadcast_to(array, (batch_size, *array.shape[1:]))

    fields = {name: getattr(state, name) for name in ("tokens", "num_tokens", "memory")}
    return dataclasses.replace(state, **jax.tree.map(repeat, fields))


def reuse(
    state: DecodeState, prompts: list[np.ndarray], params: Params, decoder: Decoder, capacity: int
) -> Cache | None:
    """Returns the cache of `state`, cut to the tokens that it shares with the prompts, for `capacity` tokens.

    It is empty for a prompt that leaves an earlier text that cannot be shortened, as after a ring has lost tokens:
    those before the place are gone. None if no text can be shortened, and a prompt leaves its own; and after a text
    without a token, as its prompt may have left NaN.
    """
    cache = state.memory.cache
    tokens, num_tokens, prompt_lengths = mesh_lib.fetch(
        (state.tokens, state.num_tokens, state.constants.prompt_lengths)
    )
    if np.any(num_tokens == prompt_lengths):
        return None
    longest = divisible(cache)
    shared = []
    for known, length, ids in zip(tokens, num_tokens, prompts, strict=True):
        most = min(length, len(ids)) - 1  # the last token of either is left to the first step
        differs = np.flatnonzero(known[:most] != ids[:most])
        number, cached = differs[0] if len(differs) else most, length - 1
        if number < cached and not longest:
            return None
        shared.append(number if number == cached or cached <= longest else 0)
    return resize(cache, np.array(shared, np.int32), cache_shapes(decoder, params, len(prompts), capacity))
