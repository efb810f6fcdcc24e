"""The shape of a matrix in groups, on which the choice of a kernel depends, and its codes as kernels read them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jlade.models.grouped import GroupedMatrix


class MatrixShape(NamedTuple):
    """The shape of a matrix [in, out] in groups, and the dtype of its products."""

    inputs: int
    outputs: int
    group: int
    bits: int
    has_zero: bool
    has_offset: bool
    has_levels: bool
    dtype: str

    @classmethod
    def of(cls, matrix: GroupedMatrix, dtype: jax.typing.DTypeLike) -> "MatrixShape":
        """Returns the shape of a matrix, or of `jax.ShapeDtypeStruct` in its place."""
        bits = 4 if matrix.weight.dtype == jnp.uint8 else 8
        inputs, outputs = matrix.shape[-2:]
        zero, offset, levels = (array is not None for array in (matrix.zero, matrix.offset, matrix.levels))
        return cls(inputs, outputs, matrix.group, bits, zero, offset, levels, jnp.dtype(dtype).name)

    @property
    def parts(self) -> int:
        """Codes of a byte."""
        return 8 // self.bits

    def __str__(self) -> str:
        return f"{self.inputs} x {self.outputs} in {self.bits} bits with groups of {self.group}, {self.dtype}"


def alone(matrix: GroupedMatrix) -> GroupedMatrix:
    """Returns a matrix [in, out] as one of experts, [1, in, out]."""
    arrays = jax.tree.map(lambda array: array[None], matrix.replace(levels=None))  # type: ignore[attr-defined]
    return arrays.replace(levels=matrix.levels)


def parts_of(stored: jax.Array, is_place: bool = False) -> tuple[jax.Array, ...]:
    """Returns codes as int32: of bytes the lower and the upper four bits, of int8 the numbers.

    Args:
      is_place: whether codes are places in a table, 0 to 15, and no numbers with a sign.
    """
    numbers = stored.astype(jnp.int32)
    if stored.dtype != jnp.uint8:
        return (numbers & 15,) if is_place else (numbers,)
    return (numbers & 15, numbers >> 4) if is_place else (numbers << 28 >> 28, numbers << 24 >> 28)
