"""Anthropic's `/v1/messages`. The rest of the server knows of it only `routes`, and can be read without it.

`reading` makes a chat of a body, whose blocks become a conversation; `events` writes the message, whole or as a stream.
"""

import functools
from collections.abc import Callable
from typing import Any

from jlade.server.guard import MESSAGES
from jlade.server.messages.events import MessageWriter
from jlade.server.messages.reading import count, read
from jlade.server.protocol import BodyReader


def routes(reader: BodyReader, complete: Callable[..., Any], answer: Callable[..., Any]) -> list[tuple[str, str, Any]]:
    """Returns the methods, paths and endpoints.

    Args:
      reader: of bodies.
      complete: returns the endpoint for a function that reads a body, and the class that writes its response.
      answer: returns the endpoint for a function from a body to that of the response.
    """
    return [
        ("POST", MESSAGES, complete(functools.partial(read, reader), MessageWriter)),
        ("POST", f"{MESSAGES}/count_tokens", answer(functools.partial(count, reader))),
    ]
