"""The kinds of fields: each value is read with its type and range, or refused.

A kind is a function of the path and the value of a field. It returns what the program uses, None for nothing, or raises
a `RequestError` that names the field, its value and what is accepted. A table has the kinds of an object's fields.
"""

import functools
import json
import logging
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from jlade.server.fields import Body, RequestError, refused

MAX_LOGGED = 1000  # names of unknown fields; anyone may make up more
_cut = reprlib.Repr()
_cut.maxstring = 100  # characters of a path
_logged: set[str] = set()
log = logging.getLogger(__name__)
Kind = Callable[[str, Any], Any]
Table = Mapping[str, Kind]


def read(body: Body, table: Table) -> Body:
    """Returns the values of the fields of a body, without those that are null; unknown fields are logged."""
    log_unknown(body, table)
    return {name: value for name, value in values(body, table).items() if value is not None}


def values(body: Body, table: Table, path: str = "") -> Body:
    """Returns the values of the fields of an object, None for some; `path` precedes their names in errors."""
    return {name: kind(f"{path}{name}", body[name]) for name, kind in table.items() if body.get(name) is not None}


def log_unknown(value: Any, table: Table, path: str = "", pattern: str = "") -> None:
    """Logs each field of an object, or of the objects of a list, that is not in its table, once.

    Args:
      value: of JSON.
      table: of the object's fields.
      path: that of the value.
      pattern: the same without the indices of lists, by which it is logged once.
    """
    if isinstance(value, list):
        for i, item in enumerate(value):
            if isinstance(item, dict):
                log_unknown(item, table, f"{path}[{i}]", pattern)
    elif isinstance(value, dict):
        for name, field in value.items():
            dot = "." if path else ""
            inner = f"{path}{dot}{name}", f"{pattern}{dot}{name}"
            if name not in table:
                _log(*inner)
            elif isinstance(kind := table[name], Nested):
                log_unknown(field, kind.table, *inner)


def _log(path: str, pattern: str) -> None:
    pattern = pattern if len(pattern) <= _cut.maxstring else _cut.repr(pattern)  # which takes longer
    if pattern not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add(pattern)
        log.warning("the field %s of a request is not known and not read", _cut.repr(path))


class Nested:
    """The kind of an object, or of a list of objects, whose fields are in a table.

    Args:
      table: of the fields.
      kind: reads the value; by default it is an object, and each of its fields becomes what the table makes of it.
    """

    def __init__(self, table: Table, kind: Kind | None = None):
        self.table, self._kind = table, kind

    def __call__(self, name: str, value: Any) -> Any:
        """Returns the value."""
        if self._kind is not None:
            return self._kind(name, value)
        return any_object(name, value) | values(value, self.table, f"{name}.")


def anything(name: str, value: Any) -> Any:
    """Returns any value: of a field that has no effect, or that other code reads."""
    return value


def names(*free: str, **nested: Kind) -> dict[str, Kind]:
    """Returns the table of fields that may be anything, and of `nested` ones."""
    return dict.fromkeys(free, anything) | nested


def only(*neutral: Any) -> Kind:
    """Returns the kind of a field that is not supported: all but the values that change nothing are refused."""

    def check(name: str, value: Any) -> None:
        if value not in neutral:
            alternatives = "".join(f" or set it to {json.dumps(each)}" for each in neutral)
            raise RequestError(f"{name}={reprlib.repr(value)} is not supported: leave it out{alternatives}", name)

    return check


def that_is(accepted: str, test: Callable[[Any], bool], kind: Kind = anything) -> Kind:
    """Returns the kind of the values of another kind that pass a test."""

    def read(name: str, value: Any) -> Any:
        if not test(kind(name, value)):
            raise refused(name, value, accepted)
        return value

    return read


def is_integer(value: Any) -> bool:
    """Returns whether a value of JSON is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def integer(low: int, high: int = 2**31 - 1) -> Kind:
    """Returns the kind of integers from `low` to `high`."""
    return that_is(f"an integer from {low} to {high}", lambda value: is_integer(value) and low <= value <= high)


def number(low: float, high: float) -> Kind:
    """Returns the kind of numbers from `low` to `high`."""
    accepted = f"a number from {low} to {high}"
    return that_is(accepted, lambda value: (is_integer(value) or isinstance(value, float)) and low <= value <= high)


def one_of(*accepted: str) -> Kind:
    """Returns the kind of some strings."""
    return that_is(f"one of {', '.join(accepted)}", lambda value: value in accepted)


def without_effect(neutral: str, *others: str) -> Kind:
    """Returns the kind of some strings that change nothing; of all but the neutral one the log says so, once."""
    check = one_of(neutral, *others)

    def read(name: str, value: Any) -> None:
        if check(name, value) != neutral:
            warn_once("the field %s of a request has no effect", name)

    return read


@functools.lru_cache(maxsize=1024)
def warn_once(message: str, *values: str) -> None:
    """Logs a warning, each of the latest ones once."""
    log.warning(message, *values)


boolean = that_is("true or false", lambda value: isinstance(value, bool))
any_object = that_is("an object", lambda value: isinstance(value, dict))


def text(name: str, value: Any) -> str:
    """Returns a text that UTF-8 can write."""
    if not isinstance(value, str):
        raise refused(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refused(name, value, "text that UTF-8 can write") from error
    return value


def parts(name: str, content: Any) -> str | list[Body]:
    """Returns a text, or its parts if it is given in parts."""
    if not isinstance(content, list):
        return text(name, content)
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise refused(f"{name}[{i}]", part, 'a part {"type": "text", "text": ...}, as the model reads text alone')
    return [{"type": "text", "text": text(f"{name}[{i}].text", part.get("text"))} for i, part in enumerate(content)]
