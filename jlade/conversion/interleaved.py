"""Tensors whose rows are those of several arrays in turn: for each head, or group of heads, some rows of each."""

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jlade.conversion.hf_packed import FileMatrix
from jlade.conversion.parts import Shape, TensorPart
from jlade.conversion.weight_files import StoredTensor, aligned


@dataclasses.dataclass(frozen=True)
class Interleaved(StoredTensor):
    """The rows of an array in such a tensor.

    Attributes:
      pieces: the rows of each group, parts of the tensor.
    """

    pieces: tuple[StoredTensor, ...]

    @property
    def stamps(self) -> dict[pathlib.Path, tuple[int, ...]]:
        return self.pieces[0].stamps

    @property
    def value_dtype(self) -> str:
        return self.pieces[0].value_dtype

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def read_bytes(self, name: str) -> np.ndarray:
        return np.concatenate([piece.read_bytes(name) for piece in self.pieces])

    def read(self, name: str, dtype: np.dtype, parts: Sequence[TensorPart]) -> tuple[list[np.ndarray], set[int]]:
        height = self.pieces[0].shape[0]
        arrays = [aligned((len(part.rows), len(part.columns)), dtype) for part in parts]
        broken: set[int] = set()
        for array, part in zip(arrays, parts, strict=True):
            for first in range(part.rows.start // height * height, part.rows.stop, height):
                own = range(max(part.rows.start, first), min(part.rows.stop, first + height))
                of_piece = TensorPart(range(own.start - first, own.stop - first), part.columns)
                (values,), rows = self.pieces[first // height].read(name, dtype, [of_piece])
                array[own.start - part.rows.start : own.stop - part.rows.start] = values.reshape(len(own), -1)
                broken |= {first + row for row in rows}
        return [array if len(self.shape) == 2 else array[:, 0] for array in arrays], broken


def divide(tensor: StoredTensor, shapes: Sequence[Shape], groups: int) -> list[StoredTensor]:
    """Returns the arrays of these shapes in a tensor, each of whose `groups` has some rows of each array in turn."""
    if groups == 1:
        return tensor.divide(shapes)
    of_group = [(rows // groups, *inner) for rows, *inner in shapes]
    if isinstance(tensor, FileMatrix):
        rows_of_groups = np.arange(tensor.shape[0]).reshape(groups, -1)
        ends = np.cumsum([rows for rows, *_ in of_group])
        return [tensor.take(rows.reshape(-1)) for rows in np.split(rows_of_groups, ends[:-1], axis=1)]
    pieces = tensor.divide(of_group * groups)
    pairs = zip(shapes, (tuple(pieces[i :: len(shapes)]) for i in range(len(shapes))), strict=True)
    first = (tensor.file, tensor.stamp, tensor.offset)
    return [Interleaved(*first, shape, tensor.dtype, pieces=own) for shape, own in pairs]


def join(arrays: Sequence[jax.Array], groups: int) -> jax.Array:
    """Returns the tensor that `divide` divides into these arrays."""
    grouped = [array.reshape(groups, -1, *array.shape[1:]) for array in arrays]
    return jnp.concatenate(grouped, axis=1).reshape(-1, *arrays[0].shape[1:])
