"""Room for programs: those that were not used for longest are dropped before a process has as many as it may.

XLA holds each kernel of a CPU's program as code of its own, in memory maps that live as long as the program, and Linux
allows a process 65,530 maps (vm.max_map_count). Without a map left the next program fails with "LLVM compilation error:
Cannot allocate memory" while most memory is free.
"""

import contextlib
import contextvars
import gc
import itertools
import logging
import pathlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

SHARE = 7 / 8  # of the limit; the rest is for the programs that compile next
MAX_PROGRAMS = 1000  # where the system does not show the maps
LIMIT, MAPS = pathlib.Path("/proc/sys/vm/max_map_count"), pathlib.Path("/proc/self/maps")

logger = logging.getLogger("jlade")


class Usage(NamedTuple):
    """What the programs of a process take, and what it may have."""

    number: int
    limit: int
    text: str  # the same for people, with a remedy


class Programs:
    """Programs that are dropped together.

    Args:
      drop: frees them, those that run when they end. The next call compiles or loads its program again.
    """

    def __init__(self, drop: Callable[[], object]):
        self._drop = drop
        self._number = self._last_use = 0

    def use(self) -> None:
        """Notes that one of them is called, before it runs."""
        self._last_use = next(_uses)
        keeper = _keeper.get()
        if keeper is not None:
            keeper.programs.add(self)

    def gain(self) -> None:
        """Notes that there is one more. Others are dropped if there is little room for the next."""
        with _lock:
            self._number += 1
            _living.add(self)
            kept = {programs for keeper in _keepers for programs in tuple(keeper.programs)}
            others = (programs for programs in _living if programs is not self)
            for oldest in sorted(others, key=lambda each: (each in kept, each._last_use)):
                usage = measure()
                if usage.number <= SHARE * usage.limit:
                    break
                if not _warned.is_set():
                    _warned.set()
                    logger.warning("%s", usage.text)
                _living.discard(oldest)
                oldest._number = 0
                oldest._drop()
                gc.collect()  # cycles hold some programs


class Keeper:
    """One whose programs are dropped after all others, until `end`."""

    def __init__(self) -> None:
        self.programs: set[Programs] = set()
        with _lock:
            _keepers.add(self)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Keeps the programs that this thread calls in the block."""
        token = _keeper.set(self)
        try:
            yield
        finally:
            _keeper.reset(token)

    def end(self) -> None:
        """Keeps no programs any more."""
        with _lock:
            _keepers.discard(self)


def measure() -> Usage:
    """Returns what the programs of this process take. Linux needs up to 50 ms to list the maps."""
    try:
        limit = int(LIMIT.read_bytes())
        number = MAPS.read_bytes().count(b"\n")
        what, remedy = "memory maps, most of them of compiled programs", f", or sysctl vm.max_map_count={4 * limit}"
    except OSError:
        number, limit = sum(programs._number for programs in _living), MAX_PROGRAMS
        what, remedy = "compiled programs", ""
    return Usage(
        number,
        limit,
        f"this process has {number} {what}, and may have {limit}: programs that were not used for longest are dropped, "
        f"and compile again when they are called. Fewer settings, models and engines in a process help{remedy}",
    )


_lock = threading.RLock()
_uses = itertools.count(1)
_living = weakref.WeakSet[Programs]()  # those that have any
_keepers = weakref.WeakSet[Keeper]()
_keeper: contextvars.ContextVar[Keeper | None] = contextvars.ContextVar("keeper", default=None)
_warned = threading.Event()
