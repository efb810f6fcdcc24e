"""What a process is doing, on the terminal: the line of a command, and that programs compile.

After two seconds of compiling a line says so. What is on the terminal already, such as the bars of a command, shows the
line too: it is one of `viewers`. Otherwise the line is there alone while the main thread compiles. Where stderr is no
terminal there is none.
"""

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

PATIENCE = 2.0  # seconds
PAUSE = 1.0  # seconds between two programs of one wait
BLINK = 0.2  # seconds, for which nothing is shown

viewers: set[Any] = set()


class _Wait:
    """Programs that compile one after another, or at once."""

    begin = end = 0.0  # seconds
    num_running = num_done = 0
    timer: threading.Timer | None = None
    alone: Any = None  # the `Status` that no one else shows


_wait, _lock = _Wait(), threading.Lock()


def begin_program() -> None:
    """Notes that a program begins to compile in this thread."""
    now = time.monotonic()
    with _lock:
        if not _wait.num_running and now - _wait.end > PAUSE:
            _wait.begin, _wait.num_done = now, 0
        _wait.num_running += 1
        if threading.current_thread() is threading.main_thread() and _has_terminal():
            _wait.timer = threading.Timer(max(BLINK, _wait.begin + PATIENCE - now), _show)
            _wait.timer.daemon = True
            _wait.timer.start()


def end_program() -> None:
    """Notes that a program that began in this thread is there, or has failed."""
    with _lock:
        _wait.num_running, _wait.num_done, _wait.end = _wait.num_running - 1, _wait.num_done + 1, time.monotonic()
        if threading.current_thread() is threading.main_thread() and _wait.timer is not None:
            _wait.timer.cancel()
            _wait.timer = None
            if _wait.alone is not None:
                _wait.alone.clear()
                _wait.alone = None


def compiling() -> str:
    """Returns what compiles, or nothing if nothing does, or not for long."""
    seconds = time.monotonic() - _wait.begin
    if not _wait.num_running or seconds < PATIENCE:
        return ""
    return f"compiling, {_wait.num_done} done, {int(seconds)} s"


def _has_terminal() -> bool:
    with contextlib.suppress(AttributeError, ValueError):  # stderr is closed, None, or an object that lacks the method
        return sys.stderr.isatty()
    return False


class Status(contextlib.AbstractContextManager["Status"]):
    """What a command or a call is doing, with the seconds since it began: "compiling, 12 s".

    It is shown on stderr if that is a terminal, until `clear` or the end of the block. Meanwhile it also shows
    the line of `compiling`.

    Args:
      doing: the first activity.
      above: lines to show above it, for example the prompt.
    """

    def __init__(self, doing: str, above: "RenderableType | None" = None):
        from rich.console import Console  # not above: most calls that compile need none of it
        from rich.live import Live

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
            viewers.add(self)
            self._live.start(refresh=True)

    def say(self, doing: str) -> None:
        """Shows another activity, which begins now."""
        self._doing, self._begin = doing, time.monotonic()
        if self._live.is_started:
            self._live.refresh()

    def clear(self) -> None:
        """Removes the line."""
        self._live.stop()
        viewers.discard(self)

    def __exit__(self, *error: object) -> None:
        self.clear()

    def _lines(self) -> "RenderableType":
        from rich.console import Group
        from rich.text import Text

        seconds = int(time.monotonic() - self._begin)
        doing = f"{self._doing}, {seconds} s" if seconds else self._doing
        line = Text(compiling() or doing, style="dim")
        return line if self._above is None else Group(self._above, line)


def _show() -> None:
    with _lock:
        if _wait.timer is threading.current_thread() and not viewers:
            _wait.alone = Status("compiling")
