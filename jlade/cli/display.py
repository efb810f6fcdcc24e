"""Output that several commands share: the colours of steps, and the table of tokens, steps and speed."""

import dataclasses
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

NARROW = 72  # columns
STEP_STYLES = ("bright_cyan", "bright_magenta", "bright_yellow", "bright_green")

_CONTROLS = dict.fromkeys(i for i in (*range(32), *range(127, 160)) if chr(i) not in "\t\n")


@dataclasses.dataclass(frozen=True)
class Tally:
    """Tokens and steps, and the seconds that `timed_tokens` of the tokens took."""

    tokens: int = 0
    steps: int = 0
    timed_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.timed_tokens + other.timed_tokens,
            self.seconds + other.seconds,
        )

    @property
    def compression(self) -> float | None:
        """Tokens per step; None without steps."""
        return self.tokens / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Timed tokens per second; None when nothing was timed."""
        return self.timed_tokens / self.seconds if self.seconds else None

    def figures(self) -> dict[str, str]:
        """Returns the columns of `table`."""
        return {
            "tokens": str(self.tokens),
            "steps": str(self.steps),
            "tokens/step": "-" if self.compression is None else f"{self.compression:.2f}",
            "tokens/s": "-" if self.tokens_per_second is None else f"{self.tokens_per_second:.0f}",
        }


@dataclasses.dataclass(frozen=True)
class Tallies:
    """Tallies by name as a table, or line by line where the terminal is narrow.

    With a `baseline` each has its speed relative to that.
    """

    tallies: dict[str, Tally]
    baseline: Tally | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        base = None if self.baseline is None else self.baseline.tokens_per_second
        rows = {
            name: tally.figures() | ({"speed": f"{(tally.tokens_per_second or 0) / base:.2f}x"} if base else {})
            for name, tally in self.tallies.items()
        }
        if options.max_width < NARROW:
            for name, figures in rows.items():
                yield Text(f"{name}: " + ", ".join(f"{figure} {unit}" for unit, figure in figures.items()))
            return
        table = Table("", *next(iter(rows.values()), {}))
        for column in table.columns[1:]:
            column.justify = "right"
        for name, figures in rows.items():
            table.add_row(name, *figures.values())
        yield table


def visible(text: str, style: str) -> Text:
    """Returns the text without control characters, with which a model could control the terminal."""
    return Text(text.translate(_CONTROLS), style=style)
