"""The loop over steps, at one width or at adaptive widths."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jlade import mesh as mesh_lib
from jlade.config import LookaheadConfig
from jlade.decoding import prefill as prefill_lib
from jlade.decoding import sharding
from jlade.decoding import step as step_lib
from jlade.decoding.state import DecodeState, Inputs, Program
from jlade.drafts.sources import Drafts
from jlade.lookahead import adaptive
from jlade.lookahead.ngram_pool import NGramPool
from jlade.mesh import DATA
from jlade.models.base import KVCache, Params

NO_LIMIT = 2**30  # steps


class _Carry(NamedTuple):
    state: DecodeState
    num_steps: jax.Array  # [] int32, steps made by this call
    num_running: jax.Array  # [] int32, sequences that have not ended, on all devices


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
    params = sharding.put_params(params, program)
    cache = prefill_lib.prefill(params, inputs, program)
    return run(params, prefill_lib.start(cache, inputs, program), program)


def step(params: Params, state: DecodeState, program: Program) -> DecodeState:
    """Returns the state after one step, at the width that the state's pace gives."""
    if state.pace is None and program.mesh is None:
        return step_lib.step(params, state, program, program.lookahead)
    return _steps(params, state, jnp.int32(1), program)


def run(params: Params, state: DecodeState, program: Program, max_steps: int | jax.Array = NO_LIMIT) -> DecodeState:
    """Makes steps until every sequence has ended, at most `max_steps`, in one compiled program for any `max_steps`.

    It takes over the buffers of the state's cache, pool and drafts, so `state` must not be used afterwards. The rest of
    the state, which is small, may share arrays with the caller.
    """
    rest, *large = apart(state)
    after = _run(params, rest, *large, jnp.int32(max_steps), program)
    return dataclasses.replace(after, constants=state.constants)


def apart(state: DecodeState) -> tuple[DecodeState, KVCache, NGramPool, Drafts | None]:
    """Returns a state without its large parts, and these: programs take over their memory."""
    rest = dataclasses.replace(state, cache=None, pool=None, drafts=None)  # type: ignore[arg-type]
    return rest, state.cache, state.pool, state.drafts


@functools.partial(jax.jit, static_argnames="program", donate_argnames=("cache", "pool", "drafts"))
def _run(
    params: Params,
    rest: DecodeState,
    cache: KVCache,
    pool: NGramPool,
    drafts: Drafts | None,
    max_steps: jax.Array,
    program: Program,
) -> DecodeState:
    after = _steps(params, dataclasses.replace(rest, cache=cache, pool=pool, drafts=drafts), max_steps, program)
    # A program copies what it returns as it came: in every step of a stream, the table of the stop strings.
    return dataclasses.replace(after, constants=None)  # type: ignore[arg-type]  # `run` has them


def _steps(params: Params, state: DecodeState, max_steps: jax.Array, program: Program) -> DecodeState:
    """Makes steps on the program's devices."""
    loop = functools.partial(_loop, program=program)
    specs = sharding.state_specs(state.constants.stopping, program)
    in_specs = sharding.param_specs(params, program), specs, PartitionSpec()
    return mesh_lib.shard(loop, program.mesh, in_specs, specs)(params, state, max_steps)


def _loop(params: Params, state: DecodeState, max_steps: jax.Array, program: Program) -> DecodeState:
    """`_steps` for the sequences of a device."""

    def goes_on(carry: _Carry) -> jax.Array:
        return (carry.num_running > 0) & (carry.num_steps < max_steps)

    def make_step(carry: _Carry) -> _Carry:
        return _next(carry, step_lib.step(params, carry.state, program, program.lookahead), program.mesh)

    carry = _Carry(state, jnp.int32(0), _count(~state.done, program.mesh))
    if state.pace is None:
        return jax.lax.while_loop(goes_on, make_step, carry).state
    return _adaptive_loop(params, carry, goes_on, program)


def _next(carry: _Carry, state: DecodeState, mesh: Mesh | None) -> _Carry:
    return _Carry(state, carry.num_steps + 1, _count(~state.done, mesh))


def _count(numbers: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Returns the sum of numbers [B] of all sequences, those of other devices included."""
    total = jnp.sum(numbers, dtype=jnp.int32)
    return total if mesh_lib.size(mesh, DATA) == 1 else jax.lax.psum(total, DATA)


def _mean(numbers: jax.Array, running: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Returns the mean of `numbers` [B, ...] over the sequences that are running [B], also on other devices."""
    weights = running.astype(numbers.dtype).reshape(-1, *[1] * (numbers.ndim - 1))
    total, number = jnp.sum(numbers * weights, axis=0), jnp.sum(weights)
    if mesh_lib.size(mesh, DATA) > 1:
        total, number = jax.lax.psum((total, number), DATA)
    return total / jnp.maximum(number, 1)


def _adaptive_loop(
    params: Params, carry: _Carry, goes_on: Callable[[_Carry], jax.Array], program: Program
) -> DecodeState:
    """Makes steps while `goes_on`, each at the level of the state's pace.

    Each level has a loop of its own, within one around all of them: with a conditional in a single loop, compilers copy
    the cache.
    """
    levels = adaptive.levels(program.lookahead)
    step_cost = carry.state.constants.step_cost
    assert step_cost is not None
    costs = adaptive.costs(levels, step_cost)

    def step_at(level: LookaheadConfig, carry: _Carry) -> _Carry:
        before = carry.state
        assert before.pace is not None
        after = step_lib.step(params, before, program, level)
        if after.drafts is not None and adaptive.forecasts(program.lookahead):
            expected = jax.vmap(functools.partial(adaptive.forecast, levels=levels))(after.drafts.tree)
            pace = adaptive.choose(before.pace, _mean(expected, ~after.done, program.mesh), costs)
        else:
            accepted = (after.num_tokens - before.num_tokens).astype(jnp.float32)
            pace = adaptive.update(before.pace, _mean(accepted, ~before.done, program.mesh), costs)
        return _next(carry, dataclasses.replace(after, pace=pace), program.mesh)

    def is_at(index: int, carry: _Carry) -> jax.Array:
        assert carry.state.pace is not None
        return goes_on(carry) & (carry.state.pace.level == index)

    def all_levels(carry: _Carry) -> _Carry:
        for index, level in enumerate(levels):
            carry = jax.lax.while_loop(functools.partial(is_at, index), functools.partial(step_at, level), carry)
        return carry

    return jax.lax.while_loop(goes_on, all_levels, carry).state
