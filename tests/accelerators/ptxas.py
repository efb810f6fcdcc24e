"""Reports of NVIDIA's assembler, ptxas, on the Hopper kernel: the bytes that it spills from registers to memory."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp

from jlade.inspection import targets
from jlade.models.attention import Operands, hopper

DIRECTORY = "MOSAIC_GPU_DUMP_TO"  # of Pallas's reports


@dataclasses.dataclass(frozen=True)
class Case:
    """The sizes of a kernel."""

    head_dim: int
    block_size: int
    group: int = 1  # heads of a KV head
    batch_size: int = 1
    num_masks: int = 1
    dtype: str = "bfloat16"
    window: int | None = None
    cap: float | None = None
    chunk: int = hopper.CHUNK
    slots: int = hopper.SLOTS


def spills(cases: list[Case], directory: pathlib.Path) -> dict[Case, int]:
    """Returns the bytes that each kernel spills and reloads.

    Args:
      cases: different from each other. A new process compiles them, without JAX's cache of programs: a cached program
        leaves no report.
      directory: an empty one, for the reports.
    """
    settings = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    settings |= {"MOSAIC_GPU_DUMP_PTXAS": "1", DIRECTORY: str(directory)}
    command = [sys.executable, "-m", __name__, json.dumps([dataclasses.asdict(case) for case in cases])]
    root = pathlib.Path(__file__).parents[2]
    subprocess.run(command, cwd=root, env=os.environ | settings, check=True, capture_output=True)
    reports = [path.read_text() for path in sorted(directory.iterdir())]
    found = [re.findall(r"(\d+) bytes spill (?:stores|loads)", report) for report in reports]
    return {case: sum(map(int, numbers)) for case, numbers in zip(cases, found, strict=True)}


def compile_and_report(index: int, case: Case) -> None:
    """Compiles a kernel and leaves its report, without Pallas's other files, in the directory."""
    hopper.CHUNK, hopper.SLOTS = case.chunk, case.slots
    kv_heads, capacity = 8, 1024 + 8 * index  # equal kernels are compiled once, and reported once
    block = case.batch_size, case.block_size, kv_heads, case.head_dim
    cache = case.batch_size, kv_heads, capacity, case.head_dim
    queries = case.batch_size, case.block_size, kv_heads * case.group, case.head_dim
    arrays = [jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype)) for shape in (queries, block, block, cache, cache)]
    length = jax.ShapeDtypeStruct((case.batch_size,), jnp.int32)
    positions = jax.ShapeDtypeStruct((case.batch_size, case.block_size), jnp.int32)
    mask = jax.ShapeDtypeStruct((case.num_masks, case.block_size, case.block_size), bool)
    device, _ = targets.find("h100")
    attend = functools.partial(hopper.attend, window=case.window, cap=case.cap)
    targets.compile_for(device, attend, Operands(*arrays, length, mask, positions))
    directory = pathlib.Path(os.environ[DIRECTORY])
    (report,) = directory.glob("*.ptxas")
    report.rename(directory / f"{index:03}")
    for path in directory.glob("*.*"):
        path.unlink()


if __name__ == "__main__":
    for index, case in enumerate(json.loads(sys.argv[1])):
        compile_and_report(index, Case(**case))
