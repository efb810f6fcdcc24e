"""The tensors of a model in files of Hugging Face's format, some of which hold several of its arrays."""

import dataclasses
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlade.conversion import hf_experts, hf_fp8
from jlade.conversion.families import FAMILIES
from jlade.conversion.family import Family
from jlade.conversion.hf_packed import FileMatrix
from jlade.conversion.json_files import refuse_or_warn
from jlade.conversion.parts import Shape, TensorPart
from jlade.conversion.tensors import EMBEDDING, OUTPUT, arrays_by_name, expected_tensors, first_few, name_in_files
from jlade.conversion.weight_files import (
    FLOATS,
    ConstantTensor,
    StoredTensor,
    Tensor,
    aligned,
    are_equal,
    broken_rows,
    check_kind,
)
from jlade.models.layers.mixture import EXPERTS
from jlade.models.llama import LlamaConfig

# Of the model without its output matrix
INNER = (
    "embed_tokens.",
    "layers.",
    "norm.",
    "final_layernorm.",
    "embedding_norm.",
    "embed_tokens_per_layer.",
    "per_layer_",
)
TEXT_PARTS = ("language_model.", "text_model.", "llm.")  # names of the text part in models with others
BODIES = ("model.", "backbone.")  # names of what a text part has besides its output matrix
# transformers 5.24 writes layers of some text parts with the names of another part's: of Kimi K2.5 and Qianfan-OCR.
LAYERS_OF_OTHERS = ("model.blocks.", "model.encoder.layers.")
PREDICTORS = ("mtp.", "model.mtp.")  # begin the names of layers that predict further tokens (Qwen3-Next, MiMo V2)
# Ends of names of tensors with axes of one element that their arrays lack: [channels, 1, taps], [1, N], [1, 1, H, 1]
MORE_AXES = {
    "conv1d.weight": (1,),
    "conv.conv.weight": (1,),
    "moe_statics.e_score_correction_bias": (0,),
    "self_attn.A_log": (0, 1, 3),
}
NO_AXES = ("act_fn.beta", "act_fn.eps")  # ends of names of numbers, whose arrays have one element
QUANTIZED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".absmax", ".scales")  # ends of names


class FileTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
      parts: shapes of the model's tensors whose rows it has, by name.
      groups: in each of which some rows of each part follow those of the one before; see `Interleaved`.
      more_axes: axes of one element in the file that the parts lack, in ascending order; see `MORE_AXES`.
      is_number: whether it has no axis; see `NO_AXES`.
      is_transposed: whether it is [in, out], where its parts are [out, in].
    """

    parts: dict[str, Shape]
    groups: int = 1
    more_axes: tuple[int, ...] = ()
    is_number: bool = False
    is_transposed: bool = False

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""
        (_, *inner), rows = next(iter(self.parts.values())), sum(shape[0] for shape in self.parts.values())
        shape = [] if self.is_number else [rows, *inner]
        for axis in self.more_axes:
            shape.insert(axis, 1)
        return tuple(reversed(shape) if self.is_transposed else shape)

    def divide(self, tensor: StoredTensor) -> list[StoredTensor]:
        """Returns the parts of a tensor of this shape."""
        if self.is_transposed:
            return TransposedTensor.of(tensor).divide(self.parts.values())
        return _divided(tensor, list(self.parts.values()), self.groups)

    def join(self, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the tensor, given arrays by the names of its parts."""
        if self.is_transposed:
            return jnp.concatenate([arrays[name] for name in self.parts]).T
        if len(self.parts) == 1:
            return arrays[next(iter(self.parts))].reshape(self.shape)
        parts = [arrays[name] for name in self.parts]
        in_groups = [part.reshape(self.groups, -1, *part.shape[1:]) for part in parts]
        return jnp.concatenate(in_groups, axis=1).reshape(self.shape)


def file_tensors(config: LlamaConfig, family: Family | None = None) -> dict[str, FileTensor]:
    """Returns the tensors of files in Hugging Face's format, without those of experts.

    `family` has the tensors of several arrays, if not that of the model.
    """
    family = FAMILIES[config.family] if family is None else family
    paths = {within: path for within, (path, _) in arrays_by_name(config).items()}
    wholes = {path: name for name, fused in family.fused.items() for path in fused}
    whole = {within: wholes[path] for within, path in paths.items() if path in wholes}
    experts = {within for within, path in paths.items() if path in EXPERTS}
    files: dict[str, FileTensor] = {}
    for name, shape in expected_tensors(config).items():
        prefix, _, rest = name.partition("layers.")
        number, _, within = rest.partition(".")
        if within in experts:
            continue
        file_within = whole.get(within, within)
        groups = family.row_groups[file_within](config) if file_within in family.row_groups else 1
        file_name = f"{prefix}layers.{number}.{file_within}" if within in whole else name
        axes = next((axes for end, axes in MORE_AXES.items() if file_within.endswith(end)), ())
        is_transposed = family.has_columns and number != "" and len(shape) == 2
        file = FileTensor({}, groups, axes, file_within.endswith(NO_AXES), is_transposed)
        files.setdefault(name_in_files(file_name, config), file).parts[name] = shape

    places = {path: i for fused in family.fused.values() for i, path in enumerate(fused)}

    def place(part: tuple[str, Shape]) -> int:
        """Returns the place of an array among those of its tensor."""
        return places.get(paths.get(part[0].split(".", 3)[-1], ""), 0)

    return {name: file._replace(parts=dict(sorted(file.parts.items(), key=place))) for name, file in files.items()}


def text_part(tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Returns the tensors of the text part of a model with other parts, by their names in a model of text alone."""
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        inner = outer = name.removeprefix("model.")
        for part in TEXT_PARTS:
            inner = inner.removeprefix(part)
        if inner != outer:
            own = inner if inner.startswith((*BODIES, "lm_head.")) else f"model.{inner}"
            for layers in LAYERS_OF_OTHERS:
                own = own.replace(layers, "model.layers.", 1) if own.startswith(layers) else own
            renamed[own] = tensor
        elif name.startswith(("lm_head.", *PREDICTORS)):
            renamed[name] = tensor
    if any(name.startswith(BODIES) for name in renamed):
        return renamed
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("visual.")}  # early Qwen2.5-VL


def own_names(tensors: Mapping[str, StoredTensor], config: LlamaConfig) -> dict[str, StoredTensor]:
    """Returns the tensors by the names that jlade writes, of those that transformers reads."""
    others, prefixes = FAMILIES[config.family].renamed, FAMILIES[config.family].prefixes
    parts = tuple(own for own in prefixes.values() if own.count(".") > 1)
    body = next(iter(parts), "").partition(".")[0]

    def own_name(name: str) -> str:
        if prefixes:  # transformers renames "model.", and adds and removes what names of parts begin with
            own = f"{body}.{name}" if f"{body}.{name}".startswith(parts) else name
            own = name_in_files(name, config) if name.startswith("model.") else own
        else:
            inner = name.removeprefix("model.")  # transformers adds and removes it
            own = f"model.{inner}" if inner.startswith(INNER) else inner if inner.startswith("lm_head.") else name
        prefix, layers, rest = own.partition("layers.")
        number, dot, within = rest.partition(".")
        own = f"{prefix}{layers}{number}{dot}{others.get(within, within)}"
        return name if own in tensors else own  # two of one name: the second is not of this model

    named = {own_name(name): tensor for name, tensor in tensors.items()}
    for name, parts in FAMILIES[config.family].divided.items():
        for whole in [each for each in named if each.endswith(f".{name}")]:
            tensor, number = named.pop(whole), len(parts)
            rows, *inner = tensor.shape
            shapes = [(rows // number, *inner)] * number
            named |= zip((whole.removesuffix(name) + part for part in parts), tensor.divide(shapes), strict=True)
    return named


def implied_value(name: str, config: LlamaConfig) -> float | None:
    """Returns the value of all elements of a tensor that files may leave out, None for others."""
    ends = FAMILIES[config.family].implied.items()
    return next((value for end, value in ends if name.endswith(end)), None)


def untied(config: LlamaConfig, tensors: Mapping[str, StoredTensor]) -> LlamaConfig:
    """Returns the configuration with an output matrix of its own if the files have one that is not the embedding.

    transformers compares the two as well.
    """
    names = [name_in_files(name, config) for name in (EMBEDDING, OUTPUT)]
    if config.tie_embeddings and all(name in tensors for name in names):
        return dataclasses.replace(config, tie_embeddings=are_equal(*(tensors[name] for name in names)))
    return config


def model_tensors(
    tensors: Mapping[str, StoredTensor], config: LlamaConfig, directory: pathlib.Path, strict: bool = False
) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Returns the configuration of a model, see `untied`, and its tensors by name.

    The tensors of some families are rows of larger ones in the files.
    """
    tensors = own_names(text_part(tensors), config)
    embedding, output = (name_in_files(name, config) for name in (EMBEDDING, OUTPUT))
    if config.tie_embeddings and embedding not in tensors and output in tensors:
        tensors[embedding] = tensors.pop(output)
    config = untied(config, tensors)
    result: dict[str, Tensor] = {}
    in_files = file_tensors(config)
    expected = {name: file.shape for name, file in in_files.items()} | hf_experts.shapes(config, tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if name in expected or not _is_empty(name, tensors)}
    for name in expected.keys() - tensors.keys():
        if (value := implied_value(name, config)) is not None:
            tensors[name] = ConstantTensor(directory, (), 0, expected[name], "F32", value)
    check_tensors(tensors, expected, config, directory, strict)
    for name, file in in_files.items():
        result |= zip(file.parts, file.divide(tensors[name]), strict=True)
    return config, result | hf_experts.read(config, tensors)


def check_tensors(
    tensors: Mapping[str, StoredTensor],
    expected: Mapping[str, Shape],
    config: LlamaConfig,
    directory: pathlib.Path,
    strict: bool,
) -> None:
    """Raises a ValueError unless the files hold exactly the `expected` tensors, with accepted dtypes.

    Those of layers beyond the last give a warning, or with `strict` an error.
    """
    others = [name for name in tensors.keys() - expected.keys() if not _is_redundant(name, config)]
    beyond = sorted(name for name in others if is_beyond(name, config))
    predictors = sorted(name for name in others if name.startswith(PREDICTORS))
    check_names(directory, expected.keys() - tensors.keys(), set(others) - {*beyond, *predictors})
    more = f"of more layers than num_hidden_layers, {config.num_layers}"
    for left_out, which in ((beyond, more), (predictors, "that predict further tokens")):
        if left_out:
            said = f"{len(left_out)} tensors {which}: {first_few(left_out)}"
            refuse_or_warn(strict, directory, said, f"{directory}: ignored {said}")
    for name, shape in expected.items():
        accepted: Collection[str] = FLOATS
        if name.endswith((hf_experts.BLOCKS, hf_experts.SCALES)):
            accepted = ("U8",)
        elif isinstance(tensors[name], hf_fp8.BlockScaled | FileMatrix) and name != name_in_files(EMBEDDING, config):
            accepted = (tensors[name].dtype,)
        check_kind(name, tensors[name], shape, accepted)


def check_names(
    source: pathlib.Path, missing: Collection[str], unexpected: Collection[str], reason: str = "not of this model"
) -> None:
    """Raises a ValueError that names the tensors of both kinds, and the likely cause where the names show one."""
    problems = []
    if missing:
        problems.append(f"{len(missing)} tensors are missing: {first_few(sorted(missing))}")
    if unexpected:
        problems.append(f"{len(unexpected)} tensors are {reason}: {first_few(sorted(unexpected))}")
    if problems:
        raise ValueError(f"{source}: {'; '.join(problems)}{_cause(missing, unexpected)}")


def _cause(missing: Collection[str], unexpected: Collection[str]) -> str:
    """Returns the likely cause of unfit names, in parentheses, or nothing."""
    prefixes = {name[: -len(end)] for end in sorted(missing)[:1] for name in unexpected if name.endswith(f".{end}")}
    causes = {
        f"the files' names begin with {' or '.join(sorted(prefixes))}": prefixes,
        "these are of an adapter, which belongs into adapter=": any(".lora_" in name for name in unexpected),
        "these are of quantized weights": any(name.endswith(QUANTIZED) for name in unexpected),
        "lm_head must be stored unless tie_word_embeddings is true": list(missing) == [OUTPUT],
        "the configuration has no biases for these": unexpected and all(name.endswith(".bias") for name in unexpected),
        "the configuration has biases for these": missing and all(name.endswith(".bias") for name in missing),
    }
    return next((f" ({cause})" for cause, holds in causes.items() if holds), "")


def is_beyond(name: str, config: LlamaConfig) -> bool:
    """Whether a tensor is of a layer that the model does not have."""
    layers = name_in_files("model.layers.", config)
    number = name.removeprefix(layers).partition(".")[0]
    return name.startswith(layers) and number.isdecimal() and int(number) >= config.num_layers


def _is_empty(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor has no elements, as those of no shared experts, or is a bias of zeros of a matrix without one.

    AutoGPTQ writes these.
    """
    if 0 in tensors[name].shape:
        return True
    matrix = tensors.get(name.removesuffix("bias") + "weight")
    if not name.endswith(".bias") or not isinstance(matrix, FileMatrix) or tensors[name].dtype not in FLOATS:
        return False
    return not tensors[name].read_bytes(name).any()


def _is_redundant(name: str, config: LlamaConfig) -> bool:
    """Whether a tensor repeats other data, as rotary tables and tied output matrices in old files, or is not read."""
    number, _, within = name.removeprefix("model.layers.").partition(".")
    if number.isdecimal() and config.num_layers - config.shared_kv_layers <= int(number) < config.num_layers:
        return within.startswith(("self_attn.k_", "self_attn.v_"))
    if name.endswith(("rotary_emb.inv_freq", *FAMILIES[config.family].unread)):
        return True
    return name == name_in_files(OUTPUT, config) and config.tie_embeddings


@dataclasses.dataclass(frozen=True)
class TransposedTensor(StoredTensor):
    """Rows of a matrix [out, in], from `first` on, whose tensor in the file is [in, out]."""

    stored: StoredTensor
    first: int = 0

    @classmethod
    def of(cls, stored: StoredTensor) -> "TransposedTensor":
        """Returns the whole matrix."""
        return cls(stored.file, stored.stamp, stored.offset, stored.shape[::-1], stored.dtype, stored)

    @property
    def stamps(self) -> dict[pathlib.Path, tuple[int, ...]]:
        return self.stored.stamps

    @property
    def value_dtype(self) -> str:
        return self.stored.value_dtype

    def divide(self, shapes: Iterable[Shape]) -> list[StoredTensor]:
        parts, first = list[StoredTensor](), self.first
        for shape in shapes:
            parts.append(dataclasses.replace(self, shape=shape, first=first))
            first += shape[0]
        return parts

    def read_bytes(self, name: str) -> np.ndarray:
        return self.stored.read_bytes(name)[:, self.first : self.first + self.shape[0]].T

    def read(self, name: str, dtype: np.dtype, parts: Sequence[TensorPart]) -> tuple[list[np.ndarray], set[int]]:
        arrays: list[np.ndarray] = []
        broken: set[int] = set()
        for rows, columns in parts:
            own = TensorPart(columns, range(self.first + rows.start, self.first + rows.stop))
            (matrix,), _ = self.stored.read(name, dtype, [own])
            array = aligned((len(rows), len(columns)), dtype)
            array[...] = matrix.T
            broken |= broken_rows(array, array, rows.start)
            arrays.append(array)
        return arrays, broken


@dataclasses.dataclass(frozen=True)
class Interleaved(StoredTensor):
    """The rows of an array in a tensor that has, for each head or group of heads, some rows of several arrays in turn.

    Attributes:
      pieces: the rows of each group, parts of the tensor.
    """

    pieces: tuple[StoredTensor, ...]

    @property
    def stamps(self) -> dict[pathlib.Path, tuple[int, ...]]:
        return self.pieces[0].stamps

    @property
    def value_dtype(self) -> str:
        return self.pieces[0].value_dtype

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def read_bytes(self, name: str) -> np.ndarray:
        return np.concatenate([piece.read_bytes(name) for piece in self.pieces])

    def read(self, name: str, dtype: np.dtype, parts: Sequence[TensorPart]) -> tuple[list[np.ndarray], set[int]]:
        height = self.pieces[0].shape[0]
        arrays = [aligned((len(part.rows), len(part.columns)), dtype) for part in parts]
        broken: set[int] = set()
        for array, part in zip(arrays, parts, strict=True):
            for first in range(part.rows.start // height * height, part.rows.stop, height):
                own = range(max(part.rows.start, first), min(part.rows.stop, first + height))
                of_piece = TensorPart(range(own.start - first, own.stop - first), part.columns)
                (values,), rows = self.pieces[first // height].read(name, dtype, [of_piece])
                array[own.start - part.rows.start : own.stop - part.rows.start] = values.reshape(len(own), -1)
                broken |= {first + row for row in rows}
        return [array if len(self.shape) == 2 else array[:, 0] for array in arrays], broken


def _divided(tensor: StoredTensor, shapes: Sequence[Shape], groups: int) -> list[StoredTensor]:
    """Returns the arrays of these shapes in a tensor, each of whose `groups` has some rows of each array in turn."""
    if groups == 1:
        return tensor.divide(shapes)
    of_group = [(rows // groups, *inner) for rows, *inner in shapes]
    if isinstance(tensor, FileMatrix):
        rows_of_groups = np.arange(tensor.shape[0]).reshape(groups, -1)
        ends = np.cumsum([rows for rows, *_ in of_group])
        return [tensor.take(rows.reshape(-1)) for rows in np.split(rows_of_groups, ends[:-1], axis=1)]
    pieces = tensor.divide(of_group * groups)
    pairs = zip(shapes, (tuple(pieces[i :: len(shapes)]) for i in range(len(shapes))), strict=True)
    first = (tensor.file, tensor.stamp, tensor.offset)
    return [Interleaved(*first, shape, tensor.dtype, pieces=own) for shape, own in pairs]
