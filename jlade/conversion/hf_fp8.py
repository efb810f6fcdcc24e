"""Matrices in FP8 with a scale for each block, as DeepSeek, Qwen and GLM publish them, for each output, or for all."""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jlade.conversion.parts import Shape, TensorPart
from jlade.conversion.weight_files import FLOATS, StoredTensor, aligned, broken_rows, check_kind

FP8 = "F8_E4M3"  # in safetensors' spelling
SCALES = "_scale_inv"  # end of the name of a matrix's scales


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

    def read(self, name: str, dtype: np.dtype, parts: Sequence[TensorPart]) -> tuple[list[np.ndarray], set[int]]:
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


def wrong_setting(settings: Mapping[str, Any]) -> str | None:
    """Returns the setting in config.json with which weights are not read, for a message."""
    blocks = settings.get("weight_block_size")
    return None if are_sizes(blocks) else f"weight_block_size is {blocks!r}, supported is a list of two positive sizes"


def assembled(tensors: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Returns the tensors of files, those in FP8 with their scales, given the settings of the quantization."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype == FP8 and name + SCALES in result:
            rows, columns = settings["weight_block_size"]
            result[name] = in_blocks(name, tensor, name + SCALES, result.pop(name + SCALES), (rows, columns))
    return result


def in_blocks(
    name: str, matrix: StoredTensor, scales_name: str, scales: StoredTensor, sizes: tuple[int | None, int | None]
) -> BlockScaled:
    """Returns a matrix with a scale for each block of `sizes` rows and columns, None for all.

    The last blocks of rows and of columns may be smaller.
    """
    if len(matrix.shape) != 2:
        raise ValueError(f"{matrix.file}: {name} has shape {matrix.shape}; it must be a matrix")
    rows, columns = (size or whole for size, whole in zip(sizes, matrix.shape, strict=True))
    check_kind(scales_name, scales, (-(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns)), FLOATS)
    return BlockScaled(**vars(matrix), scales=scales, blocks=(rows, columns))


def are_sizes(value: Any) -> bool:
    """Whether a value is a list of two positive integers."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)
    )
