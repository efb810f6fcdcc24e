"""Which request has which row, and which one is next. Plain Python that knows no model."""

import heapq
import itertools
import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class Scheduler(Generic[T]):
    """Requests that wait and requests that have rows.

    Args:
      num_rows: number of rows.
      max_waiting: most requests that wait.

    Attributes:
      rows: the request of each row, None in a free one.
    """

    def __init__(self, num_rows: int, max_waiting: int):
        self.rows: list[T | None] = [None] * num_rows
        self._max_waiting = max_waiting
        self._waiting: list[tuple[int, int, T]] = []  # a heap, the next one first
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a row."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether no more requests may wait."""
        return self.num_waiting >= self._max_waiting

    @property
    def is_idle(self) -> bool:
        """Whether there is no request."""
        return not self._waiting and all(each is None for each in self.rows)

    def add(self, request: T, priority: int = 0) -> None:
        """Adds a request to those that wait. Higher priorities come first, and of equal ones the earliest.

        Raises:
          queue.Full: when as many requests as may wait are waiting.
        """
        if self.is_full:
            raise queue.Full(f"{self.num_waiting} requests are waiting, the most that this engine accepts")
        heapq.heappush(self._waiting, (-priority, next(self._numbers), request))

    def place(self) -> tuple[int, T] | None:
        """Gives the next request a free row and returns both; None if all rows are taken or no request waits."""
        free = next((row for row, each in enumerate(self.rows) if each is None), None)
        if free is None or not self._waiting:
            return None
        request = heapq.heappop(self._waiting)[2]
        self.rows[free] = request
        return free, request

    def remove(self, request: T) -> int | None:
        """Removes a request, wherever it is, and returns the row that it had; None if it had none."""
        if request in self.rows:
            row = self.rows.index(request)
            self.rows[row] = None
            return row
        self._waiting = [entry for entry in self._waiting if entry[2] != request]
        heapq.heapify(self._waiting)
        return None

    def clear(self) -> list[T]:
        """Removes and returns all requests."""
        requests = [each for each in self.rows if each is not None] + [entry[2] for entry in self._waiting]
        self.rows, self._waiting = [None] * len(self.rows), []
        return requests
