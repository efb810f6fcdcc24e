"""Figures, drawn by matplotlib."""

import dataclasses
import io
import textwrap
from collections.abc import Callable, Collection
from typing import Any

from jlade import pictures

WIDTH, HEIGHT, DPI = 5.0, 3.2, 200  # inches without the legend; on a phone, where they shrink, the letters are legible
BAR = 0.18  # inches for a bar and its number, or for a line of a name
NAME = 22  # most characters of a line in the name of a group


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure."""

    name: str  # of its file
    title: str  # one line
    draw: Callable[[Any], None]  # on a `matplotlib.figure.Figure`
    note: str = ""  # how to read it

    def png(self) -> bytes:
        """Returns the picture.

        Raises:
          ValueError: when matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure as Canvas
        except ImportError as error:
            raise ValueError('figures need matplotlib: pip install "jlade[evaluation]"') from error
        canvas = Canvas(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained", facecolor="white")
        self.draw(canvas)
        buffer = io.BytesIO()
        canvas.savefig(buffer, format="png")
        return buffer.getvalue()


def lines(
    series: pictures.Series,
    x_label: str,
    y_label: str,
    is_log: bool = False,
    dashed: Collection[str] = (),
) -> Callable[[Any], None]:
    """Returns a function that draws a line with markers for each series of points, dashed for the names in `dashed`.

    The x axis is logarithmic, to base 2, if `is_log`.
    """

    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        pictures.draw_lines(axes, series, dashed)
        if is_log:
            pictures.use_log2(axes, (x for points in series.values() for x, _ in points))
        axes.set(xlabel=x_label, ylabel=y_label)
        pictures.finish(axes)
        pictures.add_legend(canvas)

    return draw


def bars(groups: list[str], series: dict[str, list[float]], label: str) -> Callable[[Any], None]:
    """Returns a function that draws horizontal bars with their numbers: each group has one of each series, by name.

    The groups stand from top to bottom, and `label` is that of the axis.
    """

    def draw(canvas: Any) -> None:
        names = ["\n".join(textwrap.fill(line, NAME) for line in group.splitlines()) for group in groups]
        rows = max(len(series), *(name.count("\n") + 1 for name in names)) + 1  # in the height of a bar, with a gap
        canvas.set_size_inches(WIDTH, 0.8 + BAR * rows * len(groups))
        axes = canvas.subplots()
        height = 1 / rows
        for i, (name, lengths) in enumerate(series.items()):
            places = [group + (i - (len(series) - 1) / 2) * height for group in range(len(groups))]
            drawn = axes.barh(places, lengths, height, label=name, **pictures.bar_style(i))
            axes.bar_label(drawn, fmt="%.1f", padding=2, fontsize="small")
        axes.set_yticks(range(len(groups)), labels=names, fontsize="small")
        axes.invert_yaxis()
        axes.margins(x=0.12, y=0.02)
        axes.set(xlabel=label)
        pictures.finish(axes, grid="x")
        pictures.add_legend(canvas)

    return draw
