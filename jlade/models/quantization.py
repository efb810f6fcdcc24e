"""Matrices in eight or four bits: a step reads a half or a quarter of bfloat16's bytes and computes in its dtypes.

Not qwix: it applies the scale before the product. That rounds every weight once more in bfloat16, and on CPUs writes
out the whole floating-point matrix in every step.
"""

from typing import Any, Literal, TypeGuard

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.models.grouped import GroupedMatrix, group_of, quantize_in_groups

BITS = (4, 8)  # that matrices may be rounded to
FILE: Literal["file"] = "file"
Bits = int | Literal["file"] | None  # of a model that is loaded: "file" keeps what files hold, and rounds nothing
ROWS = 512  # rows of a matrix converted at once on CPUs; they fit the processor's cache


@flax.struct.dataclass
class Int8Matrix:
    """A matrix whose row i is `scale[i] * weight[i]`, or experts [N, in, out] with a scale [N, out] for each output.

    The scale is float32 for every dtype of the model: float16 cannot hold the scales of small weights.
    """

    weight: jax.Array  # [out, in] int8, -127 to 127
    scale: jax.Array  # [out] float32

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """Its shape in floating point."""
        return self.weight.shape

    def __getitem__(self, rows: jax.Array) -> jax.Array:
        """Returns the rows with indices `rows` [...], as float32 [..., in]."""
        return self.weight[rows].astype(jnp.float32) * self.scale[rows][..., None]


Quantized = Int8Matrix | GroupedMatrix
Matrix = jax.Array | Quantized


def is_int8(leaf: object) -> TypeGuard[Int8Matrix]:
    """Returns whether `leaf` is an `Int8Matrix`."""
    return isinstance(leaf, Int8Matrix)


def is_quantized(leaf: object) -> TypeGuard[Quantized]:
    """Returns whether `leaf` is a matrix in eight or four bits."""
    return isinstance(leaf, Quantized)


def dense_shape(leaf: Matrix) -> tuple[int, ...]:
    """Returns the shape of a matrix, or any other array, in floating point."""
    return leaf.dense_shape if isinstance(leaf, Quantized) else leaf.shape


def kinds(params: object) -> list[str]:
    """Returns the kinds of matrices in few bits that are in a pytree, for people."""
    leaves = [leaf for leaf in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(leaf)]
    names = {"4 bits" if leaf.weight.dtype == jnp.uint8 else "int8" for leaf in leaves}
    return sorted(names)


def fewest_bits(params: object) -> int | None:
    """Returns the fewest bits of an element of a matrix in a pytree, None if all are in floating point."""
    names = kinds(params)
    return None if not names else 4 if "4 bits" in names else 8


def check_bits(bits: Any, accepted: tuple[Any, ...] = BITS) -> None:
    """Raises a ValueError unless `bits` is one of `accepted` or None."""
    if bits not in (None, *accepted):
        raise ValueError(f"bits must be {', '.join(map(repr, accepted))} or None, got {bits!r}")


def quantize(
    matrix: jax.Array, bits: int, shards: int = 1, importance: jax.Array | np.ndarray | None = None
) -> Quantized:
    """Returns `matrix` [out, in], or experts [N, in, out], in `bits` bits.

    Four bits take groups of at least eight inputs: other matrices are in eight.

    Args:
      shards: devices that may divide the inputs of a matrix, whose parts then have whole groups.
      importance: of each input [in] in four bits, such as its mean square on some text; None for equal ones.
    """
    inputs_first = jnp.swapaxes(matrix, 0, 1) if matrix.ndim == 2 else matrix
    num_inputs = inputs_first.shape[-2]
    group = group_of(num_inputs // shards if num_inputs % shards == 0 else num_inputs)
    return quantize_in_groups(inputs_first, group, importance) if bits == 4 and group else quantize_matrix(matrix)


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
