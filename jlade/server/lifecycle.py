"""From the socket to the signal that ends the server."""

import asyncio
import contextlib
import ctypes
import ipaddress
import platform
import signal
import socket
from types import FrameType

import uvicorn

from jlade.server.app import Service

IDLE_SECONDS = 30  # after which a connection without a request is closed
TRIMMED_TICKS = 100  # tenths of a second
LAST_SECONDS = 10  # for clients to take the texts that have ended, when the server ends


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound and does not listen yet, so that a port in use is an error before a model loads.

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
            stack.pop_all()  # it stays open
    except OSError as error:
        raise OSError(f"{host}:{port} cannot be listened to: {error.strerror}") from error
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Returns whether this machine alone reaches a socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def url(bound: socket.socket) -> str:
    """Returns the address of a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves until a signal. The first one lets the completions that have rows end, the second one ends them.

    Attributes:
      signals: those that have come.
    """

    def __init__(self, service: Service):
        super().__init__(
            uvicorn.Config(
                service.app,
                log_config=None,  # uvicorn's closes the handlers of others
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=LAST_SECONDS,
            )
        )
        self.signals: list[int] = []
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal; `on_tick` acts on it."""
        self.signals.append(sig)
        self.force_exit = len(self.signals) > 1

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to stop listening; uvicorn asks every tenth of a second."""
        if counter % TRIMMED_TICKS == 0:
            await asyncio.to_thread(_trim)
        if self.signals:
            self._service.drain()
            self.should_exit = self.force_exit or self._service.is_idle
        return await super().on_tick(counter)

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return signal.SIGINT in self.signals


def _trim() -> None:
    """Gives free memory back to the system. glibc keeps the fragments that arrays on a CPU leave, ever more of them."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
