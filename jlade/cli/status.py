"""The line at the bottom of a terminal that says what a command is doing, and for how long."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text


class Status:
    """What a command is doing, with the seconds since it began: "compiling, 12 s".

    It is shown on stderr if that is a terminal, until `clear`.
    """

    def __init__(self, doing: str, above: RenderableType | None = None):
        self._doing, self._begin, self._above = doing, time.monotonic(), above
        console = Console(stderr=True)
        self._live = Live(
            console=console,
            get_renderable=self._lines,
            transient=True,
            auto_refresh=console.is_terminal,
            redirect_stdout=False,  # it may be a pipe or a file
            redirect_stderr=False,
        )
        if console.is_terminal:
            self._live.start(refresh=True)

    def say(self, doing: str) -> None:
        """Shows another activity, which begins now."""
        self._doing, self._begin = doing, time.monotonic()
        if self._live.is_started:
            self._live.refresh()

    def clear(self) -> None:
        """Removes the line."""
        self._live.stop()

    def _lines(self) -> RenderableType:
        seconds = int(time.monotonic() - self._begin)
        line = Text(f"{self._doing}, {seconds} s" if seconds else self._doing, style="dim")
        return line if self._above is None else Group(self._above, line)


@contextlib.contextmanager
def show(doing: str, above: RenderableType | None = None) -> Iterator[Status]:
    """Yields a `Status`, cleared at the end.

    Args:
      doing: the first activity.
      above: lines to show above it, for example the prompt.
    """
    status = Status(doing, above)
    try:
        yield status
    finally:
        status.clear()
