"""Experts in files of Hugging Face's format: tensors of each expert, or of all, gates and products joined, or MXFP4."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlade.conversion.families import FAMILIES
from jlade.conversion.hf_fp4 import MXFP4_GROUP, mxfp4
from jlade.conversion.packed import PackedTensor
from jlade.conversion.parts import Shape, TensorPart
from jlade.conversion.tensors import layer_tensors, name_in_files
from jlade.conversion.weight_files import ComposedTensor, StoredTensor, Tensor, aligned
from jlade.models.grouped import GroupedMatrix
from jlade.models.llama import LlamaConfig

BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of a tensor's name in MXFP4 (GPT-OSS), of its numbers and exponents


class File(NamedTuple):
    """A tensor in a file.

    Attributes:
      names: of the arrays it holds, of gate and product if there are two.
      shape: of the tensor.
      expert: of which it holds a part, None for all.
      has_rows: whether its matrices are [out, in].
    """

    names: tuple[str, ...]
    shape: Shape
    expert: int | None
    has_rows: bool


@dataclasses.dataclass(frozen=True)
class ExpertTensor(ComposedTensor):
    """An array of all experts, [N, in, out] or biases [N, out].

    Attributes:
      experts: the tensor of each in the files.
      outputs: those of the array, where gate and product are one tensor.
      is_transposed: whether the files have [out, in].
    """

    experts: Sequence[Tensor]
    outputs: slice
    is_transposed: bool
    shape: Shape

    @property
    def sources(self) -> Sequence[Tensor]:
        return self.experts

    @property
    def num_bytes(self) -> int:
        """Bytes of the array's outputs in the files."""
        share = 1 if self.outputs == slice(None) else 2
        return super().num_bytes // share

    def read(self, name: str, dtype: np.dtype, parts: Sequence[TensorPart]) -> tuple[list[np.ndarray], set[int]]:
        """Returns distinct parts, each the arrays of some experts, and the experts with NaN or infinite elements."""
        arrays: list[np.ndarray] = []
        broken: set[int] = set()
        for part in parts:
            array = aligned((len(part.rows), *self.shape[1:]), dtype)
            for target, expert in zip(array, part.rows, strict=True):
                stored = self.experts[expert]
                (matrix,), broken_of_expert = stored.read(name, dtype, [TensorPart.of(None, stored.shape)])
                target[...] = matrix[self.outputs].T if self.is_transposed else matrix[..., self.outputs]
                broken |= {expert} if broken_of_expert else set()
            arrays.append(array)
        return arrays, broken


@dataclasses.dataclass(frozen=True, eq=False)
class PackedExperts(ExpertTensor, PackedTensor):
    """An array of experts that are all in four or eight bits in the files, which can be kept so."""

    @classmethod
    def of(cls, tensor: ExpertTensor) -> ExpertTensor:
        """Returns the array, as one of this class if its experts are packed alike."""
        are_packed = all(isinstance(expert, PackedTensor) for expert in tensor.experts)
        return cls(tensor.experts, tensor.outputs, True, tensor.shape) if are_packed else tensor

    @property
    def _packed(self) -> list[PackedTensor]:
        return [expert for expert in self.experts if isinstance(expert, PackedTensor)]

    @property
    def bits(self) -> int:  # type: ignore[override]
        return max(expert.bits for expert in self._packed)

    @property
    def can_stay(self) -> bool:
        experts = self._packed
        return all(expert.can_stay and expert.shapes == experts[0].shapes for expert in experts)

    @property
    def shapes(self) -> GroupedMatrix:
        def of_all(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.shape[0], *array.shape[:-1], self.shape[-1]), array.dtype)

        first = self._packed[0].shapes
        arrays: GroupedMatrix = jax.tree.map(of_all, first.replace(levels=None))  # type: ignore[attr-defined]
        return arrays.replace(levels=first.levels)  # type: ignore[attr-defined]

    def matrix(self, name: str) -> GroupedMatrix:
        shapes = self.shapes.replace(levels=None)  # type: ignore[attr-defined]
        arrays = jax.tree.map(lambda array: aligned(array.shape, np.dtype(array.dtype)), shapes)
        levels: Any = None
        for i, expert in enumerate(self._packed):
            own: Any = expert.matrix(name)
            levels = levels if i else own.levels
            if not np.array_equal(levels, own.levels):
                raise ValueError(f"{self.file}: the experts of {name} differ in the values of their codes")
            stored = jax.tree.leaves(own.replace(levels=None))
            for target, array in zip(jax.tree.leaves(arrays), stored, strict=True):
                target[i] = array[..., self.outputs]
        kept: GroupedMatrix = arrays.replace(levels=levels)
        return kept


def files(config: LlamaConfig, stored: Mapping[str, StoredTensor] = MappingProxyType({})) -> dict[str, File]:
    """Returns the tensors of files that hold experts, by name, in the family's own format or in that of `stored`."""
    family = FAMILIES[config.family]
    layout = family.expert_layout
    result: dict[str, File] = {}
    for i in filter(config.has_experts, range(config.num_layers)):
        prefix, tensors = f"model.layers.{i}.", layer_tensors(config, i)
        before = name_in_files(prefix, config)
        are_joined = any(before + name in stored for name in family.joined_experts)
        for file_name, paths in (family.joined_experts if are_joined else family.experts).items():
            held = [tensors[path] for path in paths]
            number, *inputs, outputs = held[0][1].shape
            outputs *= len(held)
            rows, columns = (outputs, *inputs), (*inputs, outputs)
            has_rows = layout == "rows"
            if layout == "either":  # a square matrix has rows, as for transformers
                tensor = stored.get(before + file_name)
                has_rows = tensor is None or rows == columns or tensor.shape != (number, *columns)
            matrix = rows if has_rows else columns
            names = tuple(prefix + name for name, _ in held)
            if "{}" in file_name:
                result |= {before + file_name.format(n): File(names, matrix, n, has_rows) for n in range(number)}
            else:
                result[before + file_name] = File(names, (number, *matrix), None, has_rows)
    return result


def shapes(config: LlamaConfig, stored: Mapping[str, StoredTensor]) -> dict[str, Shape]:
    """Returns the shapes of the tensors of `files` by their names in `stored`, where MXFP4 makes one two."""
    expected: dict[str, Shape] = {}
    for name, file in files(config, stored).items():
        if name + BLOCKS in stored:
            number, inputs, outputs = file.shape
            expected[name + BLOCKS] = (number, outputs, inputs // MXFP4_GROUP, MXFP4_GROUP // 2)
            expected[name + SCALES] = (number, outputs, inputs // MXFP4_GROUP)
        else:
            expected[name] = file.shape
    return expected


def read(config: LlamaConfig, stored: Mapping[str, StoredTensor]) -> dict[str, ExpertTensor]:
    """Returns the arrays of experts by name, given the tensors of the files, with the shapes of `shapes`."""
    layout = FAMILIES[config.family].expert_layout
    sparse = next(filter(config.has_experts, range(config.num_layers)), 0)
    array_shapes = {name: array.shape for name, array in layer_tensors(config, sparse).values()}
    experts: dict[str, list[Tensor]] = {}
    tensors: dict[str, ExpertTensor] = {}
    for file_name, file in files(config, stored).items():
        is_packed = file_name + BLOCKS in stored
        held: Iterable[Tensor]
        if is_packed:
            pairs = zip(stored[file_name + BLOCKS].rows(), stored[file_name + SCALES].rows(), strict=True)
            held = [mxfp4({file_name + BLOCKS: _flat(blocks), file_name + SCALES: scales}) for blocks, scales in pairs]
        else:
            held = [stored[file_name]] if file.expert is not None else stored[file_name].rows()
        experts.setdefault(file.names[0], []).extend(held)
        if file.expert:  # the first expert's tensor has made the array
            continue
        for k, name in enumerate(file.names):
            shape = array_shapes[name.split(".", 3)[3]]
            outputs = slice(None)
            if len(file.names) > 1:
                half = slice(k * shape[-1], (k + 1) * shape[-1])
                outputs = slice(k, None, 2) if layout == "interleaved" else half
            tensors[name] = ExpertTensor(experts[file.names[0]], outputs, is_packed or file.has_rows, shape)
    return {name: PackedExperts.of(tensor) for name, tensor in tensors.items()}


def _flat(blocks: StoredTensor) -> StoredTensor:
    """Returns the bytes [out, in / 2] of those of the blocks of an expert [out, in / 32, 16]."""
    outputs, *inner = blocks.shape
    return dataclasses.replace(blocks, shape=(outputs, math.prod(inner)))


def write(config: LlamaConfig, arrays: Mapping[str, jax.Array]) -> Iterator[tuple[str, jax.Array]]:
    """Yields the tensors of files with their names, given the arrays by name."""
    layout = FAMILIES[config.family].expert_layout
    for name, file in files(config).items():
        held = [arrays[array] for array in file.names]
        if file.expert is not None:
            held = [array[file.expert] for array in held]
        if layout == "interleaved":
            yield name, jnp.stack(held, axis=-1).reshape(file.shape)
        elif layout == "columns":
            yield name, jnp.concatenate(held, axis=-1)
        else:
            yield name, jnp.concatenate([jnp.swapaxes(array, -1, -2) for array in held], axis=-2)
