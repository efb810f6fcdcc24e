"""A request as its caller sees it: pieces of text, a result, and a way to cancel it."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

from jlade.generation.results import Generation, Piece


class Request:
    """A request to an engine, made by `jlade.Engine.submit`. Any thread may use it.

    Iterating yields the `jlade.Piece`s of the text as they are made, from the first one on; the last one has the whole
    `Generation`. For a request that was cancelled the iteration ends early. Awaiting it gives the `Generation`, as
    `result` does, without a thread that waits.

    Attributes:
      num_cached: tokens of the prompt that were not read, as an earlier text begins with them; 0 until reading begins.
    """

    def __init__(self, cancel: Callable[[], None]):
        self.num_cached = 0
        self._cancel = cancel
        self._pieces: list[Piece] = []
        self._future: Future[Generation] = Future()
        self._future.set_running_or_notify_cancel()  # a task that no longer awaits it does not end it
        self._changed = threading.Condition()

    @property
    def done(self) -> bool:
        """Whether it has ended: with a result, with an error, or cancelled."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Generation:
        """Waits for the end of the text and returns it, as `jlade.generate` does for one prompt.

        Args:
          timeout: seconds to wait at most; None for any time.

        Raises:
          TimeoutError: the text has not ended within `timeout`.
          concurrent.futures.CancelledError: the request was cancelled.
          Exception: the error that ended it.
        """
        return self._future.result(timeout)

    def cancel(self) -> None:
        """Ends the request, if it has not ended; its row is free within two steps."""
        self._end(CancelledError("the request was cancelled"))
        self._cancel()

    def __iter__(self) -> Iterator[Piece]:
        for number in itertools.count():
            with self._changed:
                while len(self._pieces) == number and not self.done:
                    self._changed.wait()
                if len(self._pieces) == number:
                    break
            yield self._pieces[number]
        error = self._future.exception()
        if error is not None and not isinstance(error, CancelledError):
            raise error

    def __await__(self) -> Generator[Any, None, Generation]:
        return asyncio.wrap_future(self._future).__await__()

    def _add(self, piece: Piece) -> None:
        """Adds a piece, the last one if it has a generation, unless the request has ended."""
        with self._changed:
            if not self.done:
                self._pieces.append(piece)
                if piece.generation is not None:
                    self._future.set_result(piece.generation)
                self._changed.notify_all()

    def _end(self, error: BaseException) -> None:
        """Ends the request with an error, unless it has ended."""
        with self._changed:
            if not self.done:
                self._future.set_exception(error)
                self._changed.notify_all()
