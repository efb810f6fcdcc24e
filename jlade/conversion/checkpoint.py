"""A checkpoint in any format: what its files say of a model, and the parameters that its tensors make.

A format is a `Checkpoint`: `huggingface`, `own` and `gguf` have one each, and `formats.find` chooses.
"""

import abc
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer

from jlade.conversion import packed
from jlade.conversion.json_files import Values, refuse_or_warn
from jlade.conversion.parts import Shape, TensorPart, place, quantize
from jlade.conversion.tensors import (
    SCALE,
    Sharding,
    bits_of,
    build_params,
    check_dtype,
    check_finite,
    device_of,
    dtype_of_name,
    expected_tensors,
    first_few,
    place_of,
    scale_shape,
    sharding_for,
)
from jlade.conversion.weight_files import FLOATS, Tensor, check_unchanged
from jlade.models import llama, quantization
from jlade.models.llama import LlamaConfig, LlamaParams
from jlade.models.quantization import FILE, Bits, Int8Matrix, Matrix


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How parameters are made of a checkpoint: the arguments of `load_hf`, `load` and `load_gguf` after the path.

    Attributes:
      dtype: floating type of the parameters, and so of the computation; "auto" for the one in config.json, else that of
        the first tensor, which is float32 for GGUF files. The default is float32 if the parameters go to CPUs, else
        bfloat16.
      sharding: the sharding of all tensors, or a function from a tensor's name in the checkpoint and its shape to a
        sharding. The names are those of Hugging Face's format; in jlade's own the scales of int8 matrices, whose names
        end with "_scale", are tensors too. The default is the default device.
      progress: called after each tensor with its bytes in the file.
      bits: 8 or 4 for matrices of so many bits (`jlade.models.llama.quantize`), each rounded when it is on its device,
        so only one is held in floating point. Matrices that the files hold in so many bits, or fewer, stay as they are.
        With "file" all that files hold in few bits stay so, embeddings too, and the others are in floating point.
      strict: whether to refuse what otherwise gives a warning. Keys that are known to change the model's output in a
        way that is not supported are always refused.
      mesh: devices to divide the model among, made by `jlade.make_mesh`, instead of `sharding`: the parameters are
        placed as `jlade.models.sharding.put` places them.
      adapter: a directory with a LoRA adapter of PEFT, which is merged into each tensor when it is read: the result is
        that of PEFT's `merge_and_unload` for the model in `dtype`. jlade's own checkpoints take none.
    """

    dtype: jax.typing.DTypeLike | None = None
    sharding: Sharding | None = None
    progress: Callable[[int], None] | None = None
    bits: Bits = None
    strict: bool = False
    mesh: Mesh | None = None
    adapter: str | os.PathLike[str] | None = None


@dataclasses.dataclass(frozen=True)
class Checkpoint(abc.ABC):
    """The files of a model. Headers are read and checked when they are needed, and weights by `load` alone.

    Attributes:
      path: a directory, or a GGUF file.
      format: its name in `jlade inspect`.
    """

    path: pathlib.Path
    format: ClassVar[str]

    @abc.abstractmethod
    def config(self, strict: bool = False) -> LlamaConfig:
        """Returns the configuration, with the end tokens and stop strings of the settings of generation.

        A key that is known to change the model's output is never ignored.

        Warns:
          UserWarning: names the unknown keys, the settings of generation that are ignored, the parts of the model that
            are left out, or the end tokens outside the vocabulary; `strict` refuses them.
        """

    @abc.abstractmethod
    def weights(
        self, strict: bool = False, adapter: str | os.PathLike[str] | None = None
    ) -> tuple[LlamaConfig, Mapping[str, Tensor]]:
        """Returns the configuration and the tensors by name, all checked, with an adapter if there is one."""

    @abc.abstractmethod
    def tokenizer(self, strict: bool = False) -> Tokenizer | None:
        """Returns the tokenizer, None if there is none.

        Warns:
          UserWarning: there is one in a format that is not read, or a setting of it is ignored; `strict` refuses both.
        """

    @abc.abstractmethod
    def chat_tokenizer(self) -> Any:
        """Returns the tokenizer of transformers, which renders chat templates.

        Raises:
          ValueError: when transformers is missing, or the files are broken.
        """

    @property
    @abc.abstractmethod
    def has_chat_template(self) -> bool:
        """Whether there is a chat template."""

    @property
    @abc.abstractmethod
    def generation(self) -> Values:
        """The settings of generation, by the keys of generation_config.json."""

    @property
    @abc.abstractmethod
    def model_type(self) -> str:
        """The family, as the files name it."""

    def auto_dtype(self, dtype: jax.typing.DTypeLike | None) -> jax.typing.DTypeLike | None:
        """Returns `dtype`, or in the place of "auto" the one that the files name, if they name one."""
        return dtype

    @abc.abstractmethod
    def copy_metadata(self, target: pathlib.Path) -> None:
        """Gives its metadata to a directory that `save` or `save_hf` has written with its parameters, in any dtype."""

    def dtype(self, dtype: jax.typing.DTypeLike | None, tensors: Mapping[str, Tensor], device: jax.Device) -> np.dtype:
        """Returns the dtype of the parameters on a device, given that of `LoadOptions`."""
        return check_dtype(self.auto_dtype(dtype), _first_dtype(tensors), self.path, device)

    def load(self, options: LoadOptions) -> LlamaParams:
        """Returns the parameters.

        All names, shapes and types are checked first. Then the tensors are read and moved to their devices one at a
        time. A process reads only the parts that its devices hold.

        Raises:
          ValueError: names the file, and the key or the tensor, that is missing, broken or not supported; the model
            cannot be divided among the devices of `mesh`; both `sharding` and `mesh` are given.

        Warns:
          UserWarning: names what is ignored: unknown keys, parts of the model besides text, end tokens outside the
            vocabulary, layers beyond the last, an index of files that are not there, an adapter; names the tensors with
            NaN or infinite values, and their rows, and those that `bits` rounds again.
        """
        config, tensors = self.weights(options.strict, options.adapter)
        options = dataclasses.replace(options, dtype=self.auto_dtype(options.dtype))
        return read_params(tensors, config, self.path, options)


def read_params(
    tensors: Mapping[str, Tensor], config: LlamaConfig, source: str | os.PathLike[str], options: LoadOptions
) -> LlamaParams:
    """Returns the parameters of a model, given its checked tensors by name; matrices in int8 come with their scales.

    `source` names the tensors in messages.
    """
    quantization.check_bits(options.bits, (*quantization.BITS, FILE))
    sharding = sharding_for(config, options.sharding, options.mesh)
    target = check_dtype(options.dtype, _first_dtype(tensors), source, device_of(sharding, config))
    broken: dict[str, set[int]] = {}
    again: list[str] = []

    def read(name: str, shape: Shape, dtype: np.dtype) -> jax.Array:
        def read_parts(parts: Sequence[TensorPart]) -> list[np.ndarray]:
            values, rows = tensors[name].read(name, dtype, parts)
            if rows:
                broken[name] = rows
            return values

        return place(shape, dtype, place_of(sharding, name, shape), read_parts)

    def read_matrix(name: str, shape: Shape) -> Matrix:
        tensor, new_bits = tensors[name], bits_of(name, config, options.bits)
        matrix: Matrix
        if name + SCALE in tensors:
            scales = read(name + SCALE, scale_shape(shape), np.dtype(np.float32))
            matrix = Int8Matrix(read(name, shape, np.dtype(np.int8)), scales)
        elif packed.keeps(tensor, new_bits):
            stored = tensor.matrix(name)
            if outputs := packed.broken_outputs(stored):
                broken[name] = outputs
            matrix = packed.place(stored, place_of(sharding, name, shape))
        else:
            new_bits = None if new_bits == FILE else new_bits
            if new_bits is not None and isinstance(tensor, packed.PackedTensor) and tensor.bits <= new_bits:
                again.append(name)
            array = read(name, shape, np.dtype(dtype_of_name(name, config, target)))
            matrix = array if new_bits is None else quantize(array, new_bits)
        jax.block_until_ready(matrix)  # so that the host holds one tensor at a time
        if options.progress is not None:
            options.progress(sum(tensors[each].num_bytes for each in (name, name + SCALE) if each in tensors))
        return matrix

    params = build_params(config, read_matrix)
    check_unchanged(tensors.values())
    if again:
        said = f"{len(again)} matrices whose groups are not of as many adjacent inputs, as by act-order: "
        said += first_few(again)
        refuse_or_warn(options.strict, source, f"to round again {said}", f"{source}: rounded again are {said}")
    shapes = expected_tensors(config)
    shapes |= {name + SCALE: scale_shape(shape) for name, shape in shapes.items() if name + SCALE in tensors}
    check_finite(tensors[next(iter(broken))].file if broken else source, broken, shapes, options.strict)
    return params


def loaded_shapes(
    tensors: Mapping[str, Tensor], config: LlamaConfig, dtype: np.dtype, bits: Bits = None
) -> LlamaParams:
    """Returns the parameters that `read_params` returns, with a `jax.ShapeDtypeStruct` in the place of each array.

    Tensors that are not there are taken to be in floating point.
    """

    def shape_of(name: str, shape: Shape) -> Any:
        if name + SCALE in tensors:
            scale = jax.ShapeDtypeStruct(scale_shape(shape), jnp.float32)
            return Int8Matrix(jax.ShapeDtypeStruct(shape, jnp.int8), scale)  # type: ignore[arg-type]
        tensor = tensors.get(name)
        if packed.keeps(tensor, bits_of(name, config, bits)):
            return tensor.shapes
        return jax.ShapeDtypeStruct(shape, dtype_of_name(name, config, dtype))

    params = build_params(config, shape_of)
    return params if bits in (None, FILE) else jax.eval_shape(functools.partial(llama.quantize, bits=bits), params)


def _first_dtype(tensors: Mapping[str, Tensor]) -> str:
    """Returns the dtype of the first tensor in floating point of the first file, as transformers takes it.

    It is float32 where there are no tensors: weights of the Hub may not have been fetched.
    """
    floating = [(tensor.file, name) for name, tensor in tensors.items() if tensor.value_dtype in FLOATS.values()]
    weights = [each for each in floating if not each[1].endswith(SCALE)]
    return tensors[min(weights)[1]].value_dtype if weights else "float32"
