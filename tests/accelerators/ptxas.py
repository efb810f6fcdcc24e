"""Reports of NVIDIA's assembler, ptxas, on the GPU kernels: the bytes that it spills from registers to memory."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jlade.inspection import targets
from jlade.models import kv_rounding, products
from jlade.models.attention import Operands, hopper
from jlade.models.experts import hopper as experts
from jlade.models.grouped import GroupedMatrix
from jlade.models.products import gpu

DIRECTORY = "MOSAIC_GPU_DUMP_TO"  # of Pallas's reports


@dataclasses.dataclass(frozen=True)
class Case:
    """The sizes of a kernel of attention."""

    head_dim: int
    block_size: int
    group: int = 1  # heads of a KV head
    batch_size: int = 1
    num_masks: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    window: int | None = None
    cap: float | None = None
    page_size: int | None = None  # of a cache in pages
    chunk: int = hopper.CHUNK
    slots: int = hopper.SLOTS

    def compile(self, index: int) -> Any:
        """Returns the compiled program, another one for each index."""
        hopper.CHUNK, hopper.SLOTS = self.chunk, self.slots
        kv_heads, capacity = 8, 1024 + 8 * index  # equal kernels are compiled once, and reported once
        block = self.batch_size, self.block_size, kv_heads, self.head_dim
        number, entries = self.batch_size, capacity
        if self.page_size is not None:
            number, entries = 33 + index, self.page_size
        cache = number, kv_heads, entries, self.head_dim
        queries = self.batch_size, self.block_size, kv_heads * self.group, self.head_dim
        of_keys = self.dtype if self.kv_dtype is None else kv_rounding.STORED[self.kv_dtype]
        arrays = [
            jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
            for shape, dtype in ((queries, self.dtype), *((x, of_keys) for x in (block, block, cache, cache)))
        ]
        of_scales = [] if self.kv_dtype is None else [block[:-1], block[:-1], cache[:-1], cache[:-1]]
        scales = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in of_scales]
        length = jax.ShapeDtypeStruct((self.batch_size,), jnp.int32)
        positions = jax.ShapeDtypeStruct((self.batch_size, self.block_size), jnp.int32)
        mask = jax.ShapeDtypeStruct((self.num_masks, self.block_size, self.block_size), bool)
        (device,), _ = targets.find("h100")
        attend = functools.partial(hopper.attend, window=self.window, cap=self.cap)
        operands = Operands(*arrays, length, mask, positions, None, *scales)
        if self.page_size is not None:
            table = jax.ShapeDtypeStruct((self.batch_size, 8), jnp.int32)
            operands = operands._replace(table=table)
        return targets.compile_for(device, attend, operands)


@dataclasses.dataclass(frozen=True)
class ExpertsCase:
    """The sizes of a kernel of experts."""

    num_tiles: int
    rows: int
    size: int
    width: int
    number: int = 1  # of arrays of matrices
    num_experts: int = 128
    dtype: str = "bfloat16"

    def compile(self, index: int = 0) -> Any:
        """Returns the compiled program, the same one for each index."""
        shapes = [(self.num_tiles, self.rows, self.size), *[(self.num_experts, self.size, self.width)] * self.number]
        tiles, *weights = (jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for shape in shapes)
        chosen = jax.ShapeDtypeStruct((self.num_tiles,), jnp.int32)
        (device,), _ = targets.find("h100")
        return targets.compile_for(device, experts.multiply, tiles, chosen, *weights)


@dataclasses.dataclass(frozen=True)
class ProductCase:
    """The sizes of a kernel of products with a matrix in four bits."""

    device: str
    tokens: int
    inputs: int
    outputs: int
    group: int = 64
    dtype: str = "bfloat16"
    field: str | None = None  # of the groups, besides their scale
    rows: int = gpu.ROWS[1]
    columns: int = gpu.COLUMNS[1]

    def compile(self, index: int) -> Any:
        """Returns the compiled program, the same one for each index."""
        gpu.ROWS, gpu.COLUMNS = (gpu.ROWS[0], self.rows), (gpu.COLUMNS[0], self.columns)
        of_groups = jax.ShapeDtypeStruct((self.inputs // self.group, self.outputs), jnp.float32)
        codes = jax.ShapeDtypeStruct((self.inputs // 2, self.outputs), jnp.uint8)
        matrix = GroupedMatrix(codes, of_groups, **({} if self.field is None else {self.field: of_groups}))
        (device,), _ = targets.find(self.device)
        x = jax.ShapeDtypeStruct((self.tokens, self.inputs), jnp.dtype(self.dtype))
        return targets.compile_for(device, functools.partial(products.multiply, implementation="gpu"), x, matrix)


def spills(cases: list[Case | ExpertsCase], directory: pathlib.Path) -> dict[Case | ExpertsCase, int]:
    """Returns the bytes that each kernel spills and reloads.

    Args:
      cases: different from each other. A new process compiles them, without JAX's cache of programs: a cached program
        leaves no report.
      directory: an empty one, for the reports.
    """
    _compile_all(cases, {"MOSAIC_GPU_DUMP_PTXAS": "1", DIRECTORY: str(directory)})
    reports = [path.read_text() for path in sorted(directory.iterdir())]
    return {case: _spilled(report) for case, report in zip(cases, reports, strict=True)}


def spills_of_products(cases: list[ProductCase]) -> dict[ProductCase, int]:
    """Returns the bytes that each kernel spills and reloads. XLA, which compiles them with Triton, logs the reports."""
    outside = (
        "--xla_gpu_enable_libnvptxcompiler=false --xla_gpu_enable_libnvjitlink=false"  # as a process that is logged
    )
    log = _compile_all(
        cases,
        {"XLA_FLAGS": outside, "TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "subprocess_compilation=5"},
    )
    reports = re.findall(r"entry function 'multiply'.*?spill loads", log, re.DOTALL)
    return {case: _spilled(report) for case, report in zip(cases, reports, strict=True)}


def _compile_all(cases: Sequence[Case | ExpertsCase | ProductCase], settings: dict[str, str]) -> str:
    """Compiles cases in a process with these variables of the environment. Returns what it logs."""
    settings |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    settings |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    described = [(type(case).__name__, dataclasses.asdict(case)) for case in cases]
    command = [sys.executable, "-m", __name__, json.dumps(described)]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=os.environ | settings, check=True, capture_output=True, text=True)
    return done.stderr


def _spilled(report: str) -> int:
    return sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report)))


def compile_and_report(index: int, case: Case | ExpertsCase | ProductCase) -> None:
    """Compiles a kernel and leaves its report, without Pallas's other files, in the directory if there is one."""
    case.compile(index)
    if DIRECTORY not in os.environ:
        return
    directory = pathlib.Path(os.environ[DIRECTORY])
    (report,) = directory.glob("*.ptxas")
    report.rename(directory / f"{index:03}")
    for path in directory.glob("*.*"):
        path.unlink()


if __name__ == "__main__":
    for index, (name, fields) in enumerate(json.loads(sys.argv[1])):
        compile_and_report(index, globals()[name](**fields))
