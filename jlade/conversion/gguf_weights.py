"""The tensors of GGUF files, dequantized while they are read, or kept in the four or eight bits of the file."""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import jax
import numpy as np

from jlade.conversion import gguf_blocks
from jlade.conversion.gguf_config import architecture_of
from jlade.conversion.hf_experts import ExpertTensor
from jlade.conversion.hf_tensors import FileTensor, check_names, file_tensors
from jlade.conversion.json_files import Values
from jlade.conversion.packed import PackedTensor, grouped
from jlade.conversion.parts import Shape, TensorPart, runs
from jlade.conversion.tensors import ARRAYS, expected_tensors
from jlade.conversion.weight_files import CHUNK, ComposedTensor, Tensor, aligned, broken_rows
from jlade.models.grouped import GroupedMatrix
from jlade.models.llama import LlamaConfig

FLOATING = ("F32", "F16", "BF16")  # the types of vectors
TYPES = (
    *FLOATING,
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0"),
    *("MXFP4", "NVFP4"),
)


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a file, as described by the file's header.

    Attributes:
      stamp: changes with the file.
      offset: of the first byte.
      dtype: in GGUF's spelling.
      name: in the file.
      head_dim: of queries and keys whose rows are permuted, see `stored_rows`; 0 if they are not.
      added: to every element of the file.
    """

    file: pathlib.Path
    stamp: tuple[int, ...]
    offset: int
    shape: Shape
    dtype: str
    num_bytes: int
    name: str
    head_dim: int = 0
    added: float = 0.0

    def divide(self, shapes: Iterable[Shape]) -> list["GGUFTensor"]:
        """Returns the parts of the tensor that have these shapes, one after the other."""
        parts, offset = [], self.offset
        for shape in shapes:
            size = self.num_bytes * math.prod(shape) // math.prod(self.shape)
            parts.append(dataclasses.replace(self, offset=offset, shape=shape, num_bytes=size))
            offset += size
        return parts

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
            step = max(1, CHUNK // ((end - first) * block))
            for begin in range(0, len(rows), step):
                blocks = stored[self.stored_rows(rows[begin : begin + step]), first * size : end * size]
                with np.errstate(all="ignore"):  # the broken rows tell of it
                    values = quants.dequantize(np.ascontiguousarray(blocks), kind)
                    if self.added:
                        values = values - np.float32(self.added)
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
        try:
            return np.memmap(self.file, np.uint8, "r", self.offset, (math.prod(rows), width // block * size))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.file}: {self.name} cannot be read: {error}") from error

    def stored_rows(self, rows: range) -> slice | np.ndarray:
        """Returns the places in the file of a model's rows.

        Rotary embeddings of llama.cpp rotate neighbours, those of LLaMA in Hugging Face's format the halves of a head:
        elements 2i and 2i + 1 of a head in the file are i and i + D/2 of the model.
        """
        if not self.head_dim:
            return slice(rows.start, rows.stop)
        head, place = np.divmod(np.arange(rows.start, rows.stop), self.head_dim)
        half, pair = np.divmod(place, self.head_dim // 2)
        return head * self.head_dim + 2 * pair + half


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
                rows = range(begin, min(begin + step, outputs))
                of_rows = np.asarray(stored[expert * outputs :][self.tensor.stored_rows(rows)])
                for field, array in self.kind.unpack(of_rows.reshape(len(rows), inputs // block, size)).items():
                    target = arrays[field].reshape(-1, *arrays[field].shape[-2:])[expert]
                    target[:, begin : begin + step] = array.reshape(len(rows), -1).T
        return grouped(**arrays, levels=self.kind.levels and np.array(self.kind.levels, np.float32))

    def read(self, name: str, dtype: np.dtype, parts: Sequence[TensorPart]) -> tuple[list[np.ndarray], set[int]]:
        return self.dense.read(name, dtype, parts)


def model_tensors(tensors: Mapping[str, GGUFTensor], config: LlamaConfig, metadata: Values) -> dict[str, Tensor]:
    """Returns the tensors of a model by their names in Hugging Face's format, given those of the file by its names."""
    import gguf

    file, architecture = metadata.file, architecture_of(metadata)
    keys = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(keys[metadata.get("general.architecture")], config.num_layers)
    in_files = file_tensors(config)
    arrays = expected_tensors(config)
    for name, shape in arrays.items():
        if len(shape) == 3:  # experts, [out, in] in the file
            in_files[name] = FileTensor({name: (shape[0], shape[2], shape[1])})
    stored = {name: names.get_name(name, (".weight", ".bias")) or name for name in in_files}
    check_names(file, set(stored.values()) - tensors.keys(), tensors.keys() - set(stored.values()))
    result: dict[str, Tensor] = {}
    for name, in_file in in_files.items():
        tensor, shape = tensors[stored[name]], in_file.shape
        accepted = TYPES if len(shape) > 1 else FLOATING
        if tensor.shape != shape:
            raise ValueError(f"{tensor.file}: {tensor.name} has shape {tensor.shape}; the metadata imply {shape}")
        if tensor.dtype not in accepted:
            raise ValueError(
                f"{tensor.file}: {tensor.name} is of type {tensor.dtype}; accepted are {', '.join(accepted)}"
            )
        for part, rows in zip(in_file.parts, tensor.divide(in_file.parts.values()), strict=True):
            is_permuted = architecture.is_permuted and part.split(".")[-2] in ("q_proj", "k_proj")
            own = dataclasses.replace(
                rows,
                head_dim=config.head_dim if is_permuted else 0,
                added=architecture.norm_offset if part.endswith("norm.weight") else 0.0,
            )
            result[part] = _model_tensor(own)
    return result


def _model_tensor(tensor: GGUFTensor) -> Tensor:
    """Returns the tensor of a model, experts as one with [in, out] of each, and blocks that can be kept as such."""
    shape, dense = tensor.shape, cast(Tensor, tensor)
    if len(shape) == 3:
        number, outputs, inputs = shape
        shape = number, inputs, outputs
        dense = ExpertTensor(tensor.divide([(outputs, inputs)] * number), slice(None), True, shape)
    return Blocks(shape, tensor, dense) if tensor.dtype in gguf_blocks.KINDS else dense
