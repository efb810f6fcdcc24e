"""The parts of a tensor that the devices of this process hold."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jlade.models.quantization import Int8Matrix, quantize_matrix

Shape = tuple[int, ...]
Index = tuple[slice, ...]


class Part(NamedTuple):
    """Rows and columns of a matrix, or elements of a vector, which has one column."""

    rows: range
    columns: range

    @classmethod
    def of(cls, index: Index | None, shape: Shape) -> "Part":
        """Returns the part at an index of a tensor [rows, columns] or [rows]; None is the whole tensor."""
        rows, columns = (*(index or ()), slice(None), slice(None))[:2]
        num_rows, num_columns = (*shape, 1)[:2]
        return cls(range(num_rows)[rows], range(num_columns)[columns])


def runs(parts: Iterable[Part]) -> list[list[Part]]:
    """Returns the parts in groups with equal rows and adjacent columns, which one pass over the rows reads."""
    groups: list[list[Part]] = []
    for part in sorted(parts, key=lambda part: (part.rows.start, part.columns.start)):
        last = groups[-1][-1] if groups else None
        if last is not None and last.rows == part.rows and last.columns.stop == part.columns.start:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def place(
    shape: Shape, dtype: np.dtype, sharding: Sharding | None, read: Callable[[Sequence[Part]], Sequence[np.ndarray]]
) -> jax.Array:
    """Returns an array with the parts that `read` returns; each is read once, for all devices that hold it.

    Args:
      shape: of the array, [rows, columns] or [rows].
      dtype: of the parts.
      sharding: None for the default device.
      read: returns distinct parts.
    """
    if sharding is None:
        return jax.device_put(*read([Part.of(None, shape)]))
    indices = sharding.addressable_devices_indices_map(shape).values()
    parts = list(dict.fromkeys(Part.of(index, shape) for index in indices))
    arrays = dict(zip(parts, read(parts), strict=True))
    return jax.make_array_from_callback(shape, sharding, lambda index: arrays[Part.of(index, shape)], dtype=dtype)


def quantize(matrix: jax.Array) -> Int8Matrix:
    """Returns `matrix` [out, in] in int8, on the same devices: the scales are divided like the rows."""
    sharding = matrix.sharding
    if not isinstance(sharding, NamedSharding):
        return quantize_matrix(matrix)
    rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]), memory_kind=sharding.memory_kind)
    tree: Any = Int8Matrix
    quantized: Int8Matrix = jax.jit(quantize_matrix, out_shardings=tree(weight=sharding, scale=rows))(matrix)
    return quantized
