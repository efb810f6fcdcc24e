"""The width of steps by their number of rows: few rows, wide trees; many rows, narrow or plain steps."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.config import LookaheadConfig
from jlade.costs import choice, learned
from jlade.costs.learned import Learned
from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.generation.lookahead import with_prediction
from jlade.generation.request import Setup
from jlade.lookahead import adaptive
from jlade.lookahead.adaptive import Pace
from jlade.mesh import DATA
from jlade.models.base import Params

LESSON = 16  # steps whose time is learned at once


def sizes(num_rows: int, mesh: Mesh | None) -> tuple[int, ...]:
    """Returns the numbers of rows that a state may have: all rows, a half, above 8 a quarter, and one.

    Each of them compiles programs. Devices that `data` divides have rows of their own, so there it is all rows alone.
    """
    if mesh_lib.size(mesh, DATA) > 1:
        return (num_rows,)
    part = num_rows // (2 if num_rows <= 8 else 4)
    return tuple(sorted({num_rows, max(part, 1), 1}, reverse=True))


def resolve(
    params: Params, setup: Setup, given: LookaheadConfig | str | None, num_rows: int, predicts: bool
) -> tuple[LookaheadConfig, dict[int, "Width"]]:
    """Returns the setting of an engine, and the widths of its states by their numbers of rows.

    Args:
      params, setup: for all rows.
      given: the setting as the caller gave it.
      num_rows: of all states, the most.
      predicts: whether requests have predictions.

    Raises:
      ValueError: they have, and the given setting has no tree.
    """
    numbers, is_auto = sizes(num_rows, setup.config.mesh), given == "auto"
    setting = choose(params, setup.config, numbers) if is_auto else setup.config.lookahead
    if predicts:
        setting = with_prediction(setting, given)
    if not is_auto:
        return setting, {number: Width(setup.costs) for number in numbers}
    return setting, learned_widths(params, dataclasses.replace(setup.config, lookahead=setting), numbers)


def choose(params: Params, config: DecodeConfig, sizes: Sequence[int]) -> LookaheadConfig:
    """Returns the setting of "auto" for states of several sizes: the widest one of theirs.

    It fixes the shapes of a row. If sizes have different settings, it has no window, so that steps of any width in
    between are possible.
    """
    chosen = {choice.choose(params, config.decoder, size, config.mesh) for size in sizes}
    chosen = {dataclasses.replace(setting, relative_step_time=None) for setting in chosen}
    return chosen.pop() if len(chosen) == 1 else LookaheadConfig.tree(max(setting.block_size for setting in chosen) - 1)


def learned_widths(params: Params, config: DecodeConfig, sizes: Sequence[int]) -> dict[int, "Width"]:
    """Returns the widths of states by their sizes, with the costs that "auto" knows; see `choose`."""
    arguments = config.mesh, config.lookahead, config.chunks, "rounds"
    of_sizes = {size: learned.find(params, config.decoder, size, *arguments) for size in sizes}
    # At a size that was tuned to keep its full width, all widths cost the same.
    same = np.ones(len(adaptive.settings(config.lookahead)), np.float32) if any(of_sizes.values()) else None
    return {size: Width(costs.costs() if costs else same, costs) for size, costs in of_sizes.items()}


class Width:
    """The costs and the pace of the steps of states of one size. The rows are kept without them.

    Args:
      costs: [L] float32, as in `Inputs.costs`; None if all steps have the full width.
      learned: the costs as far as rounds have taught them; None if they are fixed.

    Attributes:
      costs: as they are known now.
    """

    def __init__(self, costs: Any, learned: Learned | None = None):
        self.costs, self._learned = costs, learned
        # Between rounds on the host: so it is the same to a program whether another program made it or not.
        self._pace = None if costs is None else mesh_lib.fetch(adaptive.start(costs))
        self._before = self._pace  # the last round
        # Since the last lesson: steps, their tokens of context together, and their time.
        self._num_steps, self._context, self._seconds = np.zeros(np.shape(costs), np.int32), 0, 0.0

    @property
    def rests(self) -> int:
        """The steps without drafts before the next forecast, once the first has dropped the drafts of the state."""
        pace = self._pace
        if pace is None or pace.level < len(pace.num_steps) or pace.age == 0:
            return 0
        return int(pace.wait - pace.age)

    def rest(self, num_steps: int) -> None:
        """Records as many steps without drafts, made by another program; see `adaptive.rest`."""
        pace = self._before = self._pace
        assert pace is not None
        made: Any = np.zeros_like(pace.num_steps)
        made[-1] = num_steps
        level = pace.level if num_steps < self.rests else np.int32(len(made) - 1)
        age = np.int32(pace.age + num_steps)
        self._pace = dataclasses.replace(pace, level=level, age=age, num_steps=pace.num_steps + made)

    def put(self, state: DecodeState) -> DecodeState:
        """Returns the state with the costs and the pace of its next steps."""
        inputs = dataclasses.replace(state.inputs, costs=self.costs)
        return dataclasses.replace(state, pace=self._pace, inputs=inputs)

    def keep(self, pace: Pace | None) -> None:
        """Keeps the pace after the steps of a round."""
        self._before, self._pace = self._pace, mesh_lib.fetch(pace)

    def learn(self, context: int, seconds: float) -> None:
        """Learns from the round that `keep` ended, by the tokens of its longest row and its time."""
        if self._learned is None or self._before is None or self._pace is None:
            return
        num_steps = self._pace.num_steps - self._before.num_steps
        self._num_steps = self._num_steps + num_steps
        self._context += int(num_steps.sum()) * context
        self._seconds += seconds
        total = int(self._num_steps.sum())
        if total >= LESSON:
            self._learned.learn_round(self._num_steps, self._context / total, self._seconds)
            self.costs = self._learned.costs()
            self._num_steps, self._context, self._seconds = np.zeros_like(self._num_steps), 0, 0.0
