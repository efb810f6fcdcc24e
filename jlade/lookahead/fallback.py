"""Falling back to narrower steps while a text does not repay wide ones, and trying these again."""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

TRIAL = 16  # steps at a level before it is judged
MEMORY = 32  # steps over which tokens per step are averaged, about
FIRST_WAIT, LONGEST_WAIT = 32, 512  # narrow steps before the full width is tried again; doubled with every try


@flax.struct.dataclass
class Pace:
    """How wide the next step is, and what was seen of steps so wide; for all rows of a batch together."""

    level: jax.Array  # [] int32, 0 for the full width
    age: jax.Array  # [] int32, steps made since the level was entered
    rate: jax.Array  # [] float32, mean tokens per step of them
    wait: jax.Array  # [] int32, narrow steps until the next try


def start() -> Pace:
    """Returns the pace of a decode that begins at full width."""
    return Pace(jnp.int32(0), jnp.int32(0), jnp.float32(0), jnp.int32(FIRST_WAIT))


def update(pace: Pace, accepted: jax.Array, level_costs: Sequence[float]) -> Pace:
    """Takes note of a step that accepted `accepted` [] tokens a row, and decides the next one's level.

    A level pays when its tokens per step exceed its cost, both by plain decoding's. One that does not is left for the
    next narrower one after `TRIAL` steps. From there the full width is tried again after `pace.wait` steps, which
    double from try to try, so that what tries cost vanishes, and begin anew once the full width has paid.

    Args:
      level_costs: of each level, the time of a step by that of a plain step.
    """
    age = pace.age + 1
    rate = pace.rate + (accepted - pace.rate) / jnp.minimum(age, MEMORY).astype(jnp.float32)
    costs = jnp.asarray(level_costs, jnp.float32)
    judged = age >= TRIAL
    pays = rate > costs[pace.level]
    last = len(level_costs) - 1
    falls = judged & ~pays & (pace.level < last)
    tries = ~falls & (pace.level > 0) & (age >= pace.wait)
    wait = jnp.where(tries, jnp.minimum(2 * pace.wait, LONGEST_WAIT), pace.wait)
    wait = jnp.where((pace.level == 0) & (age >= MEMORY) & pays, FIRST_WAIT, wait)
    return Pace(
        level=jnp.where(falls, pace.level + 1, jnp.where(tries, 0, pace.level)),
        age=jnp.where(falls | tries, 0, age),
        rate=jnp.where(falls | tries, 0.0, rate),
        wait=wait,
    )
