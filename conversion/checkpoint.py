"""jlade's own checkpoints: config.json as in Hugging Face's, and the arrays in Orbax's format.

Unlike with safetensors files, each process and device writes and restores its own part.
"""

import os
import pathlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jlade.conversion.hf_config import read_config, write_configs
from jlade.conversion.tensors import (
    SCALE,
    Shape,
    Sharding,
    array_shapes,
    build_params,
    check_dtype,
    device_of,
    expected_tensors,
    first_few,
    named_arrays,
    place_of,
)
from jlade.devices.sheet import default_device
from jlade.files import written_whole
from jlade.models.llama import LlamaConfig, LlamaParams, quantize
from jlade.models.quantization import Int8Matrix

ARRAYS = "params"  # the subdirectory of Orbax's files


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a directory is a checkpoint written by `save`."""
    return (pathlib.Path(path) / ARRAYS).is_dir()


def save(params: LlamaParams, path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> None:
    """Writes a checkpoint. The directory appears whole or not at all.

    Args:
      params: the parameters, of any sharding and dtype, int8 included.
      path: a new directory.
      progress: called with the bytes of each array when all are written.

    Raises:
      ValueError: if `path` exists.
    """
    import orbax.checkpoint as ocp  # takes a second to import

    with written_whole(path) as directory:
        directory.mkdir()
        write_configs(params.config, params.norm.dtype.name, directory)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((directory / ARRAYS).absolute(), named_arrays(params))
        if progress is not None:
            for array in jax.tree.leaves(params):
                progress(array.nbytes)


def load(
    path: str | os.PathLike[str],
    dtype: jax.typing.DTypeLike | None = None,
    sharding: Sharding | None = None,
    progress: Callable[[int], None] | None = None,
    int8: bool = False,
    strict: bool = False,
) -> LlamaParams:
    """Returns the parameters of a checkpoint that `save` wrote.

    The arguments are those of `load_hf`, except that:

    * `progress` is called when all arrays are read.
    * A function `sharding` is also called for the scales of int8 matrices, whose names end with "_scale".
    * `int8` quantizes after all arrays are read. A checkpoint in int8 stays in int8 without it.

    Raises:
      ValueError: names the directory, and the config key or the array, that is missing, broken or not supported.

    Warns:
      UserWarning: names the unknown keys of config.json.
    """
    import orbax.checkpoint as ocp

    directory = pathlib.Path(path)
    if not is_checkpoint(directory):
        raise ValueError(f"path must be a directory written by jlade.conversion.save, got {os.fspath(path)!r}")
    config = read_config(directory, strict)
    dtypes = stored_dtypes(directory, config)
    target = check_dtype(dtype, floating_dtypes(dtypes), directory, device_of(sharding, config))
    default = jax.sharding.SingleDeviceSharding(default_device())
    targets = {
        name: array.update(sharding=place_of(sharding, name, array.shape) or default)
        for name, array in array_shapes(config, target, "int8" in dtypes.values()).items()
    }
    arrays = (directory / ARRAYS).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            restored = checkpointer.restore(arrays, targets)
        except Exception as error:  # Orbax and TensorStore share no class of errors
            raise ValueError(f"{arrays} cannot be restored: {error}") from error
    if progress is not None:
        for name, array in targets.items():
            progress(array.size * np.dtype(dtypes[name]).itemsize)

    def read(name: str, shape: Shape) -> jax.Array | Int8Matrix:
        array: jax.Array = restored[name]
        return Int8Matrix(array, restored[name + SCALE]) if array.dtype == jnp.int8 else array

    params = build_params(config, read)
    return quantize(params) if int8 else params


def floating_dtypes(dtypes: Mapping[str, str]) -> set[str]:
    """Returns the dtypes of the arrays that are neither in int8 nor its scales, given the dtype of each array."""
    return {dtype for name, dtype in dtypes.items() if dtype != "int8" and not name.endswith(SCALE)}


def stored_dtypes(directory: pathlib.Path, config: LlamaConfig) -> dict[str, str]:
    """Returns the dtype of each array of a checkpoint, by its name in `named_arrays`. Only metadata is read.

    Raises:
      ValueError: if the metadata is broken, or the arrays are not those of `config`.
    """
    import orbax.checkpoint as ocp

    arrays = (directory / ARRAYS).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored = checkpointer.metadata(arrays).item_metadata.tree
            shapes = {name: tuple(array.shape) for name, array in stored.items()}
            dtypes = {name: str(array.dtype.name) for name, array in stored.items()}
        except Exception as error:
            raise ValueError(f"{arrays} is not a checkpoint of Orbax: {error}") from error
    expected = expected_tensors(config)
    if "int8" in dtypes.values():
        expected = {name: array.shape for name, array in array_shapes(config, np.dtype("float32"), int8=True).items()}
    if wrong := sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name)):
        raise ValueError(
            f"{arrays}: {first_few(wrong)} differ from config.json: {wrong[0]} has shape {shapes.get(wrong[0])}, "
            f"expected is {expected.get(wrong[0])}"
        )
    return dtypes
