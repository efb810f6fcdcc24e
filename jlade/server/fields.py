"""Bodies in JSON. Each field is read with its type and range, and refused in OpenAI's form.

All code of this package that reads bodies raises a `RequestError` that names the field, its value and what is accepted.
"""

import contextlib
import gc
import json
import re
import reprlib
from collections.abc import Iterator
from typing import Any

Body = dict[str, Any]
# Characters at which clients divide a stream into lines as they do at a newline, and those that UTF-8 cannot write.
_ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")


class RequestError(Exception):
    """A request that is refused.

    Attributes:
      status: of HTTP.
      body: in OpenAI's form.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        self.status = status
        self.body: Body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def to_json(body: Body) -> str:
    """Returns a body in JSON: one line, whatever divides lines for the client."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def parse(data: bytes, name: str = "the body") -> Body:
    """Returns the object of a body in JSON; errors call it `name`."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        with _without_collections():
            body = json.loads(data, parse_constant=refuse, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"{name} must be a JSON object, got {reprlib.repr(body)}")
    return body


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Spares the parser, which holds Python's lock, the collections that a million new lists would cause."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _number(digits: str) -> float:
    """Returns a number; the parser, which calls this, lets other threads go on meanwhile."""
    return float(digits)


def refused(name: str, value: Any, accepted: str) -> RequestError:
    """Returns the error for a field of that name with a wrong value."""
    return RequestError(f"{name} must be {accepted}, got {reprlib.repr(value)}", name)


def is_integer(value: Any) -> bool:
    """Returns whether a value of JSON is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_number(name: str, value: Any, min_value: float, max_value: float) -> None:
    """Raises a RequestError unless the value is a number of that range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not min_value <= value <= max_value:
        raise refused(name, value, f"a number from {min_value} to {max_value}")


def integer(body: Body, name: str, default: int | None, min_value: int, max_value: int = 2**31 - 1) -> int | None:
    """Returns an integer field, the default for null or none."""
    value = body.get(name)
    if value is None:
        return default
    if not is_integer(value) or not min_value <= value <= max_value:
        raise refused(name, value, f"an integer from {min_value} to {max_value}")
    return int(value)


def boolean(body: Body, name: str, within: str | None = None, default: bool = False) -> bool:
    """Returns a field that is true or false; `within` is the field whose object has it."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise refused(name if within is None else f"{within}.{name}", value, "true or false")
    return default if value is None else value


def nested(body: Body, name: str) -> Body:
    """Returns a field that is an object, an empty one by default."""
    value = body.get(name)
    if not isinstance(value, dict | None):
        raise refused(name, value, "an object")
    return value or {}


def text(name: str, value: Any) -> str:
    """Returns a text that UTF-8 can write."""
    if not isinstance(value, str):
        raise refused(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refused(name, value, "text that UTF-8 can write") from error
    return value


def content(name: str, content: Any) -> str:
    """Returns a text that is given whole or in parts."""
    texts = parts(name, content)
    return texts if isinstance(texts, str) else "".join(part["text"] for part in texts)


def parts(name: str, content: Any) -> str | list[Body]:
    """Returns a text, or its parts if it is given in parts."""
    if not isinstance(content, list):
        return text(name, content)
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise refused(f"{name}[{i}]", part, 'a part {"type": "text", "text": ...}, as the model reads text alone')
    return [{"type": "text", "text": text(f"{name}[{i}].text", part.get("text"))} for i, part in enumerate(content)]


def too_long(name: str, amount: str, capacity: int, remedy: str = "shorten it") -> RequestError:
    """Returns the error for a prompt that does not fit with its new tokens; clients know it by OpenAI's words."""
    message = f"This model's maximum context length is {capacity} tokens. However, {name} of {amount} exceed it"
    return RequestError(f"{message}; {remedy}", name, "context_length_exceeded")
