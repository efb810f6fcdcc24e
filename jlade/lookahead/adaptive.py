"""Adaptive width: narrower steps while wide ones do not pay.

A wide step pays when it accepts more tokens than its cost in plain steps. (An addition of jlade's; the paper keeps W, N
and G fixed.) A tree without a window forecasts the tokens that a step accepts, and each step has the best width. The
forecasts are calibrated by the ratio of accepted to forecast tokens in recent steps: sampled text accepts a fraction of
what greedy text does. While the plain width is best, most steps rest: they make no drafts, so that text without use for
them costs what plain decoding does. A window has no forecast, as its n-grams are of use to later steps too.
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

MEMORY = 32  # steps over which means are taken, approximately
LONG_MEMORY = 512  # forecasts of plain steps after which earlier drafts count little
TRUSTED = 4.0  # drafted tokens that count as forecast and accepted before the first ones
MIN_TREE = 3  # tokens of the smallest tree: on CPUs a step of 2 tokens takes as long as one of 4
MAX_REST = 16  # most plain steps without drafts in a row: 1 first, twice as many after each plain forecast


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
    """The level of the next step, and the record of the steps so far, shared by all sequences of a batch."""

    level: jax.Array  # [] int32, an index of the L `settings`: 0 for the full width; L for `REST`
    age: jax.Array  # [] int32, steps made since the last forecast
    wait: jax.Array  # [] int32, steps that rest until the next forecast
    num_steps: jax.Array  # [L] int32, steps made with each setting; those of `REST` count as plain ones
    # Numbers of drafted tokens, means over the sequences; the totals weigh later steps more:
    expected: jax.Array  # [] float32, that the next step accepts by its forecast
    forecast_total: jax.Array  # [] float32, that the steps so far were to accept by their forecasts
    accepted_total: jax.Array  # [] float32, that they accepted


def settings(lookahead: LookaheadConfig) -> tuple[LookaheadConfig, ...]:
    """Returns the settings of an adaptive decode, widest first: the full tree, narrower trees, plain."""
    tree = lookahead.drafts
    assert isinstance(tree, TreeConfig)
    # The geometric mean of the blocks of the full tree and of the smallest one, as a power of two: on CPUs a step of 9
    # tokens takes longer than one of 16.
    middle = 2 ** round(math.log2((MIN_TREE + 1) * (tree.size + 1)) / 2)
    sizes = (tree.size, middle - 1, MIN_TREE)
    trees = [dataclasses.replace(tree, size=min(size, tree.size)) for size in sizes]
    plain = dataclasses.replace(lookahead.ngrams, guess_set_size=0)
    widths: dict[TreeConfig | NGramConfig, None] = dict.fromkeys([*trees, plain])
    return tuple(dataclasses.replace(lookahead, drafts=width, relative_step_time=None) for width in widths)


def costs(lookahead: LookaheadConfig, step_times: Mapping[int, float] | None = None) -> Any:
    """Returns the cost of a step of each setting [L] float32, in plain steps; None if the setting is not adaptive.

    Args:
      lookahead: the setting.
      step_times: times by block size, in ascending order from 1; interpolated between sizes. Without them the cost is
        taken to grow linearly from a plain step, 1, to a step of full width, `relative_step_time`.
    """
    if lookahead.relative_step_time is None:
        return None
    times = step_times or {1: 1.0, lookahead.block_size: lookahead.relative_step_time}
    sizes = [setting.block_size for setting in settings(lookahead)]
    return (np.interp(sizes, list(times), list(times.values())) / times[1]).astype(np.float32)


def start(costs: jax.Array) -> Pace:
    """Returns the pace of a decode that begins at full width, given the cost of each setting [L]."""
    count, total = jnp.int32(0), jnp.float32(0)
    return Pace(count, count, count, jnp.zeros(jnp.shape(costs), jnp.int32), total, total, total)


def forecast(tree: Tree, settings: Sequence[LookaheadConfig]) -> jax.Array:
    """Returns the tokens that a step with a tree is expected to accept with each setting [L] float32."""
    assert tree.costs is not None
    # Costs of a tree are logarithms of probabilities, not times. Its most probable tokens come first.
    probability = jnp.exp2(tree.costs.astype(jnp.float32) / -BIT)
    return jnp.stack([1 + jnp.sum(probability[: setting.num_drafted]) for setting in settings])


def choose(pace: Pace, accepted: jax.Array, forecast: jax.Array, costs: jax.Array) -> Pace:
    """Records a step and chooses the level of the next one by a forecast.

    Args:
      pace: before the step.
      accepted: [] float32, mean number of tokens that the step accepted for a sequence.
      forecast: [L] float32, mean number of tokens that a step with each setting is expected to accept for a sequence; 0
        where all have ended: the next step, the first one of other sequences, has the cheapest width.
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
    level = jnp.where(goes_on, plain + 1, plain).astype(jnp.int32)  # of a weak type, the next call would compile anew
    return dataclasses.replace(pace, level=level, age=age, num_steps=pace.num_steps.at[plain].add(1))


def pause(pace: Pace) -> Pace:
    """Records a plain step of sequences without drafts, which tells nothing about those with drafts."""
    return dataclasses.replace(pace, num_steps=pace.num_steps.at[-1].add(1))
