"""The attention kernel for TPUs, made by their compiler without a device: it fits on-chip memory at every shape."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jlade.inspection import targets
from jlade.models.attention import Operands, tpu
from tests.accelerators.needs import device

OPTIMIZED = True

SHAPES = [
    (1, 1, 128),
    (120, 1, 128),
    (512, 1, 128),
    (8, 4, 64),
    (120, 4, 64),
    (512, 4, 128),
    (128, 7, 80),
    (120, 7, 96),
]
CASES = [
    pytest.param(name, *shape, marks=[*device(name).marks, *([] if few else [pytest.mark.thorough])])
    for name in ("v5e", "v6e", "v5p")
    for shape in SHAPES
    for few in [name == "v5e" and shape in SHAPES[:2]]
]


@pytest.mark.parametrize(("name", "block_size", "group", "head_dim"), CASES)
@pytest.mark.parametrize("has_variations", [False, True], ids=["", "variations"])
def test_compiles(has_variations, name, block_size, group, head_dim):
    (target,), _ = targets.find(name)
    block, cache = (2, block_size, 8, head_dim), (2, 8, 4096, head_dim)
    shapes = [(2, block_size, 8 * group, head_dim), block, block, cache, cache]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    lengths, mask = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((1, block_size, block_size), bool)
    operands, attend = Operands(*arrays, lengths, mask), tpu.attend
    if has_variations:
        positions, sinks = (
            jax.ShapeDtypeStruct((2, block_size), jnp.int32),
            jax.ShapeDtypeStruct((8 * group,), jnp.bfloat16),
        )
        operands = operands._replace(positions=positions, sinks=sinks)
        attend = functools.partial(tpu.attend, window=512, scale=0.1, cap=50.0)
    program = targets.compile_for(target, attend, operands)
    assert "tpu_custom_call" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 0.1e9
