"""Figures, drawn by matplotlib."""

import dataclasses
import io
from collections.abc import Callable
from typing import Any

WIDTH, HEIGHT, DPI = 7.0, 4.2, 150  # inches; legible on a phone


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
        canvas = Canvas(figsize=(WIDTH, HEIGHT), layout="constrained")
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
        axes.grid(color="0.9")
        axes.legend(fontsize="small")

    return draw


def bars(groups: list[str], series: dict[str, list[float | None]], y_label: str) -> Callable[[Any], None]:
    """Returns a function that draws groups of bars.

    Args:
      groups: names of the groups.
      series: the heights of a series in each group, by name; None for no bar.
      y_label: of the axis.
    """

    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        width = 0.85 / len(series)
        for i, (name, heights) in enumerate(series.items()):
            places = [group + (i - (len(series) - 1) / 2) * width for group in range(len(groups))]
            axes.bar(places, [height or 0.0 for height in heights], width, label=name)
        axes.set_xticks(range(len(groups)), labels=groups)
        axes.set(ylabel=y_label)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        canvas.legend(loc="outside lower center", ncols=2, fontsize="small")

    return draw
