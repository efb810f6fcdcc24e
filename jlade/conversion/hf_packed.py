"""Matrices in few bits in the formats of other packages, each made of several tensors of the files."""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jlade.conversion.packed import PackedTensor, grouped
from jlade.conversion.parts import Shape
from jlade.conversion.weight_files import CHUNK, StoredTensor, check_kind
from jlade.models.grouped import GroupedMatrix, pack

SCALE_TYPES = ("F32", "F16", "BF16")  # in safetensors' spelling
# Ends of the names of tensors by which activations and caches would be rounded.
OF_ACTIVATIONS = (
    "activation_scale",
    *(f".{place}_{kind}" for place in ("input", "output") for kind in ("scale", "zero_point", "global_scale")),
    *(f".{place}_scale" for place in "kvq"),
)


class DecodedMatrix(NamedTuple):
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
    decode: Callable[..., DecodedMatrix]
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
        return grouped(weight, scale, zero, levels=levels)

    def values(self, name: str) -> np.ndarray:
        codes, scale, groups, zero, levels = self._decoded()
        values = codes.astype(np.float32) if levels is None else levels[codes & 15]
        step = max(1, CHUNK // self.shape[0])
        for some in (slice(begin, begin + step) for begin in range(0, len(values), step)):
            with np.errstate(all="ignore"):  # the broken rows tell of it
                if zero is not None:
                    values[some] -= zero[groups[some]].astype(np.float32)
                values[some] *= scale[groups[some]].astype(np.float32)
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

    def _decoded(self) -> DecodedMatrix:
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
    decode: Callable[..., DecodedMatrix],
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
      scales: the dtype of scales and zeros.
    """
    if order is not None:
        check_kind(order, arrays[order], shape[1:], ("I32", "I64"))
    first = next(iter(arrays.values()))
    whole = shapes_of(bits, shape[1], shape[0], groups, scales, has_zero, has_levels)
    return FileMatrix(first.file, first.stamp, first.offset, shape, dtype, arrays, bits, whole, decode, order)


def shapes_of(
    bits: int, inputs: int, outputs: int, groups: int, dtype: str, has_zero: bool = False, has_levels: bool = False
) -> GroupedMatrix | None:
    """Returns a `jax.ShapeDtypeStruct` in the place of each array of a matrix, None if its groups are not equal.

    The codes have `bits`, and scales and zeros the `dtype`.
    """
    if groups < 1 or inputs % groups:
        return None
    of_groups = jax.ShapeDtypeStruct((groups, outputs), np.dtype(dtype))
    rows, dtype_of_codes = (inputs // 2, np.uint8) if bits == 4 else (inputs, np.int8)
    return grouped(
        jax.ShapeDtypeStruct((rows, outputs), dtype_of_codes),
        of_groups,
        zero=of_groups if has_zero else None,
        levels=jax.ShapeDtypeStruct((16,), np.float32) if has_levels else None,
    )


def num_groups(module: str, codes: StoredTensor, inputs: int, size: int, has_order: bool = False) -> int:
    """Returns the number of groups of `size` inputs, -1 for a group of all.

    All must be of this size unless the files have the group of each input (`has_order`).
    """
    size = inputs if size == -1 else min(size, inputs)
    if not size or (inputs % size and not has_order):
        raise ValueError(f"{codes.file}: {module} has {inputs} inputs, which group_size, {size}, does not divide")
    return -(-inputs // size)


def take(
    found: dict[str, StoredTensor], prefix: str, needed: Sequence[str], others: Sequence[str] = ()
) -> dict[str, StoredTensor]:
    """Returns tensors that make up a matrix, by name, and removes them. The first is there."""
    if missing := [prefix + kind for kind in needed if prefix + kind not in found]:
        file = found[prefix + needed[0]].file
        raise ValueError(f"{file}: {missing[0]} is missing, though {prefix}{needed[0]} is there")
    return {prefix + kind: found.pop(prefix + kind) for kind in (*needed, *others) if prefix + kind in found}


def matches(key: str, pattern: str, module: str) -> bool:
    """Whether the name of a module begins with a regular expression in the setting `key`."""
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise ValueError(f"config.json: {key} has a broken regular expression, {pattern}: {error}") from error


def unpack_integers(packed: np.ndarray, bits: int, axis: int, places: Sequence[int] | None = None) -> np.ndarray:
    """Returns the numbers of `bits` bits in integers of 32 [rows, columns], which follow one another along an axis.

    Args:
      places: of the numbers in an integer, of which 0 has the lowest bits; in their order unless given.

    Returns:
      uint8, with 32 / `bits` times the rows or columns.
    """
    integers, count, mask = packed.view(np.uint32), 32 // bits, (1 << bits) - 1
    rows, columns = packed.shape
    numbers = np.empty((rows, count, columns) if axis == 0 else (rows, columns, count), np.uint8)
    step = max(1, CHUNK // (8 * max(1, columns)))
    for some in (slice(begin, begin + step) for begin in range(0, rows, step)):
        for i, place in enumerate(places or range(count)):
            target = numbers[some, i] if axis == 0 else numbers[some, :, i]
            target[...] = (integers[some] >> (bits * place)) & mask
    return numbers.reshape((rows * count, columns) if axis == 0 else (rows, columns * count))
