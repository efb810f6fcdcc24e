"""Choosing W, N and G by measuring: what a step costs on this device, and how many tokens it yields on some prompts."""

import dataclasses
import functools
import pathlib
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jlade import automatic, decoding, request, tuned_files
from jlade.config import PLAIN, LookaheadConfig, SamplingConfig, check_int
from jlade.decoding import DecodeState
from jlade.generation import Prompt
from jlade.models.base import Decoder, Params
from jlade.request import Request
from jlade.stopping import Stopping

if TYPE_CHECKING:
    from rich.console import RenderableType

K = TypeVar("K")

# What is tried: prompt lookup in small blocks, then in wide ones; settings with a window, those of Table 4 of arXiv
# 2402.02057 among them.
USUAL = tuple(
    LookaheadConfig(*sizes)
    for sizes in (
        *((0, 3, 1), (0, 4, 1), (0, 5, 1), (0, 6, 1), (0, 8, 1), (0, 12, 1), (0, 4, 2), (0, 6, 2)),
        *((0, 5, 4), (0, 8, 4), (0, 5, 10)),
        *((3, 4, 3), (5, 4, 5), (7, 5, 7), (10, 5, 10), (15, 5, 15), (20, 7, 20)),
    )
)

# Settings of 2, 4, 8, ... 256 tokens a step, whose steps are timed before any text is decoded.
BLOCKS = tuple(
    LookaheadConfig(*sizes)
    for sizes in ((0, 2, 1), (0, 4, 1), (0, 8, 1), (2, 5, 2), (4, 5, 4), (8, 5, 8), (16, 5, 16), (32, 5, 32))
)

SLACK = 1.15  # a step time read off between two measured ones may be too long by so much
CLOSE = 0.2  # settings that are slower than the best by no more are measured again, side by side
TIE = 0.03  # and by no more than that they are as good


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a setting came to: texts decoded whole, prefill included, and the time of a step alone.

    Attributes:
      lookahead: the setting; `jlade.config.PLAIN` for plain decoding.
      tokens_per_step: of a row, over all prompts.
      seconds_per_step: of the device, for all rows of a batch.
      tokens_per_second: of all rows together.
      speed: `tokens_per_second` by that of plain decoding in the same turns.
      step_cost: `seconds_per_step` by that of plain decoding in the same turns. With fewer tokens per step than this,
        plain decoding is faster.
    """

    lookahead: LookaheadConfig
    tokens_per_step: float
    seconds_per_step: float
    tokens_per_second: float
    speed: float
    step_cost: float


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The fastest setting, and what was measured to find it. `print` shows it as tables.

    Attributes:
      best: the trial of the fastest setting.
      trials: plain decoding first, then the settings that were tried, fastest first.
      pruned: settings that were not tried: even with N tokens in every step they could not have won.
      step_times: tokens that a step feeds to the model for each text -> seconds of one step.
      device: what it was measured on.
      batch_size: texts decoded at once.
      adaptive: whether `lookahead` falls back to narrower steps where a text does not repay it.
      path: the file where `lookahead="auto"` finds the result; None when it is not stored.
    """

    best: Trial
    trials: tuple[Trial, ...]
    pruned: tuple[LookaheadConfig, ...]
    step_times: dict[int, float]
    device: str
    batch_size: int
    adaptive: bool = True
    path: pathlib.Path | None = None

    @property
    def lookahead(self) -> LookaheadConfig:
        """The fastest setting, with what its step costs if it is to be adaptive; `config.PLAIN` for plain decoding."""
        setting = self.best.lookahead
        step_cost = round(self.best.step_cost, 2) if self.adaptive and setting.block_size > 1 else None
        return dataclasses.replace(setting, step_cost=step_cost)

    def figures(self) -> dict[str, Any]:
        """Returns all of it as JSON has it."""
        figures = {"lookahead": dataclasses.asdict(self.lookahead), **dataclasses.asdict(self)}
        return figures | {"path": None if self.path is None else str(self.path)}

    def plot(self, file: str | pathlib.Path) -> None:
        """Draws step time and tokens per second against the block size. It needs matplotlib, the extra `plot`.

        Raises:
          ValueError: when matplotlib is missing or cannot write such a file.
        """
        from jlade import tuning_report

        tuning_report.plot(self, file)

    def __rich__(self) -> "RenderableType":
        from jlade import tuning_report

        return tuning_report.tables(self)

    def __str__(self) -> str:
        from jlade import tuning_report

        return tuning_report.text(self)


def tune(
    params: Params,
    prompts: Prompt | Sequence[Prompt],
    *,
    settings: Sequence[LookaheadConfig] = USUAL,
    batch_size: int = 1,
    max_new_tokens: int = 128,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008, it is immutable
    tokenizer: Any = None,
    decoder: Decoder | None = None,
    repeat: int = 3,
    adaptive: bool = True,
    store: bool = True,
    progress: Callable[[str], None] = lambda doing: None,
) -> Tuning:
    """Finds the setting with which these prompts are decoded fastest on this device, plain decoding included.

    First steps of several block sizes are timed. By these times the settings that cannot win are left out; each of the
    others is compiled and decodes all prompts, in turns with plain decoding, and the best ones once more side by side.
    Between settings as fast as each other the one with the smaller block wins.

    Args:
      params: the model's parameters.
      prompts: what `jlade.generate` takes; a few that are like those to come, as tokens per step depend on the text.
      settings: what to try beside plain decoding.
      batch_size: prompts decoded at once. The result is for batches of this size.
      max_new_tokens: most tokens generated after each prompt, 16 or more, and no less than twice the largest N; end
        tokens end a text before that.
      sampling: how tokens are drawn. Sampled texts yield fewer tokens per step than greedy ones.
      tokenizer, decoder: see `jlade.generate`.
      repeat: how often the best settings' times are taken, the others' half as often; of texts the median counts, of
        steps the shortest.
      adaptive: whether the setting that is returned falls back to narrower steps where a text does not repay it:
        `LookaheadConfig.step_cost`, as measured. Trials do not.
      store: whether to write the result to where `lookahead="auto"` finds it, in place of an earlier one.
      progress: is told what is measured next.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted, before anything is compiled.
    """
    repeat, batch_size = check_int("repeat", repeat, 1), check_int("batch_size", batch_size, 1)
    for setting in settings:
        if not isinstance(setting, LookaheadConfig):
            raise TypeError(f"settings must hold LookaheadConfigs, got {setting!r}")
    settings = [setting for setting in settings if setting != PLAIN]  # which is tried anyway
    most_accepted = max(setting.max_accepted for setting in (*settings, *BLOCKS))
    check_int("max_new_tokens", max_new_tokens, 2 * most_accepted)  # so that it takes more than one step
    measure = _Measurement.of(params, prompts, batch_size, max_new_tokens, sampling, tokenizer, decoder)

    step_times = _time_blocks(settings, functools.partial(measure.step_seconds, repeat=repeat), progress)

    def trials(settings: Sequence[LookaheadConfig], is_final: bool) -> list[Trial]:
        names = ", ".join(map(name, settings)) or name(PLAIN)
        progress(f"{names} once more" if is_final else names)
        return measure.trials(settings, repeat if is_final else (repeat + 1) // 2)

    best, tried, pruned = search(settings, step_times, trials)
    key = tuned_files.key(params, measure.batches[0].decoder, batch_size)
    result = Tuning(best, tuple(tried), tuple(pruned), step_times, key.device, batch_size, adaptive)
    return _store(result, key) if store else result


def name(setting: LookaheadConfig) -> str:
    """Returns the setting for people to read."""
    is_plain = setting.block_size == 1
    return "plain" if is_plain else f"{setting.window_size}, {setting.ngram_size}, {setting.guess_set_size}"


def search(
    settings: Sequence[LookaheadConfig],
    step_times: dict[int, float],
    measure: Callable[[Sequence[LookaheadConfig], bool], list[Trial]],
) -> tuple[Trial, list[Trial], list[LookaheadConfig]]:
    """Tries settings, the most promising first, until none of the rest can be faster than the best one.

    Args:
      settings: what to try beside plain decoding.
      step_times: block size -> seconds; between sizes they are interpolated, and above the largest taken as its own.
      measure: returns the trials of plain decoding and of the settings, in this order; told whether they are the final
        ones.

    Returns:
      The best trial, as `pick` has it; all trials, plain decoding first, then fastest first; and the settings that
      were not tried.
    """
    sizes, seconds = list(step_times), list(step_times.values())

    def promise(setting: LookaheadConfig) -> float:
        """The speed of a setting that accepts all it can in every step."""
        return SLACK * setting.max_accepted * seconds[0] / float(np.interp(setting.block_size, sizes, seconds))

    tried: dict[LookaheadConfig, Trial] = {}
    pruned, best = [], 1.0
    for setting in sorted(dict.fromkeys(settings), key=promise, reverse=True):
        if promise(setting) < best:
            pruned.append(setting)
        else:
            _, tried[setting] = measure([setting], False)
            best = max(best, tried[setting].speed)
    close = [setting for setting, trial in tried.items() if trial.speed >= (1 - CLOSE) * best]
    plain, *final = measure(close, True)
    tried |= {trial.lookahead: trial for trial in final}
    fastest_first = sorted(tried.values(), key=lambda trial: trial.speed, reverse=True)
    return pick([plain, *final]), [plain, *fastest_first], pruned


def pick(trials: Sequence[Trial]) -> Trial:
    """Returns the fastest trial; of those that are as good, the one with the smallest block."""
    least = (1 - TIE) * max(trial.speed for trial in trials)
    good = [trial for trial in trials if trial.speed >= least]
    return min(good, key=lambda trial: (trial.lookahead.block_size, -trial.speed))


def _time_blocks(
    settings: Sequence[LookaheadConfig],
    step_seconds: Callable[[Sequence[LookaheadConfig]], dict[LookaheadConfig, float]],
    progress: Callable[[str], None],
) -> dict[int, float]:
    """Times steps of growing blocks, until no setting that is wider could make up for what its step costs."""
    times: dict[int, float] = {}
    for block in (PLAIN, *BLOCKS):
        progress(f"a step of {block.block_size} token{'s'[: block.block_size > 1]}")
        times |= {b.block_size: seconds for b, seconds in step_seconds([block]).items()}
        wider = [setting.max_accepted for setting in settings if setting.block_size > block.block_size]
        if SLACK * max(wider, default=0) * times[1] < times[block.block_size]:
            break
    return times


def _store(result: Tuning, key: tuned_files.Key) -> Tuning:
    facts = result.figures()
    try:
        tuned_files.save(key, result.lookahead, {name: facts[name] for name in ("step_times", "trials", "pruned")})
    except OSError as error:
        warnings.warn(f'the result is not stored, so lookahead="auto" will not find it: {error}', stacklevel=3)
        return result
    automatic.forget()
    return dataclasses.replace(result, path=key.path)


@dataclasses.dataclass(frozen=True)
class _Measurement:
    """Runs and times decodes."""

    params: Params
    batches: list[Request]  # of B rows each, all of one capacity, so that they share a program

    @classmethod
    def of(
        cls,
        params: Params,
        prompts: Prompt | Sequence[Prompt],
        batch_size: int,
        max_new_tokens: int,
        sampling: SamplingConfig,
        tokenizer: Any,
        decoder: Decoder | None,
    ) -> "_Measurement":
        checked = request.check(
            params,
            prompts,
            max_new_tokens=max_new_tokens,
            min_new_tokens=0,
            lookahead=None,
            sampling=sampling,
            tokenizer=tokenizer,
            eos_ids=None,
            stop=None,
            key=None,
            decoder=decoder,
            state=None,
            pool=None,
            logprobs=False,
            with_statistics=False,
            keep_state=False,
        )
        num_prompts = len(checked.prompts)
        batches = []
        for begin in range(0, num_prompts, batch_size):
            rows = np.arange(begin, begin + batch_size) % num_prompts  # the last batch is filled with the first prompts
            fields = {name: getattr(checked, name) for name in ("prompts", "prompt_lengths", "stopping", "sampling")}
            batches.append(dataclasses.replace(checked, **_take(fields, rows)))
        return cls(params, batches)

    def trials(self, settings: Sequence[LookaheadConfig], repeat: int) -> list[Trial]:
        """Returns the trials of plain decoding and of the settings, taken in turns."""
        settings = [PLAIN, *settings]
        runs = {setting: functools.partial(self._decode_all, setting) for setting in settings}
        counts = {setting: run() for setting, run in runs.items()}  # which compiles them
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
        """Times steps after the first prompts, taken in turns.

        It is what decoding on after the first token takes, by the number of steps, so that prefill is not in it.
        """
        batch = self.batches[0]
        endless = dataclasses.replace(batch.stopping, eos_ids=jnp.full_like(batch.stopping.eos_ids, -1))
        single = dataclasses.replace(endless, max_new_tokens=jnp.ones_like(endless.max_new_tokens))
        runs = {
            (setting, stopping is endless): functools.partial(self._decode, setting, batch, stopping)
            for setting in settings
            for stopping in (endless, single)
        }
        steps = {setting: int(np.max(runs[setting, True]().steps)) for setting in settings}  # which compiles them
        # Whatever disturbs a run makes it longer, and of a difference that may be a large part.
        seconds = {run: min(times) for run, times in _in_turns(runs, repeat).items()}
        return {s: (seconds[s, True] - seconds[s, False]) / (steps[s] - 1) for s in settings}

    def _decode_all(self, setting: LookaheadConfig) -> tuple[int, int]:
        """Decodes all prompts and returns how many tokens that were and how many steps, counted for each row."""
        tokens = steps = 0
        for batch in self.batches:
            state = self._decode(setting, batch, batch.stopping)
            tokens += int(np.sum(state.num_tokens - state.prompt_lengths))
            steps += int(np.sum(state.steps))
        return tokens, steps

    def _decode(self, setting: LookaheadConfig, batch: Request, stopping: Stopping) -> DecodeState:
        batch = dataclasses.replace(batch, lookahead=setting, stopping=stopping)
        return jax.block_until_ready(decoding.decode(self.params, *batch.arrays, **batch.static))


def _take(tree: Any, rows: np.ndarray) -> Any:
    return jax.tree.map(lambda array: jnp.asarray(array)[rows], tree)


def _in_turns(runs: Mapping[K, Callable[[], Any]], repeat: int) -> dict[K, list[float]]:
    """Returns the seconds of every run, each of which took place `repeat` times."""
    seconds: dict[K, list[float]] = {run: [] for run in runs}
    for _ in range(repeat):
        for run, decode in runs.items():
            begin = time.perf_counter()
            decode()
            seconds[run].append(time.perf_counter() - begin)
    return seconds
