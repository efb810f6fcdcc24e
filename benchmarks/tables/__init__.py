"""The tables of README.md and docs/, made of the files in benchmarks/results: `python -m benchmarks.tables`.

To add a table, put these lines into a page, with the name of a module here and of a function in it:

    <!-- made by benchmarks.tables: speed.corpus -->
    <!-- end -->

The function gets the `Results` and yields rows of cells, the titles of the columns first. The command writes the table
between the lines.
"""

import importlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?<=<!-- made by benchmarks\.tables: )(\w+)\.(\w+) -->\n((?:(?!<!--).*\n)*)(?=<!-- end -->)")

Rows = Iterator[Sequence[str]]


class Results(dict[str, Any]):
    """The JSON files of a directory by their names without suffix, each read when it is first used."""

    def __init__(self, directory: Path = ROOT / "benchmarks" / "results") -> None:
        self.directory = directory

    def __missing__(self, name: str) -> Any:
        self[name] = json.loads((self.directory / f"{name}.json").read_text(encoding="utf-8"))
        return self[name]

    def bench(self, name: str, table: str = "tasks") -> dict[str, dict[str, Any]]:
        """Returns the rows of a table of `jlade bench` by their first cells."""
        rows = self[name][table]["rows"]
        return {row[next(iter(row))]: row for row in rows}


def two(values: Iterable[float]) -> list[str]:
    """Returns cells with two decimal places."""
    return [f"{value:.2f}" for value in values]


def fill(page: str, results: Results) -> str:
    """Returns a page with its tables made anew.

    Raises:
      ValueError: a table has no end.
    """
    page, number = BLOCK.subn(lambda block: f"{block[1]}.{block[2]} -->\n{made(block[1], block[2], results)}", page)
    if number != page.count("<!-- made by "):
        raise ValueError(f"of {page.count('<!-- made by ')} tables {number} have a name and an end")
    return page


def made(module: str, function: str, results: Results) -> str:
    """Returns the Markdown of a table."""
    rows = getattr(importlib.import_module(f"{__name__}.{module}"), function)(results)
    titles, *others = rows
    wrong = [row for row in others if len(row) != len(titles)]
    if wrong:
        raise ValueError(f"{module}.{function} has {len(titles)} titles, and a row with another number: {wrong[0]}")
    return markdown(titles, others)


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns rows of cells as a table in Markdown, which ends with a line feed."""
    return "\n".join([line(titles), "|---" * len(titles) + "|", *map(line, rows), ""])


def line(row: Sequence[str]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in row) + "|"
