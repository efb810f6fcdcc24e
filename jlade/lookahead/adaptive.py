"""Adaptive width: narrower steps while wide ones do not pay.

A wide step pays when it accepts more tokens than its cost in plain steps. (An addition of jlade's; the paper keeps W, N
and G fixed.) A tree without a window forecasts the tokens that a step accepts, and each step has the best width. The
forecasts are calibrated by the ratio of accepted to forecast tokens in recent steps: sampled text accepts a fraction of
what greedy text does. While the plain width is best, most steps rest: they make no drafts, so that text without use for
them costs what plain decoding does. For other settings the full width is tried from time to time.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.config import PLAIN, LookaheadConfig, NGramConfig, TreeConfig
from jlade.drafts.record import BIT
from jlade.drafts.tree import Tree

TRIAL = 16  # steps at a level before it is judged
MEMORY = 32  # steps over which means are taken, approximately
LONG_MEMORY = 512  # forecasts of plain steps after which earlier drafts count little
TRUSTED = 4.0  # drafted tokens that count as forecast and accepted before the first ones
NARROW = 7  # tokens of a narrow tree beside a window
MIN_TREE = 3  # tokens of the smallest tree: on CPUs a step of 2 tokens takes as long as one of 4
MAX_REST = 16  # plain steps without drafts before the next forecast; doubled after each one that advises another
FIRST_WAIT, MAX_WAIT = 32, 512  # narrow steps before the next trial of the full width; doubled after each trial


class Level(NamedTuple):
    """The width of a step.

    Attributes:
      setting: the sizes of its window and of its tree.
      makes_drafts: whether it makes drafts for the next step, and learns for later ones.
    """

    setting: LookaheadConfig
    makes_drafts: bool = True


REST = Level(PLAIN, makes_drafts=False)


@flax.struct.dataclass
class Pace:
    """The level of the next step and the record at that level, shared by all sequences of a batch."""

    level: jax.Array  # [] int32, an index of `levels`: 0 for the full width, L for `REST`
    age: jax.Array  # [] int32, steps made since the level was entered; by forecasts, since the last one
    rate: jax.Array  # [] float32, mean tokens per step since then
    wait: jax.Array  # [] int32, narrow steps before the next trial of the full width; by forecasts, steps that rest
    num_steps: jax.Array  # [L] int32, steps made at each level
    # By forecasts, numbers of drafted tokens, means over the sequences; the totals weigh later steps more:
    expected: jax.Array  # [] float32, that the next step accepts by its forecast
    forecast_total: jax.Array  # [] float32, that the steps so far were to accept by their forecasts
    accepted_total: jax.Array  # [] float32, that they accepted


def levels(lookahead: LookaheadConfig) -> tuple[Level, ...]:
    """Returns the levels of an adaptive decode: those of its L `settings`, and where forecasts choose them `REST`."""
    return (*map(Level, settings(lookahead)), *((REST,) if has_forecast(lookahead) else ()))


def settings(lookahead: LookaheadConfig) -> tuple[LookaheadConfig, ...]:
    """Returns the settings of an adaptive decode, widest first: the full one, a few drafts without a window, plain."""
    drafts, without_window = lookahead.drafts, dataclasses.replace(lookahead.ngrams, window_size=0)
    narrower: list[TreeConfig | NGramConfig]
    if isinstance(drafts, NGramConfig):
        narrower = [dataclasses.replace(without_window, guess_set_size=min(1, drafts.guess_set_size))]
    elif has_forecast(lookahead):
        # The geometric mean of the blocks of the full tree and of the smallest one, as a power of two: on CPUs a step
        # of 9 tokens takes longer than one of 16.
        middle = 2 ** round(math.log2((MIN_TREE + 1) * (drafts.size + 1)) / 2)
        narrower = [dataclasses.replace(drafts, size=min(size, drafts.size)) for size in (middle - 1, MIN_TREE)]
    else:
        narrower = [dataclasses.replace(drafts, size=min(NARROW, drafts.size), ngrams=without_window)]
    plain = dataclasses.replace(without_window, guess_set_size=0)
    widths = dict.fromkeys([drafts, *narrower, plain])
    return tuple(dataclasses.replace(lookahead, drafts=width) for width in widths)


def has_forecast(lookahead: LookaheadConfig) -> bool:
    """Returns whether the drafts tell how many tokens a step accepts: a window would also be of use to later steps."""
    return lookahead.has_tree and lookahead.window_size == 0


def costs(lookahead: LookaheadConfig, step_times: Mapping[int, float] | None = None) -> Any:
    """Returns the cost of a step of each setting [L] float32, in plain steps; None if the setting is not adaptive.

    Args:
      lookahead: the setting.
      step_times: times by block size, in ascending order from 1; interpolated between sizes. Without them the cost is
        taken to grow linearly from a plain step, 1, to a step of full width, `relative_step_time`.
    """
    if lookahead.relative_step_time is None or lookahead.block_size == 1:  # a plain step has no narrower ones
        return None
    times = step_times or {1: 1.0, lookahead.block_size: lookahead.relative_step_time}
    sizes = [setting.block_size for setting in settings(lookahead)]
    return (np.interp(sizes, list(times), list(times.values())) / times[1]).astype(np.float32)


def start(costs: jax.Array) -> Pace:
    """Returns the pace of a decode that begins at full width, given the cost of each setting [L]."""
    zero = jnp.float32(0)
    num_steps = jnp.zeros(jnp.shape(costs), jnp.int32)
    return Pace(jnp.int32(0), jnp.int32(0), zero, jnp.int32(FIRST_WAIT), num_steps, zero, zero, zero)


def forecast(tree: Tree, settings: Sequence[LookaheadConfig]) -> jax.Array:
    """Returns the tokens that a step with a tree is expected to accept with each setting [L] float32."""
    assert tree.costs is not None
    probability = jnp.exp2(tree.costs.astype(jnp.float32) / -BIT)
    return jnp.stack([1 + jnp.sum(probability[: setting.num_drafted]) for setting in settings])


def choose(pace: Pace, accepted: jax.Array, forecast: jax.Array, costs: jax.Array) -> Pace:
    """Records a step and chooses the level of the next one by a forecast.

    Args:
      pace: before the step.
      accepted: [] float32, mean number of tokens that the step accepted for a sequence.
      forecast: [L] float32, mean number of tokens that a step with each setting is expected to accept for a sequence; 0
        where all have ended. The next step is then the first one of other sequences.
      costs: [L], cost of a step with each setting, in plain steps.
    """
    has_drafts, goes_on, drafted = pace.expected > 0, forecast[-1] > 0, jnp.maximum(forecast - 1, 0)
    # Without drafts the totals fade slowly, so that drafts are tried again.
    fading = jnp.where(has_drafts, 1 - 1 / MEMORY, 1 - 1 / LONG_MEMORY)
    forecast_total = fading * pace.forecast_total + pace.expected
    accepted_total = fading * pace.accepted_total + jnp.where(has_drafts, accepted - 1, 0)
    calibrated = 1 + drafted * (accepted_total + TRUSTED) / (forecast_total + TRUSTED)
    level, plain = jnp.argmax(calibrated / costs).astype(jnp.int32), len(costs) - 1
    rests = (pace.level == plain) & (level == plain) & goes_on
    return dataclasses.replace(
        pace,
        level=jnp.where(rests, plain + 1, level),
        age=jnp.int32(0),
        wait=jnp.where(rests, jnp.clip(2 * pace.wait, 1, MAX_REST), 0),
        num_steps=pace.num_steps.at[pace.level].add(1),
        expected=drafted[level],
        forecast_total=forecast_total,
        accepted_total=accepted_total,
    )


def rest(pace: Pace) -> Pace:
    """Records a step that rested. After the last one of the wait a plain step makes drafts again."""
    age, plain = pace.age + 1, len(pace.num_steps) - 1
    goes_on = age < pace.wait
    level = jnp.where(goes_on, plain + 1, plain)
    return dataclasses.replace(pace, level=level, age=age, num_steps=pace.num_steps.at[plain].add(1))


def pause(pace: Pace) -> Pace:
    """Records a plain step of sequences without drafts, which tells nothing about those with drafts."""
    return dataclasses.replace(pace, num_steps=pace.num_steps.at[-1].add(1))


def update(pace: Pace, accepted: jax.Array, costs: jax.Array) -> Pace:
    """Records a step and chooses the level of the next one.

    A level pays when its tokens per step exceed its cost. A level that does not pay is left for the next narrower one
    after `TRIAL` steps. After `pace.wait` narrow steps the full width is tried again. The wait doubles with each trial,
    so that the cost of trials vanishes, and is reset once the full width pays.

    Args:
      pace: before the step.
      accepted: [] float32, mean number of tokens that the step accepted for a sequence.
      costs: [L], cost of a step with each setting, in plain steps.
    """
    age = pace.age + 1
    rate = pace.rate + (accepted - pace.rate) / jnp.minimum(age, MEMORY).astype(jnp.float32)
    pays = rate > costs[pace.level]
    falls = (age >= TRIAL) & ~pays & (pace.level < len(costs) - 1)
    tries = ~falls & (pace.level > 0) & (age >= pace.wait)
    wait = jnp.where(tries, jnp.minimum(2 * pace.wait, MAX_WAIT), pace.wait)
    wait = jnp.where((pace.level == 0) & (age >= MEMORY) & pays, FIRST_WAIT, wait)
    return dataclasses.replace(
        pace,
        level=jnp.where(falls, pace.level + 1, jnp.where(tries, 0, pace.level)),
        age=jnp.where(falls | tries, 0, age),
        rate=jnp.where(falls | tries, 0.0, rate),
        wait=wait,
        num_steps=pace.num_steps.at[pace.level].add(1),
    )
