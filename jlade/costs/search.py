"""The search for the fastest setting, which prunes settings by the time of their steps and tries the others."""

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jlade import mesh as mesh_lib
from jlade.config import PLAIN, LookaheadConfig
from jlade.costs import choice
from jlade.costs.estimate import SLACK, speed_limit
from jlade.costs.measurement import Measurement
from jlade.costs.settings import USUAL
from jlade.costs.tuning import Trial, Tuning
from jlade.decoding import sharding
from jlade.decoding.state import DecodeConfig, Inputs
from jlade.errors import check_int
from jlade.lookahead import adaptive
from jlade.lookahead.names import label
from jlade.models.base import Params

CLOSE = 0.2  # settings within this share of the best speed are measured again, side by side
TIE = 0.03  # settings within this share of the best speed are equally good
BUSY = 0.1  # a median spread of repeated timings above this means that other work disturbs them


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `jlade.tune`.

    Attributes:
      step_times: seconds of one step by block size, of those that were timed.
      trials: those that were measured.
    """

    def __init__(self, step_times: dict[int, float], trials: tuple[Trial, ...]):
        super().__init__()
        self.step_times: dict[int, float] = step_times
        self.trials: tuple[Trial, ...] = trials


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The options of the search; see `jlade.tune`."""

    settings: Sequence[LookaheadConfig] = USUAL
    batch_size: int = 1
    repeat: int = 3
    adaptive: bool = True
    store: bool = True
    force: bool = False
    progress: Callable[[str, int, int], None] = lambda doing, done, total: None


def find_fastest(
    params: Params, inputs: Inputs, config: DecodeConfig, max_new_tokens: int, options: SearchOptions
) -> Tuning:
    """Returns the fastest setting for the texts that go on from `inputs`; see `jlade.tune`."""
    mesh, batch_size, repeat = config.mesh, options.batch_size, options.repeat
    default = choice.estimated(params, batch_size, mesh)
    settings = [setting for setting in (default, *options.settings) if setting != PLAIN]  # plain is tried anyway
    least = 2 * max((setting.max_accepted for setting in settings), default=1)  # for a text of more than one step
    check_int("max_new_tokens", max_new_tokens, least)
    key = choice.key(params, config.decoder, batch_size, mesh)
    params = sharding.put_params(params, mesh)
    amount = {"prompts": len(inputs.lengths), "tokens": max_new_tokens, "repeat": repeat}
    store = options.store and (options.force or _replaces(amount, choice.load(key)))
    shared = mesh is not None and mesh.is_multi_process
    if shared:
        store = mesh_lib.gather(store)[0]
    measure = Measurement.of(params, inputs, config, batch_size)

    step_times = measure.step_times
    found: dict[LookaheadConfig, Trial] = {}
    num_done = itertools.count()

    def announce(doing: str, num_left: int) -> None:
        done = next(num_done)
        options.progress(doing, done, done + num_left)

    def trials(settings: Sequence[LookaheadConfig], is_final: bool) -> list[Trial]:
        measured = measure.trials(settings, repeat if is_final else (repeat + 1) // 2)
        found.update({trial.lookahead: trial for trial in measured})
        return measured

    num_others = len(set(settings)) + 1  # the settings, and the last comparison
    timed = settings
    if options.adaptive:  # the cost of each width decides
        timed = [
            width
            for setting in settings
            for width in (adaptive.settings(setting) if setting.has_forecast else (setting,))
        ]
    try:
        time_blocks(timed, functools.partial(measure.step_seconds, repeat=repeat), step_times, announce, num_others)
        if options.adaptive:
            default, *settings = (_with_cost(setting, step_times) for setting in (default, *settings))
        best, tried, pruned = search(settings, step_times, trials, default, announce)
    except KeyboardInterrupt as interrupt:
        raise Interrupted(dict(step_times), tuple(found.values())) from interrupt
    announce("done", 0)
    result = Tuning(best, tuple(tried), tuple(pruned), step_times, key.device, batch_size)
    if result.spread > BUSY:
        warnings.warn(
            f"the machine was busy: repeated timings of the same texts differ by {result.spread:.0%}. Tune again when "
            "nothing else runs",
            stacklevel=4,
        )
    return _store(result, key, amount, shared) if store else result


def search(
    settings: Sequence[LookaheadConfig],
    step_times: dict[int, float],
    measure: Callable[[Sequence[LookaheadConfig], bool], list[Trial]],
    default: LookaheadConfig | None = None,
    announce: Callable[[str, int], None] = lambda doing, num_left: None,
) -> tuple[Trial, list[Trial], list[LookaheadConfig]]:
    """Tries settings, the most promising first, until none of the others can be faster than the best one.

    Args:
      settings: the settings to try besides plain decoding.
      step_times: seconds by block size; interpolated between sizes, constant above the largest.
      measure: returns the trials of plain decoding and of the given settings, in this order; its second argument is
        whether they are final.
      default: the setting that is tried in any case, and first.
      announce: called before each measurement with its description and the most that are left.

    Returns:
      The best trial, by `pick`; all trials, plain decoding first, then fastest first; and the settings that were not
      tried.
    """
    promise = functools.partial(speed_limit, step_times=step_times)
    order = sorted(dict.fromkeys(settings), key=lambda setting: (setting == default, promise(setting)), reverse=True)
    tried: dict[LookaheadConfig, Trial] = {}
    best = 1.0
    left = [setting for setting in order if setting == default or promise(setting) >= best]
    while left:
        announce(label(left[0]), len(left) + 1)
        _, tried[left[0]] = measure(left[:1], False)
        best = max(best, tried[left[0]].speed)
        left = [setting for setting in left[1:] if promise(setting) >= best]
    pruned = [setting for setting in order if setting not in tried]
    close = [setting for setting, trial in tried.items() if trial.speed >= (1 - CLOSE) * best]
    announce(f"{'; '.join(map(label, close)) or label(PLAIN)} once more", 1)
    plain, *final = measure(close, True)
    tried |= {trial.lookahead: trial for trial in final}
    fastest_first = sorted(tried.values(), key=lambda trial: trial.speed, reverse=True)
    return pick([plain, *final]), [plain, *fastest_first], pruned


def pick(trials: Sequence[Trial]) -> Trial:
    """Returns the fastest trial; of equally good ones, the one with the smallest block."""
    least = (1 - TIE) * max(trial.speed for trial in trials)
    good = [trial for trial in trials if trial.speed >= least]
    return min(good, key=lambda trial: (trial.lookahead.block_size, -trial.speed))


def time_blocks(
    settings: Sequence[LookaheadConfig],
    step_seconds: Callable[[Sequence[LookaheadConfig]], list[float]],
    times: dict[int, float],
    announce: Callable[[str, int], None],
    num_others: int,
) -> None:
    """Times steps, plain and of settings whose blocks at least double, up to a block that no wider setting can repay.

    A disturbance only makes a step longer, so the least time counts: of all times of a plain step, and of a block and
    all larger ones.

    Args:
      settings: the settings to try besides plain decoding.
      step_seconds: returns the seconds of one step of each of these settings.
      times: takes seconds by block size, from the first measurement on, so that an interrupt leaves those until then.
      announce: of `search`.
      num_others: measurements that come afterwards.
    """
    blocks = [PLAIN]
    for setting in sorted(settings, key=lambda setting: setting.block_size):
        if setting.block_size >= 2 * blocks[-1].block_size:
            blocks.append(setting)
    announce("a step of 1 token", len(blocks) + num_others)
    times[PLAIN.block_size] = step_seconds([PLAIN])[0]
    for i, setting in enumerate(blocks[1:], start=1):
        size = setting.block_size
        announce(f"a step of {size} tokens", len(blocks) - i + num_others)
        plain, times[size] = step_seconds([PLAIN, setting])
        times[1] = min(times[1], plain)
        wider = [setting.max_accepted for setting in settings if setting.block_size > size]
        if SLACK * max(wider, default=0) * times[1] < times[size]:
            break
    least = np.minimum.accumulate(list(times.values())[::-1])[::-1]
    times.update(zip(times, least.tolist(), strict=True))


def _with_cost(setting: LookaheadConfig, step_times: dict[int, float]) -> LookaheadConfig:
    """Returns a setting whose drafts tell the width that pays with the cost of its step."""
    if not setting.has_forecast:
        return setting
    seconds = np.interp(setting.block_size, list(step_times), list(step_times.values()))
    return dataclasses.replace(setting, relative_step_time=round(float(seconds) / step_times[1], 2))


def _replaces(amount: dict[str, int], earlier: choice.Stored | None) -> bool:
    """Whether a result replaces an earlier one. If less text is timed than before, a warning says that it does not."""
    if earlier is None or math.prod(amount.values()) >= earlier.effort:
        return True
    warnings.warn(
        f"the result will not be stored: an earlier one ({earlier.date}) timed {earlier.prompts} prompts x "
        f"{earlier.tokens} tokens x {earlier.repeat} repeats, this one times {' x '.join(map(str, amount.values()))}. "
        "force=True or --force replaces it",
        stacklevel=5,
    )
    return False


def _store(result: Tuning, key: choice.SettingKey, amount: dict[str, int], shared: bool) -> Tuning:
    facts = result.figures()
    try:
        if shared and jax.process_index() > 0:  # `choice.find` takes what process 0 has stored
            return result
        choice.save(key, result.lookahead, amount | {name: facts[name] for name in ("step_times", "trials", "pruned")})
    except OSError as error:
        warnings.warn(f'the result is not stored, so lookahead="auto" will not find it: {error}', stacklevel=5)
        return result
    finally:
        choice.forget()  # in all processes, as the next `choice.find` is an exchange
    return dataclasses.replace(result, path=key.path)
