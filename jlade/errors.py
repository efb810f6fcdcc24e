"""Errors of arguments, which carry the argument's name, so that the server can write its own field in its place.

And those of libraries that raise nothing more specific than an Exception.
"""

import contextlib
import numbers
from collections.abc import Iterator
from typing import Any


class ArgumentError(Exception):
    """An argument that is refused. Its subclasses, a TypeError and a ValueError, are raised.

    Attributes:
      argument: its name, with which the message begins.
      problem: the rest of the message: what is accepted, and the value. It names no other argument; an error that must
        is a plain TypeError or ValueError.
    """

    def __init__(self, argument: str, problem: str):
        super().__init__(argument, problem)
        self.argument, self.problem = argument, problem

    def __str__(self) -> str:
        """Returns the message."""
        return f"{self.argument} {self.problem}"


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of a wrong type."""


class ArgumentValueError(ArgumentError, ValueError):
    """An argument of a wrong value."""


def check_int(name: str, value: Any, min_value: int, max_value: int | None = None) -> int:
    """Returns `value` as an int. The bounds are included.

    Raises:
      ArgumentTypeError, ArgumentValueError: name the argument, the value and what is accepted.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(name, f"must be an integer of at least {min_value}, got {value!r}")
    if value < min_value:
        raise ArgumentValueError(name, f"must be at least {min_value}, got {value}")
    if max_value is not None and int(value) > max_value:
        raise ArgumentValueError(name, f"must be at most {max_value}, got {value}")
    return int(value)


@contextlib.contextmanager
def errors_of(message: str) -> Iterator[None]:
    """Makes errors in the block, which calls tokenizers or transformers, a ValueError whose text begins so."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing more specific, and where it panics no Exception
        raise ValueError(f"{message}: {error}") from error
