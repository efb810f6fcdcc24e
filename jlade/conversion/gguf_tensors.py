"""The tensors of a model in a GGUF file: under which names, which rows of them, in which order."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import cast

import numpy as np

from jlade.conversion import gguf_blocks
from jlade.conversion.families import FAMILIES
from jlade.conversion.family import Family
from jlade.conversion.gguf_architectures import Metadata, architecture_of
from jlade.conversion.gguf_weights import FLOATING, TYPES, Blocks, GGUFTensor, TransposedHeads
from jlade.conversion.hf_experts import ExpertTensor
from jlade.conversion.hf_tensors import FileTensor, check_names, file_tensors
from jlade.conversion.parts import Shape
from jlade.conversion.tensors import arrays_by_name, expected_tensors, name_in_files
from jlade.conversion.weight_files import Tensor
from jlade.models.layers.mixture import EXPERTS
from jlade.models.llama import LlamaConfig

# Names within a layer of a file where those of the package gguf are others or none, by the path of the array.
NAMES = {
    "mixture.selection_bias": "exp_probs_b.bias",
    "recurrent.decay_bias": "ssm_dt.bias",
}
# Tensors that files of any architecture may have in the place of several.
FUSED: dict[str, tuple[str, ...]] = {
    "attn_qkv.weight": ("attention.query", "attention.key", "attention.value"),
    "attn_qkv.bias": ("attention.query_bias", "attention.key_bias", "attention.value_bias"),
}
# Arrays that files have with other axes
RESHAPED = ("mixture.selection_bias", "attention.value_up", "recurrent.decay_rate", "recurrent.norm", "recurrent.skip")
PERMUTED = ("attention.query", "attention.key", "attention.query_bias", "attention.key_bias")
TILED = tuple(
    f"recurrent.{name}" for name in ("value", "gate", "beta", "decay", "decay_rate", "decay_bias", "value_filter")
)


def model_tensors(tensors: Mapping[str, GGUFTensor], config: LlamaConfig, metadata: Metadata) -> dict[str, Tensor]:
    """Returns the tensors of a model by their names in Hugging Face's format, given those of the file by its names."""
    return _Reader(tensors, config, metadata).read()


class _Reader:
    """Finds the tensors of a model in those of a file."""

    def __init__(self, tensors: Mapping[str, GGUFTensor], config: LlamaConfig, metadata: Metadata):
        import gguf

        self.tensors, self.config, self.file = tensors, config, metadata.values.file
        self.architecture = architecture_of(metadata)
        self.shapes = expected_tensors(config)
        self.paths = {name: path for name, (path, _) in arrays_by_name(config).items()}
        keys = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
        name = self.architecture.like or metadata.values.get("general.architecture")
        self.names = gguf.get_tensor_name_map(keys[name], config.num_layers)

    def read(self) -> dict[str, Tensor]:
        """Returns the tensors, once none is missing, none is left, and all have shapes and types that are accepted."""
        in_files = file_tensors(self.config, self._family())
        stored = {name: self._stored_name(name, next(iter(file.parts))) for name, file in in_files.items()}
        experts = self._experts()
        expected = {*stored.values(), *(name for name, _ in experts.values())}
        beyond = {name for name in self.tensors if self._is_beyond(name)}
        check_names(self.file, expected - self.tensors.keys(), self.tensors.keys() - expected - beyond)
        result: dict[str, Tensor] = {}
        for name, in_file in in_files.items():
            paths = [self._path(part) for part in in_file.parts]
            shape = in_file._replace(more_axes=()).shape
            if paths == ["attention.key_up"] and len(self.tensors[stored[name]].shape) == 3:
                result[name] = self._transposed(stored[name], shape)
                continue
            tensor = self._checked(stored[name], shape, paths[0])
            for part, path, rows in zip(in_file.parts, paths, self._divided(tensor, in_file), strict=True):
                result[part] = self._array(part, path, rows)
        for name, (stored_name, half) in experts.items():
            number, *inputs, outputs = self.shapes[name]
            halves = 1 if half is None else 2
            tensor = self._checked(stored_name, (number, halves * outputs, *inputs), self._path(name))
            if half is not None:
                places = np.arange(number * 2 * outputs).reshape(number, 2, outputs)[:, half].reshape(-1)
                tensor = tensor.take(places, (number, outputs, *inputs))
            result[name] = _model_tensor(tensor)
        return result

    def _family(self) -> Family:
        """Returns the family with the tensors of several arrays that the file has."""
        family, architecture = FAMILIES[self.config.family], self.architecture
        layers = range(self.config.num_layers)

        def is_there(name: str) -> bool:
            names = (name_in_files(f"model.layers.{i}.{name}", self.config) for i in layers)
            return any(self._name(name) in self.tensors for name in names)

        fused = {name: paths for name, paths in family.fused.items() if is_there(name)}
        if FUSED["attn_qkv.weight"] not in fused.values():
            first = self.config.attention_layers[0]
            fused |= {name: paths for name, paths in FUSED.items() if f"blk.{first}.{name}" in self.tensors}
        groups = family.row_groups if architecture.has_groups else {}
        return dataclasses.replace(family, fused=fused | dict(architecture.fused), row_groups=groups)

    def _path(self, name: str) -> str | None:
        """Returns the path of an array in its layer, None for one outside of layers."""
        return self.paths.get(name.split(".", 3)[-1]) if name.startswith("model.layers.") else None

    def _name(self, name: str) -> str:
        """Returns the name in the file by that in Hugging Face's format, which is returned if it is not known."""
        return str(self.names.get_name(name, (".weight", ".bias")) or name)

    def _stored_name(self, name: str, part: str) -> str:
        """Returns the name in the file of a tensor in Hugging Face's format, given the first array in it."""
        if not part.startswith("model.layers."):
            return self._name(name)
        _, _, number, within = part.split(".", 3)
        before = name_in_files(f"model.layers.{number}.", self.config)
        if name.removeprefix(before) in dict(self.architecture.fused) | FUSED:
            return f"blk.{number}.{name.removeprefix(before)}"
        if name != name_in_files(part, self.config):  # one of several arrays
            return self._name(name)
        path = self.paths[within]
        own = (NAMES | dict(self.architecture.tensors)).get(path)
        if own is None and path.startswith("mlp."):
            field, _, kind = path.removeprefix("mlp.").partition("_")
            is_shared = self.config.has_experts(int(number)) and not self.config.separate_experts
            own = f"ffn_{field}{'_shexp' if is_shared else ''}.{kind or 'weight'}"
        return self._name(name) if own is None else f"blk.{number}.{own}"

    def _experts(self) -> dict[str, tuple[str, int | None]]:
        """Returns the tensor of each array of experts, and which half of its outputs where gate and product are one."""
        experts: dict[str, tuple[str, int | None]] = {}
        for name in self.shapes:
            if (path := self._path(name)) not in EXPERTS:
                continue
            number, (field, _, kind) = name.split(".")[2], path.removeprefix("mixture.").partition("_")
            suffix = kind or "weight"
            joined = f"blk.{number}.ffn_gate_up_exps.{suffix}"
            half = {"gate": 0, "up": 1}.get(field) if joined in self.tensors else None
            experts[name] = (f"blk.{number}.ffn_{field}_exps.{suffix}" if half is None else joined, half)
        return experts

    def _checked(self, name: str, shape: Shape, path: str | None) -> GGUFTensor:
        """Returns a tensor, which must have this shape and a type that is accepted for it."""
        tensor = self.tensors[name]
        if path in RESHAPED and math.prod(tensor.shape) == math.prod(shape):
            tensor = dataclasses.replace(tensor, shape=shape)
        if tensor.shape != shape:
            raise ValueError(f"{tensor.file}: {name} has shape {tensor.shape}; the metadata imply {shape}")
        accepted = TYPES if len(shape) > 1 else FLOATING
        if tensor.dtype not in accepted:
            raise ValueError(f"{tensor.file}: {name} is of type {tensor.dtype}; accepted are {', '.join(accepted)}")
        return tensor

    def _transposed(self, name: str, shape: Shape) -> TransposedHeads:
        """Returns the keys' part of a latent's matrix, whose heads have a shape [in, out] in the file."""
        heads, (outputs, inputs) = self.config.num_heads, shape
        tensor = self._checked(name, (heads, inputs, outputs // heads), None)
        return TransposedHeads(shape, tensor.divide([(inputs, outputs // heads)] * heads))

    def _divided(self, tensor: GGUFTensor, in_file: FileTensor) -> list[GGUFTensor]:
        """Returns the arrays that a tensor holds."""
        shapes = list(in_file.parts.values())
        if in_file.groups == 1:
            return tensor.divide(shapes)
        places = np.arange(tensor.shape[0]).reshape(in_file.groups, -1)
        ends = np.cumsum([rows // in_file.groups for rows, *_ in shapes])
        return [
            tensor.take(rows.reshape(-1), shape)
            for shape, rows in zip(shapes, np.split(places, ends[:-1], axis=1), strict=True)
        ]

    def _array(self, name: str, path: str | None, tensor: GGUFTensor) -> Tensor:
        """Returns an array of the model, given it in the order and with the elements of the file."""
        order, columns = self._row_order(path, tensor.shape[0]), None
        if order is not None and tensor.rows is not None:
            order = tensor.rows[order]
        if self.architecture.is_tiled and path == "recurrent.output":
            columns = _of_heads(self._value_heads(), tensor.shape[1])
        rows = tensor.rows if order is None else order
        own = dataclasses.replace(tensor, rows=rows, columns=columns, change=self._change(name, path))
        return _model_tensor(own)

    def _row_order(self, path: str | None, count: int) -> np.ndarray | None:
        """Returns the places in the file of an array's rows, None if they are the same."""
        if self.architecture.is_permuted and path in PERMUTED:
            return _neighbours(count, self.config.head_dim)
        if self.architecture.is_tiled and path in TILED:
            return _of_heads(self._value_heads(), count)
        return None

    def _value_heads(self) -> np.ndarray:
        """Returns the places of the heads of values, of which a file has the first of each key, then the second, ..."""
        sizes = self.config.recurrence
        assert sizes is not None
        return np.arange(sizes.value_heads).reshape(-1, sizes.key_heads).T.reshape(-1)

    def _change(self, name: str, path: str | None) -> Callable[[np.ndarray], np.ndarray] | None:
        """Returns the function for an array's elements from those of the file, None if they are the same."""
        if path == "recurrent.decay_rate":
            return _logarithm
        if self.architecture.norm_offset and name.endswith("norm.weight") and path != "recurrent.norm":
            return functools.partial(np.add, np.float32(-self.architecture.norm_offset))
        return None

    def _is_beyond(self, name: str) -> bool:
        """Whether a tensor is of a layer that predicts further tokens, after those of the model."""
        number = name.removeprefix("blk.").partition(".")[0]
        return number.isdecimal() and int(number) >= self.config.num_layers


def _neighbours(count: int, head_dim: int) -> np.ndarray:
    """Returns the places in a file of the rows of queries or keys.

    Rotary embeddings of llama.cpp rotate neighbours, those of LLaMA in Hugging Face's format the halves of a head:
    elements 2i and 2i + 1 of a head in the file are i and i + D/2 of the model.
    """
    return np.arange(count).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _of_heads(heads: np.ndarray, count: int) -> np.ndarray:
    """Returns the places of `count` elements, of which each head has as many, given the places of the heads."""
    size = count // len(heads)
    return (heads[:, None] * size + np.arange(size)).reshape(-1)


def _logarithm(values: np.ndarray) -> np.ndarray:
    """Returns the logarithms of decay rates, of which files have the negative powers."""
    with np.errstate(all="ignore"):  # the broken rows tell of it
        logarithms: np.ndarray = np.log(-values)
    return logarithms


def _model_tensor(tensor: GGUFTensor) -> Tensor:
    """Returns the tensor of a model, experts as one with [in, out] of each, and blocks that can be kept as such."""
    shape, dense = tensor.shape, cast(Tensor, tensor)
    if len(shape) == 3:
        number, outputs, inputs = shape
        shape = number, inputs, outputs
        dense = ExpertTensor(tensor.divide([(outputs, inputs)] * number), slice(None), True, shape)
    is_changed = tensor.columns is not None or tensor.change is not None
    is_kept = tensor.dtype in gguf_blocks.KINDS and not is_changed
    return Blocks(shape, tensor, dense) if is_kept else dense
