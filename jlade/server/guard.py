"""Who may ask for what: keys, the hosts of a server without keys, the form and size of bodies."""

import asyncio
import hashlib
import hmac
import ipaddress
import urllib.parse
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jlade.server import fields
from jlade.server.fields import RequestError

OPEN = ("/", "/health")  # paths that need no key: the page asks for it
JSON = "application/json"
MAX_BYTES = 4 * 2**20  # of a body
BODY_SECONDS = 30  # to send a body
ID, ANTHROPIC_ID = "x-request-id", "request-id"  # headers of a request's id
MAX_ID_LENGTH = 128  # characters
MESSAGES = "/v1/messages"  # below which errors have Anthropic's form
RETRY_AFTER = "2"  # seconds, where the server is busy or ends


class JsonResponse(JSONResponse):
    """A response with a body in JSON."""

    def render(self, content: fields.Body) -> bytes:
        """Returns the body."""
        return fields.to_json(content).encode()


class Guard:
    """Lets requests through to an application, and refuses others.

    Args:
      app: the application.
      keys: one of them has to come as `Authorization: Bearer KEY` or `x-api-key: KEY`. Without keys the host has to be
        this machine: the browser sends its own name for the host with a request from a page that was loaded under
        another one.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = _with_id(request_id(scope), send)
            try:
                self._check(scope)
            except RequestError as error:
                await refuse(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if not self._keys and not _is_this_machine(headers.get("host", "")):
            raise RequestError(
                "the host must be localhost or an address like 127.0.0.1, as this server has no API key",
                "Host",
                status=403,
            )
        if self._keys and scope["path"] not in OPEN:
            kind, _, token = headers.get("authorization", "").partition(" ")
            sent = [token.strip() if kind.lower() == "bearer" else "", headers.get("x-api-key", "")]
            # All keys are compared, each in the same time.
            right = [one for one in sent for key in self._keys if hmac.compare_digest(one.encode("latin-1"), key)]
            if not right:
                raise RequestError("the API key is missing or wrong", "Authorization", "invalid_api_key", status=401)
            scope.setdefault("state", {})["api_key"] = right[0]
        if scope["method"] == "POST" and headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            # Another type comes from a form of a foreign page, without the browser asking this server.
            raise RequestError(f"the content type must be {JSON}", "Content-Type", status=415)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > MAX_BYTES:
            raise _too_large()


def keys(text: str, source: str) -> list[str]:
    """Returns the keys in the text of a file; errors call it `source`.

    Raises:
      ValueError: there is no key in a line of its own, or one that a header cannot have.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or not all(line.isascii() and line.isprintable() and " " not in line for line in lines):
        raise ValueError(f"{source} must hold a key of printable ASCII characters in each line")
    return lines


def request_id(scope: Scope) -> str:
    """Returns the id of a request: the client's, if it is short and printable, else a new one."""
    sent = Headers(scope=scope).get(ID, "")
    is_usable = 0 < len(sent) <= MAX_ID_LENGTH and sent.isascii() and sent.isprintable()
    made: str = scope.setdefault("state", {}).setdefault("request_id", sent if is_usable else uuid.uuid4().hex)
    return made


def compartment(scope: Scope, key: str) -> str:
    """Returns the name of what belongs to a key that a client chose: another one for each API key.

    Neither can be read from it.
    """
    owner = scope.get("state", {}).get("api_key", "")
    return hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()


def _with_id(request: str, send: Send) -> Send:
    """Returns `send` for a response whose headers have the id of its request, as clients of both forms read it."""

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update({ID: request, ANTHROPIC_ID: request})
        await send(message)

    return send_with_id


async def read(request: Request) -> bytes:
    """Returns the body of a request.

    Raises:
      RequestError: it is too large, or does not come in time.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                data += chunk
                if len(data) > MAX_BYTES:
                    raise _too_large()
    except TimeoutError as error:
        raise RequestError(f"the body did not come within {BODY_SECONDS} seconds", status=408) from error
    return bytes(data)


def refuse(error: RequestError, scope: Scope) -> JsonResponse:
    """Returns the response that refuses a request, in the form of its path."""
    headers = {"Retry-After": RETRY_AFTER} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    is_of_messages = scope["path"].startswith(MESSAGES)
    body = error.in_anthropic_form(request_id(scope)) if is_of_messages else error.body
    return JsonResponse(body, error.status, headers)


def _too_large() -> RequestError:
    return RequestError(f"the body must be at most {MAX_BYTES} bytes", status=413)


def _is_this_machine(host: str) -> bool:
    """Returns whether a host, perhaps with a port, is this machine."""
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname
        return name == "localhost" or ipaddress.ip_address(name or "").is_loopback
    except ValueError:
        return False
