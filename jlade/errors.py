"""Checks of arguments. Their errors name the argument, the value and what is accepted."""

import numbers
from typing import Any


def check_int(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Returns `value` as an int.

    Raises:
      TypeError, ValueError: name the argument, the value and what is accepted.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer of at least {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and int(value) > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return int(value)
