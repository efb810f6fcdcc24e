"""The latest responses in memory, from which later ones go on."""

import json
import threading
from collections import OrderedDict
from typing import NamedTuple

from jlade.server.fields import Body

MAX_BYTES = 64 * 2**20  # of stored responses, in JSON


class Turn(NamedTuple):
    """A stored response.

    Attributes:
      items: of the conversation, with those of the response.
      response: as its client got it.
      size: bytes of both in JSON.
    """

    items: list[Body]
    response: Body
    size: int


class Store:
    """The latest responses, in memory."""

    def __init__(self, max_bytes: int = MAX_BYTES):
        self._max_bytes, self._size = max_bytes, 0
        self._turns: OrderedDict[str, Turn] = OrderedDict()
        self._items: dict[str, Body] = {}  # of the responses, by their ids
        self._lock = threading.Lock()

    def add(self, items: list[Body], response: Body) -> None:
        """Keeps a response and its conversation, and forgets the oldest ones for it."""
        turn = Turn([*items, *response["output"]], response, len(json.dumps([items, response])))
        with self._lock:
            self._turns[response["id"]] = turn
            self._size += turn.size
            self._items |= {item["id"]: item for item in response["output"]}
            while self._size > self._max_bytes:
                self._forget(self._turns.popitem(last=False)[1])

    def find(self, name: str) -> Turn | None:
        """Returns the response with this id, None if there is none."""
        with self._lock:
            return self._turns.get(name)

    def find_item(self, name: str) -> Body | None:
        """Returns the item of a response with this id, None if there is none."""
        with self._lock:
            return self._items.get(name)

    def remove(self, name: str) -> bool:
        """Forgets the response with this id, and returns whether there was one."""
        with self._lock:
            turn = self._turns.pop(name, None)
            if turn is not None:
                self._forget(turn)
        return turn is not None

    def _forget(self, turn: Turn) -> None:
        self._size -= turn.size
        for item in turn.response["output"]:
            del self._items[item["id"]]
