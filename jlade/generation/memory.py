"""Memory: an error that says what was asked for, what would fit and what to lower; giving free memory back."""

import contextlib
import ctypes
import platform
import traceback
from collections.abc import Callable, Iterator

import jax
from rich.filesize import decimal

from jlade import mesh as mesh_lib
from jlade.costs import devices
from jlade.decoding import prefill, sharding
from jlade.decoding.state import DecodeState
from jlade.generation.prompts import SMALLEST_CAPACITY
from jlade.generation.request import DecodeRequest
from jlade.models.base import Params

ERRORS = jax.errors.JaxRuntimeError, ValueError  # JAX raises the latter where a program is dispatched at once
SIGNS = "resource_exhausted", "out of memory"  # in the messages of these, which have no type of their own


@contextlib.contextmanager
def explained(device: jax.Device, explain: Callable[[int], str]) -> Iterator[None]:
    """Turns the errors of allocations in the block into a `MemoryError` that explains them.

    The arrays of the block are freed first, so that the process can go on with less. `explain` returns the arrays that
    the block needs and a remedy, given the bytes that are free on the device without them.
    """
    try:
        yield
    except (MemoryError, *ERRORS) as error:
        message = str(error)
        if not isinstance(error, MemoryError) and not any(sign in message.lower() for sign in SIGNS):
            raise
        traceback.clear_frames(error.__traceback__)
        free, first_line = devices.free_bytes(device), message.partition("\n")[0]
        raise MemoryError(
            f"{device} is out of memory, with {decimal(free)} free: {explain(free)} ({first_line or 'MemoryError'})"
        ) from error


def of_request(params: Params, request: DecodeRequest, free: int) -> str:
    """Returns the memory of the state of a request, and the number of prompts or tokens that would fit."""
    batch_size, capacity = request.inputs.prompts.shape
    needed = state_bytes(params, request)
    groups = mesh_lib.size(request.config.mesh, mesh_lib.DATA)
    each = -(-needed * groups // batch_size)  # bytes of a sequence on its device
    asked = f"a batch of {batch_size}" if batch_size > 1 else "a prompt"
    asked = f"{asked} with room for {capacity} tokens of prompt and text takes {decimal(needed)}"
    # With less than all of it, where the state alone would fit but the temporary arrays of programs do not.
    if fitting := min(free // each * groups, batch_size // 2 // groups * groups):
        return (
            f"{asked}, and {fitting} would fit, or fewer with the temporary arrays of programs. Pass fewer prompts at "
            f"once, lower max_new_tokens, or use jlade.Engine, which takes any number of prompts"
        )
    tokens = SMALLEST_CAPACITY
    while 2 * tokens < capacity and 2 * tokens * (each // capacity) <= free:
        tokens *= 2
    if tokens < capacity and tokens * (each // capacity) <= free:
        return (
            f"{asked}, and prompt and text of {tokens} tokens would fit. Lower max_new_tokens, shorten the prompt, or "
            f"take less memory: load the model with another dtype, int8 or mesh, or pass kv_dtype"
        )
    return f"{asked}. Load the model with less memory (dtype, int8, mesh), pass kv_dtype, or free arrays of the process"


def of_rows(row_bytes: int, num_rows: int, capacity: int, free: int) -> str:
    """Returns the memory of the rows of an engine, and the number of rows that would fit."""
    return (
        f"{num_rows} rows of {capacity} tokens take {decimal(num_rows * row_bytes)}; "
        f"{min(num_rows, free // row_bytes)} rows would fit. Lower max_sequences, capacity or cache_tokens"
    )


def state_bytes(params: Params, request: DecodeRequest) -> int:
    """Returns the bytes of the state of a request on a device, without the parameters."""
    inputs, config = request.inputs, request.config

    def start(params: Params) -> DecodeState:
        return prefill.start(prefill.prefill(params, inputs, config), inputs, config)

    return mesh_lib.num_bytes(sharding.state_shapes(start, params, config))


def trim() -> None:
    """Gives free memory back to the system. glibc keeps the fragments that arrays on a CPU leave, ever more of them."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
