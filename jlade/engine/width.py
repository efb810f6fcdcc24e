"""The width of steps by their number of rows: few rows, wide trees; many rows, narrow or plain steps."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.choosing import choice, learned
from jlade.choosing.learned import Learned
from jlade.config import LookaheadConfig
from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.lookahead import adaptive
from jlade.mesh import DATA
from jlade.models.base import Params

LESSON = 64  # steps whose time is learned at once


def sizes(num_rows: int, mesh: Mesh | None) -> tuple[int, ...]:
    """Returns the numbers of rows that a state may have, from all rows to one: halves, above 8 quarters.

    Each of them compiles programs. Devices that `data` divides have rows of their own, so there it is all rows alone.
    """
    numbers = [num_rows]
    while numbers[-1] > 1 and mesh_lib.size(mesh, DATA) == 1:
        numbers.append(numbers[-1] // (2 if numbers[-1] <= 8 else 4))
    return tuple(numbers)


def widths(params: Params, config: DecodeConfig, numbers: Sequence[int]) -> tuple[LookaheadConfig, dict[int, "Width"]]:
    """Returns the setting of "auto", which fixes the shapes of a row, and the widths by numbers of rows.

    It is the widest of those that "auto" has for these numbers. Where they differ it has no window, as steps are as
    wide as they should be only without one.

    Args:
      params: the model's parameters.
      config: the model and its devices.
      numbers: of `sizes`.
    """
    of_model = params, config.decoder
    chosen = {choice.choose(*of_model, number, config.mesh).block_size: number for number in numbers}
    lookahead = choice.choose(*of_model, chosen[max(chosen)], config.mesh)
    lookahead = dataclasses.replace(lookahead, relative_step_time=None)
    if len(chosen) > 1:
        lookahead = LookaheadConfig.tree(lookahead.block_size - 1)
    known = {
        number: learned.find(*of_model, number, config.mesh, lookahead, config.chunks, "rounds") for number in numbers
    }
    # For a number that was tuned to keep its full width, all widths cost the same.
    same = np.ones(len(adaptive.levels(lookahead)), np.float32) if any(known.values()) else None
    return lookahead, {number: Width(each.costs() if each else same, each) for number, each in known.items()}


class Width:
    """The costs and the pace of the steps of a state of R rows. They belong to R, so the rows are kept without them.

    Args:
      costs: [L] float32, as in `Inputs.costs`; None if all steps have the full width.
      learned: learns the costs from rounds of steps; None if they are fixed.
    """

    def __init__(self, costs: Any, learned: Learned | None = None):
        self._costs, self._learned = costs, learned
        self._pace = None if costs is None else adaptive.start(costs)
        self._num_steps = np.zeros(np.shape(costs), np.int32)  # made so far, at each level
        self._lesson, self._seconds = np.zeros(np.shape(costs), np.int32), 0.0  # steps to learn from, and their time

    def put(self, state: DecodeState) -> DecodeState:
        """Returns a state of R rows with the costs and the pace of its steps."""
        constants = dataclasses.replace(state.constants, costs=self._costs)
        return dataclasses.replace(state, pace=self._pace, constants=constants)

    def take(self, state: DecodeState) -> DecodeState:
        """Keeps the pace of a state after steps, and returns the state without pace and costs."""
        self._pace = state.pace
        return dataclasses.replace(state, pace=None, constants=dataclasses.replace(state.constants, costs=None))

    @property
    def num_steps(self) -> Any:
        """The steps so far at each level [L] int32, on the device; None if all have the full width."""
        return None if self._pace is None else self._pace.num_steps

    def learn(self, num_steps: Any, seconds: float | None) -> None:
        """Learns from a round of steps.

        Args:
          num_steps: the property after the round, in NumPy.
          seconds: the time of the round; None if the device had other work.
        """
        if self._learned is None:
            return
        made, self._num_steps = num_steps - self._num_steps, num_steps
        if seconds is None:
            return
        self._lesson, self._seconds = self._lesson + made, self._seconds + seconds
        if self._lesson.sum() >= LESSON:
            self._learned.learn_round(self._lesson, self._seconds)
            self._costs = self._learned.costs()
            self._lesson, self._seconds = np.zeros_like(self._lesson), 0.0
