"""Products with matrices in groups, as one Pallas kernel for TPUs."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jlade.models.grouped import GroupedMatrix, MatrixShape, rescaled
from jlade.models.products import parts_of

LANES, SUBLANES = 128, 8
ROWS = 16  # tokens are a multiple of them
MAX_ROWS = 512  # tokens; on-chip memory holds them with a block of the matrix
BLOCK = 2**19  # elements of a block, which are 2 MB in float32, and a few arrays of that size
GROUPS = 16  # a block has a multiple of them, or all: its scales are whole tiles


def obstacle(shape: MatrixShape) -> str | None:
    """Returns the reason why `multiply_tiles` does not take such a matrix, None if it does."""
    if jnp.dtype(shape.dtype) != jnp.bfloat16:
        return f"needs a model in bfloat16, and this is in {shape.dtype}"
    least = SUBLANES * shape.parts
    if shape.outputs < LANES or shape.group % least:
        return f"needs {LANES} outputs or more and groups of a multiple of {least} inputs, and these are {shape}"
    return None


def multiply_tiles(tiles: jax.Array, experts: jax.Array, matrices: GroupedMatrix, interpret: bool = False) -> jax.Array:
    """Returns `products.multiply_tiles` in the dtype of the tiles, of up to `MAX_ROWS` tokens each.

    Each program converts a block of a matrix in on-chip memory, and adds its product with a tile.

    Raises:
      ValueError: there is an `obstacle`.
    """
    shape = MatrixShape.of(matrices, tiles.dtype)
    if reason := obstacle(shape):
        raise ValueError(f"the kernel of products {reason}")
    inputs, outputs = _block(shape)
    number, (num_tiles, rows, _), parts, group = matrices.shape[0], tiles.shape, shape.parts, shape.group
    num_blocks, num_columns = -(-shape.inputs // inputs), -(-shape.outputs // outputs)
    excess = num_blocks * inputs - shape.inputs  # inputs of the last block that are none
    padded = jnp.pad(tiles, ((0, 0), (0, -rows % ROWS), (0, excess)))
    height = padded.shape[1]

    def of_matrix(size: int) -> pl.BlockSpec:
        def index(tile: Any, column: Any, block: Any, experts: Any) -> tuple[Any, ...]:
            # Programs without an expert name the block of those before them, which is not fetched again.
            is_there = experts[tile] < number
            place = (experts[tile], block, column), (number - 1, num_blocks - 1, num_columns - 1)
            return tuple(jnp.where(is_there, here, last) for here, last in zip(*place, strict=True))

        return pl.BlockSpec((None, size, outputs), index)

    of_groups = of_matrix(inputs // group)
    arrays = {"weight": matrices.weight, "scale": matrices.scale, "zero": matrices.zero, "offset": matrices.offset}
    # The compiler loads no float16.
    arrays = {name: _without_float16(array) for name, array in arrays.items()}
    if not interpret:
        # Otherwise the compiler fetches whole matrices into on-chip memory before use.
        arrays = {
            name: array if array is None else pltpu.with_memory_space_constraint(array, pltpu.HBM)
            for name, array in arrays.items()
        }
    levels = None if matrices.levels is None else jnp.tile(matrices.levels, LANES // 16)[None]
    products: jax.Array = pl.pallas_call(
        functools.partial(_kernel, excess=excess, number=number),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_tiles, num_columns, num_blocks),
            in_specs=[
                pl.BlockSpec((None, height, inputs), lambda t, o, i, _: (t, 0, i)),
                of_matrix(inputs // parts),
                of_groups,
                None if matrices.zero is None else of_groups,
                None if matrices.offset is None else of_groups,
                None if levels is None else pl.BlockSpec((1, LANES), lambda t, o, i, _: (0, 0)),
            ],
            out_specs=pl.BlockSpec((None, height, outputs), lambda t, o, i, _: (t, 0, o)),
            scratch_shapes=[pltpu.VMEM((height, outputs), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((num_tiles, height, shape.outputs), tiles.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="multiply",
    )(experts, padded, *arrays.values(), levels)
    return products[:, :rows]


def _kernel(
    experts_ref: Any, x_ref: Any, weight_ref: Any, scale_ref: Any, zero_ref: Any, offset_ref: Any, levels_ref: Any,
    out_ref: Any, sum_ref: Any, *, excess: int, number: int,
) -> None:  # fmt: skip
    """Adds the product with one block of the matrix, whose last `excess` rows are none in the last block."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    is_last = pl.program_id(2) == pl.num_programs(2) - 1

    def of_group(ref: Any) -> jax.Array:
        rows: jax.Array = ref[...].astype(jnp.float32)[:, None]
        return rows

    @pl.when(experts_ref[pl.program_id(0)] < number)
    def _() -> None:
        halves = []
        for codes in parts_of(weight_ref[...], levels_ref is not None):
            numbers = codes.astype(jnp.float32) if levels_ref is None else _looked_up(levels_ref[...], codes)
            grouped = numbers.reshape(scale_ref.shape[0], -1, numbers.shape[-1])
            halves.append(rescaled(grouped, of_group, scale_ref, zero_ref, offset_ref))
        values = jnp.concatenate(halves, axis=1).reshape(x_ref.shape[1], -1)
        if excess:  # whose values may be NaN, and 0 * NaN is NaN
            row = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
            values = jnp.where(is_last & (row >= len(values) - excess), 0.0, values)
        sum_ref[...] += jnp.dot(x_ref[...], values.astype(x_ref.dtype), preferred_element_type=jnp.float32)

    @pl.when(is_last)
    def _() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def _without_float16(array: Any) -> Any:
    """Returns an array, or None, in float32 if it is in float16."""
    return array.astype(jnp.float32) if array is not None and array.dtype == jnp.float16 else array


def _looked_up(levels: jax.Array, codes: jax.Array) -> jax.Array:
    """Returns the levels, of [1, LANES], of codes. Selections by each bit would take more instructions."""
    rows, outputs = codes.shape
    # Unsigned, so that they need no test for negative ones.
    places = jnp.split(codes.astype(jnp.uint32), outputs // LANES, axis=1)
    table = jnp.broadcast_to(levels, (rows, LANES))
    columns = [jnp.take_along_axis(table, each, axis=1, mode="promise_in_bounds") for each in places]
    return jnp.concatenate(columns, axis=1)


def _block(shape: MatrixShape) -> tuple[int, int]:
    """Returns the inputs and outputs of a block: as many inputs as fit, in blocks of equal size if possible."""
    groups, max_groups = shape.inputs // shape.group, max(GROUPS, BLOCK // LANES // shape.group)
    heights = [n for n in range(1, min(groups, max_groups) + 1) if groups % n == 0 and (n == groups or n % GROUPS == 0)]
    inputs = shape.group * max(heights, default=max_groups // GROUPS * GROUPS)
    columns = -(-shape.outputs // LANES)
    lanes = math.gcd(columns, 1 << max(0, (BLOCK // inputs // LANES).bit_length() - 1))
    return inputs, lanes * LANES
