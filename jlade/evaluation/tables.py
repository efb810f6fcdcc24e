"""Tables: numbers with columns and a title, as Markdown, JSON and HTML."""

import dataclasses
import html
import math
import re
from collections.abc import Sequence
from typing import Any

Value = str | float | int | None
Row = Sequence[Value]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str  # in the head
    form: str = ""  # of numbers, in the language of `format`, with text after a space: ".2f x"; "" for text

    def text(self, value: Value) -> str:
        """Returns a value as it stands in the table; a missing one, or one that is not finite, is a dash."""
        value = _finite(value)
        if value is None:
            return "-"
        if isinstance(value, str):
            return value
        form, _, unit = self.form.partition(" ")
        return format(value, form) + unit


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, whose first column names the rows."""

    name: str  # of its files
    title: str  # one line
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]  # each with a value for each column
    note: str = ""  # the meaning of the numbers, and the conditions of the measurement

    def markdown(self) -> str:
        """Returns the table in Markdown, with title and note."""
        head = [column.name for column in self.columns]
        rule = ["---:" if column.form else "---" for column in self.columns]
        rows = [[" ".join(cell.replace("|", r"\|").split()) for cell in cells] for cells in [head, rule, *self.texts()]]
        lines = [f"| {' | '.join(cells)} |" for cells in rows]
        return "\n".join([f"**{self.title}**", "", *lines, *(["", self.note] if self.note else [])]) + "\n"

    def facts(self) -> dict[str, Any]:
        """Returns JSON-like values; numbers that are not finite, which JSON cannot hold, are None."""
        columns = [column.name for column in self.columns]
        rows = [dict(zip(columns, map(_finite, row), strict=True)) for row in self.rows]
        return {"name": self.name, "title": self.title, "note": self.note, "rows": rows}

    def html(self) -> str:
        """Returns the table in HTML, without its title."""

        def line(tag: str, cells: Sequence[str]) -> str:
            written = [
                f"<{tag}{'' if column.form else ' class=text'}>{_cell(cell)}</{tag}>"
                for column, cell in zip(self.columns, cells, strict=True)
            ]
            return f"<tr>{''.join(written)}</tr>"

        head = line("th", [column.name for column in self.columns])
        body = "\n".join(line("td", row) for row in self.texts())
        note = f"<p class=note>{prose(self.note)}</p>" if self.note else ""
        return f"<div class=wide><table><thead>{head}</thead>\n<tbody>{body}</tbody></table></div>{note}"

    def texts(self) -> list[list[str]]:
        """Returns the values as they stand in the table."""
        return [[c.text(value) for c, value in zip(self.columns, row, strict=True)] for row in self.rows]


def prose(text: str) -> str:
    """Returns text in HTML, with `code` in it as such."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _cell(text: str) -> str:
    return html.escape(text).replace(" = ", "&nbsp;=&nbsp;")  # "W = 15" stays in one line


def _finite(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value
