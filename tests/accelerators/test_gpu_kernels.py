"""Attention and experts on GPUs, made by their own compiler without a device."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jlade.inspection import targets
from jlade.inspection.hlo import Module
from jlade.models.attention import Operands, plain
from jlade.models.kv_rounding import DTYPES
from tests.accelerators.needs import gpu_compiler
from tests.accelerators.ptxas import Case, ExpertsCase, spills
from tests.models.devices import hopper_kernels

OPTIMIZED = True
READ = ("parameter", "bitcast", "get-tuple-element", "tuple")  # opcodes that write nothing
pytestmark = gpu_compiler

CASES = [
    *(Case(head_dim, block_size) for head_dim in (64, 128) for block_size in (1, 64, 120)),
    *(Case(head_dim, block_size, group=4) for head_dim in (64, 128) for block_size in (8, 128)),
    *(Case(head_dim, 128, group=7) for head_dim in (80, 96, 128)),
    Case(128, 120, batch_size=2, num_masks=2),
    Case(128, 120, dtype="float16"),
    *(Case(128, block_size, kv_dtype="int8") for block_size in (1, 64, 120)),
    *(Case(head_dim, 60, group=2, kv_dtype="float8_e4m3fn") for head_dim in (16, 48, 64, 96, 128)),
    *(Case(128, 128, 4, dtype="float16", kv_dtype=kv_dtype) for kv_dtype in DTYPES),
    *(Case(128, 128, 4, kv_dtype=kv_dtype, window=512, cap=50.0) for kv_dtype in DTYPES),
    *(
        Case(128, block_size, batch_size=4, page_size=128, kv_dtype=kv)
        for block_size in (1, 120)
        for kv in (None, "int8")
    ),
    *(Case(*sizes, window=512, cap=50.0) for sizes in ((64, 60, 8), (128, 1, 1), (128, 60, 2), (128, 128, 4))),
]
EXPERTS = [
    *(ExpertsCase(200, rows, 2048, 768, number=2) for rows in (8, 16, 32, 64)),  # Qwen3-30B-A3B: gate and up
    *(ExpertsCase(200, rows, 768, 2048) for rows in (8, 16, 64)),  # and down
    ExpertsCase(8, 8, 2048, 768, number=2, dtype="float16"),
    ExpertsCase(4, 8, 2880, 2880, num_experts=32),  # gpt-oss
    ExpertsCase(2, 8, 14336, 4096, num_experts=8),  # Mixtral
    ExpertsCase(24, 64, 4096, 14336, number=2, num_experts=8),
]
PLANTED = Case(128, 120, chunk=128, slots=1)  # twice the scores in registers


@hopper_kernels
def test_kernels_keep_their_state_in_registers(tmp_path):
    cases = [*CASES, *EXPERTS]
    found = spills([*cases, PLANTED], tmp_path)
    assert found.pop(PLANTED) > 0
    assert found == dict.fromkeys(cases, 0)


@hopper_kernels
@pytest.mark.parametrize("case", [EXPERTS[0], EXPERTS[-1]])
def test_experts_are_one_launch_that_reads_the_weights_in_place(case):
    program = case.compile()
    module = Module(program.as_text())
    launched = [x for x in module.computations[module.entry].values() if x.opcode not in READ]
    assert [x.opcode for x in launched] == ["custom-call"]
    assert program.memory_analysis().temp_size_in_bytes < 1e6


def compiled_attention(name, block_size, capacity):
    """Returns plain attention at the shape of LLaMA 2 7B, compiled."""
    block, cache = (1, block_size, 32, 128), (1, 32, capacity, 128)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (block, block, block, cache, cache)]
    length, mask = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1, block_size, block_size), bool)
    attend = functools.partial(plain.attend, window=None)
    return targets.compile_for(targets.find(name)[0][0], attend, Operands(*arrays, length, mask))


def largest(program):
    """Returns the most elements of an array that the program writes."""
    module = Module(program.as_text())
    return max(x.size for x in module.computations[module.entry].values() if x.opcode not in READ)


@pytest.mark.parametrize("name", ["b200", "h100", "a100", "l4", "l40s", "rtx3090", "rtx4090"])
def test_plain_attention_has_no_loop_and_reads_the_cache_in_place(name, monkeypatch):
    program = compiled_attention(name, 60, 1024)
    assert " while(" not in program.as_text()
    assert largest(program) < 32 * 1024 * 128
    if name == "h100":
        monkeypatch.setattr(jax.lax, "optimization_barrier", lambda x: x)
        assert largest(compiled_attention(name, 60, 1024)) >= 32 * (1024 + 60) * 128  # block and cache, concatenated


def test_plain_attention_of_a_prompts_chunk_takes_little_memory():
    """All scores of 512 tokens with 8192 entries would take 537 MB."""
    program = compiled_attention("h100", 512, 8192)
    assert " while(" not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 2.5 * 4 * plain.SCORES
