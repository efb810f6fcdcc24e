"""How an answer is shown while it comes: alive on a terminal, as bare text elsewhere."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from jlade.cli import display
from jlade.cli.display import STEP_STYLES

Show = Callable[[str, int, str], None]
"""Shows the text that a step added, coloured by the number of tokens it accepted, and how the answer stands."""


@contextlib.contextmanager
def live_answer(console: Console) -> Iterator[Show]:
    """Lets finished rows scroll up, and keeps the last row and the status below them."""
    width = console.width  # kept, so that no row is lost when the terminal is resized meanwhile
    below = _Below()
    line, num_scrolled = Text(), 0  # what follows the last newline, and how many rows of it have scrolled up

    def show(text: str, num_tokens: int, status: str) -> None:
        nonlocal line, num_scrolled
        line.append_text(display.visible(text, step_style(num_tokens)))
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

    with Live(below, console=console, refresh_per_second=20):
        yield show


class _Below:
    """What is drawn anew, several times a second and whenever something is printed above it."""

    row = status = Text()

    def __rich__(self) -> Group:
        return Group(self.row, self.status)


@contextlib.contextmanager
def plain_answer() -> Iterator[Show]:
    """Writes the text and nothing else."""
    yield lambda text, num_tokens, status: print(text, end="", flush=True)
    print(flush=True)


def step_style(num_tokens: int) -> str:
    """Returns the colour of a step that accepted so many tokens."""
    return STEP_STYLES[min(num_tokens, len(STEP_STYLES)) - 1]


def legend() -> Text:
    """Says which colour is which."""
    last = len(STEP_STYLES)
    parts = [(f" {n}{' or more' if n == last else ''}", step_style(n)) for n in range(1, last + 1)]
    return Text.assemble("The colour of a text is how many tokens came in one step:", *parts)
