"""Ctrl-C at moments when an exception would do harm."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def noted() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C sets, so that the current step can end. A second Ctrl-C raises KeyboardInterrupt.

    An exception raised at once would often be lost: Python drops it in callbacks, which JAX uses.
    """
    event = threading.Event()

    def interrupt(*signal_and_frame: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def delayed() -> Iterator[None]:
    """Delays the KeyboardInterrupt of Ctrl-C to the end of the block. A second Ctrl-C interrupts at once."""
    with noted() as interrupted:
        yield
    if interrupted.is_set():
        raise KeyboardInterrupt
