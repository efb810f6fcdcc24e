"""Matrices in FP8 with a scale for each block, as DeepSeek, Qwen and GLM publish them, for each output, or for all."""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jlade.conversion.parts import Part, Shape
from jlade.conversion.weight_files import FLOATS, StoredTensor, aligned, broken_rows

FP8 = "F8_E4M3"  # in safetensors' spelling
SCALES = "_scale_inv", "_scale"  # suffixes of a matrix's name, for its scales; the second of compressed-tensors
BLOCK = 128  # rows and columns of a block, unless the number of scales says otherwise


@dataclasses.dataclass(frozen=True)
class BlockScaled(StoredTensor):
    """A matrix in FP8, whose values are those of the file times the scale of their block.

    Attributes:
      scales: of the blocks [rows, columns].
      blocks: rows and columns of a block.
      first_row: in the matrix that the scales are of.
    """

    scales: StoredTensor
    blocks: tuple[int, int]
    first_row: int = 0

    @property
    def stamps(self) -> dict[pathlib.Path, tuple[int, ...]]:
        return super().stamps | self.scales.stamps

    @property
    def value_dtype(self) -> str:
        return "bfloat16"

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape))

    def divide(self, shapes: Iterable[Shape]) -> list[StoredTensor]:
        parts: list[StoredTensor] = []
        first = self.first_row
        for part in super().divide(shapes):
            assert isinstance(part, BlockScaled)
            parts.append(dataclasses.replace(part, first_row=first))
            first += part.shape[0]
        return parts

    def read(self, name: str, dtype: np.dtype, parts: Sequence[Part]) -> tuple[list[np.ndarray], set[int]]:
        in_file = StoredTensor(self.file, self.stamp, self.offset, self.shape, self.dtype)
        read, broken = in_file.read(name, np.dtype(np.float32), parts)
        scales = self.scales.read_bytes(name).astype(np.float32)
        scales = scales.reshape(-1, -(-self.shape[1] // self.blocks[1]))
        arrays = []
        for values, part in zip(read, parts, strict=True):
            of_columns = np.array(part.columns) // self.blocks[1]
            array = aligned(values.shape, dtype)
            of_rows = (self.first_row + np.array(part.rows)) // self.blocks[0]
            for block in range(of_rows[0], of_rows[-1] + 1):
                begin, end = np.searchsorted(of_rows, [block, block + 1])
                values[begin:end] *= scales[block, of_columns]
            with np.errstate(over="ignore"):  # the caller hears of it
                array[...] = values
            broken |= broken_rows(values, array, part.rows.start)
            arrays.append(array)
        return arrays, broken


def scaled(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors of files, those in FP8 with their scales.

    Raises:
      ValueError: names the file and the tensor whose scales do not fit.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        suffix = next((suffix for suffix in SCALES if name + suffix in tensors), None)
        if tensor.dtype == FP8 and suffix is not None:
            scales = found.pop(name + suffix)
            of_blocks = scales.shape if len(scales.shape) == 2 else (1, 1) if scales.shape in ((), (1,)) else ()
            fits = len(tensor.shape) == len(of_blocks) == 2 and scales.dtype in FLOATS
            rows, columns = map(_block, tensor.shape, of_blocks) if fits else (0, 0)
            if not rows or not columns:
                raise ValueError(
                    f"{scales.file}: {name}{suffix} has shape {scales.shape} and type {scales.dtype}; a matrix of "
                    f"shape {tensor.shape} must have a scale in floating point for each block"
                )
            found[name] = BlockScaled(**vars(tensor), scales=scales, blocks=(rows, columns))
    return found


def _block(size: int, number: int) -> int:
    """Returns the size of `number` blocks, 0 if there are none."""
    if -(-size // BLOCK) == number:
        return BLOCK
    return size // number if number and size % number == 0 else 0
