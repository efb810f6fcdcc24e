"""Measurements for tuning: whole texts and single steps, timed in turns."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jlade.config import PLAIN, LookaheadConfig
from jlade.decoding import loop
from jlade.decoding.state import DecodeState, Inputs, Program
from jlade.models.base import Params
from jlade.tuning.result import Trial

K = TypeVar("K")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Decodes and times batches of one shape, which share their programs."""

    params: Params
    program: Program
    batches: list[Inputs]  # of B sequences each

    @classmethod
    def of(cls, params: Params, inputs: Inputs, program: Program, batch_size: int) -> "Measurement":
        """Divides `inputs` into batches; the first prompts fill up the last one."""
        number = len(inputs.lengths)
        sequences = [np.arange(begin, begin + batch_size) % number for begin in range(0, number, batch_size)]
        return cls(params, program, [_take(inputs, indices) for indices in sequences])

    def trials(self, settings: Sequence[LookaheadConfig], repeat: int) -> list[Trial]:
        """Returns the trials of plain decoding and of the settings, taken in turns."""
        settings = [PLAIN, *settings]
        runs = {setting: functools.partial(self._decode_all, setting) for setting in settings}
        counts = {setting: run() for setting, run in runs.items()}  # compiles the programs
        seconds = {setting: statistics.median(times) for setting, times in _in_turns(runs, repeat).items()}
        step = self.step_seconds(settings, repeat)
        rate = {setting: counts[setting][0] / seconds[setting] for setting in settings}
        return [
            Trial(
                lookahead=setting,
                tokens_per_step=counts[setting][0] / counts[setting][1],
                seconds_per_step=step[setting],
                tokens_per_second=rate[setting],
                speed=rate[setting] / rate[PLAIN],
                step_cost=step[setting] / step[PLAIN],
            )
            for setting in settings
        ]

    def step_seconds(self, settings: Sequence[LookaheadConfig], repeat: int) -> dict[LookaheadConfig, float]:
        """Returns the time of a step after the first prompts, for settings timed in turns.

        It is the time of all steps but the first, divided by their number, so that it does not include prefill.
        """
        batch = self.batches[0]
        endless = dataclasses.replace(batch.stopping, eos_ids=jnp.full_like(batch.stopping.eos_ids, -1))
        single = dataclasses.replace(endless, max_new_tokens=jnp.ones_like(endless.max_new_tokens))
        runs = {
            (setting, stopping is endless): functools.partial(
                self._decode, setting, dataclasses.replace(batch, stopping=stopping)
            )
            for setting in settings
            for stopping in (endless, single)
        }
        steps = {setting: int(np.max(runs[setting, True]().num_steps)) for setting in settings}  # compiles the programs
        # A disturbance makes a run longer, and may be a large part of the difference; the minimum avoids it.
        seconds = {run: min(times) for run, times in _in_turns(runs, repeat).items()}
        return {s: (seconds[s, True] - seconds[s, False]) / (steps[s] - 1) for s in settings}

    def _decode_all(self, setting: LookaheadConfig) -> tuple[int, int]:
        """Decodes all prompts and returns the numbers of tokens and of steps, summed over sequences."""
        tokens = steps = 0
        for batch in self.batches:
            state = self._decode(setting, batch)
            tokens += int(np.sum(state.num_tokens - state.constants.prompt_lengths))
            steps += int(np.sum(state.num_steps))
        return tokens, steps

    def _decode(self, setting: LookaheadConfig, batch: Inputs) -> DecodeState:
        program = dataclasses.replace(self.program, lookahead=setting)
        return jax.block_until_ready(loop.decode(self.params, batch, program))


def _take(inputs: Inputs, indices: np.ndarray) -> Inputs:
    """Returns the inputs of some sequences."""

    def take(tree: Any) -> Any:
        return jax.tree.map(lambda array: jnp.asarray(array)[indices], tree)

    # Stop strings share their table; a single key serves all sequences.
    strings = inputs.stopping.strings
    stopping = take(dataclasses.replace(inputs.stopping, strings=None))
    if strings is not None:
        strings = dataclasses.replace(strings, start=take(strings.start))
    return Inputs(
        prompts=take(inputs.prompts),
        lengths=take(inputs.lengths),
        stopping=dataclasses.replace(stopping, strings=strings),
        key=inputs.key[indices] if inputs.key.ndim else inputs.key,
        sampling=take(inputs.sampling),
    )


def _in_turns(runs: Mapping[K, Callable[[], Any]], repeat: int) -> dict[K, list[float]]:
    """Returns the seconds of every run, each made `repeat` times."""
    seconds: dict[K, list[float]] = {run: [] for run in runs}
    for _ in range(repeat):
        for run, decode in runs.items():
            begin = time.perf_counter()
            decode()
            seconds[run].append(time.perf_counter() - begin)
    return seconds
