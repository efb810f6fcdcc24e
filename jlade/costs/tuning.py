"""The result of tuning: its measurements as tables and as a plot."""

import dataclasses
import io
import pathlib
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jlade import pictures
from jlade.config import LookaheadConfig
from jlade.files import written_whole
from jlade.lookahead.names import label

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclasses.dataclass(frozen=True)
class Trial:
    """The measured speed of a setting: of whole texts, prefill included, and of a step alone.

    Attributes:
      lookahead: the setting; `jlade.config.PLAIN` for plain decoding.
      tokens_per_step: of a sequence, over all prompts.
      seconds_per_step: of the device, for all sequences of a batch.
      tokens_per_second: of all sequences together.
      speed: `tokens_per_second` divided by that of plain decoding, measured in the same turns.
      relative_step_time: `seconds_per_step` divided by that of plain decoding, measured in the same turns.
        With fewer tokens per step than this, plain decoding is faster. For an adaptive setting, the mean over steps of
        all widths.
      spread: of the repeated timings of the texts, the longest relative to the shortest, less 1.
    """

    lookahead: LookaheadConfig
    tokens_per_step: float
    seconds_per_step: float
    tokens_per_second: float
    speed: float
    relative_step_time: float
    spread: float = 0.0


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The fastest setting, and the measurements that show it. `print` shows them as tables.

    Attributes:
      best: the trial of the fastest setting.
      trials: plain decoding first, then the settings that were tried, fastest first.
      pruned: settings that were not tried, because even N tokens in every step would have been too slow.
      step_times: seconds of one step by the number of tokens that it feeds to the model for each sequence.
      device: the device of the measurements.
      batch_size: sequences decoded at once.
      path: the file where `lookahead="auto"` finds the result; None when it is not stored.
    """

    best: Trial
    trials: tuple[Trial, ...]
    pruned: tuple[LookaheadConfig, ...]
    step_times: dict[int, float]
    device: str
    batch_size: int
    path: pathlib.Path | None = None

    @property
    def lookahead(self) -> LookaheadConfig:
        """The fastest setting, with the cost of its step if it is adaptive; `config.PLAIN` for plain decoding."""
        return self.best.lookahead

    @property
    def spread(self) -> float:
        """The median spread of the trials; far above 0 if other work disturbed the measurements."""
        return statistics.median(trial.spread for trial in self.trials)

    def figures(self) -> dict[str, Any]:
        """Returns all fields in a form that JSON can hold."""
        figures = {"lookahead": dataclasses.asdict(self.lookahead), **dataclasses.asdict(self)}
        return figures | {"path": None if self.path is None else str(self.path)}

    def plot(self, file: str | pathlib.Path) -> None:
        """Draws the time of a step against its tokens, and the speed of each setting that was tried.

        It needs matplotlib, the extra `plot`.

        Raises:
          ValueError: when matplotlib is missing or cannot write such a file.
        """
        _plot(self, file)

    def __rich__(self) -> "RenderableType":
        return _tables(self)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=100, highlight=False)
        with console.capture() as capture:
            console.print(_tables(self))
        return capture.get()


def _tables(tuning: Tuning) -> "RenderableType":
    """Returns the step times by block size, the settings that were tried, and the fastest."""
    from rich.console import Group

    best = tuning.best
    is_plain = best == tuning.trials[0]
    found = (
        "fastest: plain decoding" if is_plain else f"fastest: {label(best.lookahead)}, {best.speed:.2f}x plain decoding"
    )
    lines = [f"{tuning.device}, batch size {tuning.batch_size}", *measurements(tuning.step_times, tuning.trials, best)]
    if tuning.pruned:
        lines.append(f"not tried, because even N tokens in every step are too few: {len(tuning.pruned)} settings")
    return Group(*lines, found)


def measurements(
    step_times: dict[int, float], trials: Sequence[Trial], best: Trial | None = None
) -> "list[RenderableType]":
    """Returns tables of step times by block size and of trials; of those that are not empty."""
    from rich.table import Table

    steps = Table("tokens a step", "ms", "of plain")
    for size, seconds in step_times.items():
        steps.add_row(str(size), f"{1000 * seconds:.2f}", f"{seconds / step_times[1]:.2f}")
    settings = Table("setting", "block", "tokens/step", "ms/step", "of plain", "tokens/s", "speed")
    for trial in trials:
        figures = [
            str(trial.lookahead.block_size),
            f"{trial.tokens_per_step:.2f}",
            f"{1000 * trial.seconds_per_step:.2f}",
            f"{trial.relative_step_time:.2f}",
            f"{trial.tokens_per_second:.0f}",
            f"{trial.speed:.2f}x",
        ]
        settings.add_row(label(trial.lookahead), *figures, style="bold" if trial == best else None)
    for column in (*steps.columns, *settings.columns[1:]):
        column.justify = "right"
    return [table for table in (steps, settings) if table.row_count]


def check_image(file: str | pathlib.Path) -> None:
    """Raises a ValueError when `Tuning.plot` cannot write such a file."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ValueError('a plot needs matplotlib: pip install "jlade[plot]"') from error
    path, accepted = pathlib.Path(file), FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in accepted:
        raise ValueError(f"the plot's file must end in one of .{', .'.join(accepted)}, got {str(file)!r}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"the plot's file must be in a directory that exists, got {str(file)!r}")


def _plot(tuning: Tuning, file: str | pathlib.Path) -> None:
    check_image(file)
    from matplotlib.figure import Figure

    trials = tuning.trials
    figure = Figure(figsize=(11, max(4.5, 1.2 + 0.25 * len(trials))), layout="constrained")
    figure.suptitle(f"{tuning.device}, batch size {tuning.batch_size}", fontsize="medium")
    left, right = figure.subplots(1, 2)
    left.plot(list(tuning.step_times), [1000 * seconds for seconds in tuning.step_times.values()], "k.-")
    for trial in trials:
        style = pictures.line_style(int(trial == tuning.best))
        left.plot(trial.lookahead.block_size, 1000 * trial.seconds_per_step, **style)
    pictures.use_log2(left, tuning.step_times)
    left.set(xlabel="tokens of a step", ylabel="one step, ms", ylim=(0, None))
    left.set_title("line: timed first; circles: the settings tried; square: the fastest", fontsize="small")
    for row, trial in enumerate(trials):
        bar = right.barh(row, trial.tokens_per_second, **pictures.bar_style(int(trial == tuning.best)))
        right.bar_label(bar, fmt="%.1f", padding=2, fontsize="small")
    right.axvline(trials[0].tokens_per_second, color="black", linestyle="--", linewidth=1)
    names = [f"{label(trial.lookahead)} ({trial.lookahead.block_size})" for trial in trials]
    right.set_yticks(range(len(trials)), labels=names, fontsize="small")
    right.invert_yaxis()
    right.margins(x=0.12)
    right.set(xlabel="tokens/s", ylabel="setting (tokens of a step)")
    right.set_title("hatched: the fastest; dashed: plain decoding", fontsize="small")
    pictures.finish(left)
    pictures.finish(right, grid="x")
    with written_whole(file, replace=True) as partial:
        figure.savefig(partial)
