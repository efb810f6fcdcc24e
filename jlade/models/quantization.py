"""Weight-only int8 matrices: a step reads half the bytes of bfloat16 and computes in the same dtypes.

Not qwix: it applies the scale before the product. That rounds every weight once more in bfloat16, and on CPUs writes
out the whole floating-point matrix in every step.
"""

from typing import TypeGuard

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

ROWS = 512  # rows of a matrix converted at once on CPUs; they fit the processor's cache


@flax.struct.dataclass
class Int8Matrix:
    """A matrix whose row i is `scale[i] * weight[i]`, or experts [N, in, out] with a scale [N, out] for each output.

    The scale is float32 for every dtype of the model: float16 cannot hold the scales of small weights.
    """

    weight: jax.Array  # [out, in] int8, -127 to 127
    scale: jax.Array  # [out] float32

    def __getitem__(self, rows: jax.Array) -> jax.Array:
        """Returns the rows with indices `rows` [...], as float32 [..., in]."""
        return self.weight[rows].astype(jnp.float32) * self.scale[rows][..., None]


def is_int8(leaf: object) -> TypeGuard[Int8Matrix]:
    """Returns whether `leaf` is an `Int8Matrix`."""
    return isinstance(leaf, Int8Matrix)


@jax.jit
def quantize_matrix(matrix: jax.Array) -> Int8Matrix:
    """Returns `matrix` [out, in] with each row rounded to multiples of a 127th of its largest magnitude.

    Of experts [N, in, out], each column of an expert is rounded.

    No element changes by more than half the row's scale. A row of zeros has the scale 1. A row with NaN or infinite
    elements has an infinite scale, so that products with it are not finite either.
    """
    magnitudes = jnp.abs(matrix)
    magnitudes = jnp.where(magnitudes < jnp.inf, magnitudes, jnp.inf)  # XLA's maximum for CPUs drops NaN
    scale = jnp.max(magnitudes, axis=1).astype(jnp.float32) / 127
    scale = jnp.where(scale < np.finfo(np.float32).tiny, 1.0, scale)  # processors flush smaller scales to 0
    rounded = jnp.round(matrix.astype(jnp.float32) / jnp.expand_dims(scale, 1))
    return Int8Matrix(rounded.astype(jnp.int8), scale)


def multiply(matrix: Int8Matrix, x: jax.Array) -> jax.Array:
    """Returns `matrix` [out, in] times transposed `x` [..., in]: [out, ...] in the dtype of `x`.

    The weights are exact in the dtype of `x`. The sum is float32 and is scaled once.
    """
    # The barrier makes the weights depend on x. Otherwise the compiler converts them once, before the loop over steps,
    # and every step reads a floating-point copy.
    weight, x = jax.lax.optimization_barrier((matrix.weight, x))
    product: jax.Array = jax.lax.platform_dependent(weight, x, cpu=_multiply_by_rows, default=_multiply)
    scale = matrix.scale.reshape(-1, *(1,) * (x.ndim - 1))
    return (product * scale).astype(x.dtype)


def _multiply(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Converts and multiplies: compilers for accelerators fuse the two."""
    dimensions = (((1,), (x.ndim - 1,)), ((), ()))
    return jax.lax.dot_general(weight.astype(x.dtype), x, dimensions, preferred_element_type=jnp.float32)


def _multiply_by_rows(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`_multiply`, some rows at a time: XLA for CPUs does not fuse, and would write out the whole matrix."""
    num_rows = weight.shape[0]
    rows = min(ROWS, num_rows)

    def some_rows(i: jax.Array, product: jax.Array) -> jax.Array:
        start = jnp.minimum(i * rows, num_rows - rows)  # the last rows may overlap those before
        part = _multiply(jax.lax.dynamic_slice_in_dim(weight, start, rows), x)
        return jax.lax.dynamic_update_slice_in_dim(product, part, start, axis=0)

    empty = jnp.zeros((num_rows, *x.shape[:-1]), jnp.float32)
    product: jax.Array = jax.lax.fori_loop(0, -(-num_rows // rows), some_rows, empty)
    return product
