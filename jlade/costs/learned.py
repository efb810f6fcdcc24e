"""The cost of a step at each width, learned from the calls of `lookahead="auto"`.

The wall time of a call is the sum of its parts: the call itself, its forward passes over chunks of the prompt, its
reading of earlier tokens, and its steps at each level. The time of a part is its prior, times a ratio of its own, times
a scale for all parts. The prior is the estimate of the device's data sheet, or the measurements of `jlade.tune`; both
say more of the ratios of these times than of the times. An extended Kalman filter follows the logarithms of the scale
and the ratios: a call moves what is uncertain and has a large share in its time. No call waits for a measurement, and
none compiles anything for it.

Attention reads the earlier tokens in every step, and takes about the same share of a wide step as of a narrow one. So
their number is no reason for another width, but without it a call with a long prompt seems to be slow.

The machine may change: another process takes a core, and wide steps then lose more than narrow ones. So what is known
becomes uncertain again. The ratios also return slowly to the prior, so that steps that calls leave out are tried again.
"""

import dataclasses
import functools
import json
import math
import pathlib
import threading
import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jlade import files
from jlade import mesh as mesh_lib
from jlade.config import LookaheadConfig
from jlade.costs import choice, estimate
from jlade.decoding import prefill
from jlade.decoding.state import Chunks, DecodeConfig, Inputs
from jlade.lookahead import adaptive, division
from jlade.mesh import DATA, LOOKAHEAD

FORMAT = 2
MEMORY = 64  # calls after which the file is written again
# Standard deviations of logarithms, of which the prior knows nothing else:
SCALE = 0.3  # of the time of all parts
DRAFTS = 0.3  # of what all steps with drafts have in common
RATIO = 0.2  # of the ratio of a part
NOISE = 0.05  # of the times of equal calls
FADING = 0.03  # share of what calls have taught that becomes uncertain again with each call
RETURN = 0.01  # share of their distance to 1 by which the ratios return with each call
DISTURBED = 3.0  # a call that differs by more than this many times the noise counts for less
CONTEXT = 0.3  # time that 1,000 earlier tokens add to a step, relative to it, by the prior; about that of SmolLM2
SAVED = 1 / 3  # share of the time of plain decoding that wider steps save; assumed
COMPILATION = 10.0  # seconds that the programs of wider steps take to compile; about that on two cores
MAX_NUMBER = 1e9  # of a file, and 1 / it the least one


class Learned:
    """What the calls of one setting, model, batch size and device teach, kept in a file from call to call.

    Args:
      prior: [K] times of the parts of a call, in plain steps, of which the last L are the steps at each level.
      num_levels: L.
      plain_time: seconds of a plain step, by the data sheet.
      path: the file.
    """

    def __init__(self, prior: np.ndarray, num_levels: int, plain_time: float, path: pathlib.Path):
        self._prior, self._num_levels, self._plain_time, self._path = prior, num_levels, plain_time, path
        self._ratios = np.ones(len(prior))  # [K] of the times to those of the prior
        self._scale = 0.0  # seconds of a plain step of the prior; 0 before the first call
        drafts = np.zeros(1 + len(prior))
        drafts[-num_levels:-1] = DRAFTS
        variances = np.diag([SCALE**2, *[RATIO**2] * len(prior)])
        self._unknown = variances + np.outer(drafts, drafts)  # [1 + K, 1 + K] covariance without calls
        self._covariance = self._unknown  # of the logarithms of the scale and of the ratios
        self._lock = threading.Lock()
        self._programs: set[Any] = set()
        self._is_used = False  # whether a call has asked for its programs
        self.num_calls = 0  # of this process, that it has learned from
        self._read()

    def costs(self, learned: bool = True) -> np.ndarray:
        """Returns the cost of a step at each level [L] float32, in plain steps, widest first; or the prior's cost."""
        times = (self._prior * self._ratios if learned else self._prior)[-self._num_levels :]
        times = np.minimum.accumulate(times)  # a narrower step takes no longer
        return (times / times[-1]).astype(np.float32)

    def pays(self, num_tokens: int) -> bool:
        """Returns whether the programs of wider steps pay for a call of this process, of `num_tokens` new tokens.

        They do for the second call, as more seem to follow. The first one has to save the time of the compilation.
        """
        with self._lock:
            is_first, self._is_used = not self._is_used, True
            plain_time = self._scale * self._prior[-1] or self._plain_time
        return not is_first or SAVED * plain_time * num_tokens > COMPILATION

    def learn(self, inputs: Inputs, config: DecodeConfig, num_steps: np.ndarray, seconds: float) -> None:
        """Learns from a call of `decode` with these arguments, except from the first with its programs: it compiles.

        Args:
          inputs, config: of the call.
          num_steps: [L] int32, steps at each level.
          seconds: wall time, until `num_steps` was there.
        """
        if inputs.cache is not None:  # it is on the device how much of the prompts it holds
            return
        most = int(np.max(np.asarray(inputs.lengths))) - 1
        passes = prefill.num_passes(config.chunks, inputs.prompts.shape[1], most)
        self._learn(inputs, config, num_steps, seconds, 1, *passes)

    def learn_steps(self, inputs: Inputs, config: DecodeConfig, num_steps: np.ndarray, seconds: float) -> None:
        """Learns as `learn` does from steps alone, without the reading of the prompts."""
        self._learn(inputs, config, num_steps, seconds)

    def _learn(
        self, inputs: Inputs, config: DecodeConfig, num_steps: np.ndarray, seconds: float, *others: float
    ) -> None:
        if config.mesh is not None and config.mesh.is_multi_process:
            return  # processes must take the same steps, and to exchange what each learns would make them wait
        leaves, structure = jax.tree.flatten(inputs)
        shapes = tuple((np.shape(leaf), jax.typeof(leaf).dtype) for leaf in leaves)
        programs = config, structure, shapes, tuple(number > 0 for number in others)  # one for each size of chunks
        with self._lock:
            is_new = programs not in self._programs
            self._programs.add(programs)
        if not is_new:
            # The text grows by a token or a few in each step.
            context = float(np.max(np.asarray(inputs.lengths))) + np.sum(num_steps) / 2
            self.learn_round(num_steps, context, seconds, *others)

    def learn_round(self, num_steps: np.ndarray, context: float, seconds: float, *others: float) -> None:
        """Learns from steps, by programs that have run before, in one process.

        Args:
          num_steps: [L] int32, steps at each level.
          context: mean number of tokens of the longest sequence in these steps.
          seconds: wall time.
          others: the counts of the call itself and of its passes; none for steps alone.
        """
        # The reading of earlier tokens counts in plain steps, each times the thousands of tokens that it reads.
        reading = float(num_steps @ self._prior[-self._num_levels :]) * context / 1000
        others = others or (0,) * (len(self._prior) - self._num_levels - 1)
        counts = np.array([*others, reading, *num_steps], float)
        with self._lock:
            parts = counts * self._prior * self._ratios
            self._scale = self._scale or seconds / parts.sum()
            difference = math.log(seconds / (self._scale * parts.sum()))
            noise = max(NOISE, abs(difference) / DISTURBED)  # something disturbs a call that differs by much
            slope = np.array([1.0, *parts / parts.sum()])  # of the logarithm of the call's time
            covariance = self._covariance @ slope
            gain = covariance / (slope @ covariance + noise**2)
            self._scale *= math.exp(gain[0] * difference)
            self._ratios = (self._ratios * np.exp(gain[1:] * difference)) ** (1 - RETURN)
            known = self._covariance - np.outer(gain, covariance)
            self._covariance = (1 - FADING) * known + FADING * self._unknown
            self.num_calls += 1
            if self.num_calls & (self.num_calls - 1) == 0 or self.num_calls % MEMORY == 0:  # seldom: it takes 1 ms
                self._write()

    def _read(self) -> None:
        try:
            facts = json.loads(self._path.read_text(encoding="utf-8"))
            if facts["format"] == FORMAT and len(facts["ratios"]) == len(self._ratios):
                numbers = [choice.positive(number) for number in (facts["scale"], *facts["ratios"])]
                if max(*numbers, *(1 / number for number in numbers)) > MAX_NUMBER:
                    raise ValueError(f"a number is above {MAX_NUMBER:g} or below its inverse")
                self._scale, self._ratios = numbers[0], np.array(numbers[1:])
        except (FileNotFoundError, NotADirectoryError):
            return
        except Exception as error:  # a broken file can raise any
            warnings.warn(f"{self._path} is ignored; later calls write it anew: {error!r}", stacklevel=2)

    def _write(self) -> None:
        facts = {"format": FORMAT, "scale": self._scale, "ratios": self._ratios.tolist()}
        try:
            with files.written_whole(self._path, replace=True, sync=False) as file:
                file.write_text(json.dumps(facts), encoding="utf-8")
        except OSError:  # such as a full disk: this process goes on with what it knows
            pass


def find(
    params: Any,
    decoder: object,
    batch_size: int,
    mesh: Mesh | None,
    lookahead: LookaheadConfig,
    chunks: Chunks,
    *calls: str,
) -> Learned | None:
    """Returns what calls have taught about a setting; None if it has no forecast, or is tuned to keep its full width.

    The first arguments are those of `choice.choose`. With a name of other calls than those of `jlade.generate`, it is
    what these have taught.
    """
    key, stored = choice.key(params, decoder, batch_size, mesh), choice.find(params, decoder, batch_size, mesh)
    if not lookahead.has_forecast or (stored is not None and stored.lookahead.relative_step_time is None):
        return None
    device, each = mesh_lib.device_of(params, mesh), batch_size // mesh_lib.size(mesh, DATA)
    rates = estimate.rates(device.platform, device.device_kind)
    weights = estimate.weights_of(params).counted(device.platform)

    def step_time(tokens: int) -> float:
        return estimate.step_time(rates, tokens, each, weights).total / plain

    plain = estimate.step_time(rates, 1, each, weights).total
    settings = adaptive.settings(lookahead)
    if stored is not None and stored.step_times:
        sizes, seconds = list(stored.step_times), list(stored.step_times.values())
        steps = np.interp([setting.block_size for setting in settings], sizes, seconds) / seconds[0]
    else:
        num_devices = mesh_lib.size(mesh, LOOKAHEAD)
        steps = np.array([step_time(division.share_size(setting, num_devices)[0]) for setting in settings])
    prior = 1.0, *[step_time(size) for size, _ in chunks], CONTEXT, *steps.tolist()
    without_cost = dataclasses.replace(lookahead, relative_step_time=None)
    path = key.path.parent.with_name("costs") / key.name(without_cost, *calls)
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    return _find(prior, len(settings), num_bytes / rates.bytes, path)


def forget() -> None:
    """Makes the next call of `find` read the file again."""
    _find.cache_clear()


@functools.cache
def _find(prior: tuple[float, ...], num_levels: int, plain_time: float, path: pathlib.Path) -> Learned:
    return Learned(np.array(prior), num_levels, plain_time, path)
