"""The display of an answer while it is generated: live on a terminal, as plain text elsewhere."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from jlade.cli import display
from jlade.cli.display import STEP_STYLES

Show = Callable[[str, int, str], None]
"""Shows the text of a step, coloured by its number of tokens, and the status of the answer."""


@contextlib.contextmanager
def live_answer(console: Console) -> Iterator[Show]:
    """Yields a `Show` for a terminal: finished rows scroll up, the last row and the status stay below them."""
    width = console.width  # fixed, so that no row is lost when the terminal is resized
    below = _Below()
    line, num_scrolled = Text(), 0  # the text after the last newline, and how many of its rows have scrolled up

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
    """The last row and the status, redrawn several times a second and whenever something is printed above them."""

    row = status = Text()

    def __rich__(self) -> Group:
        return Group(self.row, self.status)


@contextlib.contextmanager
def plain_answer() -> Iterator[Show]:
    """Yields a `Show` that writes the text alone."""
    yield lambda text, num_tokens, status: print(text, end="", flush=True)
    print(flush=True)


def step_style(num_tokens: int) -> str:
    """Returns the colour of a step that accepted `num_tokens` tokens."""
    return STEP_STYLES[min(num_tokens, len(STEP_STYLES)) - 1]


def legend() -> Text:
    """Returns the explanation of the colours."""
    last = len(STEP_STYLES)
    parts = [(f" {n}{' or more' if n == last else ''}", step_style(n)) for n in range(1, last + 1)]
    return Text.assemble("The colour shows how many tokens a step accepted:", *parts)
