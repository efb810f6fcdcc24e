"""Matrices that files hold in four or eight bits with scales of groups, which can be kept so."""

import abc
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jlade.conversion.parts import Part, Shape
from jlade.conversion.tensors import ARRAYS
from jlade.conversion.weight_files import FLOATS, StoredTensor, Tensor, aligned, broken_rows, check_kind
from jlade.models import sharding as model_sharding
from jlade.models.grouped import GroupedMatrix, pack, unpack

# The numbers of 4 bits: sign, exponent of two bits, one bit more (OCP Microscaling Formats, section 5.3.3).
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


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
        """Returns the matrix as the file holds it, in arrays of NumPy.

        Raises:
          ValueError: names the file, and the tensor `name`, if the file cannot be read.
        """

    def values(self, name: str) -> np.ndarray:
        """Returns the elements [in, out] in float32. Errors are those of `matrix`."""
        return values_of(self.matrix(name))

    def read(self, name: str, dtype: np.dtype, parts: Sequence[Part]) -> tuple[list[np.ndarray], set[int]]:
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
class OwnMatrix(PackedTensor):
    """A `GroupedMatrix` in jlade's own files.

    Attributes:
      arrays: by the field of `GroupedMatrix`.
    """

    shape: Shape
    arrays: Mapping[str, StoredTensor]

    @property
    def bits(self) -> int:  # type: ignore[override]
        return 4 if self.dtype == "U8" else 8

    @property
    def file(self) -> pathlib.Path:
        return self.arrays["weight"].file

    @property
    def stamps(self) -> dict[pathlib.Path, tuple[int, ...]]:
        return {file: stamp for tensor in self.arrays.values() for file, stamp in tensor.stamps.items()}

    @property
    def dtype(self) -> str:
        return self.arrays["weight"].dtype

    @property
    def value_dtype(self) -> str:
        return self.arrays["weight"].value_dtype

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.arrays.values())

    @property
    def shapes(self) -> GroupedMatrix:
        return _grouped(
            {field: jax.ShapeDtypeStruct(each.shape, each.value_dtype) for field, each in self.arrays.items()}
        )

    def matrix(self, name: str) -> GroupedMatrix:
        return _grouped({field: each.read_bytes(name + ARRAYS[field]) for field, each in self.arrays.items()})


class Decoded(NamedTuple):
    """A matrix in the format of another package, whose element [i, o] is `(codes - zero) * scale`.

    Attributes:
      codes: [in, out] int8, with `levels` places in it.
      scale, zero: [groups, out].
      groups: of each input [in].
      levels: [16] float32, the values of the codes.
    """

    codes: np.ndarray
    scale: np.ndarray
    groups: np.ndarray
    zero: np.ndarray | None = None
    levels: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class FileMatrix(PackedTensor, StoredTensor):
    """A matrix in the format of another package, or some of its outputs. `dtype` is the name of the format.

    Attributes:
      arrays: the tensors that it is made of, by their names in the file.
      bits: of a code.
      whole: a `jax.ShapeDtypeStruct` in the place of each array of the whole matrix, None if it has no equal groups.
      decode: returns the matrix, given the arrays in their order.
      order: the name of the array with the group of each input, if there is one.
      outputs: of the matrix, None for all.
      share: of the outputs.
    """

    arrays: Mapping[str, StoredTensor]
    bits: int
    whole: GroupedMatrix | None
    decode: Callable[..., Decoded]
    order: str | None = None
    outputs: np.ndarray | None = None
    share: float = 1.0

    @property
    def stamps(self) -> dict[pathlib.Path, tuple[int, ...]]:
        return {file: stamp for tensor in self.arrays.values() for file, stamp in tensor.stamps.items()}

    @property
    def value_dtype(self) -> str:
        return "float32" if self.whole is None else str(self.whole.scale.dtype)

    @property
    def num_bytes(self) -> int:
        return int(sum(tensor.num_bytes for tensor in self.arrays.values()) * self.share)

    @property
    def can_stay(self) -> bool:
        if self.whole is None or self.whole.group % 2:
            return False
        if self.order is None:
            return True
        groups = self.arrays[self.order].read_bytes(self.order)
        return np.array_equal(groups, np.arange(len(groups)) // self.whole.group)

    @property
    def shapes(self) -> GroupedMatrix:
        def of_outputs(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*array.shape[:-1], self.shape[0]), array.dtype)

        assert self.whole is not None
        arrays = jax.tree.map(of_outputs, self.whole.replace(levels=None))  # type: ignore[attr-defined]
        return arrays.replace(levels=self.whole.levels)

    def matrix(self, name: str) -> GroupedMatrix:
        assert self.whole is not None
        codes, scale, _, zero, levels = self._decoded()
        weight = pack(codes, self.whole.group) if self.bits == 4 else codes
        return _grouped({"weight": weight, "scale": scale, "zero": zero, "levels": levels})

    def values(self, name: str) -> np.ndarray:
        codes, scale, groups, zero, levels = self._decoded()
        values = codes.astype(np.float32) if levels is None else levels[codes & 15]
        with np.errstate(all="ignore"):  # the broken rows tell of it
            if zero is not None:
                values -= zero.astype(np.float32)[groups]
            values *= scale.astype(np.float32)[groups]
        return values

    def divide(self, shapes: Iterable[Shape]) -> list[StoredTensor]:
        parts, first = list[StoredTensor](), 0
        for rows, _ in shapes:
            parts.append(self.take(np.arange(first, first + rows)))
            first += rows
        return parts

    def take(self, outputs: np.ndarray) -> "FileMatrix":
        """Returns these outputs of the matrix."""
        own = outputs if self.outputs is None else self.outputs[outputs]
        share = self.share * len(own) / self.shape[0]
        return dataclasses.replace(self, shape=(len(own), self.shape[1]), outputs=own, share=share)

    def _decoded(self) -> Decoded:
        arrays = {name: tensor.read_bytes(name) for name, tensor in self.arrays.items()}
        decoded = self.decode(*arrays.values())
        if self.order is not None and not (0 <= decoded.groups.min() <= decoded.groups.max() < len(decoded.scale)):
            raise ValueError(f"{self.file}: {self.order} names groups beyond the {len(decoded.scale)} that have scales")
        if self.outputs is None:
            return decoded
        codes, scale = (np.ascontiguousarray(array[:, self.outputs]) for array in (decoded.codes, decoded.scale))
        zero = None if decoded.zero is None else np.ascontiguousarray(decoded.zero[:, self.outputs])
        return decoded._replace(codes=codes, scale=scale, zero=zero)


def file_matrix(
    dtype: str,
    shape: Shape,
    arrays: Mapping[str, StoredTensor],
    bits: int,
    groups: int,
    decode: Callable[..., Decoded],
    *,
    scales: str,
    has_zero: bool = False,
    has_levels: bool = False,
    order: str | None = None,
) -> FileMatrix:
    """Returns a matrix; see `FileMatrix`.

    Args:
      dtype: the name of the format.
      shape: [out, in].
      groups: their number.
      scales: the dtype of scales and zeros.
    """
    first = next(iter(arrays.values()))
    whole = shapes_of(bits, shape[1], shape[0], groups, scales, has_zero, has_levels)
    return FileMatrix(first.file, first.stamp, first.offset, shape, dtype, arrays, bits, whole, decode, order)


def shapes_of(
    bits: int, inputs: int, outputs: int, groups: int, dtype: str, has_zero: bool = False, has_levels: bool = False
) -> GroupedMatrix | None:
    """Returns a `jax.ShapeDtypeStruct` in the place of each array of a matrix, None if its groups are not equal.

    Args:
      bits: of a code.
      groups: their number.
      dtype: of scales and zeros.
    """
    if groups < 1 or inputs % groups:
        return None
    of_groups = jax.ShapeDtypeStruct((groups, outputs), np.dtype(dtype))
    rows, weight = (inputs // 2, np.uint8) if bits == 4 else (inputs, np.int8)
    fields: dict[str, Any] = {"weight": jax.ShapeDtypeStruct((rows, outputs), weight), "scale": of_groups}
    fields["zero"] = of_groups if has_zero else None
    fields["levels"] = jax.ShapeDtypeStruct((16,), np.float32) if has_levels else None
    return _grouped(fields)


def own_matrix(name: str, shape: Shape, arrays: Mapping[str, StoredTensor]) -> OwnMatrix:
    """Returns the matrix of these arrays in jlade's own files.

    Args:
      name, shape: of the matrix in floating point.
      arrays: at least "weight" and "scale", by the field of `GroupedMatrix`.

    Raises:
      ValueError: names the file and the array that does not fit.
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
        expected = ((16,), ("F32",)) if field == "levels" else (of_groups, FLOATS)
        check_kind(name + ARRAYS[field], arrays[field], *expected)
    return OwnMatrix(shape, arrays)


def keeps(tensor: Tensor | None, bits: int | None) -> TypeGuard[PackedTensor]:
    """Whether a tensor stays as it is in a model that is loaded with `bits`: one of jlade's own always does."""
    if not isinstance(tensor, PackedTensor):
        return False
    return isinstance(tensor, OwnMatrix) or (bits is not None and tensor.bits <= bits and tensor.can_stay)


def unpack_integers(packed: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Returns the numbers of `bits` bits in integers of 32 [rows, columns], the lowest bits first, along an axis.

    Returns:
      uint8, with 32 / `bits` times the rows or columns.
    """
    integers, mask = packed.view(np.uint32), (1 << bits) - 1
    numbers = [((integers >> shift) & mask).astype(np.uint8) for shift in range(0, 32, bits)]
    rows, columns = packed.shape
    count = len(numbers)
    shape = (rows * count, columns) if axis == 0 else (rows, columns * count)
    return np.stack(numbers, axis=axis + 1).reshape(shape)


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
    """Returns a matrix in arrays of NumPy on its devices, given the sharding of the matrix in floating point."""
    return jax.device_put(matrix, shardings(matrix, sharding))


def shardings(matrix: GroupedMatrix, sharding: Sharding | None) -> Any:
    """Returns the sharding of each array of a matrix, given that of the matrix in floating point.

    Raises:
      ValueError: the groups of the matrix do not divide among the devices.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh: Any = sharding.mesh
    specs = model_sharding.matrix_spec(matrix, sharding.spec, mesh)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec, memory_kind=sharding.memory_kind), specs)


def _grouped(arrays: Mapping[str, Any]) -> GroupedMatrix:
    tree: Any = GroupedMatrix
    return tree(**arrays)
