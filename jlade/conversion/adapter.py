"""LoRA adapters in PEFT's format, merged into the tensors of their base model while these are read.

The result is that of PEFT's `merge_and_unload` for a base model that is loaded in the same dtype.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jlade.conversion import adapter_config, hf_experts
from jlade.conversion.adapter_config import AdapterConfig
from jlade.conversion.gguf_weights import Blocks
from jlade.conversion.hf_experts import ExpertTensor
from jlade.conversion.hf_tensors import FileTensor, check_names, file_tensors, own_names, text_part
from jlade.conversion.parts import Shape, TensorPart
from jlade.conversion.tensors import EMBEDDING, OUTPUT, first_few, name_in_files
from jlade.conversion.weight_files import CHUNK, FLOATS, ComposedTensor, StoredTensor, Tensor, broken_rows, read_header
from jlade.models.llama import LlamaConfig

WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # of the names in the file


class Product(NamedTuple):
    """Two matrices whose product is added to a tensor.

    Attributes:
      a: [rank, in], of an embedding [rank, tokens].
      b: [out, rank], of an embedding [hidden, rank].
      scale: of the product.
    """

    a: StoredTensor
    b: StoredTensor
    scale: float
    is_embedding: bool

    def factors(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the left and the right matrix, of the tensor `name`."""
        # In float64 the products of a part and of the whole round alike: a mesh has the weights of one device.
        a, b = (tensor.read_bytes(name).astype(np.float64) for tensor in (self.a, self.b))
        return (a.T, b.T) if self.is_embedding else (b, a)


class Change(NamedTuple):
    """What an adapter has for a tensor: another one in its place, a product to add to it, or both."""

    saved: StoredTensor | None
    product: Product | None

    def divide(self, file: FileTensor) -> list["Change"]:
        """Returns the changes of the parts of a tensor."""
        if len(file.parts) == 1 and not file.is_transposed:
            return [self]
        saved: Sequence[StoredTensor | None] = [None] * len(file.parts)
        if self.saved is not None:
            saved = file.divide(self.saved)
        products: Sequence[Product | None] = [None] * len(file.parts)
        if self.product is not None:
            rank = self.product.a.shape[0]
            parts: dict[str, Shape] = {name: (shape[0], rank) for name, shape in file.parts.items()}
            of_ranks = file._replace(parts=parts, is_transposed=False)
            products = [self.product._replace(b=b) for b in of_ranks.divide(self.product.b)]
        return list(map(Change, saved, products))


@dataclasses.dataclass(frozen=True)
class AdaptedTensor(ComposedTensor):
    """A tensor of a base model with the change of an adapter."""

    base: Tensor
    change: Change
    shape: Shape

    @property
    def _values(self) -> Tensor:
        return self.change.saved or self.base

    @property
    def file(self) -> pathlib.Path:
        return self._values.file

    @property
    def sources(self) -> list[Tensor]:
        product = self.change.product
        return [self.base, self._values, *([] if product is None else [product.a])]

    @property
    def num_bytes(self) -> int:
        return self.base.num_bytes

    def read(self, name: str, dtype: np.dtype, parts: Sequence[TensorPart]) -> tuple[list[np.ndarray], set[int]]:
        """Returns distinct parts of the tensor as `dtype`, and its rows in which they have NaN or infinite elements."""
        arrays, broken = self._values.read(name, dtype, parts)
        if self.change.product is None:
            return arrays, broken
        left, right = self.change.product.factors(name)
        scale = np.float32(self.change.product.scale)
        for array, (rows, columns) in zip(arrays, parts, strict=True):
            step = max(1, CHUNK // len(columns))
            for begin in range(0, len(rows), step):
                chunk, of_chunk = array[begin : begin + step], rows[begin : begin + step]
                with np.errstate(all="ignore"):  # the broken rows tell of it
                    product = left[of_chunk.start : of_chunk.stop] @ right[:, columns.start : columns.stop]
                    change = scale * product.astype(np.float32)
                    if self.change.product.is_embedding:  # PEFT rounds it first
                        change = change.astype(dtype)
                    chunk[:] = chunk.astype(np.float32) + change.astype(np.float32)
                broken |= broken_rows(chunk, chunk, of_chunk.start)
        return arrays, broken


def merge(
    config: LlamaConfig, tensors: Mapping[str, Tensor], adapter: str | os.PathLike[str], strict: bool = False
) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Returns the configuration of a model and its tensors, with the changes of an adapter's directory.

    The configuration differs if the adapter has an embedding or an output matrix for a model that ties them.
    """
    directory = pathlib.Path(adapter)
    if not directory.is_dir():
        raise ValueError(
            f"adapter must be a directory with {adapter_config.NAME} and {WEIGHTS}, got {os.fspath(adapter)!r}; "
            "`hf download OWNER/NAME --local-dir DIR` makes one of an adapter of the Hub"
        )
    changes = _Changes(adapter_config.read(directory, strict), _stored(directory), directory / WEIGHTS, config)
    adapted = dict(tensors)
    if config.tie_embeddings and changes.untie():
        config = dataclasses.replace(config, tie_embeddings=False)
        adapted[OUTPUT] = tensors[EMBEDDING]
    for name, file_tensor in file_tensors(config).items():
        change = changes.take(name, file_tensor.shape, is_transposed=file_tensor.is_transposed)
        if change is not None:
            for (part, shape), of_part in zip(file_tensor.parts.items(), change.divide(file_tensor), strict=True):
                adapted[part] = AdaptedTensor(adapted[part], of_part, shape)
    for name, file in hf_experts.files(config).items():
        if file.expert is not None and (change := changes.take(name, file.shape, is_required=False)) is not None:
            for array in file.names:
                adapted[array] = _with_expert(adapted[array], file.expert, change)
    changes.check_all_taken()
    return config, adapted


def _with_expert(tensor: Tensor, expert: int, change: Change) -> ExpertTensor:
    """Returns an array of all experts with a change of the matrix of one of them."""
    if isinstance(tensor, Blocks):
        tensor = tensor.dense
    assert isinstance(tensor, ExpertTensor)
    if tensor.outputs != slice(None):
        raise ValueError(
            f"{tensor.file} has one tensor for all experts; the adapter changes single ones, which needs files with a "
            "tensor for each expert, as transformers writes them by default"
        )
    experts = list(tensor.experts)
    experts[expert] = AdaptedTensor(experts[expert], change, experts[expert].shape)
    return ExpertTensor(experts, tensor.outputs, tensor.is_transposed, tensor.shape)


class _Changes:
    """The tensors of an adapter that are yet to be taken as changes of the model's, by their names in the file."""

    def __init__(
        self, config: AdapterConfig, tensors: Mapping[str, StoredTensor], file: pathlib.Path, model: LlamaConfig
    ):
        self.config, self.file, self.left = config, file, own_names(text_part(tensors), model)
        self.embedding, self.output = (name_in_files(name, model) for name in (EMBEDDING, OUTPUT))
        self.has_other_parts = any("language_model." in name for name in tensors)
        self.missing: list[str] = []

    def untie(self) -> bool:
        """Whether the embedding and the output matrix of a model that ties them get different values."""
        modules = [name.removesuffix(".weight") for name in (self.embedding, self.output)]
        if any(map(self.config.saves, modules)) and not self.config.keeps_ties:
            return True
        if low_rank := [name for name in self.left if name.startswith(tuple(f"{name}.lora_" for name in modules))]:
            raise ValueError(
                f"{self.file}: {first_few(low_rank)} would change the embedding and lm_head at once, which the model "
                "ties: merge into a copy with tie_word_embeddings=False that has both"
            )
        self.left.pop(self.output, None)  # of a tied model that was saved with its embedding
        return False

    def take(self, name: str, shape: Shape, is_required: bool = True, is_transposed: bool = False) -> Change | None:
        """Returns the change of a tensor in the files of the model, [in, out] if it is transposed, if there is one.

        Factors may be missing, though an adapter targets the module, unless `is_required`.
        """
        module, _, kind = name.rpartition(".")
        full = module.replace("model.", "model.language_model.", 1) if self.has_other_parts else module
        saved = self._pop(name, shape) or self._pop(f"{module}.base_layer.{kind}", shape)
        if saved is None and self.config.saves(full):
            self.missing.append(name)
        product = None
        if kind == "weight" and len(shape) == 2 and self.config.targets(full):
            (rows, columns), rank = shape[::-1] if is_transposed else shape, self.config.rank(full)
            if name == self.embedding:
                shapes = {f"{module}.lora_embedding_A": (rank, rows), f"{module}.lora_embedding_B": (columns, rank)}
            else:
                shapes = {f"{module}.lora_A.weight": (rank, columns), f"{module}.lora_B.weight": (rows, rank)}
            factors = {name: self._pop(name, shape) for name, shape in shapes.items()}
            a, b = factors.values()
            if a is not None and b is not None:
                product = Product(a, b, self.config.scale(full), name == self.embedding)
            elif a is not b or (is_required and not self.config.is_all_linear):
                self.missing += [name for name, tensor in factors.items() if tensor is None]
        return Change(saved, product) if saved or product else None

    def check_all_taken(self) -> None:
        """Raises a ValueError that names the tensors that are missing, and those that belong to no module."""
        check_names(self.file, self.missing, self.left, f"of no module that {adapter_config.NAME} names")

    def _pop(self, name: str, shape: Shape) -> StoredTensor | None:
        tensor = self.left.pop(name, None)
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{self.file}: {name} has shape {tensor.shape}; the base model and {adapter_config.NAME} imply {shape}"
            )
        if tensor is not None and tensor.dtype not in FLOATS:
            raise ValueError(f"{self.file}: {name} is of type {tensor.dtype}; accepted are {', '.join(FLOATS)}")
        return tensor


def _stored(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns the tensors of an adapter by their names without PEFT's prefix. Only the header is read."""
    file = directory / WEIGHTS
    if not file.exists():
        raise ValueError(
            f"{directory} has no {WEIGHTS}"
            + (f", and {PICKLED} is in a format that can run code when read" if (directory / PICKLED).exists() else "")
            + ": PEFT's `save_pretrained` writes it"
        )
    tensors = read_header(file)
    if other := [name for name in tensors if not name.startswith(PREFIX)]:
        raise ValueError(f"{file}: names must begin with {PREFIX}, as those that PEFT writes, got {first_few(other)}")
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
