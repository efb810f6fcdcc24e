"""OpenAI's `/v1/responses`. The rest of the server knows of it only `routes`, and can be read without it.

`reading` makes a chat of a body, whose items become a conversation; `events` writes the response, whole or as a stream;
`store` keeps responses that later ones go on from. The specification is that of https://www.openresponses.org.
"""

import functools
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jlade.server.fields import RequestError
from jlade.server.guard import JsonResponse
from jlade.server.protocol import BodyReader
from jlade.server.responses.events import ItemsWriter
from jlade.server.responses.reading import read
from jlade.server.responses.store import Store

PATH = "/v1/responses"


def routes(reader: BodyReader, complete: Callable[..., Any]) -> list[tuple[str, str, Any]]:
    """Returns the methods, paths and endpoints.

    Args:
      reader: of bodies.
      complete: returns the endpoint for a function that reads a body, and the class that writes its response.
    """
    store = Store()

    async def show(request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise RequestError("stream must be false: a stored response has no events", "stream")
        if (turn := store.find(name := request.path_params["name"])) is None:
            raise _missing(name)
        return JsonResponse(turn.response)

    async def remove(request: Request) -> Response:
        if not store.remove(name := request.path_params["name"]):
            raise _missing(name)
        return JsonResponse({"id": name, "object": "response", "deleted": True})

    return [
        ("POST", PATH, complete(functools.partial(read, reader, store), ItemsWriter)),
        ("GET", f"{PATH}/{{name}}", show),
        ("DELETE", f"{PATH}/{{name}}", remove),
    ]


def _missing(name: str) -> RequestError:
    return RequestError(f"there is no stored response {name!r:.100}", "response_id", "response_not_found", 404)
