"""The progress bar of long work: how much is done, and the time left."""

import contextlib
from collections.abc import Callable, Iterator

from rich import progress
from rich.console import Console


@contextlib.contextmanager
def bar(total: int, num_done: int, unit: str, hidden: bool = False) -> Iterator[Callable[[int], int]]:
    """Yields a function that advances a bar on stderr, if that is a terminal, and returns its argument.

    Args:
      total: number of pieces of work.
      num_done: those done before.
      unit: their name, such as "prompts".
      hidden: whether to show nothing.
    """
    console = Console(stderr=True)
    columns = (
        progress.MofNCompleteColumn(),
        progress.TextColumn(unit),
        progress.BarColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left:"),
        progress.TimeRemainingColumn(),
    )
    hidden = hidden or not console.is_terminal
    with progress.Progress(*columns, console=console, disable=hidden, redirect_stdout=False) as shown:
        task = shown.add_task("", total=total, completed=num_done)

        def advance(number: int) -> int:
            shown.advance(task, number)
            return number

        yield advance
