"""What the commands show on a terminal: what they are doing, progress bars, answers as they come, tables of speed.

`jlade.cli` imports this module before JAX, so it imports nothing that imports JAX.
"""

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from jlade.decoding.status import Status as Status
from jlade.decoding.status import compiling, viewers

NARROW = 72  # columns
STEP_STYLES = ("bright_cyan", "bright_magenta", "bright_yellow", "bright_green")

_CONTROLS = dict.fromkeys(i for i in (*range(32), *range(127, 160)) if chr(i) not in "\t\n")

Show = Callable[[str, int, str], None]
"""Shows the text of a step, coloured by its number of tokens, and the status of the answer."""


class Bars(Progress):
    """Progress bars on stderr, if that is a terminal: columns, the bar, the time since its beginning, and that left.

    The line of `status.compiling` is below them.
    """

    def __init__(self, *columns: ProgressColumn, last: tuple[ProgressColumn, ...] = (), hidden: bool = False):
        console = Console(stderr=True)
        super().__init__(
            *columns,
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            *last,
            console=console,
            disable=hidden or not console.is_terminal,
            redirect_stdout=False,
            speed_estimate_period=math.inf,  # a piece may take minutes
        )

    def start(self) -> None:
        if not self.disable:
            viewers.add(self)
        super().start()

    def stop(self) -> None:
        super().stop()
        viewers.discard(self)

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if line := compiling():
            yield Text(line, style="dim")

    def begin(self, description: str, total: float | None, num_done: int = 0) -> Callable[[float], None]:
        """Adds a bar, whose speed is measured from now on, and returns a function that advances it."""
        advance = functools.partial(self.advance, self.add_task(description, total=total, completed=num_done))
        advance(0)
        return advance


@contextlib.contextmanager
def bar(total: int, num_done: int, unit: str, hidden: bool = False) -> Iterator[Callable[[float], None]]:
    """Yields a function that advances a bar.

    Args:
      total: number of pieces of work.
      num_done: those done before.
      unit: their name, such as "prompts".
      hidden: whether to show nothing.
    """
    with Bars(MofNCompleteColumn(), TextColumn(unit), hidden=hidden) as bars:
        yield bars.begin("", total, num_done)


@contextlib.contextmanager
def changing_bar(unit: str) -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function that shows work whose amount may change: it takes what is done now, the number done, and all.

    `unit` is the name of the pieces of work.
    """
    with Bars(MofNCompleteColumn(), TextColumn(unit), last=(TextColumn("{task.description}"),)) as bars:
        bars.begin("", None)

        def show(doing: str, num_done: int, total: int) -> None:
            bars.tasks[0].total = total  # `update` would forget the speed
            bars.update(bars.task_ids[0], completed=num_done, description=doing, refresh=True)

        yield show


@contextlib.contextmanager
def live_answer(console: Console) -> Iterator[Show]:
    """Yields a `Show` for a terminal: finished rows scroll up, the last row and the status stay below them."""
    width = console.width  # fixed, so that no row is lost when the terminal is resized
    below = _Below()
    line, num_scrolled = Text(), 0  # the text after the last newline, and how many of its rows have scrolled up

    def show(text: str, num_tokens: int, status: str) -> None:
        nonlocal line, num_scrolled
        line.append_text(visible(text, step_style(num_tokens)))
        *finished, line = line.split("\n", allow_blank=True)
        scrolled = []
        for whole in finished:
            scrolled += whole.wrap(console, width)[num_scrolled:]
            num_scrolled = 0
        rows = line.wrap(console, width)
        scrolled += rows[num_scrolled:-1]
        num_scrolled = max(num_scrolled, len(rows) - 1)
        below.row, below.status = rows[-1], Text(status, style="dim", no_wrap=True, overflow="ellipsis")
        if scrolled:
            console.print(*scrolled, sep="\n")

    viewers.add(below)
    try:
        with Live(below, console=console, refresh_per_second=20):
            yield show
    finally:
        viewers.discard(below)


class _Below:
    """The last row and the status, redrawn several times a second and whenever something is printed above them."""

    row = status = Text()

    def __rich__(self) -> Group:
        return Group(self.row, Text(compiling(), style="dim") or self.status)


@contextlib.contextmanager
def plain_answer() -> Iterator[Show]:
    """Yields a `Show` that writes the text alone."""
    yield lambda text, num_tokens, status: print(text, end="", flush=True)
    print(flush=True)


def visible(text: str, style: str) -> Text:
    """Returns the text without control characters, with which a model could control the terminal."""
    return Text(text.translate(_CONTROLS), style=style)


def step_style(num_tokens: int) -> str:
    """Returns the colour of a step that accepted `num_tokens` tokens."""
    return STEP_STYLES[min(num_tokens, len(STEP_STYLES)) - 1]


def legend() -> Text:
    """Returns the explanation of the colours."""
    last = len(STEP_STYLES)
    parts = [(f" {n}{' or more' if n == last else ''}", step_style(n)) for n in range(1, last + 1)]
    return Text.assemble("The colour shows how many tokens a step accepted:", *parts)


@dataclasses.dataclass(frozen=True)
class Tally:
    """Tokens and steps, and the seconds that `timed_tokens` of the tokens took."""

    tokens: int = 0
    steps: int = 0
    timed_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    @property
    def compression(self) -> float | None:
        """Tokens per step; None without steps."""
        return self.tokens / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Timed tokens per second; None when nothing was timed."""
        return self.timed_tokens / self.seconds if self.seconds else None

    def figures(self) -> dict[str, str]:
        """Returns the columns of `Tallies`."""
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


def facts_table(rows: dict[str, str]) -> Table:
    """Returns a table of two columns: names and facts."""
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table
