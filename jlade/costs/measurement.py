"""Measurements for tuning: whole texts, and the steps within them."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlade import mesh
from jlade.config import PLAIN, LookaheadConfig
from jlade.costs.tuning import Trial
from jlade.decoding import loop, prefill
from jlade.decoding.state import DecodeConfig, Inputs
from jlade.lookahead import adaptive
from jlade.models.base import Params


class DecodeTotals(NamedTuple):
    """Counts and times of decoding some batches once.

    Attributes:
      tokens: generated for all sequences.
      steps: made by all sequences.
      seconds: of everything, prefill included.
      loop_steps: made by the device, which goes on for a batch until its last sequence has ended.
      loop_seconds: of the device's steps alone.
    """

    tokens: int
    steps: int
    seconds: float
    loop_steps: int
    loop_seconds: float


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Decodes and times batches of one shape, which share their programs."""

    params: Params
    config: DecodeConfig
    batches: list[Inputs]  # of B sequences each
    step_times: dict[int, float] = dataclasses.field(default_factory=dict)  # seconds by block size, once measured
    compiled: set[LookaheadConfig] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, params: Params, inputs: Inputs, config: DecodeConfig, batch_size: int) -> "Measurement":
        """Divides `inputs` into batches; the first prompts fill up the last one."""
        number = len(inputs.lengths)
        sequences = [np.arange(begin, begin + batch_size) % number for begin in range(0, number, batch_size)]
        return cls(params, config, [jax.tree.map(jnp.asarray, inputs.rows(indices)) for indices in sequences])

    def trials(self, settings: Sequence[LookaheadConfig], repeat: int) -> list[Trial]:
        """Returns the trials of plain decoding and of the settings, taken in turns."""
        settings = [PLAIN, *settings]
        trials: list[Trial] = []
        for setting, runs in zip(settings, self._in_turns(settings, self.batches, repeat), strict=True):
            seconds = [run.seconds for run in runs]
            rate, step = runs[0].tokens / statistics.median(seconds), _step_seconds(runs)
            trials.append(
                Trial(
                    lookahead=setting,
                    tokens_per_step=runs[0].tokens / runs[0].steps,
                    seconds_per_step=step,
                    tokens_per_second=rate,
                    speed=rate / trials[0].tokens_per_second if trials else 1.0,
                    relative_step_time=step / trials[0].seconds_per_step if trials else 1.0,
                    spread=max(seconds) / min(seconds) - 1,
                )
            )
        return trials

    def step_seconds(self, settings: Sequence[LookaheadConfig], repeat: int) -> list[float]:
        """Returns the times of a step of the settings, taken in turns, after the first prompts."""
        return [_step_seconds(runs) for runs in self._in_turns(settings, [_endless(self.batches[0])], repeat)]

    def _in_turns(
        self, settings: Sequence[LookaheadConfig], batches: Sequence[Inputs], repeat: int
    ) -> list[tuple[DecodeTotals, ...]]:
        """Returns the runs of each setting, made after all programs are compiled."""
        for setting in settings:
            if setting not in self.compiled:
                self._decode(setting, self.batches[:1])
                self.compiled.add(setting)
        turns = [[self._decode(setting, batches) for setting in settings] for _ in range(repeat)]
        return list(zip(*turns, strict=True))

    def _decode(self, setting: LookaheadConfig, batches: Sequence[Inputs]) -> DecodeTotals:
        config = dataclasses.replace(self.config, lookahead=dataclasses.replace(setting, relative_step_time=None))
        tokens = steps = loop_steps = 0
        seconds = loop_seconds = 0.0
        for batch in batches:
            batch = dataclasses.replace(batch, costs=adaptive.costs(setting, self.step_times))
            begin = time.perf_counter()
            cache = prefill.prefill(self.params, batch, config)
            state = jax.block_until_ready(prefill.start(cache, batch, config))
            started = time.perf_counter()
            state = jax.block_until_ready(loop.run_steps(self.params, state, config))
            end = time.perf_counter()
            ends, lengths, num_steps = mesh.fetch((state.num_tokens, state.inputs.lengths, state.num_steps))
            tokens += int(np.sum(ends - lengths))
            steps += int(np.sum(num_steps))
            seconds += end - begin
            loop_steps += int(np.max(num_steps))
            loop_seconds += end - started
        decoded = DecodeTotals(tokens, steps, seconds, loop_steps, loop_seconds)
        if config.mesh is not None and config.mesh.is_multi_process:  # all take the same decisions
            decoded = mesh.gather(decoded)[0]
        return decoded


def _step_seconds(runs: Sequence[DecodeTotals]) -> float:
    """Returns the least time of a step: a disturbance only makes a run longer."""
    return min(run.loop_seconds / run.loop_steps for run in runs)


def _endless(batch: Inputs) -> Inputs:
    """Returns a batch that no end token stops."""
    stopping = dataclasses.replace(batch.stopping, eos_ids=jnp.full_like(batch.stopping.eos_ids, -1))
    return dataclasses.replace(batch, stopping=stopping)
