"""The cost of a step at each width, learned from the calls of `lookahead="auto"`.

The wall time of a call is the sum of its parts: the call itself, its forward passes over chunks of the prompt, its
reading of earlier tokens, and its steps at each level. A Bayesian linear regression finds the time of each part. Its
prior is the estimate of the device's data sheet, or the measurements of `jlade.tune`; both say more of the ratios of
these times than of the times. No call waits for a measurement, and none compiles anything for it.

Attention reads the earlier tokens in every step, and takes about the same share of a wide step as of a narrow one. So
their number is no reason for another width, but without it a call with a long prompt seems to be slow.

The machine may change: another process takes a core, and wide steps then lose more than narrow ones. Where several
calls in a row are all slower than expected, or all faster, those before them no longer count.
"""

import dataclasses
import functools
import json
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

FORMAT = 1
MEMORY = 64  # calls that the fit remembers, approximately
NOISE = 0.05  # standard deviation of the wall time of equal calls, relative to it
DOUBT = 0.2  # standard deviation of the prior's time of each step, relative to it
OVERHEAD = 1.0  # standard deviation of the time of drafting, which all steps that draft share, in plain steps
DISTURBED = 3 * NOISE  # a call whose time differs by more than this counts for less
UNUSUAL = 2 * NOISE  # a call whose time differs by more than this may tell of a change
CHANGED = 3  # unusual calls in a row, all slower or all faster, after which the machine is another one
CONTEXT = 0.3  # standard deviation of the time that 1,000 earlier tokens add to a step, relative to it
CALL = 5.0  # standard deviation of the time of a call itself, in plain steps
MOST = 1e30  # of a number in the file; the square of a larger one is none
LEAST = 0.3  # of the prior's time: no step is taken to be faster


@dataclasses.dataclass
class Times:
    """The times of the parts of a call, as far as they are known: K parts, of which the last L are steps.

    Attributes:
      prior: [K] times of the parts, in plain steps.
      covariance: [K, K] of these.
      scale: seconds of a plain step, by the first call; 0 before.
      precision: [K, K] of the times in seconds, by the calls alone.
      moment: [K] the product of `precision` and the times that fit best.
      counts: [K] how often the calls had each part. Like the other sums, it forgets old calls.
      unusual: the last calls, if they were unusual in the same way: parts, seconds, and whether they were slower.
    """

    prior: np.ndarray
    covariance: np.ndarray
    scale: float = 0.0
    precision: np.ndarray = dataclasses.field(init=False)
    moment: np.ndarray = dataclasses.field(init=False)
    counts: np.ndarray = dataclasses.field(init=False)
    unusual: list[tuple[np.ndarray, float, bool]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Returns to the prior."""
        size = len(self.prior)
        self.scale, self.precision = 0.0, np.zeros((size, size))
        self.moment, self.counts, self.unusual = np.zeros(size), np.zeros(size), []

    def add(self, counts: np.ndarray, seconds: float) -> None:
        """Learns from a call of these parts [K] and this wall time."""
        surprise = self._surprise(counts, seconds)
        if abs(surprise) <= UNUSUAL:
            self.unusual = []
        else:
            is_slower = surprise > 0
            alike = [call for call in self.unusual if call[-1] == is_slower]
            self.unusual = [*alike, (counts, seconds, is_slower)]
        if len(self.unusual) == CHANGED:
            calls = self.unusual
            self.forget()
            for earlier, its_seconds, _ in calls:
                self._add(earlier, its_seconds, self._surprise(earlier, its_seconds))
        else:
            self._add(counts, seconds, surprise)

    def _surprise(self, counts: np.ndarray, seconds: float) -> float:
        """Returns by how much a call took longer than expected, relative to its time; 0 for the first one."""
        return (seconds - float(counts @ self._posterior()[0])) / seconds if self.scale else 0.0

    def _add(self, counts: np.ndarray, seconds: float, surprise: float) -> None:
        if not self.scale:
            self.scale = seconds / float(counts @ self.prior)
        weight = min(1.0, DISTURBED / max(abs(surprise), DISTURBED)) / (NOISE * seconds) ** 2
        keep = 1 - 1 / MEMORY
        self.precision = keep * self.precision + weight * np.outer(counts, counts)
        self.moment = keep * self.moment + weight * seconds * counts
        self.counts = keep * self.counts + counts

    def costs(self, num_levels: int) -> np.ndarray:
        """Returns the cost of a step at each level [L] float32, in plain steps, widest first.

        The times of seldom levels are uncertain compared with those of the most frequent one. By as much they are taken
        to be shorter, so that calls try these levels and learn.
        """
        if not self.scale:
            return self.prior[-num_levels:].astype(np.float32)
        times, covariance = (each[-num_levels:] for each in self._posterior())
        times = np.maximum(times, LEAST * self.scale * self.prior[-num_levels:])
        times = np.minimum.accumulate(times)  # a narrower step takes no longer
        logarithms = covariance[:, -num_levels:] / np.outer(times, times)  # covariance of the logarithms of the times
        frequent = int(np.argmax(self.counts[-num_levels:]))
        variance = np.diag(logarithms) + logarithms[frequent, frequent] - 2 * logarithms[frequent]
        optimistic = times * np.exp(-np.sqrt(np.maximum(variance, 0)) / 2)
        return (optimistic / optimistic[-1]).astype(np.float32)

    def _posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns mean [K] and covariance [K, K] of the times, in seconds."""
        mean = self.scale * self.prior
        known = np.linalg.inv(self.scale**2 * self.covariance)
        covariance = np.linalg.inv(known + self.precision)
        return covariance @ (known @ mean + self.moment), covariance


class Learned:
    """What the calls of one setting, model, batch size and device teach, kept in a file from call to call."""

    def __init__(self, num_levels: int, times: Times, path: pathlib.Path):
        self._num_levels, self._times, self._path = num_levels, times, path
        self._lock = threading.Lock()
        self._programs: set[Any] = set()
        self.num_calls = 0  # of this process, that it has learned from
        self._read()

    def costs(self, learned: bool = True) -> np.ndarray:
        """Returns the cost of a step at each level [L] float32, in plain steps, widest first; or the prior's cost."""
        if not learned:
            return self._times.prior[-self._num_levels :].astype(np.float32)
        with self._lock:
            return self._times.costs(self._num_levels)

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

    def learn_round(self, num_steps: np.ndarray, context: float, seconds: float) -> None:
        """Learns from steps alone as `learn_steps` does, by programs that have run before, in one process.

        Args:
          num_steps: [L] int32, steps at each level.
          context: mean number of tokens of the longest sequence in these steps.
          seconds: wall time.
        """
        with self._lock:
            self._add(num_steps, context, seconds)

    def _learn(
        self, inputs: Inputs, config: DecodeConfig, num_steps: np.ndarray, seconds: float, *others: float
    ) -> None:
        if config.mesh is not None and config.mesh.is_multi_process:
            return  # processes must take the same steps, and to exchange what each learns would make them wait
        leaves, structure = jax.tree.flatten(inputs)
        program = config, structure, tuple((np.shape(leaf), jax.typeof(leaf).dtype) for leaf in leaves)
        with self._lock:
            if program not in self._programs:
                self._programs.add(program)
                return
            # The text grows by a token or a few in each step.
            self._add(num_steps, float(np.max(np.asarray(inputs.lengths))) + np.sum(num_steps) / 2, seconds, *others)

    def _add(self, num_steps: np.ndarray, context: float, seconds: float, *others: float) -> None:
        """Learns from steps and from others, the counts of a call and of its passes; without these there are none.

        The reading of earlier tokens counts in plain steps, each times the thousands of tokens that it reads.
        """
        steps = float(num_steps @ self._times.prior[-self._num_levels :])
        others = others or (0,) * (len(self._times.prior) - self._num_levels - 1)
        self._times.add(np.array([*others, steps * context / 1000, *num_steps], float), seconds)
        self.num_calls += 1
        if self.num_calls & (self.num_calls - 1) == 0 or self.num_calls % MEMORY == 0:  # seldom: it takes 1 ms
            self._write()

    def _read(self) -> None:
        try:
            facts = json.loads(self._path.read_text(encoding="utf-8"))
            if facts["format"] == FORMAT and np.shape(facts["moment"]) == self._times.moment.shape:
                self._times.scale = choice.positive(facts["scale"])
                for name in ("precision", "moment", "counts"):
                    setattr(self._times, name, np.array(facts[name], float).reshape(getattr(self._times, name).shape))
                    choice.positive(MOST - np.max(np.abs(getattr(self._times, name))))
                choice.positive(MOST - 1 / self._times.scale)
            choice.positive(self._times.costs(self._num_levels).min())
        except (FileNotFoundError, NotADirectoryError):
            return
        except Exception as error:  # a broken file can raise any
            self._times.forget()
            warnings.warn(f"{self._path} is ignored; later calls write it anew: {error!r}", stacklevel=2)

    def _write(self) -> None:
        sums = {name: getattr(self._times, name).tolist() for name in ("precision", "moment", "counts")}
        try:
            with files.written_whole(self._path, replace=True, sync=False) as file:
                file.write_text(json.dumps({"format": FORMAT, "scale": self._times.scale, **sums}), encoding="utf-8")
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

    def time_of(setting: LookaheadConfig) -> float:
        if stored is not None and stored.step_times:
            sizes, seconds = list(stored.step_times), list(stored.step_times.values())
            return float(np.interp(setting.block_size, sizes, seconds)) / seconds[0]
        return step_time(division.share_size(setting, mesh_lib.size(mesh, LOOKAHEAD))[0])

    plain = estimate.step_time(rates, 1, each, weights).total
    settings = adaptive.settings(lookahead)
    passes, steps = [step_time(size) for size, _ in chunks], [*map(time_of, settings)]
    num_drafting = len(settings) - 1  # most plain steps rest
    without_cost = dataclasses.replace(lookahead, relative_step_time=None)
    path = key.path.parent.with_name("costs") / key.name(without_cost, *calls)
    return _find(tuple(passes), tuple(steps), num_drafting, path)


def forget() -> None:
    """Makes the next call of `find` read the file again."""
    _find.cache_clear()


@functools.cache
def _find(passes: tuple[float, ...], steps: tuple[float, ...], num_drafting: int, path: pathlib.Path) -> Learned:
    """Returns what the file has, or else the prior of these times of forward passes and of steps, in plain steps.

    Steps at the first `num_drafting` levels make drafts.
    """
    prior = np.array([1.0, *passes, 0.0, *steps])
    drafts = np.zeros(len(prior))
    drafts[len(prior) - len(steps) :][:num_drafting] = 1
    own = np.array([CALL, *passes, CONTEXT, *(DOUBT * step for step in steps)])
    covariance = np.diag(own**2) + np.outer(prior, prior) + OVERHEAD**2 * np.outer(drafts, drafts)
    return Learned(len(steps), Times(prior, covariance), path)
