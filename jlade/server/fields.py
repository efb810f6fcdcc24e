"""Bodies in JSON, and the errors that refuse them."""

import contextlib
import gc
import json
import re
import reprlib
from collections.abc import Iterator
from typing import Any

Body = dict[str, Any]
TOO_LONG = "context_length_exceeded"  # OpenAI's code of a prompt that does not fit
# Types of errors in Anthropic's form by their status, where they are not those of all faults or of all refusals.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
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

    def in_anthropic_form(self, request_id: str) -> Body:
        """Returns the body of `/v1/messages`."""
        message, of_others = str(self), "api_error" if self.status >= 500 else "invalid_request_error"
        if self.body["error"]["code"] == TOO_LONG:
            message = f"prompt is too long: {message}"  # words by which agents know that they have to shorten it
        error = {"type": ANTHROPIC_TYPES.get(self.status, of_others), "message": message}
        return {"type": "error", "error": error, "request_id": request_id}


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


def too_long(name: str, amount: str, capacity: int, remedy: str = "shorten it") -> RequestError:
    """Returns the error for a prompt that does not fit with its new tokens; clients know it by OpenAI's words."""
    message = f"This model's maximum context length is {capacity} tokens. However, {name} of {amount} exceed it"
    return RequestError(f"{message}; {remedy}", name, TOO_LONG)
