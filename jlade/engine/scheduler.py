"""Which request has which row, and which one is next. Plain Python that knows no model."""

import bisect
import itertools
import queue
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Scheduler(Generic[T]):
    """Requests that wait, up to `max_waiting`, and requests that have one of `num_rows` rows."""

    def __init__(self, num_rows: int, max_waiting: int):
        self._max_waiting = max_waiting
        self._waiting: list[tuple[int, int, T]] = []  # sorted, the next one first
        self._placed: list[tuple[int, int, T] | None] = [None] * num_rows
        self._numbers = itertools.count()

    @property
    def rows(self) -> list[T | None]:
        """The request of each row, None in a free one."""
        return [None if entry is None else entry[2] for entry in self._placed]

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a row."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether no more requests may wait."""
        return self.num_waiting >= self._max_waiting

    def add(self, request: T, priority: int = 0) -> None:
        """Adds a request to those that wait. Higher priorities come first, and of equal ones the earliest.

        Raises:
          queue.Full: when as many requests as may wait are waiting.
        """
        if self.is_full:
            raise queue.Full(f"{self.num_waiting} requests are waiting, the most that this engine accepts")
        bisect.insort(self._waiting, (-priority, next(self._numbers), request))

    @property
    def placeable(self) -> list[T]:
        """Those that wait, the next one first, if a row is free."""
        return [request for *_, request in self._waiting] if None in self._placed else []

    def can_place(self, may_run: Callable[[T], bool] = lambda _: True) -> bool:
        """Returns whether a row is free and a request that waits may run."""
        return any(map(may_run, self.placeable))

    def place(self, may_run: Callable[[T], bool] = lambda _: True) -> tuple[int, T] | None:
        """Gives the next request that may run a free row and returns both; None if there is no such row or request."""
        if None in self._placed:
            for index, entry in enumerate(self._waiting):
                if may_run(entry[2]):
                    row = self._placed.index(None)
                    self._placed[row] = self._waiting.pop(index)
                    return row, entry[2]
        return None

    @property
    def placed(self) -> list[T]:
        """Those that have rows, in the order in which they would get them."""
        return [request for *_, request in sorted(filter(None, self._placed), key=lambda entry: entry[:2])]

    def put_back(self, request: T) -> int:
        """Takes a request out of its row, and lets it wait again at its place in the order; returns the row."""
        row = self.rows.index(request)
        entry, self._placed[row] = self._placed[row], None
        assert entry is not None
        bisect.insort(self._waiting, entry)
        return row

    def remove(self, request: T) -> int | None:
        """Removes a request, wherever it is, and returns the row that it had; None if it had none."""
        if request in self.rows:
            row = self.rows.index(request)
            self._placed[row] = None
            return row
        self._waiting = [entry for entry in self._waiting if entry[2] != request]
        return None

    def clear(self) -> list[T]:
        """Removes and returns all requests."""
        requests = [entry[2] for entry in (*filter(None, self._placed), *self._waiting)]
        self._placed, self._waiting = [None] * len(self._placed), []
        return requests
