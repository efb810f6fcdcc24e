"""Pictures by matplotlib: series that differ without colours too, ticks that do not touch, a legend that fits."""

import math
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

# Of Okabe and Ito, without their yellow, which is faint on white: the colour-blind can tell these apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# As many as colours and one more, so that series differ in both, and the first 56 pairs are distinct.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "++++", "oooo")
MARKED = 24  # most markers of a line
APART = 0.07  # of an axis: least distance of its ticks
LINE = 52  # most characters of a line in a legend

Series = Mapping[str, Sequence[tuple[float, float]]]  # points by name


def line_style(i: int, is_dashed: bool = False) -> dict[str, Any]:
    """Returns arguments of `axes.plot` for series `i`."""
    style = {
        "color": COLORS[i % len(COLORS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": "--" if is_dashed else "-",
    }
    # Later lines are thinner and markers open, so that series show through where their points coincide.
    return style | {"linewidth": 1 + 2 / (1 + i), "markersize": 6, "markerfacecolor": "none"}


def bar_style(i: int) -> dict[str, Any]:
    """Returns arguments of `axes.barh` for series `i`."""
    return {"color": COLORS[i % len(COLORS)], "hatch": HATCHES[i % len(HATCHES)], "edgecolor": "white", "linewidth": 0}


def draw_lines(axes: Any, series: Series, dashed: Collection[str] = ()) -> None:
    """Draws a line with markers for each series of points, dashed for the names in `dashed`."""
    for i, (name, points) in enumerate(series.items()):
        every = math.ceil(len(points) / MARKED)
        axes.plot(*zip(*points, strict=True), label=name, markevery=every, **line_style(i, name in dashed))


def use_log2(axes: Any, values: Iterable[float]) -> None:
    """Makes the x axis logarithmic, to base 2, with a tick at each value that has room for its number."""
    values = sorted(set(values))
    least = (values[-1] / values[0]) ** APART
    ticks: list[float] = []
    for value in values:
        if not ticks or value / ticks[-1] >= least:
            ticks.append(value)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks], fontsize="small")
    axes.minorticks_off()


def finish(axes: Any, grid: str = "both") -> None:
    """Draws the grid of an axis or of both behind the data, and removes the upper and the right border."""
    axes.grid(axis=grid, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(canvas: Any) -> None:
    """Adds a legend of the first axes below all axes, in as many columns as fit, and makes room for it."""
    handles, labels = canvas.axes[0].get_legend_handles_labels()
    labels = [textwrap.fill(label, LINE) for label in labels]
    options = {"loc": "outside lower center", "fontsize": "small", "frameon": False, "handlelength": 3}
    for columns in range(len(labels), 0, -1):
        legend = canvas.legend(handles, labels, ncols=columns, **options)
        box = legend.get_window_extent()
        if box.width <= canvas.bbox.width or columns == 1:
            break
        legend.remove()
    width, height = canvas.get_size_inches()
    canvas.set_size_inches(width, height + box.height / canvas.dpi)
