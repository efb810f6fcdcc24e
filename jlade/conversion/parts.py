"""The parts of a tensor that the devices of this process hold."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jlade import mesh as mesh_lib
from jlade.mesh import MODEL
from jlade.models import quantization
from jlade.models import sharding as model_sharding
from jlade.models.quantization import Quantized

Shape = tuple[int, ...]
Index = tuple[slice, ...]


class TensorPart(NamedTuple):
    """Rows and columns of a matrix, or elements of a vector, which has one column."""

    rows: range
    columns: range

    @classmethod
    def of(cls, index: Index | None, shape: Shape) -> "TensorPart":
        """Returns the part at an index of a tensor [rows, columns] or [rows]; None is the whole tensor."""
        rows, columns = (*(index or ()), slice(None), slice(None))[:2]
        num_rows, num_columns = (*shape, 1)[:2]
        return cls(range(num_rows)[rows], range(num_columns)[columns])


def runs(parts: Iterable[TensorPart]) -> list[list[TensorPart]]:
    """Returns the parts in groups with equal rows and adjacent columns, which one pass over the rows reads."""
    groups: list[list[TensorPart]] = []
    for part in sorted(parts, key=lambda part: (part.rows.start, part.columns.start)):
        last = groups[-1][-1] if groups else None
        if last is not None and last.rows == part.rows and last.columns.stop == part.columns.start:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def place(
    shape: Shape,
    dtype: np.dtype,
    sharding: Sharding | None,
    read: Callable[[Sequence[TensorPart]], Sequence[np.ndarray]],
) -> jax.Array:
    """Returns an array with the parts that `read` returns; each is read once, for all devices that hold it.

    The array is [rows, columns] or [rows]. A sharding of None is the default device.
    """
    if sharding is None:
        return jax.device_put(*read([TensorPart.of(None, shape)]))
    indices = sharding.addressable_devices_indices_map(shape).values()
    parts = list(dict.fromkeys(TensorPart.of(index, shape) for index in indices))
    arrays = dict(zip(parts, read(parts), strict=True))
    return jax.make_array_from_callback(shape, sharding, lambda index: arrays[TensorPart.of(index, shape)], dtype=dtype)


def quantize(matrix: jax.Array, bits: int) -> Quantized:
    """Returns `matrix` [out, in], or experts [N, in, out], in `bits` bits on the same devices."""
    sharding = matrix.sharding
    if not isinstance(sharding, NamedSharding):
        return quantization.quantize(matrix, bits)
    mesh: Any = sharding.mesh
    run = functools.partial(quantization.quantize, bits=bits, shards=mesh_lib.size(mesh, *MODEL))
    shardings = matrix_shardings(jax.eval_shape(run, matrix), sharding)
    quantized: Quantized = jax.jit(run, out_shardings=shardings)(matrix)
    return quantized


def matrix_shardings(matrix: Any, sharding: Sharding | None) -> Any:
    """Returns the sharding of each array of a matrix in few bits, given that of the matrix in floating point."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh: Any = sharding.mesh
    specs = model_sharding.matrix_spec(matrix, sharding.spec, mesh)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec, memory_kind=sharding.memory_kind), specs)
