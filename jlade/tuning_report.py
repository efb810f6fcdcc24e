"""What `jlade.tune` found, as tables and as a plot."""

import io
import pathlib

from rich.console import Console, Group, RenderableType
from rich.table import Table

from jlade.tuning import Tuning, name


def tables(tuning: Tuning) -> Group:
    """Returns step times by block size, the settings tried, and what came of it."""
    steps = Table("tokens a step", "ms", "of plain's")
    for size, seconds in tuning.step_times.items():
        steps.add_row(str(size), f"{1000 * seconds:.2f}", f"{seconds / tuning.step_times[1]:.2f}")
    settings = Table("W, N, G", "block", "tokens/step", "ms/step", "of plain's", "tokens/s", "speed")
    for trial in tuning.trials:
        figures = [
            str(trial.lookahead.block_size),
            f"{trial.tokens_per_step:.2f}",
            f"{1000 * trial.seconds_per_step:.2f}",
            f"{trial.step_cost:.2f}",
            f"{trial.tokens_per_second:.0f}",
            f"{trial.speed:.2f}x",
        ]
        settings.add_row(name(trial.lookahead), *figures, style="bold" if trial == tuning.best else None)
    for column in (*steps.columns, *settings.columns[1:]):
        column.justify = "right"
    best = tuning.best
    is_plain = best == tuning.trials[0]
    found = (
        "fastest: plain decoding" if is_plain else f"fastest: {name(best.lookahead)}, {best.speed:.2f}x plain decoding"
    )
    lines: list[RenderableType] = [f"{tuning.device}, batch size {tuning.batch_size}", steps, settings]
    if tuning.pruned:
        lines.append(f"not tried, because even N tokens in each step are too few: {len(tuning.pruned)} settings")
    return Group(*lines, found)


def text(tuning: Tuning) -> str:
    """Returns the tables as text without colours."""
    console = Console(file=io.StringIO(), width=100, highlight=False)
    with console.capture() as capture:
        console.print(tables(tuning))
    return capture.get()


def check_image(file: str | pathlib.Path) -> None:
    """Raises a ValueError when `plot` cannot write such a file, which is better known before measuring."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ValueError('a plot needs matplotlib: pip install "jlade[plot]"') from error
    path, accepted = pathlib.Path(file), FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in accepted:
        raise ValueError(f"the plot's file must end in one of .{', .'.join(accepted)}, got {str(file)!r}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"the plot's file must be in a directory that exists, got {str(file)!r}")


def plot(tuning: Tuning, file: str | pathlib.Path) -> None:
    """Draws what `Tuning.plot` says."""
    check_image(file)
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(f"{tuning.device}, batch size {tuning.batch_size}", fontsize="medium")
    left, right = figure.subplots(1, 2)
    for trial in tuning.trials:
        is_best = trial == tuning.best
        look = {"marker": "*" if is_best else "o", "markersize": 14 if is_best else 6, "color": "black"}
        size, fill = trial.lookahead.block_size, "black" if is_best else "white"
        left.plot(size, 1000 * trial.seconds_per_step, markerfacecolor=fill, **look)
        right.plot(size, trial.tokens_per_second, markerfacecolor=fill, **look)
        label = {"rotation": 45, "rotation_mode": "anchor", "fontsize": "small", "weight": "bold" if is_best else None}
        right.annotate(
            name(trial.lookahead), (size, trial.tokens_per_second), (4, 6), textcoords="offset points", **label
        )
    left.plot(list(tuning.step_times), [1000 * seconds for seconds in tuning.step_times.values()], "k.-", zorder=1)
    left.set(ylabel="one step, ms")
    left.set_title("line: timed first; points: the settings tried", fontsize="small")
    right.axhline(tuning.trials[0].tokens_per_second, color="black", linestyle="--", linewidth=1, zorder=1)
    right.set(ylabel="tokens/s")
    right.set_title("points: the settings tried, as W, N, G; star: the fastest", fontsize="small")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(tuning.step_times), labels=list(map(str, tuning.step_times)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel="block size, tokens", xlim=(0.8, 2 * axes.dataLim.x1), ylim=(0, 1.2 * axes.dataLim.y1))
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
    figure.savefig(file)
