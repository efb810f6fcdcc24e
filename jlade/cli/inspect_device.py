"""`jlade inspect --device`: describes the programs that a device's compiler makes of a model."""

import argparse
import collections
import glob
import json
import math
import pathlib
from typing import Any

import jax
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from jlade.cli import arguments, terminal
from jlade.costs.devices import DEVICES
from jlade.inspection.compiled import Loop
from jlade.inspection.inspect import Inspection, inspect
from jlade.inspection.sequences import Sequences
from jlade.lookahead.names import label
from jlade.mesh import AXES

CAPACITY = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that need `--device`."""
    group = parser.add_argument_group(
        "compiled programs",
        "With --device, the programs are compiled for a device that need not be there, and their memory, copies and "
        "estimated times are shown. MODEL then needs nothing but a config.json.",
    )
    group.add_argument("--device", choices=("cpu", *DEVICES), type=str.lower, help="the device; cpu is this machine")
    group.add_argument(
        "--lookahead",
        metavar="SETTING",
        help="setting to compile, like tree=63 (default: the tuned one, or an estimate for the device)",
    )
    arguments.add(group, "--attention", "--experts", "--bits", "--int8")
    group.add_argument("--mesh", metavar="SIZES", help="several devices, like data=2,lookahead=4; see `jlade plan`")
    group.add_argument(
        "--engine",
        action="store_true",
        help="compile the programs of an engine too, and count their memory in the number of its sequences",
    )


def check(options: argparse.Namespace) -> None:
    """Raises a ValueError that names an option without effect, as there is no `--device`."""
    for name in ("lookahead", "attention", "experts", "bits", "mesh", "engine"):
        if options.device is None and getattr(options, name):
            raise ValueError(f"--{name} has no effect without --device: leave it out, or name a device")


def run(options: argparse.Namespace, directory: pathlib.Path) -> None:
    """Compiles the programs of the model in a directory and prints facts about them."""
    look_for_no_driver()
    lookahead: Any = "auto" if options.lookahead is None else arguments.setting("--lookahead", options.lookahead)
    found = inspect(
        directory,
        options.device,
        dtype=None if options.dtype == "auto" else options.dtype,
        bits=options.bits,
        kv_dtype=options.kv_dtype,
        lookahead=lookahead,
        batch_size=options.batch_size,
        capacity=CAPACITY if options.length is None else options.length,
        attention=options.attention or "auto",
        experts=options.experts or "auto",
        mesh=None if options.mesh is None else arguments.mesh_sizes(options.mesh),
        engine=options.engine,
    )
    if options.json:
        print(json.dumps(found.facts()))
    else:
        Console(highlight=False).print(_table(found))


def look_for_no_driver() -> None:
    """Keeps JAX on the CPU where no accelerator is: otherwise the plugin for GPUs looks for a driver and refuses."""
    if not any(map(glob.glob, ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*"))):
        jax.config.update("jax_platforms", "cpu")


def in_words(sequences: Sequences, capacity: int) -> str:
    """Returns how many sequences of an engine fit, and their parts of the memory."""
    bound, temporary = "at most ", ""
    if sequences.temporary:
        bound, temporary = "", f" and {decimal(sequences.temporary)} of temporary memory"
    return (
        f"{bound}{sequences.number:,} sequences of {capacity:,} tokens: {decimal(sequences.row)} of state{temporary} "
        f"each, and {decimal(sequences.prompt)} for a prompt being read"
    )


def _table(found: Inspection) -> Table:
    """Returns the facts as a table."""
    memory = found.memory
    sizes = ", ".join(f"{name} {size}" for name, size in zip(AXES, found.mesh, strict=True) if size > 1)
    rows = {
        "device": f"{found.device_kind}, {decimal(memory.limit)}" + (f"; each of {sizes}" if sizes else ""),
        "programs": f"{found.batch_size} x {found.capacity:,} tokens, "
        f"{f'{found.bits} bits and ' if found.bits else ''}{found.dtype}, "
        f"{f'cache in {found.kv_dtype}, ' if found.kv_dtype else ''}attention {found.attention}, "
        f"{f'experts {found.experts}, ' if found.experts else ''}compiled in {found.compile_seconds:.0f} s",
    }
    if found.failure is not None:
        rows["refused"] = found.failure.splitlines()[0]
    if memory.needed is not None:
        rows["memory"] = (
            f"{'fits' if found.fits else 'does not fit'}: {decimal(memory.arguments)} of arguments, "
            f"{decimal(memory.outputs or 0)} of results, {decimal(memory.temporary or 0)} temporary"
        )
        rows["largest capacity"] = f"{memory.largest_capacity:,} tokens" if memory.largest_capacity else "none"
        copied = collections.Counter(copy.partition(": ")[2] for copy in found.copies)
        rows["engine"] = in_words(found.sequences, found.capacity)
        rows["copies in loops"] = ", ".join(f"{number} of {shape}" for shape, number in copied.items()) or "none"
    if found.plain_step is not None and found.step is not None:
        rows["plain step"] = _step(found.plain_step, found.plain_step_seconds)
        rows[f"step at {label(found.lookahead)}"] = _step(found.step, found.step_seconds)
        if exchanges := found.step.exchanges:
            rows["exchanges"] = f"{len(exchanges)} in a step, {decimal(sum(exchanges))}"
    return terminal.facts_table(rows)


def _step(step: Loop, measured: float | None) -> str:
    """Returns a step's time and its parts."""
    parts = [
        f"estimated {_milliseconds(step.time.total)}: arithmetic {_milliseconds(step.time.arithmetic)}, "
        f"memory {_milliseconds(step.time.memory)}",
        f"{step.kernels} kernels",
    ]
    if measured is not None:
        parts.insert(0, f"measured {_milliseconds(measured)}")
    if step.host_loops:
        parts.append(f"{step.host_loops} loops that wait for the host")
    if step.vector_products:
        parts.append(f"{len(step.vector_products)} products outside the matrix unit")
    return "; ".join(parts)


def _milliseconds(seconds: float) -> str:
    """Returns a time with three significant digits."""
    number = 1e3 * seconds
    digits = max(0, 2 - math.floor(math.log10(number))) if number > 0 else 0
    return f"{number:.{digits}f} ms"
