"""Products with matrices in groups, as one Pallas kernel for TPUs."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jlade.models.grouped import GroupedMatrix, rescaled
from jlade.models.products.shape import MatrixShape, parts_of

LANES = 128
ROWS = 16  # tokens are a multiple of them
MOST_ROWS = 512  # tokens; on-chip memory holds them with a block of the matrix
BLOCK = 2**19  # elements of a block, which are 2 MB in float32, and a few arrays of that size
GROUPS = 16  # a block has a multiple of them, or all: its scales are whole tiles


def obstacle(shape: MatrixShape) -> str | None:
    """Returns the reason why `multiply` does not take such a matrix, None if it does."""
    if jnp.dtype(shape.dtype) != jnp.bfloat16:
        return f"needs a model in bfloat16, and this is in {shape.dtype}"
    if shape.has_levels:
        return "needs matrices of integers, and these have levels"
    if shape.outputs % LANES or shape.group % (16 * shape.parts):
        return f"needs outputs of a multiple of {LANES} and groups of a multiple of 32 inputs, and these are {shape}"
    return None


def multiply(x: jax.Array, matrix: GroupedMatrix, interpret: bool = False) -> jax.Array:
    """Returns the product [T, out] of `x` [T, in], up to `MOST_ROWS` tokens, in its dtype.

    Each program converts a block of the matrix in on-chip memory, and adds its product with the tokens.

    Args:
      interpret: run the kernel as plain JAX, on any device; for tests.

    Raises:
      ValueError: there is an `obstacle`.
    """
    shape = MatrixShape.of(matrix, x.dtype)
    if reason := obstacle(shape):
        raise ValueError(f"the kernel of products {reason}")
    inputs, outputs = _block(shape)
    rows, parts, group = len(x), shape.parts, shape.group
    num_blocks = -(-shape.inputs // inputs)
    excess = num_blocks * inputs - shape.inputs  # inputs of the last block that are none
    padded = jnp.pad(x, ((0, -rows % ROWS), (0, 0)))
    # The inputs of a part of all groups side by side, as the codes are in the matrix.
    by_part = jnp.moveaxis(padded.reshape(len(padded), -1, parts, group // parts), 2, 0).reshape(parts, len(padded), -1)
    by_part = jnp.pad(by_part, ((0, 0), (0, 0), (0, excess // parts)))
    of_groups = pl.BlockSpec((inputs // group, outputs), lambda o, i: (i, o))
    arrays = {"weight": matrix.weight, "scale": matrix.scale, "zero": matrix.zero, "offset": matrix.offset}
    if not interpret:
        # Otherwise the compiler fetches whole matrices into on-chip memory before use.
        arrays = {
            name: array if array is None else pltpu.with_memory_space_constraint(array, pltpu.HBM)
            for name, array in arrays.items()
        }
    product: jax.Array = pl.pallas_call(
        functools.partial(_kernel, group=group, excess=excess // parts),
        grid=(shape.outputs // outputs, num_blocks),
        in_specs=[
            pl.BlockSpec((parts, len(padded), inputs // parts), lambda o, i: (0, 0, i)),
            pl.BlockSpec((inputs // parts, outputs), lambda o, i: (i, o)),
            of_groups,
            None if matrix.zero is None else of_groups,
            None if matrix.offset is None else of_groups,
        ],
        out_specs=pl.BlockSpec((len(padded), outputs), lambda o, i: (0, o)),
        scratch_shapes=[pltpu.VMEM((len(padded), outputs), jnp.float32)],
        out_shape=jax.ShapeDtypeStruct((len(padded), shape.outputs), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="multiply",
    )(by_part, *arrays.values())
    return product[:rows]


def _kernel(
    x_ref: Any, weight_ref: Any, scale_ref: Any, zero_ref: Any, offset_ref: Any, out_ref: Any, sum_ref: Any,
    *, group: int, excess: int,
) -> None:  # fmt: skip
    """Adds the product with one block of the matrix, whose last `excess` rows are none in the last block."""

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    parts = parts_of(weight_ref[...])
    height, outputs = weight_ref.shape

    def of_group(ref: Any) -> jax.Array:
        rows = ref[...].astype(jnp.float32)[:, None]
        return jnp.broadcast_to(rows, (len(rows), group // len(parts), outputs)).reshape(height, outputs)

    for i, codes in enumerate(parts):
        values = rescaled(codes.astype(jnp.float32), of_group, scale_ref, zero_ref, offset_ref)
        if excess:  # whose values may be NaN, and 0 * NaN is NaN
            is_last = pl.program_id(1) == pl.num_programs(1) - 1
            row = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
            values = jnp.where(is_last & (row >= height - excess), 0.0, values)
        sum_ref[...] += jnp.dot(x_ref[i], values.astype(x_ref.dtype), preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def _block(shape: MatrixShape) -> tuple[int, int]:
    """Returns the inputs and outputs of a block: as many inputs as fit, in blocks of equal size if possible."""
    groups, most = shape.inputs // shape.group, max(GROUPS, BLOCK // LANES // shape.group)
    heights = [n for n in range(1, min(groups, most) + 1) if groups % n == 0 and (n == groups or n % GROUPS == 0)]
    inputs = shape.group * max(heights, default=most // GROUPS * GROUPS)
    lanes = math.gcd(shape.outputs // LANES, 1 << max(0, (BLOCK // inputs // LANES).bit_length() - 1))
    return inputs, lanes * LANES
