"""A request as its caller sees it: pieces of text, a result, and a way to cancel it."""

import asyncio
import contextlib
import functools
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

from jlade.engine.scoring import PromptLogProbs
from jlade.generation.results import Generation, Piece


class Request:
    """A request to an engine, made by `jlade.Engine.submit`. Any thread may use it.

    Iterating yields the `jlade.Piece`s of the text as they are made, from the first one on; the last one has the whole
    `Generation`. For a request that was cancelled the iteration ends early. `async for` yields the same pieces, and
    awaiting the request gives the `Generation`, both without a thread that waits.

    Attributes:
      started: the `time.monotonic` at which it got its row; None while it waits for one.
      num_cached: tokens of the prompt that were not read, as an earlier text begins with them; 0 until reading begins.
      num_drafted: tokens that the steps of the pieces so far have verified.
      num_taken_out: times that it lost its row, as requests before it needed its pages.
      prompt_logprobs: of the tokens of the prompt but the first, once it has been read: `logprobs` float32[L - 1],
        `top_tokens` int32[L - 1, K] and `top_logprobs` float32[L - 1, K]. None if they were not asked for, or of a
        prompt of 1 token.
    """

    def __init__(self, cancel: Callable[[], None]):
        self._cancel = cancel
        self._pieces: list[Piece] = []
        self._future: Future[Generation] = Future()
        self._future.set_running_or_notify_cancel()  # a task that no longer awaits it does not end it
        self._changed = threading.Condition()
        self._wakers: list[Callable[[], object]] = []  # of the event loops that wait for pieces
        self.started: float | None = None
        self.num_cached = self.num_drafted = self.num_taken_out = 0
        self.prompt_logprobs: PromptLogProbs | None = None

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
        cancel = self._cancel
        self._end(CancelledError("the request was cancelled"))
        cancel()

    def __iter__(self) -> Iterator[Piece]:
        for number in itertools.count():
            with self._changed:
                while len(self._pieces) == number and not self.done:
                    self._changed.wait()
                if len(self._pieces) == number:
                    break
            yield self._pieces[number]
        self._raise_error()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        changed = asyncio.Event()
        wake = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, changed.set)
        with self._changed:
            self._wakers.append(wake)
        try:
            for number in itertools.count():
                while len(self._pieces) == number and not self.done:
                    await changed.wait()
                    changed.clear()
                if len(self._pieces) == number:
                    break
                yield self._pieces[number]
        finally:
            with self._changed:
                self._wakers.remove(wake)
        self._raise_error()

    def __await__(self) -> Generator[Any, None, Generation]:
        return asyncio.wrap_future(self._future).__await__()

    def _raise_error(self) -> None:
        """Raises the error that ended the request, if one did."""
        error = self._future.exception()
        if error is not None and not isinstance(error, CancelledError):
            raise error

    def _add(self, piece: Piece) -> None:
        """Adds a piece, the last one if it has a generation, unless the request has ended."""
        with self._changed:
            if not self.done:
                self._pieces.append(piece)
                if piece.generation is not None:
                    self._future.set_result(piece.generation)
                    self._cancel = _nothing
                self._notify()

    def _end(self, error: BaseException) -> None:
        """Ends the request with an error, unless it has ended."""
        with self._changed:
            if not self.done:
                self._future.set_exception(error)
                self._cancel = _nothing
                self._notify()

    def _notify(self) -> None:
        """Wakes all that wait for a change, whose lock is held."""
        self._changed.notify_all()
        for wake in self._wakers:
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                wake()


def _nothing() -> None:
    """Takes the place of a request's way to cancel, which refers to the request: the cycle would outlive its end."""
