"""The life of a server: its socket, its answers while the model loads, its connections, and the signal that ends it."""

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any, NoReturn

import h11
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jlade.generation import memory
from jlade.server import guard
from jlade.server.app import Service
from jlade.server.fields import RequestError

IDLE_SECONDS = 30  # that a connection waits for its client within a request or a response
KEPT_SECONDS = 75  # and between two requests: longer than the pools of proxies keep connections
MAX_IDLE = 256  # connections that wait for their clients; the oldest ones beyond wait no longer than
RUSH_SECONDS = 1
TRIMMED_TICKS = 100  # tenths of a second
LAST_SECONDS = 10  # for clients to take the texts that have ended, when the server ends


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that listens, so that a port in use is an error before a model loads.

    Args:
      host: a name or an address.
      port: 0 for a free one.

    Raises:
      OSError: the address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with contextlib.ExitStack() as stack:
            bound = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen()
            stack.pop_all()  # it stays open
    except OSError as error:
        raise OSError(f"{host}:{port} cannot be listened to: {error.strerror}") from error
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Returns whether only this machine can reach a socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def url(bound: socket.socket) -> str:
    """Returns the address of a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def leave(status: int) -> NoReturn:
    """Ends the process at once, also amid a compilation. JAX alone would take seconds to free what has compiled."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Loading:
    """The application of a service, once there is one. Before, it refuses each request.

    Attributes:
      service: None while the model loads.
      doing: what takes place meanwhile.
    """

    def __init__(self, service: Service | None = None):
        self.service, self.doing = service, "loading"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.service is not None:
            await self.service.app(scope, receive, send)
        elif scope["type"] == "http":
            error = RequestError(f"the server starts: {self.doing}", status=503)
            await guard.refuse(error, scope)(scope, receive, send)


class _Connection(H11Protocol):
    """A connection that ends quietly, where uvicorn logs a traceback, if a client breaks HTTP after its headers."""

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # sends no more
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()


class Server(uvicorn.Server):
    """Serves until a signal. The first one lets the completions that have rows end, the second one ends them.

    While the model loads, the first one ends the process.

    A connection is closed if its client neither completes the headers of a request nor takes more of a response within
    `IDLE_SECONDS`, or begins no other request within `KEPT_SECONDS`. If more than `MAX_IDLE` connections wait for their
    clients, the oldest ones are closed earlier.

    Attributes:
      signals: those that have come.
    """

    def __init__(self, app: Loading):
        super().__init__(
            uvicorn.Config(
                app,
                http=_Connection,  # h11 bounds the headers, which httptools does not
                ws="none",
                log_config=None,  # uvicorn's closes the handlers of others
                log_level="error",  # anyone may cause a warning
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_keep_alive=KEPT_SECONDS,
                timeout_graceful_shutdown=LAST_SECONDS,
            )
        )
        self.signals: list[int] = []
        self._app = app
        self._waiting: dict[tuple[Any, ...], float] = {}  # what connections wait for -> since when

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal; `on_tick` acts on it."""
        if self._app.service is None:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self.signals.append(sig)
        self.force_exit = len(self.signals) > 1

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to stop listening; uvicorn asks every tenth of a second."""
        if counter % TRIMMED_TICKS == 0:
            await asyncio.to_thread(memory.trim)
        self._close_slow()
        if self.signals and (service := self._app.service):
            service.drain()
            self.should_exit = self.force_exit or service.is_idle
        return await super().on_tick(counter)

    def _close_slow(self) -> None:
        """Closes connections whose clients are too slow."""
        connections: Any = self.server_state.connections
        # uvicorn closes those alone that stay silent after a response: they have a task for it.
        now, waiting = time.monotonic(), {}
        for connection in connections:
            cycle, unsent = connection.cycle, connection.transport.get_write_buffer_size()
            if unsent or cycle is None or cycle.response_complete:
                is_kept = connection.timeout_keep_alive_task is not None and not unsent
                key = connection, cycle, unsent, is_kept  # another one as soon as the client makes progress
                waiting[key] = self._waiting.get(key, now)
        self._waiting = waiting
        surplus = len(waiting) - MAX_IDLE
        for number, (key, since) in enumerate(sorted(waiting.items(), key=lambda item: item[1])):
            limit = RUSH_SECONDS if number < surplus else KEPT_SECONDS if key[3] else IDLE_SECONDS
            if now - since > limit:
                key[0].transport.abort()

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return signal.SIGINT in self.signals
