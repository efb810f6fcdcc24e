"""Reports: tables and figures, their files, and one HTML page with all of them that needs no network."""

import base64
import dataclasses
import html
import io
import json
import math
import pathlib
import re
import string
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jlade import pictures
from jlade.evaluation.runs import Run, limit
from jlade.files import written_whole

PAGE = pathlib.Path(__file__).parent / "report.html"
WIDTH, HEIGHT, DPI = 5.0, 3.2, 200  # inches without the legend; on a phone, where they shrink, the letters are legible
BAR = 0.18  # inches for a bar and its number, or for a line of a name
NAME = 22  # most characters of a line in the name of a group

Value = str | float | int | None
Row = Sequence[Value]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, whose first column names the rows."""

    name: str  # of its files
    title: str  # one line
    # The format of each column's numbers by its name, with a unit after a space, such as ".2f x"; "" for text.
    columns: Mapping[str, str]
    rows: Sequence[Row]  # each with a value for each column
    note: str = ""  # the meaning of the numbers, and the conditions of the measurement

    def texts(self) -> list[list[str]]:
        """Returns the values as they stand in the table."""
        return [[_text(*pair) for pair in zip(self.columns.values(), row, strict=True)] for row in self.rows]

    def markdown(self) -> str:
        """Returns the table in Markdown, with title and note."""
        rule = ["---:" if form else "---" for form in self.columns.values()]
        rows = [list(self.columns), rule, *self.texts()]
        rows = [[" ".join(cell.replace("|", r"\|").split()) for cell in row] for row in rows]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([f"**{self.title}**", "", *lines, *(["", self.note] if self.note else [])]) + "\n"

    def facts(self) -> dict[str, Any]:
        """Returns JSON-like values; numbers that are not finite, which JSON cannot hold, are None."""
        rows = [dict(zip(self.columns, map(_finite, row), strict=True)) for row in self.rows]
        return {"name": self.name, "title": self.title, "note": self.note, "rows": rows}

    def html(self) -> str:
        """Returns the table in HTML, without its title."""

        def line(tag: str, cells: Iterable[str]) -> str:
            kinds = [tag if form else f"{tag} class=text" for form in self.columns.values()]
            texts = [html.escape(cell).replace(" = ", "&nbsp;=&nbsp;") for cell in cells]  # "W = 15" stays in one line
            return f"<tr>{''.join(f'<{kind}>{text}</{tag}>' for kind, text in zip(kinds, texts, strict=True))}</tr>"

        head, body = line("th", self.columns), "\n".join(line("td", row) for row in self.texts())
        note = f"<p class=note>{prose(self.note)}</p>" if self.note else ""
        return f"<div class=wide><table><thead>{head}</thead>\n<tbody>{body}</tbody></table></div>{note}"


def prose(text: str) -> str:
    """Returns text in HTML, with `code` in it as such."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _text(form: str, value: Value) -> str:
    """Returns a value as it stands in a table; a missing one, or one that is not finite, is a dash."""
    value = _finite(value)
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    form, _, unit = form.partition(" ")
    return format(value, form) + unit


def _finite(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


Item = Table | Figure


class Section(NamedTuple):
    """A section of a report."""

    title: str
    explanation: str
    items: Sequence[Item]


def write(directory: pathlib.Path, sections: Mapping[str, Section], runs: Sequence[Run]) -> pathlib.Path:
    """Writes each table as Markdown and JSON, each figure as PNG, and all of them as report.html, which it returns.

    Args:
      directory: of the files; those of the same names are replaced.
      sections: by the names of their links.
      runs: their results.

    Raises:
      ValueError: when matplotlib is missing and there are figures.
    """
    about = [run.about for run in runs]
    parts = []
    for name, (title, explanation, items) in sections.items():
        shown = "".join(_written(directory, item, about) for item in items)
        head = f"<h2>{html.escape(title)}</h2><p>{prose(explanation)}</p>"
        parts.append(f'<section id="{name}">{head}{shown}</section>')
    page = string.Template(PAGE.read_text(encoding="utf-8")).substitute(
        title=html.escape(", ".join(dict.fromkeys(str(each["model"]) for each in about))),
        links="".join(f'<a href="#{name}">{html.escape(title)}</a>' for name, (title, *_) in sections.items()),
        about="".join(_about(each, f"Run {i}: " * (len(about) > 1)) for i, each in enumerate(about, start=1)),
        sections="\n".join(parts),
    )
    _write(directory / "report.html", page.encode())
    return directory / "report.html"


def _written(directory: pathlib.Path, item: Item, about: Sequence[Mapping[str, Any]]) -> str:
    """Writes the files of a table or figure, and returns it in HTML."""
    title = html.escape(item.title)
    if not isinstance(item, Figure):
        facts = json.dumps(item.facts() | {"runs": about}, indent=1, allow_nan=False)
        _write(directory / f"{item.name}.md", item.markdown().encode())
        _write(directory / f"{item.name}.json", f"{facts}\n".encode())
        return f"<h3>{title}</h3>{item.html()}"
    picture = item.png()
    _write(directory / f"{item.name}.png", picture)
    data = base64.b64encode(picture).decode()
    caption = f"<figcaption class=note>{prose(item.note)}</figcaption>" if item.note else ""
    return f'<h3>{title}</h3><figure><img alt="{title}" src="data:image/png;base64,{data}">{caption}</figure>'


def _about(about: Mapping[str, Any], beginning: str) -> str:
    """Returns a sentence about a run, and all facts, which a click shows."""
    host = f"{about['processor']}, {about['cores']} cores"
    device = host if about["device"] == "cpu" else f"{about['device']} ({host})"
    mesh = f", divided as {about['mesh']}" if about["mesh"] else ""
    model = f"{about['model']}, {about['parameters'] / 1e6:,.1f} M parameters in {about['dtype']}"
    answers = f"answers of {limit(about)}"
    sentence = html.escape(f"{beginning}{model}, on {device}{mesh}; {answers}; {about['date']}.")
    facts = "".join(
        f"<dt>{html.escape(name.replace('_', ' '))}</dt><dd>{html.escape(_fact(value))}</dd>"
        for name, value in about.items()
        if value not in (None, "", []) and value is not False
    )
    return f"<p>{sentence}</p><details><summary>Machine, versions and command</summary><dl>{facts}</dl></details>"


def _fact(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _write(file: pathlib.Path, content: bytes) -> None:
    with written_whole(file, replace=True) as partial:
        partial.write_bytes(content)
