"""The tensors of GGUF files, dequantized while they are read, or kept in the four or eight bits of the file."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from jlade.conversion import gguf_blocks
from jlade.conversion.packed import PackedTensor, grouped
from jlade.conversion.parts import Shape, TensorPart, runs
from jlade.conversion.tensors import ARRAYS
from jlade.conversion.weight_files import CHUNK, ComposedTensor, Tensor, aligned, broken_rows
from jlade.models.grouped import GroupedMatrix

FLOATING = ("F32", "F16", "BF16")  # the types of vectors
TYPES = (
    *FLOATING,
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0"),
    *("MXFP4", "NVFP4"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class GGUFTensor:
    """A tensor in a file, as described by the file's header.

    Attributes:
      stamp: changes with the file.
      offset: of the first byte.
      dtype: in GGUF's spelling.
      name: in the file.
      rows: the places in the file of the model's rows, None if they are the same.
      columns: the same of columns.
      change: makes the model's elements of those in the file, None if they are the same.
    """

    file: pathlib.Path
    stamp: tuple[int, ...]
    offset: int
    shape: Shape
    dtype: str
    num_bytes: int
    name: str
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    change: Callable[[np.ndarray], np.ndarray] | None = None

    def divide(self, shapes: Iterable[Shape]) -> list["GGUFTensor"]:
        """Returns the parts of the tensor that have these shapes, one after the other."""
        parts, offset, begin = [], self.offset, 0
        for shape in shapes:
            end = begin + math.prod(shape[:-1])
            if self.rows is None:
                parts.append(dataclasses.replace(self, offset=offset, shape=shape, num_bytes=self._share(shape)))
            else:
                parts.append(self.take(self.rows[begin:end], shape))
            offset, begin = offset + parts[-1].num_bytes, end
        return parts

    def take(self, rows: np.ndarray, shape: Shape) -> "GGUFTensor":
        """Returns the part of a shape that has the rows at some places in the file."""
        return dataclasses.replace(self, rows=rows, shape=shape, num_bytes=self._share(shape))

    def _share(self, shape: Shape) -> int:
        """Returns the bytes of a part in the file."""
        return self.num_bytes * math.prod(shape) // math.prod(self.shape)

    @property
    def stamps(self) -> dict[pathlib.Path, tuple[int, ...]]:
        return {self.file: self.stamp}

    @property
    def value_dtype(self) -> str:
        """The dtype that holds the values of every type."""
        return "float32"

    def read(self, name: str, dtype: np.dtype, parts: Sequence[TensorPart]) -> tuple[list[np.ndarray], set[int]]:
        """Returns distinct parts of the tensor as `dtype`, and its rows in which they have NaN or infinite elements.

        Only the blocks of the parts are read, and dequantized in chunks into the memory that the parameters keep.
        """
        from gguf import GGMLQuantizationType, quants

        kind, (block, size) = GGMLQuantizationType[self.dtype], self.block
        stored = self.stored()
        arrays = {part: aligned((len(part.rows), len(part.columns)), dtype) for part in parts}
        broken: set[int] = set()
        for run in runs(parts):
            rows, first, end = run[0].rows, run[0].columns.start // block, -(-run[-1].columns.stop // block)
            if self.columns is not None:  # from anywhere
                first, end = 0, self.shape[-1] // block
            step = max(1, CHUNK // ((end - first) * block))
            for begin in range(0, len(rows), step):
                blocks = stored[self.stored_rows(rows[begin : begin + step]), first * size : end * size]
                with np.errstate(all="ignore"):  # the broken rows tell of it
                    values = quants.dequantize(np.ascontiguousarray(blocks), kind)
                    if self.columns is not None:
                        values = values[:, self.columns]
                    if self.change is not None:
                        values = self.change(values)
                    for part in run:
                        source = values[:, part.columns.start - first * block : part.columns.stop - first * block]
                        chunk = arrays[part][begin : begin + step]
                        chunk[:] = source
                        broken |= broken_rows(source, chunk, rows.start + begin)
        return [array if len(self.shape) == 2 else array[:, 0] for array in arrays.values()], broken

    @property
    def block(self) -> tuple[int, int]:
        """Elements and bytes of a block."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        return GGML_QUANT_SIZES[GGMLQuantizationType[self.dtype]]

    def stored(self) -> np.ndarray:
        """Returns the bytes [rows, bytes] in the file, those of experts one after the other."""
        (block, size), (*rows, width) = self.block, self.shape if len(self.shape) > 1 else (*self.shape, 1)
        count = math.prod(rows) if self.rows is None else int(self.rows.max()) + 1
        try:
            return np.memmap(self.file, np.uint8, "r", self.offset, (count, width // block * size))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.file}: {self.name} cannot be read: {error}") from error

    def stored_rows(self, rows: range) -> slice | np.ndarray:
        """Returns the places in the file of a model's rows."""
        return slice(rows.start, rows.stop) if self.rows is None else self.rows[rows.start : rows.stop]


@dataclasses.dataclass(frozen=True)
class Blocks(ComposedTensor, PackedTensor):
    """A matrix, or experts, whose type is one of `gguf_blocks.KINDS`.

    Attributes:
      shape: [out, in], or [N, in, out] of experts.
      tensor: in the file, [out, in] or [N, out, in].
      dense: the tensor dequantized.
    """

    shape: Shape
    tensor: GGUFTensor
    dense: Tensor

    @property
    def kind(self) -> gguf_blocks.BlockType:
        return gguf_blocks.KINDS[self.tensor.dtype]

    @property
    def bits(self) -> int:  # type: ignore[override]
        return self.kind.bits

    @property
    def sources(self) -> list[GGUFTensor]:
        return [self.tensor]

    @property
    def shapes(self) -> GroupedMatrix:
        *others, outputs, inputs = self.tensor.shape
        block, size = self.tensor.block
        arrays = {
            field: jax.ShapeDtypeStruct((*others, inputs // block * array.shape[-1], outputs), array.dtype)
            for field, array in self.kind.unpack(np.zeros((1, size), np.uint8)).items()
        }
        return grouped(**arrays, levels=self.kind.levels and jax.ShapeDtypeStruct((16,), np.float32))

    def matrix(self, name: str) -> GroupedMatrix:
        *others, outputs, inputs = self.tensor.shape
        block, size = self.tensor.block
        stored = self.tensor.stored()
        arrays = {
            field: aligned(array.shape, array.dtype)
            for field in ARRAYS
            if field != "levels" and (array := getattr(self.shapes, field)) is not None
        }
        step = max(1, CHUNK // inputs)
        for expert in range(math.prod(others)):
            for begin in range(0, outputs, step):
                rows = range(expert * outputs + begin, expert * outputs + min(begin + step, outputs))
                of_rows = np.asarray(stored[self.tensor.stored_rows(rows)])
                for field, array in self.kind.unpack(of_rows.reshape(len(rows), inputs // block, size)).items():
                    target = arrays[field].reshape(-1, *arrays[field].shape[-2:])[expert]
                    target[:, begin : begin + step] = array.reshape(len(rows), -1).T
        return grouped(**arrays, levels=self.kind.levels and np.array(self.kind.levels, np.float32))

    def read(self, name: str, dtype: np.dtype, parts: Sequence[TensorPart]) -> tuple[list[np.ndarray], set[int]]:
        return self.dense.read(name, dtype, parts)


@dataclasses.dataclass(frozen=True, eq=False)
class TransposedHeads(ComposedTensor):
    """A matrix [heads * out, in] of which a file has each head as [in, out]."""

    shape: Shape
    heads: Sequence[GGUFTensor]

    @property
    def sources(self) -> Sequence[GGUFTensor]:
        return self.heads

    def read(self, name: str, dtype: np.dtype, parts: Sequence[TensorPart]) -> tuple[list[np.ndarray], set[int]]:
        whole = [TensorPart.of(None, self.heads[0].shape)]
        values = np.concatenate([head.read(name, dtype, whole)[0][0].T for head in self.heads])
        arrays = [aligned((len(part.rows), len(part.columns)), dtype) for part in parts]
        broken: set[int] = set()
        for array, (rows, columns) in zip(arrays, parts, strict=True):
            array[:] = values[rows.start : rows.stop, columns.start : columns.stop]
            broken |= broken_rows(array, array, rows.start)
        return arrays, broken
