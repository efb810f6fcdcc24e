"""Parameters from the arrays of another JAX program, where they are."""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade import mesh as mesh_lib
from jlade.conversion import hf_config, layouts
from jlade.conversion.hf_experts import ExpertTensor
from jlade.conversion.hf_tensors import (
    Interleaved,
    TransposedTensor,
    check_names,
    is_beyond,
    model_tensors,
    own_names,
    text_part,
)
from jlade.conversion.memory import HeldTensor, hold
from jlade.conversion.parts import Shape
from jlade.conversion.tensors import (
    EMBEDDING,
    OUTPUT,
    build_params,
    check_dtype,
    dtype_of_name,
    name_in_files,
)
from jlade.conversion.weight_files import ConstantTensor, Tensor
from jlade.models.llama import LlamaConfig, LlamaParams

Arrays = Mapping[str, jax.Array]  # by their names, with dots between the keys of a tree
SOURCE = pathlib.Path("tree")  # in the place of a file, for messages
COLLECTION = "params."  # that Flax Linen puts before all names
VALUE = "value", "raw_value"  # the last key of a variable's array in a State of Flax NNX


@mesh_lib.mesh_agnostic
def adopt(tree: Any, config: Any, *, dtype: jax.typing.DTypeLike | None = None) -> LlamaParams:
    """Returns the arrays of a model in another JAX program as parameters for `jlade.generate`.

    The names of the arrays tell their layout: that of Hugging Face checkpoints, for every family that jlade runs, or
    that of tunix, gemma (google-deepmind), keras-hub or MaxText. Arrays that are arranged as jlade's are not copied.
    The others are transposed in one program, which arrays of the same shapes reuse; they stay on their devices, divided
    along the same axes.

    Args:
      tree: arrays of JAX or NumPy in nested or flat dictionaries, such as the parameters of Flax or a State of Flax
        NNX. A key may hold several names with dots, or slashes, between them.
      config: the model: a directory with config.json or the content of that file, a configuration of transformers, or
        `LlamaParams.config` of other parameters.
      dtype: floating type of the parameters, and so of the computation; by default that of the largest array. Arrays
        of another one are converted.

    Raises:
      TypeError: `tree` holds something other than arrays, or `config` is none of these.
      ValueError: names the arrays that are missing, do not belong to the model or have a shape that `config` does not
        imply; or the key of `config` that is not supported.
    """
    arrays: Arrays = _named(tree)
    architecture = _read_config(config)
    largest = max(arrays.values(), key=lambda array: array.size)
    target = check_dtype("auto" if dtype is None else dtype, largest.dtype.name, SOURCE, mesh_lib.device_of(arrays))
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}  # those of NumPy
    layout = layouts.layout_of(arrays)
    if layout is None:
        arrays = own_names(text_part(arrays), architecture)  # type: ignore[arg-type, assignment]
        architecture, arrays = _untied(architecture, arrays)
    shapes = tuple((name, array.shape, array.dtype.name) for name, array in arrays.items())
    structure, taken = _plan(shapes, architecture, target, layout)
    made = iter(_make(arrays, architecture, target, layout) if None in taken else ())
    leaves = [next(made) if name is None else arrays[name] for name in taken]
    params: LlamaParams = jax.tree.unflatten(structure, leaves)
    return params


def _named(tree: Any) -> dict[str, jax.Array]:
    """Returns the arrays of a tree by name."""
    named: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = [str(next(getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name))) for key in path]
        name = ".".join(keys[:-1] if keys[-1:] and keys[-1] in VALUE else keys).replace("/", ".")
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise TypeError(f"tree must hold arrays of JAX or NumPy, got {type(leaf).__name__} at {name or 'its root'}")
        if name in named:
            raise ValueError(f"tree has {name} twice, with dots and with other separators")
        named[name] = leaf  # type: ignore[assignment]
    if not named:
        raise ValueError("tree must hold the arrays of a model, got none")
    while all(name.startswith(COLLECTION) for name in named):
        named = {name.removeprefix(COLLECTION): array for name, array in named.items()}
    return named


def _read_config(config: Any) -> LlamaConfig:
    """Returns the configuration of a model, from a directory, the content of config.json or an object with it."""
    if isinstance(config, LlamaConfig):
        return config
    if isinstance(config, str | os.PathLike):
        return hf_config.read_config(pathlib.Path(config))
    if hasattr(config, "to_json_string"):
        config = json.loads(config.to_json_string())
    if not isinstance(config, Mapping):
        raise TypeError(
            "config must be a directory with config.json, its content, a configuration of transformers or "
            f"`LlamaParams.config`, got {type(config).__name__}"
        )
    return hf_config.check_with_ends(pathlib.Path("config"), config)


def _untied(config: LlamaConfig, arrays: Arrays) -> tuple[LlamaConfig, Arrays]:
    """Returns the configuration and the arrays of a model that ties its embedding, as `hf_tensors.untied` does.

    The two arrays are compared where they are.
    """
    names = [name_in_files(name, config) for name in (EMBEDDING, OUTPUT)]
    if not config.tie_embeddings or any(name not in arrays for name in names):
        return config, arrays
    embedding, output = (arrays[name] for name in names)
    if embedding is not output:
        if isinstance(embedding, jax.core.Tracer) or isinstance(output, jax.core.Tracer):
            raise ValueError(
                f"tree has {' and '.join(names)}, which config ties, and a program does not know their values: leave "
                "the latter out, or set tie_word_embeddings to False"
            )
        if embedding.shape != output.shape or not bool(jnp.array_equal(embedding, output)):
            return dataclasses.replace(config, tie_embeddings=False), arrays
    return config, {name: array for name, array in arrays.items() if name != names[1]}


@functools.lru_cache(maxsize=8)
def _plan(
    shapes: tuple[tuple[str, Shape, str], ...], config: LlamaConfig, dtype: np.dtype, layout: str | None
) -> tuple[jax.tree_util.PyTreeDef, list[str | None]]:
    """Returns the structure of the result of `_convert`, and the name of each array that is a leaf of it as it is."""
    taken: list[str | None] = []

    def trace(arrays: Arrays) -> LlamaParams:
        params = _convert(arrays, config, dtype, layout)
        taken.extend(_taken(params, arrays))
        return params

    arrays = {name: jax.ShapeDtypeStruct(shape, of_array) for name, shape, of_array in shapes}
    return jax.tree.structure(jax.eval_shape(trace, arrays)), taken


@functools.partial(jax.jit, static_argnames=("config", "dtype", "layout"))
def _make(arrays: Arrays, config: LlamaConfig, dtype: np.dtype, layout: str | None) -> list[jax.Array]:
    """Returns the leaves of `_convert` that are not taken as they are: a program copies what it returns unchanged."""
    params = _convert(arrays, config, dtype, layout)
    pairs = zip(jax.tree.leaves(params), _taken(params, arrays), strict=True)
    return [leaf for leaf, name in pairs if name is None]


def _taken(params: LlamaParams, arrays: Arrays) -> list[str | None]:
    """Returns the name of each leaf that is one of the traced arrays, None for the others."""
    names = {id(array): name for name, array in arrays.items()}
    return [names.get(id(leaf)) for leaf in jax.tree.leaves(params)]


def _convert(arrays: Arrays, config: LlamaConfig, dtype: np.dtype, layout: str | None) -> LlamaParams:
    """Returns the parameters that traced arrays in a layout, None for that of Hugging Face, make."""
    if layout is not None:
        return layouts.read(arrays, config, dtype, layout, SOURCE)
    check_names(
        SOURCE,
        (),
        [name for name in arrays if is_beyond(name, config)],
        f"of layers beyond the {config.num_layers} of the model",
    )
    config, tensors = model_tensors(hold(arrays, SOURCE, _on_host), config, SOURCE)

    def read(name: str, shape: Shape) -> jax.Array:
        return _values(name, tensors[name]).reshape(shape).astype(dtype_of_name(name, config, dtype))

    return build_params(config, read)


def _on_host(array: Any) -> np.ndarray:
    raise AssertionError("a program reads no values of its arguments")


def _values(name: str, tensor: Tensor) -> jax.Array:
    """Returns the array of a tensor."""
    if isinstance(tensor, HeldTensor):
        array: jax.Array = tensor.values
        return array
    if isinstance(tensor, ConstantTensor):
        return jnp.full(tensor.shape, tensor.value, jnp.float32)
    if isinstance(tensor, TransposedTensor):
        return _values(name, tensor.stored)[:, tensor.first : tensor.first + tensor.shape[0]].T
    if isinstance(tensor, Interleaved):
        return jnp.concatenate([_values(name, piece) for piece in tensor.pieces])
    if type(tensor) is ExpertTensor:
        experts = jnp.stack([_values(name, expert) for expert in tensor.experts])
        if tensor.is_transposed and experts.ndim == 3:
            return jnp.swapaxes(experts[:, tensor.outputs], 1, 2)
        return experts[..., tensor.outputs]
    raise ValueError(f"{SOURCE}: {name} is quantized: `jlade.load` reads such weights from their files")
