"""The loop over steps, at one width or at adaptive widths."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jlade import mesh as mesh_lib
from jlade.decoding import ahead, prefill, sharding
from jlade.decoding import step as step_lib
from jlade.decoding.block import is_reading, reading_level
from jlade.decoding.state import DecodeConfig, DecodeState, Inputs, Memory
from jlade.lookahead import adaptive
from jlade.lookahead.adaptive import Level
from jlade.mesh import DATA
from jlade.models.base import Params

NO_LIMIT = 2**30  # steps


class Limits(NamedTuple):
    """When a loop returns, besides the end of all sequences; see `run_steps`."""

    max_steps: jax.Array  # [] int32
    stop_at: jax.Array | None = None  # [] int32
    until: jax.Array | None = None  # [B] int32


LIMIT_SPECS = Limits(PartitionSpec(), PartitionSpec(), sharding.BATCH)  # type: ignore[arg-type]  # specs, not arrays


class _Carry(NamedTuple):
    state: DecodeState
    num_steps: jax.Array  # [] int32, steps made by this call
    num_running: jax.Array  # [] int32, sequences that have not ended, on all devices


@mesh_lib.mesh_agnostic
def decode(params: Params, inputs: Inputs, config: DecodeConfig) -> DecodeState:
    """Reads the prompts and makes steps until every sequence has ended.

    Called eagerly, it runs a compiled program that reads, small ones that make the first state, and one that decodes.
    Under the caller's own `jax.jit`, `jax.vmap` or `jax.shard_map` it is traced as part of the caller's program.

    Args:
      params: the decoder's parameters.
      inputs: the request, as `jlade.prepare` makes it. Their capacity C must cover each prompt and its
        `max_new_tokens`. If these are traced, the caller has to see to it: tokens past the capacity are lost.
      config: the static settings.

    Raises:
      ValueError: when the capacity is too small and lengths and limits are not traced.
    """
    params = sharding.put_params(params, config.mesh)
    cache = prefill.prefill(params, inputs, config)
    return run_steps(params, prefill.start(cache, inputs, config), config)


@mesh_lib.mesh_agnostic
def step(params: Params, state: DecodeState, config: DecodeConfig) -> DecodeState:
    """Returns the state after one step, at the width that the state's pace gives."""
    if state.pace is None and config.mesh is None:
        return step_lib.step(params, state, config, Level(config.lookahead))
    return _steps(params, state, Limits(jnp.int32(1)), config)


@mesh_lib.mesh_agnostic
def run_steps(
    params: Params,
    state: DecodeState,
    config: DecodeConfig,
    max_steps: int | jax.Array = NO_LIMIT,
    stop_at: int | jax.Array | None = None,
    until: jax.Array | None = None,
) -> DecodeState:
    """Makes steps in place until every sequence has ended, at most `max_steps`, in one compiled program.

    It takes over the buffers of `state.memory`, so `state` must not be used afterwards. Its other arrays, which are
    small, may be shared with the caller. A loop of these calls costs what `jlade.decode` costs, and the time to
    start a program in each round.

    Args:
      params: the decoder's parameters.
      state: result of `jlade.start`, `jlade.step` or an earlier call.
      config: the static settings.
      max_steps: int32[] or an int. Other numbers compile nothing.
      stop_at: int32[] or an int: it returns as soon as no more than this many sequences are running. Other numbers
        compile nothing.
      until: int32[B]. Sequences of fewer tokens than their prompts read them, in the same forward passes in which the
        others make steps. It returns as soon as one of them has `until` tokens, without which it does not go on.
    """
    small = dataclasses.replace(state, memory=None)  # type: ignore[arg-type]  # an argument of its own
    limits = Limits(_int32(max_steps), None if stop_at is None else _int32(stop_at), until)
    after = _run(params, small, state.memory, limits, config)
    return dataclasses.replace(after, inputs=state.inputs)


def _int32(value: int | jax.Array) -> Any:
    """Returns a number [] int32. One of Python stays on the host: its conversion on the device would be a program."""
    return np.int32(value) if isinstance(value, int) else jnp.int32(value)


@ahead.jit(static_argnames="config", donate_argnames="memory")
def _run(params: Params, small: DecodeState, memory: Memory, limits: Limits, config: DecodeConfig) -> DecodeState:
    after = _steps(params, dataclasses.replace(small, memory=memory), limits, config)
    # A program copies each argument that it returns unchanged: in every step of a stream, the table of stop strings.
    return dataclasses.replace(after, inputs=None)  # type: ignore[arg-type]  # `run_steps` has them


def _steps(params: Params, state: DecodeState, limits: Limits, config: DecodeConfig) -> DecodeState:
    """Makes steps on the program's devices."""
    specs = sharding.state_specs(state.inputs, config)
    in_specs = sharding.param_specs(params, config.mesh), specs, LIMIT_SPECS
    steps_of_device = mesh_lib.shard(functools.partial(_loop, config=config), config.mesh, in_specs, specs)
    return steps_of_device(params, state, limits)


def _loop(params: Params, state: DecodeState, limits: Limits, config: DecodeConfig) -> DecodeState:
    """Makes steps of the sequences of a device."""

    def goes_on(carry: _Carry) -> jax.Array:
        stop_at = 0 if limits.stop_at is None else limits.stop_at
        return (carry.num_running > stop_at) & (carry.num_steps < limits.max_steps)

    def make_step(level: Level, carry: _Carry) -> _Carry:
        return _next(carry, step_lib.step(params, carry.state, config, level), config.mesh)

    carry = _Carry(state, jnp.int32(0), _count(~state.done, config.mesh))
    if limits.until is not None:
        return _reading_loop(params, carry, goes_on, limits.until, config)
    if state.pace is not None:
        return _adaptive_loop(params, carry, goes_on, config)
    level = Level(config.lookahead)
    if _may_be_plain(state, config):  # as sequences end; none begins here
        has_drafts = functools.partial(_has_drafts, config=config)
        carry = jax.lax.while_loop(
            lambda carry: goes_on(carry) & has_drafts(carry.state), functools.partial(make_step, level), carry
        )
        level = adaptive.REST
    return jax.lax.while_loop(goes_on, functools.partial(make_step, level), carry).state


def _may_be_plain(state: DecodeState, config: DecodeConfig) -> bool:
    """Returns whether the steps of a setting are wider than plain ones, and sequences may do without drafts."""
    return state.inputs.has_drafts is not None and config.lookahead.block_size > 1


def _has_drafts(state: DecodeState, config: DecodeConfig) -> jax.Array:
    """Returns whether steps verify drafts for a sequence that runs, also on another device."""
    has_drafts = state.inputs.has_drafts
    assert has_drafts is not None
    return _count(has_drafts & ~state.done, config.mesh) > 0


def _reading_loop(
    params: Params, carry: _Carry, goes_on: Callable[[_Carry], jax.Array], until: jax.Array, config: DecodeConfig
) -> DecodeState:
    """Makes steps while `goes_on`, in which rows read, up to the one in which the first of these has read enough.

    The pace stays as it is: it is of steps of other widths.
    """
    level = reading_level(carry.state, config)

    def num_left(state: DecodeState) -> jax.Array:
        return _count(is_reading(state) & (state.num_tokens < until), config.mesh)

    def goes_on_reading(carry: tuple[_Carry, jax.Array]) -> jax.Array:
        return goes_on(carry[0]) & (carry[1] == at_first)

    def make_step(carry: tuple[_Carry, jax.Array]) -> tuple[_Carry, jax.Array]:
        state = step_lib.step(params, carry[0].state, config, level, until)
        return _next(carry[0], state, config.mesh), num_left(state)

    at_first = num_left(carry.state)
    return jax.lax.while_loop(goes_on_reading, make_step, (carry, at_first))[0].state


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
    params: Params, carry: _Carry, goes_on: Callable[[_Carry], jax.Array], config: DecodeConfig
) -> DecodeState:
    """Makes steps while `goes_on`, each at the level of the state's pace."""
    widths = adaptive.settings(config.lookahead)
    may_be_plain, costs = _may_be_plain(carry.state, config), carry.state.inputs.costs
    assert costs is not None

    def make_step(carry: _Carry) -> _Carry:
        before, has_drafts = carry.state, jnp.ones((), bool)
        pace = before.pace
        assert pace is not None
        if may_be_plain:
            has_drafts = _has_drafts(before, config)
        level = jnp.where(has_drafts, pace.level, len(widths))
        after = step_lib.step_at(params, before, config, widths, level)
        accepted = _mean((after.num_tokens - before.num_tokens).astype(jnp.float32), ~before.done, config.mesh)
        forecast = jax.vmap(functools.partial(adaptive.forecast, settings=widths))(after.drafts.tree)
        expected = _mean(forecast, ~after.done, config.mesh)
        paces = adaptive.pause(pace), adaptive.rest(pace), adaptive.choose(pace, accepted, expected, costs)
        case = jnp.where(has_drafts, jnp.where(level == len(widths), 1, 2), 0)
        pace = jax.tree.map(lambda *values: jax.lax.select_n(case, *values), *paces)
        return _next(carry, dataclasses.replace(after, pace=pace), config.mesh)

    return jax.lax.while_loop(goes_on, make_step, carry).state
