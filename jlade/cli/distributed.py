"""`jlade generate --distributed`: processes, on one host or several, that decode the same prompts together."""

import argparse
import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from jlade import mesh
from jlade.errors import check_int

HEARTBEAT = 15  # seconds without a sign of life after which a process counts as dead
SHUTDOWN = 10  # seconds for which a process that ends waits for the others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--distributed`."""
    parser.add_argument(
        "--distributed",
        nargs="?",
        const="",
        metavar="ADDRESS:PORT,PROCESSES,INDEX",
        help="decode together with other processes that run the same command, on the devices of --mesh: an address of "
        "process 0, the number of processes, and the index of this one. Slurm, Open MPI, Cloud TPUs and others have "
        "them in the environment; there, leave out the value. Process 0 writes the results",
    )


@contextlib.contextmanager
def joined(options: argparse.Namespace) -> Iterator[None]:
    """Joins the other processes for the block if `--distributed` is given. JAX must not have used a device yet.

    Standard output is that of process 0; those of the others are discarded.

    Raises:
      ValueError: the value is wrong, or `--mesh` is missing.
      RuntimeError: the others cannot be reached, or one of them has ended.
    """
    if options.distributed is None:
        yield
        return
    if options.mesh is None:
        raise ValueError("--distributed needs --mesh with the devices of all processes, for example --mesh model=8")
    cluster = _parse(options.distributed) if options.distributed else {}
    try:
        jax.distributed.initialize(**cluster, heartbeat_timeout_seconds=HEARTBEAT, shutdown_timeout_seconds=SHUTDOWN)
    except ValueError as error:
        raise ValueError(
            "--distributed finds no cluster in the environment: give it ADDRESS:PORT,PROCESSES,INDEX, for example "
            f"--distributed 10.0.0.1:1234,2,0 ({error})"
        ) from error
    _reserve_standard_output()
    try:
        yield
    except BaseException as error:
        if jax.distributed.is_initialized():
            # An orderly exit would wait for processes that wait for this one, or have ended.
            atexit.register(os._exit, 130 if isinstance(error, KeyboardInterrupt) else 1)
        if isinstance(error, jax.errors.JaxRuntimeError) and "gloo" in str(error).lower():  # which connects CPUs
            raise RuntimeError(f"another process has ended or cannot be reached: {error}") from error
        raise


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """Raises an error of the block in all processes if one of them has it, so that none waits for another."""
    own = None
    try:
        yield
    except Exception as error:
        own = error
    messages = mesh.gather(None if own is None else str(own))
    failed = [f"process {index} has ended: {message}" for index, message in enumerate(messages) if message is not None]
    if failed:
        _raise(own or ValueError(failed[0]))


def check_equal(name: str, value: Any) -> None:
    """Raises a ValueError in all processes unless `value` is equal in all."""
    values = mesh.gather(value)
    for index, other in enumerate(values):
        if other != values[0]:
            _raise(ValueError(f"process {index} has other {name} than process 0: give all processes the same"))


def of_first(value: int) -> int:
    """Returns the value of process 0 in all processes."""
    first: int = mesh.gather(value)[0]
    return first


def is_first() -> bool:
    """Returns whether this is process 0, which writes the results."""
    return jax.process_index() == 0


def _raise(error: Exception) -> NoReturn:
    """Raises an error that all processes have: they can leave each other in order."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    raise error


def _parse(cluster: str) -> dict[str, Any]:
    """Returns the arguments of `jax.distributed.initialize`."""
    try:
        address, *numbers = cluster.split(",")
        number, index = (int(word) for word in numbers)
        _, port = address.rsplit(":", 1)
        int(port)
    except ValueError as error:
        raise ValueError(
            f"--distributed must be like 10.0.0.1:1234,2,0, an address of process 0, the number of processes and the "
            f"index of this one, or without a value; got {cluster!r}"
        ) from error
    check_int("the number of processes in --distributed", number, 1)
    check_int("the index in --distributed", index, 0)
    if index >= number:
        raise ValueError(f"the index in --distributed must be below the number of processes, {number}, got {index}")
    return {"coordinator_address": address, "num_processes": number, "process_id": index}


def _reserve_standard_output() -> None:
    """Reserves standard output for the results: gloo prints to it, too, and is led to stderr."""
    results = os.dup(sys.stdout.fileno()) if is_first() else os.open(os.devnull, os.O_WRONLY)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = os.fdopen(results, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
