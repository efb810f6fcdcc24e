"""Hugging Face directories, read and written without torch."""

import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jlade.conversion import adapter as adapters
from jlade.conversion import adapter_config, gguf_weights, hf_experts, hf_quantization, packed
from jlade.conversion.hf_config import auto_dtype, read_config, write_configs
from jlade.conversion.hf_tensors import file_tensors, model_tensors
from jlade.conversion.json_files import read_json, refuse_or_warn
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
    named_arrays,
    place_of,
    scale_shape,
    sharding_for,
)
from jlade.conversion.weight_files import FLOATS, SINGLE_FILE, Tensor, check_unchanged, stored_tensors, write_tensors
from jlade.files import written_whole
from jlade.models import llama, quantization
from jlade.models.llama import LlamaConfig, LlamaParams
from jlade.models.quantization import Int8Matrix, Matrix


def load_hf(
    path: str | os.PathLike[str],
    dtype: jax.typing.DTypeLike | None = None,
    sharding: Sharding | None = None,
    progress: Callable[[int], None] | None = None,
    bits: int | None = None,
    strict: bool = False,
    mesh: Mesh | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> LlamaParams:
    """Returns the parameters of a checkpoint in Hugging Face format.

    All names, shapes and types are checked first. Then the tensors are read and moved to their devices one at a time.
    A process reads only the parts that its devices hold.

    Args:
      path: a directory with config.json and either model.safetensors, or model.safetensors.index.json and the files it
        names. The end tokens come from generation_config.json if it names any.
      dtype: floating type of the parameters, and so of the computation; "auto" for the one in config.json, else that of
        the first tensor. The default is float32 if the parameters go to CPUs, else bfloat16.
      sharding: the sharding of all tensors, or a function from a tensor's name in the checkpoint and its shape to a
        sharding. The default is the default device.
      progress: called after each tensor with its bytes in the file.
      bits: 8 or 4 for matrices of so many bits (`jlade.models.llama.quantize`), each rounded when it is on its device,
        so only one is held in floating point. Matrices that the files hold in so many bits, or fewer, stay as they are.
      strict: whether to refuse what otherwise gives a warning. Keys that are known to change the model's output in a
        way that is not supported are always refused.
      mesh: devices to divide the model among, made by `jlade.make_mesh`, instead of `sharding`: the parameters are
        placed as `jlade.models.sharding.put` places them.
      adapter: a directory with a LoRA adapter of PEFT, which is merged into each tensor when it is read: the result is
        that of PEFT's `merge_and_unload` for the model in `dtype`.

    Raises:
      ValueError: names the file, and the config key or the tensor, that is missing, broken or not supported; the model
        cannot be divided among the devices of `mesh`; both `sharding` and `mesh` are given.

    Warns:
      UserWarning: names what is ignored: unknown keys of config.json, parts of the model besides text, end tokens
        outside the vocabulary, layers beyond the last, an index of files that are not there, an adapter; names the
        tensors with NaN or infinite values, and their rows, and those that `bits` rounds again.
    """
    directory = pathlib.Path(path)
    if not directory.is_dir():
        raise ValueError(f"path must be a directory with a Hugging Face checkpoint, got {os.fspath(path)!r}")
    config, tensors = headers_of(directory, strict, adapter)
    dtype = auto_dtype(dtype, directory)
    return read_params(tensors, config, directory, dtype, sharding, progress, bits, strict, mesh)


def read_params(
    tensors: Mapping[str, Tensor],
    config: LlamaConfig,
    source: str | os.PathLike[str],
    dtype: jax.typing.DTypeLike | None = None,
    sharding: Sharding | None = None,
    progress: Callable[[int], None] | None = None,
    bits: int | None = None,
    strict: bool = False,
    mesh: Mesh | None = None,
) -> LlamaParams:
    """Returns the parameters of a model, given its checked tensors by name; matrices in int8 come with their scales.

    The other arguments are those of `load_hf`. `source` names the tensors in messages.
    """
    quantization.check_bits(bits)
    sharding = sharding_for(config, sharding, mesh)
    target = check_dtype(dtype, first_dtype(tensors), source, device_of(sharding, config))
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
        tensor, new_bits = tensors[name], bits_of(name, config, bits)
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
            if new_bits is not None and isinstance(tensor, packed.PackedTensor) and tensor.bits <= new_bits:
                again.append(name)
            array = read(name, shape, np.dtype(dtype_of_name(name, config, target)))
            matrix = array if new_bits is None else quantize(array, new_bits)
        jax.block_until_ready(matrix)  # so that the host holds one tensor at a time
        if progress is not None:
            progress(sum(tensors[each].num_bytes for each in (name, name + SCALE) if each in tensors))
        return matrix

    params = build_params(config, read_matrix)
    check_unchanged(tensors.values())
    if again:
        said = f"{len(again)} matrices whose groups are not of as many adjacent inputs, as by act-order: "
        said += first_few(again)
        refuse_or_warn(strict, source, f"to round again {said}", f"{source}: rounded again are {said}")
    shapes = expected_tensors(config)
    shapes |= {name + SCALE: scale_shape(shape) for name, shape in shapes.items() if name + SCALE in tensors}
    check_finite(tensors[next(iter(broken))].file if broken else source, broken, shapes, strict)
    return params


def loaded_shapes(
    tensors: Mapping[str, Tensor], config: LlamaConfig, dtype: np.dtype, bits: int | None = None
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
    return params if bits is None else jax.eval_shape(functools.partial(llama.quantize, bits=bits), params)


def headers_of(
    directory: pathlib.Path, strict: bool = False, adapter: str | os.PathLike[str] | None = None
) -> tuple[LlamaConfig, Mapping[str, Tensor]]:
    """Returns the configuration of a directory and its tensors by name, all checked, with an adapter if there is one.

    Its weights may be in a GGUF file. An output matrix that is not the embedding is read to find that out.
    """
    config = read_config(directory, strict)
    tensors: Mapping[str, Tensor]
    if directory in gguf_weights.unfolded:
        tensors = gguf_weights.stored_tensors(directory)
    else:
        settings = hf_quantization.settings_of(read_json(directory / "config.json"))
        stored = hf_quantization.assembled(stored_tensors(directory, strict), settings)
        config, tensors = model_tensors(stored, config, directory, strict)
    if adapter is None:
        adapter_config.say_ignored(directory, strict)
        return config, tensors
    return adapters.merge(config, tensors, adapter, strict)


def first_dtype(tensors: Mapping[str, Tensor]) -> str:
    """Returns the dtype of the first tensor in floating point of the first file, as transformers takes it."""
    floating = [(tensor.file, name) for name, tensor in tensors.items() if tensor.value_dtype in FLOATS.values()]
    return tensors[min(each for each in floating if not each[1].endswith(SCALE))[1]].value_dtype


def save_hf(params: LlamaParams, path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> None:
    """Writes a checkpoint that transformers and `load_hf` read. The directory appears whole or not at all.

    Args:
      params: the parameters, in floating point; the files keep their dtype.
      path: a new directory.
      progress: called with the bytes of each tensor when its file is written.

    Raises:
      ValueError: if `path` exists, or transformers has no such model, or the parameters are in few bits.
    """
    if kinds := quantization.kinds(params):
        raise ValueError(
            f"params must be in floating point, got matrices in {' and '.join(kinds)}: save them with "
            "`jlade.conversion.save`, or load the original checkpoint without bits"
        )
    with written_whole(path) as directory:
        directory.mkdir()
        write_configs(params.config, params.norm.dtype.name, directory)
        write_tensors(_file_arrays(params), directory, SINGLE_FILE, progress, {"format": "pt"})


def _file_arrays(params: LlamaParams) -> Iterator[tuple[str, jax.Array]]:
    """Yields the tensors of files with their names."""
    arrays = named_arrays(params)
    for name, file in file_tensors(params.config).items():
        yield name, file.join(arrays)
    yield from hf_experts.write(params.config, arrays)
