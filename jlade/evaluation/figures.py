"""Figures, drawn by matplotlib."""

import dataclasses
import io
import textwrap
from collections.abc import Callable
from typing import Any

WIDTH, HEIGHT, DPI = 5.0, 3.6, 200  # inches; on a phone, where 5 inches shrink, the letters remain legible
BAR = 0.18  # inches for a bar and its number
NAME = 14  # characters of a line in the name of a group


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure.

    Attributes:
      name: of its file.
      title: one line.
      draw: draws on a `matplotlib.figure.Figure`.
      note: how to read it.
    """

    name: str
    title: str
    draw: Callable[[Any], None]
    note: str = ""

    def png(self) -> bytes:
        """Returns the picture.

        Raises:
          ValueError: when matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure as Canvas
        except ImportError as error:
            raise ValueError('figures need matplotlib: pip install "jlade[evaluation]"') from error
        canvas = Canvas(figsize=(WIDTH, HEIGHT), layout="constrained", facecolor="white")
        self.draw(canvas)
        buffer = io.BytesIO()
        canvas.savefig(buffer, format="png", dpi=DPI)
        return buffer.getvalue()


def lines(
    series: dict[str, list[tuple[float, float]]], x_label: str, y_label: str, is_log: bool = False
) -> Callable[[Any], None]:
    """Returns a function that draws a line with markers for each series of points; a name that begins with _ is dashed.

    Args:
      series: points by name.
      x_label, y_label: of the axes.
      is_log: whether the x axis is logarithmic, to base 2.
    """

    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        for name, points in series.items():
            style = "--" if name.startswith("_") else "o-"
            axes.plot(*zip(*points, strict=True), style, label=name.removeprefix("_"), markersize=5)
        if is_log:
            ticks = sorted({x for points in series.values() for x, _ in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, labels=[f"{x:g}" for x in ticks])
            axes.minorticks_off()
        axes.set(xlabel=x_label, ylabel=y_label)
        _finish(canvas, axes, axis="both")

    return draw


def bars(groups: list[str], series: dict[str, list[float]], label: str) -> Callable[[Any], None]:
    """Returns a function that draws groups of horizontal bars, from top to bottom, each with its number.

    Args:
      groups: names of the groups.
      series: the lengths of a series in each group, by name.
      label: of the axis.
    """

    def draw(canvas: Any) -> None:
        canvas.set_size_inches(WIDTH, 1.2 + BAR * len(groups) * (len(series) + 1))
        axes = canvas.subplots()
        height = 1 / (len(series) + 1)
        for i, (name, lengths) in enumerate(series.items()):
            places = [group + (i - (len(series) - 1) / 2) * height for group in range(len(groups))]
            axes.bar_label(axes.barh(places, lengths, height, label=name), fmt="%.1f", padding=2, fontsize="small")
        axes.set_yticks(range(len(groups)), labels=[textwrap.fill(group, NAME) for group in groups])
        axes.invert_yaxis()
        axes.margins(x=0.12, y=0.02)
        axes.set(xlabel=label)
        _finish(canvas, axes, axis="x")

    return draw


def _finish(canvas: Any, axes: Any, axis: str) -> None:
    axes.grid(axis=axis, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    canvas.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
