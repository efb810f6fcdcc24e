"""Products with matrices in groups, as one Pallas kernel for NVIDIA GPUs, which Triton compiles."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jlade.models.grouped import GroupedMatrix, MatrixShape, rescaled
from jlade.models.products import parts_of

ROWS = 16, 128  # tokens of a program, at least and at most
COLUMNS = 64, 128  # outputs of a program, for few tokens and for many
WIDE = 64  # tokens from which programs have many outputs, so that they read the tokens less often
PROGRAMS = 104  # at least: a Hopper has 132 multiprocessors, and more would write more partial sums
MIN_INPUTS = 16  # inputs of a product


def obstacle(shape: MatrixShape) -> str | None:
    """Returns the reason why `multiply_tiles` does not take such a matrix, None if it does."""
    if jnp.dtype(shape.dtype) not in (jnp.bfloat16, jnp.float16):
        return f"needs a model in 16-bit floats, and this is in {shape.dtype}"
    half, groups = shape.group // shape.parts, shape.inputs // shape.group
    if shape.outputs % COLUMNS[0] or half < MIN_INPUTS // 2 or half & (half - 1) or groups % _at_once(half):
        return (
            f"needs outputs of a multiple of {COLUMNS[0]} and groups of a power of two from 16 inputs, an even number "
            f"of them if they are of 16, and these are {shape}"
        )
    return None


def _at_once(half: int) -> int:
    """Returns of how many groups a product has the inputs, `half` of each."""
    return max(1, MIN_INPUTS // half)


def multiply_tiles(tiles: jax.Array, experts: jax.Array, matrices: GroupedMatrix, interpret: bool = False) -> jax.Array:
    """Returns `products.multiply_tiles` in the dtype of the tiles; the products of tiles without an expert are zeros.

    A program multiplies some tokens with some outputs of a share of the groups. The shares are summed at the end: they
    keep all multiprocessors busy where a matrix has few outputs.

    Raises:
      ValueError: there is an `obstacle`.
    """
    shape = MatrixShape.of(matrices, tiles.dtype)
    if reason := obstacle(shape):
        raise ValueError(f"the kernel of products {reason}")
    num_tiles, tokens, _ = tiles.shape
    rows = min(ROWS[1], max(ROWS[0], 1 << (tokens - 1).bit_length()))
    padded = jnp.pad(tiles, ((0, 0), (0, -tokens % rows), (0, 0))).reshape(-1, rows, shape.inputs)
    experts = jnp.repeat(experts, len(padded) // num_tiles)
    is_wide = tokens >= WIDE and shape.outputs % COLUMNS[1] == 0
    columns = COLUMNS[is_wide]
    programs, groups = len(padded) * (shape.outputs // columns), shape.inputs // shape.group
    max_shares = groups // _at_once(shape.group // shape.parts)
    shares = next(
        n for n in range(1, max_shares + 1) if max_shares % n == 0 and (n * programs >= PROGRAMS or n == max_shares)
    )
    height = groups // shares  # groups of a program

    def block(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((matrices.shape[0], size, columns), lambda tile, column, share: (0, share, column))

    of_groups = block(height)
    products = pl.pallas_call(
        functools.partial(_kernel, group=shape.group),
        grid=(len(padded), shape.outputs // columns, shares),
        in_specs=[
            pl.BlockSpec((1,), lambda tile, column, share: (tile,)),
            pl.BlockSpec((None, rows, height * shape.group), lambda tile, column, share: (tile, 0, share)),
            block(height * shape.group // shape.parts),
            of_groups,
            None if matrices.zero is None else of_groups,
            None if matrices.offset is None else of_groups,
            None if matrices.levels is None else pl.BlockSpec((16,), lambda tile, column, share: (0,)),
        ],
        out_specs=pl.BlockSpec((None, None, rows, columns), lambda tile, column, share: (share, tile, 0, column)),
        out_shape=jax.ShapeDtypeStruct(
            (shares, *padded.shape[:2], shape.outputs), tiles.dtype if shares == 1 else jnp.float32
        ),
        compiler_params=plgpu.CompilerParams(num_warps=8 if is_wide else 4, num_stages=4),
        interpret=interpret,
        name="multiply",
    )(experts, padded, matrices.weight, matrices.scale, matrices.zero, matrices.offset, matrices.levels)
    product = products[0] if shares == 1 else jnp.sum(products, axis=0).astype(tiles.dtype)
    return product.reshape(num_tiles, -1, shape.outputs)[:, :tokens]


def _kernel(
    experts_ref: Any, x_ref: Any, weight_ref: Any, scale_ref: Any, zero_ref: Any, offset_ref: Any, levels_ref: Any,
    out_ref: Any, *, group: int,
) -> None:  # fmt: skip
    """Adds up the products of all groups of a program."""
    half = group if weight_ref.dtype == jnp.int8 else group // 2
    at_once = _at_once(half)
    row = jnp.arange(at_once * half)  # of the codes of some groups
    inputs = row // half * group + row % half  # of their lower codes
    number, num_groups, _ = scale_ref.shape
    expert = experts_ref[0]

    def add_groups(i: jax.Array, total: jax.Array) -> jax.Array:
        def of_group(ref: Any) -> jax.Array:
            at = pl.ds(i, 1) if at_once == 1 else i * at_once + row // half
            rows: jax.Array = ref[expert, at, :].astype(jnp.float32)
            return rows

        stored = weight_ref[expert, pl.ds(i * at_once * half, at_once * half), :]
        for part, codes in enumerate(parts_of(stored, levels_ref is not None)):
            numbers = codes.astype(jnp.float32) if levels_ref is None else levels_ref[codes]
            values = rescaled(numbers, of_group, scale_ref, zero_ref, offset_ref)
            first = i * at_once * group + part * half
            if at_once == 1:
                x = x_ref[:, pl.ds(first, half)]
            else:
                x = x_ref[jnp.arange(x_ref.shape[0])[:, None], (first + inputs)[None]]
            total += jnp.dot(x, values.astype(x.dtype), preferred_element_type=jnp.float32)
        return total

    @pl.when(expert < number)
    def multiply_groups() -> None:
        begin = jnp.zeros(out_ref.shape, jnp.float32)
        out_ref[...] = jax.lax.fori_loop(0, num_groups // at_once, add_groups, begin).astype(out_ref.dtype)

    @pl.when(expert >= number)
    def write_zeros() -> None:
        out_ref[...] = jnp.zeros(out_ref.shape, out_ref.dtype)
