"""Tables: numbers with columns and a title, as Markdown, JSON and HTML."""

import dataclasses
import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
