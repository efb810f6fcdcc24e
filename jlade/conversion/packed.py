"""Matrices that files hold in four or eight bits with scales of groups, which can be kept so."""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jlade.conversion.parts import Shape, TensorPart, matrix_shardings
from jlade.conversion.tensors import ARRAYS
from jlade.conversion.weight_files import FLOATS, ComposedTensor, StoredTensor, Tensor, aligned, broken_rows, check_kind
from jlade.models import sharding as model_sharding
from jlade.models.grouped import GroupedMatrix, pack, unpack
from jlade.models.quantization import FILE, Bits


class PackedTensor(abc.ABC):
    """A matrix [out, in], or experts [N, in, out], in files: a `jlade.conversion.weight_files.Tensor`.

    Attributes:
      shape: in floating point.
      bits: of an element.
    """

    shape: Shape
    bits: int

    @property
    def can_stay(self) -> bool:
        """Whether the matrix is a `GroupedMatrix`: each of its groups has as many inputs, one after the other."""
        return True

    @property
    @abc.abstractmethod
    def shapes(self) -> GroupedMatrix:
        """A `jax.ShapeDtypeStruct` in the place of each array of `matrix`."""

    @abc.abstractmethod
    def matrix(self, name: str) -> GroupedMatrix:
        """Returns the matrix as the file holds it, in arrays of NumPy."""

    def values(self, name: str) -> np.ndarray:
        """Returns the elements [in, out] in float32."""
        return values_of(self.matrix(name))

    def read(self, name: str, dtype: np.dtype, parts: Sequence[TensorPart]) -> tuple[list[np.ndarray], set[int]]:
        """Returns distinct parts of the matrix [out, in] as `dtype`, and its rows that are not finite in them."""
        values = self.values(name).T
        arrays: list[np.ndarray] = []
        broken: set[int] = set()
        for rows, columns in parts:
            source = values[rows.start : rows.stop, columns.start : columns.stop]
            array = aligned(source.shape, dtype)
            with np.errstate(over="ignore"):  # the broken rows tell of it
                array[...] = source
            broken |= broken_rows(source, array, rows.start)
            arrays.append(array)
        return arrays, broken


@dataclasses.dataclass(frozen=True)
class OwnMatrix(ComposedTensor, PackedTensor):
    """A `GroupedMatrix` in jlade's own files.

    Attributes:
      arrays: by the field of `GroupedMatrix`, "weight" first.
    """

    shape: Shape
    arrays: Mapping[str, StoredTensor]

    @property
    def bits(self) -> int:  # type: ignore[override]
        return 4 if self.dtype == "U8" else 8

    @property
    def sources(self) -> list[StoredTensor]:
        return list(self.arrays.values())

    @property
    def shapes(self) -> GroupedMatrix:
        arrays = self.arrays.items()
        return grouped(**{field: jax.ShapeDtypeStruct(each.shape, each.value_dtype) for field, each in arrays})

    def matrix(self, name: str) -> GroupedMatrix:
        return grouped(**{field: each.read_bytes(name + ARRAYS[field]) for field, each in self.arrays.items()})


def own_matrix(name: str, shape: Shape, arrays: Mapping[str, StoredTensor]) -> OwnMatrix:
    """Returns the matrix of these arrays in jlade's own files, at least "weight" and "scale".

    Its name and shape are those of the matrix in floating point.
    """
    *others, inputs, outputs = shape if len(shape) > 2 else shape[::-1]
    weight, groups = arrays["weight"], arrays["scale"].shape[-2]
    if groups < 1 or inputs % (2 * groups):
        raise ValueError(
            f"{arrays['scale'].file}: {name}_scale has {groups} groups, which do not divide {inputs} inputs"
        )
    rows, of_groups = inputs // (2 if weight.dtype == "U8" else 1), (*others, groups, outputs)
    check_kind(name, weight, (*others, rows, outputs), ("U8", "I8"))
    for field in arrays.keys() - {"weight"}:
        accepted = (*FLOATS, "I8") if field == "zero" else FLOATS
        expected = ((16,), ("F32",)) if field == "levels" else (of_groups, accepted)
        check_kind(name + ARRAYS[field], arrays[field], *expected)
    return OwnMatrix(shape, arrays)


def keeps(tensor: Tensor | None, bits: Bits) -> TypeGuard[PackedTensor]:
    """Whether a tensor stays as it is in a model that is loaded with `bits`: one of jlade's own always does."""
    if not isinstance(tensor, PackedTensor):
        return False
    is_asked = bits == FILE or (bits is not None and tensor.bits <= bits)
    return isinstance(tensor, OwnMatrix) or (is_asked and tensor.can_stay)


def values_of(matrix: GroupedMatrix) -> np.ndarray:
    """Returns the elements [..., in, out] float32 of a matrix in arrays of NumPy, each operation rounded once."""
    codes = unpack(matrix.weight, matrix.group)  # [..., groups, group, out]

    def of_group(array: Any) -> np.ndarray:
        return np.asarray(array, np.float32)[..., None, :]

    values = codes.astype(np.float32) if matrix.levels is None else np.asarray(matrix.levels)[codes & 15]
    if matrix.zero is not None:
        values -= of_group(matrix.zero)
    with np.errstate(all="ignore"):  # the broken rows tell of it
        values *= of_group(matrix.scale)
        if matrix.offset is not None:
            values += of_group(matrix.offset)
    return values.reshape(matrix.shape)


def broken_outputs(matrix: GroupedMatrix) -> set[int]:
    """Returns the outputs, of experts the experts, whose scales or offsets are not finite."""
    broken: set[int] = set()
    for array in (matrix.scale, matrix.offset):
        if array is not None:
            finite = np.isfinite(np.asarray(array, np.float32))
            others = tuple(range(1, finite.ndim)) if finite.ndim > 2 else 0
            broken |= set(np.flatnonzero(~finite.all(axis=others)).tolist())
    return broken


def place(matrix: GroupedMatrix, sharding: Sharding | None) -> GroupedMatrix:
    """Returns a matrix in arrays of NumPy on its devices, given the sharding of the matrix in floating point.

    Groups that devices would divide become several with equal scales, if that makes all of them whole.
    """
    if isinstance(sharding, NamedSharding):
        shards = model_sharding.shards_of_inputs(matrix, sharding.spec, sharding.mesh)  # type: ignore[arg-type]
        matrix = _with_more_groups(matrix, shards // math.gcd(shards, matrix.scale.shape[-2]))
    return jax.device_put(matrix, matrix_shardings(matrix, sharding))


def _with_more_groups(matrix: GroupedMatrix, factor: int) -> GroupedMatrix:
    """Returns a matrix with `factor` times as many groups, or as it is if its groups do not divide so."""
    if factor == 1 or matrix.group % (2 * factor):
        return matrix
    weight: Any = matrix.weight
    if weight.dtype == np.uint8:
        weight = pack(unpack(weight, matrix.group).reshape(matrix.shape), matrix.group // factor)
    scale, zero, offset = (
        None if array is None else np.repeat(np.asarray(array), factor, axis=-2)
        for array in (matrix.scale, matrix.zero, matrix.offset)
    )
    return grouped(weight, scale, zero, offset, matrix.levels)


def grouped(weight: Any, scale: Any, zero: Any = None, offset: Any = None, levels: Any = None) -> GroupedMatrix:
    """Returns a `GroupedMatrix` of arrays in NumPy, or of what stands in their places."""
    tree: Any = GroupedMatrix
    matrix: GroupedMatrix = tree(weight, scale, zero, offset, levels)
    return matrix
