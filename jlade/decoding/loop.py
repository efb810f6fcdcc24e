"""The loop over steps, at one width or at adaptive widths."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jlade.config import LookaheadConfig
from jlade.decoding import prefill as prefill_lib
from jlade.decoding import step as step_lib
from jlade.decoding.state import DecodeState, Inputs, Program
from jlade.lookahead import adaptive
from jlade.lookahead.ngram_pool import NGramPool
from jlade.models.base import KVCache, Params

NO_LIMIT = 2**30  # steps


def decode(params: Params, inputs: Inputs, program: Program) -> DecodeState:
    """Reads the prompts and makes steps until every sequence has ended.

    Called eagerly, it runs two compiled programs, one that reads and one that decodes, and a small one between them.
    Under the caller's own `jax.jit`, `jax.vmap` or `jax.shard_map` it is traced as part of the caller's program.

    Args:
      params: the decoder's parameters.
      inputs: the request, as `jlade.prepare` makes it. Their capacity C must cover each prompt and its
        `max_new_tokens`. If these are traced, the caller has to see to it: tokens past the capacity are lost.
      program: the static settings.

    Raises:
      ValueError: when the capacity is too small and lengths and limits are not traced.
    """
    cache = prefill_lib.prefill(params, inputs, program)
    return run(params, prefill_lib.start(cache, inputs, program), program)


def step(params: Params, state: DecodeState, program: Program) -> DecodeState:
    """Returns the state after one step, at the width that the state's pace gives."""
    if state.pace is None:
        return step_lib.step(params, state, program, program.lookahead)
    return _loop(params, state, jnp.int32(1), program)


def run(params: Params, state: DecodeState, program: Program, max_steps: int | jax.Array = NO_LIMIT) -> DecodeState:
    """Makes steps until every sequence has ended, at most `max_steps`, in one compiled program for any `max_steps`.

    It takes over the buffers of the state's cache and pool, so `state` must not be used afterwards. The rest of the
    state, which is small, may share arrays with the caller.
    """
    rest = dataclasses.replace(state, cache=None, pool=None)  # type: ignore[arg-type]  # they come apart, to be donated
    after = _run(params, rest, state.cache, state.pool, jnp.int32(max_steps), program)
    return dataclasses.replace(after, constants=state.constants)


@functools.partial(jax.jit, static_argnames="program", donate_argnames=("cache", "pool"))
def _run(
    params: Params, state: DecodeState, cache: KVCache, pool: NGramPool, max_steps: jax.Array, program: Program
) -> DecodeState:
    after = _loop(params, dataclasses.replace(state, cache=cache, pool=pool), max_steps, program)
    # A program copies what it returns as it came: in every step of a stream, the table of the stop strings.
    return dataclasses.replace(after, constants=None)  # type: ignore[arg-type]  # `run` has them


def _loop(params: Params, state: DecodeState, max_steps: jax.Array, program: Program) -> DecodeState:
    last = jnp.max(state.num_steps) + max_steps  # the sequences that have not ended have made the most steps

    def goes_on(state: DecodeState) -> jax.Array:
        return ~jnp.all(state.done) & (jnp.max(state.num_steps) < last)

    if state.pace is None:
        return jax.lax.while_loop(goes_on, lambda s: step_lib.step(params, s, program, program.lookahead), state)
    return _adaptive_loop(params, state, goes_on, program)


def _adaptive_loop(
    params: Params, state: DecodeState, goes_on: Callable[[DecodeState], jax.Array], program: Program
) -> DecodeState:
    """Makes steps while `goes_on`, each at the level of the state's pace.

    Each level has a loop of its own, within one around all of them: with a conditional in a single loop, compilers copy
    the cache.
    """
    levels = adaptive.levels(program.lookahead)
    assert state.constants.step_cost is not None
    costs = adaptive.costs(levels, state.constants.step_cost)

    def step_at(level: LookaheadConfig, state: DecodeState) -> DecodeState:
        assert state.pace is not None
        after = step_lib.step(params, state, program, level)
        tokens, running = jnp.sum(after.num_tokens - state.num_tokens), jnp.sum(~state.done, dtype=jnp.int32)
        accepted = tokens.astype(jnp.float32) / running.astype(jnp.float32)
        return dataclasses.replace(after, pace=adaptive.update(state.pace, accepted, costs))

    def is_at(index: int, state: DecodeState) -> jax.Array:
        assert state.pace is not None
        return goes_on(state) & (state.pace.level == index)

    def all_levels(state: DecodeState) -> DecodeState:
        for index, level in enumerate(levels):
            state = jax.lax.while_loop(functools.partial(is_at, index), functools.partial(step_at, level), state)
        return state

    return jax.lax.while_loop(goes_on, all_levels, state)
