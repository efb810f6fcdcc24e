"""Matrices in int8, weight-only: half the bytes of bfloat16 for a step to read, and the arithmetic unchanged.

qwix would hold them as well, but it multiplies them out before the product, and the scale then rounds every weight once
more in bfloat16, and on CPUs the whole matrix is written out in every step.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

ROWS = 512  # of a matrix, converted at once on CPUs; they stay in the processor's cache


@flax.struct.dataclass
class Int8Matrix:
    """A matrix whose row i is `scale[i] * weight[i]`.

    The scale is float32 whatever the model's dtype is: float16 could not hold those of small weights.
    """

    weight: jax.Array  # [out, in] int8, -127 to 127
    scale: jax.Array  # [out] float32

    def __getitem__(self, rows: jax.Array) -> jax.Array:
        """Returns the rows [...] in float32 [..., in]."""
        return self.weight[rows].astype(jnp.float32) * self.scale[rows][..., None]


def is_int8(leaf: Any) -> bool:
    """Tells an `Int8Matrix` from what else parameters hold."""
    return isinstance(leaf, Int8Matrix)


@jax.jit
def quantize_matrix(matrix: jax.Array) -> Int8Matrix:
    """Rounds each row of `matrix` [out, in] to the nearest multiples of a 127th of its largest magnitude.

    No element moves by more than half the row's scale. A row of zeros stays so, with a scale of 1. One with NaN or
    infinite elements gets a NaN or infinite scale, so that what is made of it stays as broken as it was.
    """
    scale = jnp.max(jnp.abs(matrix), axis=1).astype(jnp.float32) / 127
    scale = jnp.where(scale < np.finfo(np.float32).tiny, 1.0, scale)  # less than that is 0 to a processor
    return Int8Matrix(jnp.round(matrix.astype(jnp.float32) / scale[:, None]).astype(jnp.int8), scale)


def multiply(matrix: Int8Matrix, x: jax.Array) -> jax.Array:
    """Returns `matrix` [out, in] times transposed `x` [..., in]: [out, ...] in the dtype of `x`.

    The weights are exact in the dtype of `x`; they are summed up in float32, which the scale multiplies once.
    """
    # The weights are made to depend on x: the compiler would convert what is the same in all steps before the loop over
    # them, and each step would read a floating-point copy.
    weight, x = jax.lax.optimization_barrier((matrix.weight, x))
    product = jax.lax.platform_dependent(weight, x, cpu=_multiply_by_rows, default=_multiply)
    scale = matrix.scale.reshape(-1, *(1,) * (x.ndim - 1))
    return (product * scale).astype(x.dtype)


def _multiply(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Converts within the product: compilers for accelerators fuse the two."""
    dimensions = (((1,), (x.ndim - 1,)), ((), ()))
    return jax.lax.dot_general(weight.astype(x.dtype), x, dimensions, preferred_element_type=jnp.float32)


def _multiply_by_rows(weight: jax.Array, x: jax.Array) -> jax.Array:
    """As `_multiply`, some rows at a time: XLA for CPUs does not fuse, and would write out the whole matrix."""
    num_rows = weight.shape[0]
    rows = min(ROWS, num_rows)

    def some_rows(i: jax.Array, product: jax.Array) -> jax.Array:
        start = jnp.minimum(i * rows, num_rows - rows)  # the last may begin earlier, among those done before
        part = _multiply(jax.lax.dynamic_slice_in_dim(weight, start, rows), x)
        return jax.lax.dynamic_update_slice_in_dim(product, part, start, axis=0)

    empty = jnp.zeros((num_rows, *x.shape[:-1]), jnp.float32)
    return jax.lax.fori_loop(0, -(-num_rows // rows), some_rows, empty)
