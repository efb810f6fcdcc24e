"""The progress bar of long work: how much is done, and the time left."""

import contextlib
import math
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
    with display(progress.MofNCompleteColumn(), progress.TextColumn(unit), hidden=hidden) as shown:
        task = begin(shown, "", total, num_done)

        def advance(number: int) -> int:
            shown.advance(task, number)
            return number

        yield advance


@contextlib.contextmanager
def changing(unit: str) -> Iterator[Callable[[str, int, int], None]]:
    """Yields a function that shows work whose amount may change: it takes what is done now, the number done, and all.

    Args:
      unit: the name of the pieces of work.
    """
    doing = progress.TextColumn("{task.description}")
    with display(progress.MofNCompleteColumn(), progress.TextColumn(unit), last=(doing,)) as shown:
        task = begin(shown, "", None)

        def show(doing: str, num_done: int, total: int) -> None:
            shown.tasks[0].total = total  # `update` would forget the speed
            shown.update(task, completed=num_done, description=doing, refresh=True)

        yield show


def display(
    *columns: progress.ProgressColumn, last: tuple[progress.ProgressColumn, ...] = (), hidden: bool = False
) -> progress.Progress:
    """Returns bars on stderr, if that is a terminal: columns, the bar, the time since its beginning, and that left."""
    console = Console(stderr=True)
    return progress.Progress(
        *columns,
        progress.BarColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left:"),
        progress.TimeRemainingColumn(),
        *last,
        console=console,
        disable=hidden or not console.is_terminal,
        redirect_stdout=False,
        speed_estimate_period=math.inf,  # a piece may take minutes
    )


def begin(shown: progress.Progress, description: str, total: float | None, num_done: int = 0) -> progress.TaskID:
    """Adds a bar, whose speed is measured from now on."""
    task = shown.add_task(description, total=total, completed=num_done)
    shown.advance(task, 0)
    return task
