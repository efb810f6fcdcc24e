"""Products with matrices in groups, as one Pallas kernel for NVIDIA GPUs, which Triton compiles."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jlade.models.grouped import GroupedMatrix, rescaled
from jlade.models.products.shape import MatrixShape, parts_of

ROWS = 16, 128  # tokens of a program, at least and at most
COLUMNS = 64, 128  # outputs of a program, for few tokens and for many
WIDE = 64  # tokens from which programs have many outputs, so that they read the tokens less often
PROGRAMS = 104  # at least: a Hopper has 132 multiprocessors, and more would write more partial sums
LEAST = 16  # inputs of a product


def obstacle(shape: MatrixShape) -> str | None:
    """Returns the reason why `multiply` does not take such a matrix, None if it does."""
    if jnp.dtype(shape.dtype) not in (jnp.bfloat16, jnp.float16):
        return f"needs a model in 16-bit floats, and this is in {shape.dtype}"
    half, groups = shape.group // shape.parts, shape.inputs // shape.group
    if shape.outputs % COLUMNS[0] or half < LEAST // 2 or half & (half - 1) or groups % _at_once(half):
        return (
            f"needs outputs of a multiple of {COLUMNS[0]} and groups of a power of two from 16 inputs, an even number "
            f"of them if they are of 16, and these are {shape}"
        )
    return None


def _at_once(half: int) -> int:
    """Returns of how many groups a product has the inputs, `half` of each."""
    return max(1, LEAST // half)


def multiply(x: jax.Array, matrix: GroupedMatrix, interpret: bool = False, at_once: int = 1) -> jax.Array:
    """Returns the product [T, out] of `x` [T, in] in its dtype.

    A program multiplies some tokens with some outputs of a share of the groups. The shares are summed at the end: they
    keep all multiprocessors busy where a matrix has few outputs.

    Args:
      interpret: run the kernel as plain JAX, on any device; for tests.
      at_once: products like this one, under `jax.vmap`.

    Raises:
      ValueError: there is an `obstacle`.
    """
    shape = MatrixShape.of(matrix, x.dtype)
    if reason := obstacle(shape):
        raise ValueError(f"the kernel of products {reason}")
    rows = min(ROWS[1], max(ROWS[0], 1 << (len(x) - 1).bit_length()))
    padded = jnp.pad(x, ((0, -len(x) % rows), (0, 0)))
    is_wide = len(x) >= WIDE and shape.outputs % COLUMNS[1] == 0
    columns = COLUMNS[is_wide]
    tiles, groups = len(padded) // rows * (shape.outputs // columns), shape.inputs // shape.group
    most = groups // _at_once(shape.group // shape.parts)
    shares = next(n for n in range(1, most + 1) if most % n == 0 and (n * tiles * at_once >= PROGRAMS or n == most))
    height = groups // shares  # groups of a program

    def block(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((size, columns), lambda row, column, share: (share, column))

    of_groups = block(height)
    products = pl.pallas_call(
        functools.partial(_kernel, group=shape.group),
        grid=(len(padded) // rows, shape.outputs // columns, shares),
        in_specs=[
            pl.BlockSpec((rows, height * shape.group), lambda row, column, share: (row, share)),
            block(height * shape.group // shape.parts),
            of_groups,
            None if matrix.zero is None else of_groups,
            None if matrix.offset is None else of_groups,
            None if matrix.levels is None else pl.BlockSpec((16,), lambda row, column, share: (0,)),
        ],
        out_specs=pl.BlockSpec((None, rows, columns), lambda row, column, share: (share, row, column)),
        out_shape=jax.ShapeDtypeStruct((shares, len(padded), shape.outputs), x.dtype if shares == 1 else jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=8 if is_wide else 4, num_stages=4),
        interpret=interpret,
        name="multiply",
    )(padded, matrix.weight, matrix.scale, matrix.zero, matrix.offset, matrix.levels)
    product = products[0] if shares == 1 else jnp.sum(products, axis=0).astype(x.dtype)
    return product[: len(x)]


def _kernel(
    x_ref: Any, weight_ref: Any, scale_ref: Any, zero_ref: Any, offset_ref: Any, levels_ref: Any, out_ref: Any,
    *, group: int,
) -> None:  # fmt: skip
    """Adds up the products of all groups of a program."""
    half = group if weight_ref.dtype == jnp.int8 else group // 2
    at_once = _at_once(half)
    # The inputs of the lower codes of some groups.
    row = jnp.arange(at_once * half)
    inputs = row // half * group + row % half

    def add_groups(i: jax.Array, total: jax.Array) -> jax.Array:
        def of_group(ref: Any) -> jax.Array:
            if at_once == 1:
                return ref[pl.ds(i, 1), :].astype(jnp.float32)
            rows: jax.Array = ref[i * at_once + row // half, :].astype(jnp.float32)
            return rows

        parts = parts_of(weight_ref[pl.ds(i * at_once * half, at_once * half), :], levels_ref is not None)
        for part, codes in enumerate(parts):
            numbers = codes.astype(jnp.float32) if levels_ref is None else levels_ref[codes]
            values = rescaled(numbers, of_group, scale_ref, zero_ref, offset_ref)
            if at_once == 1:
                x = x_ref[:, pl.ds(i * group + part * half, half)]
            else:
                x = x_ref[jnp.arange(x_ref.shape[0])[:, None], (i * at_once * group + part * half + inputs)[None]]
            total += jnp.dot(x, values.astype(x.dtype), preferred_element_type=jnp.float32)
        return total

    num_steps = scale_ref.shape[0] // at_once
    total = jax.lax.fori_loop(0, num_steps, add_groups, jnp.zeros(out_ref.shape, jnp.float32))
    out_ref[...] = total.astype(out_ref.dtype)
