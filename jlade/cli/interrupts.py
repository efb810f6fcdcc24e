"""Ctrl-C at moments when an exception would do harm."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def delayed() -> Iterator[None]:
    """Delays the KeyboardInterrupt of Ctrl-C to the end of the block. A second Ctrl-C interrupts at once."""
    is_interrupted = False

    def interrupt(*signal_and_frame: Any) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if is_interrupted:
        raise KeyboardInterrupt
