"""Reports: tables and figures as files, and one HTML page with all of them that needs no network."""

import base64
import html
import json
import pathlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

from jlade.evaluation import tables
from jlade.evaluation.experiments import EXPERIMENTS, Item
from jlade.evaluation.figures import Figure
from jlade.evaluation.runs import Run, limit
from jlade.files import written_whole

PAPER_TITLE = "Beside the paper"
PAPER_EXPLANATION = "Numbers of arXiv 2402.02057 and the same ones of this run, whose model, data and device differ."
PAGE = pathlib.Path(__file__).parent / "report.html"


def write(
    directory: pathlib.Path,
    sections: Mapping[str, Sequence[Item]],
    runs: Sequence[Run],
    beside_paper: Sequence[Item] = (),
) -> pathlib.Path:
    """Writes each table as Markdown and JSON, each figure as PNG, and all of them as report.html, which it returns.

    Args:
      directory: of the files; those of the same names are replaced.
      sections: tables and figures, by experiment.
      runs: their results.
      beside_paper: their numbers beside those of the paper, which come first.

    Raises:
      ValueError: when matplotlib is missing and there are figures.
    """
    about = [run.about for run in runs]
    all_sections = {"paper": (PAPER_TITLE, PAPER_EXPLANATION, beside_paper)} if beside_paper else {}
    for name, items in sections.items():
        all_sections[name] = EXPERIMENTS[name].title, EXPERIMENTS[name].explanation, items
    parts = []
    for name, (title, explanation, items) in all_sections.items():
        shown = "".join(_written(directory, item, about) for item in items)
        head = f"<h2>{html.escape(title)}</h2><p>{tables.prose(explanation)}</p>"
        parts.append(f'<section id="{name}">{head}{shown}</section>')
    page = string.Template(PAGE.read_text(encoding="utf-8")).substitute(
        title=html.escape(", ".join(dict.fromkeys(str(each["model"]) for each in about))),
        links="".join(f'<a href="#{name}">{html.escape(title)}</a>' for name, (title, *_) in all_sections.items()),
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
    caption = f"<figcaption class=note>{tables.prose(item.note)}</figcaption>" if item.note else ""
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
        f"<dt>{html.escape(name.replace('_', ' '))}</dt><dd>{html.escape(_text(value))}</dd>"
        for name, value in about.items()
        if value not in (None, "", []) and value is not False
    )
    return f"<p>{sentence}</p><details><summary>Machine, versions and command</summary><dl>{facts}</dl></details>"


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _write(file: pathlib.Path, content: bytes) -> None:
    with written_whole(file, replace=True) as partial:
        partial.write_bytes(content)
