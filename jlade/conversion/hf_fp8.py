"""Matrices in FP8 with a scale for each block (DeepSeek, Qwen, GLM), for each output, or for all (Mistral)."""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jlade.conversion.hf_packed import OF_ACTIVATIONS
from jlade.conversion.parts import Shape, TensorPart
from jlade.conversion.weight_files import EXPONENTS, FLOATS, StoredTensor, aligned, broken_rows, check_kind

FP8 = "F8_E4M3"  # in safetensors' spelling
# Ends of names, and the sizes of blocks where config.json names none: the first is transformers', the second AutoFP8's.
SCALES = {"_scale_inv": (128, 128), "_scale": None}


@dataclasses.dataclass(frozen=True)
class BlockScaled(StoredTensor):
    """A matrix in FP8, or one for each expert, whose values are those of the file times the scale of their block.

    Attributes:
      scales: of the blocks [rows, columns], or of each expert's.
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

    def rows(self) -> list[StoredTensor]:
        """Returns the matrix of each expert."""
        whole = super().rows()
        return [
            dataclasses.replace(part, scales=scales, first_row=0)  # type: ignore[call-arg]
            for part, scales in zip(whole, self.scales.rows(), strict=True)
        ]

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
    if blocks is None or are_sizes(blocks):
        return None
    return f"weight_block_size is {blocks!r}, supported is a list of two positive sizes or None"


def assembled(tensors: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Returns the tensors of files, those in FP8 with their scales, given the settings of the quantization."""
    result = {name: tensor for name, tensor in tensors.items() if not name.endswith(OF_ACTIVATIONS)}
    for name, tensor in tensors.items():
        end = next((end for end in SCALES if name + end in result), None)
        if tensor.dtype == FP8 and end is not None:
            scales = result.pop(name + end)
            rows, columns = settings.get("weight_block_size", SCALES[end]) or (None, None)
            if rows is None and len(tensor.shape) == 3 and scales.shape[1:] == (2, 1):  # one of gates, one of products
                rows = tensor.shape[1] // 2
            result[name] = in_blocks(name, tensor, name + end, scales, (rows, columns))
    return result


def in_blocks(
    name: str, matrix: StoredTensor, scales_name: str, scales: StoredTensor, sizes: tuple[int | None, int | None]
) -> BlockScaled:
    """Returns a matrix, or experts', with a scale for each block of `sizes` rows and columns, None for all.

    The last blocks of rows and of columns may be smaller.
    """
    if len(matrix.shape) not in (2, 3):
        raise ValueError(f"{matrix.file}: {name} has shape {matrix.shape}; it must be a matrix, or one for each expert")
    *number, outputs, inputs = matrix.shape
    rows, columns = sizes[0] or max(1, outputs), sizes[1] or max(1, inputs)
    scales = of_matrix(scales)
    check_kind(scales_name, scales, (*number, -(-outputs // rows), -(-inputs // columns)), (*FLOATS, *EXPONENTS))
    if scales.dtype in EXPONENTS:
        scales = dataclasses.replace(scales, dtype=EXPONENTS[0])
    return BlockScaled(**vars(matrix), scales=scales, blocks=(rows, columns))


def of_matrix(scales: StoredTensor) -> StoredTensor:
    """Returns scales in two dimensions, also the one of a whole matrix."""
    return dataclasses.replace(scales, shape=(1, 1)) if scales.shape in ((), (1,)) else scales


def are_sizes(value: Any) -> bool:
    """Whether a value is a list of two positive integers."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)
    )
