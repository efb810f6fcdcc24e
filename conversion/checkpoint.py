"""jlade's own checkpoints: config.json as Hugging Face writes it, and the arrays in Orbax's format.

Unlike safetensors files they are written and restored by every process and device for its own part.
"""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jlade.conversion.hf_config import read_config, write_configs
from jlade.conversion.huggingface import (
    SCALE,
    Sharding,
    arrays_of,
    build_params,
    check_dtype,
    expected_tensors,
    named_arrays,
    place_of,
    some,
)
from jlade.conversion.whole import written_whole
from jlade.models.llama import LlamaConfig, LlamaParams, quantize
from jlade.models.quantization import Int8Matrix

ARRAYS = "params"  # the directory of Orbax's files within the checkpoint's


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Tells jlade's own checkpoints from other directories."""
    return (pathlib.Path(path) / ARRAYS).is_dir()


def save(params: LlamaParams, path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> None:
    """Writes a checkpoint; the directory appears whole or not at all.

    Args:
      params: with any sharding, of any dtype, also in int8.
      path: a directory that is not there yet.
      progress: is called with the bytes of each array, once all are written.

    Raises:
      ValueError: when `path` exists.
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
) -> LlamaParams:
    """Restores a checkpoint that `save` wrote. For the arguments see `load_hf`; `progress` is called once all is read.

    A checkpoint in int8 stays so. One that is not is read whole before it is put in int8.

    Raises:
      ValueError: names the directory, and the config key or the array, that is missing, broken or not supported.
    """
    import orbax.checkpoint as ocp

    directory = pathlib.Path(path)
    if not is_checkpoint(directory):
        raise ValueError(f"path must be a directory written by jlade.conversion.save, got {os.fspath(path)!r}")
    config = read_config(directory)
    dtypes = stored_dtypes(directory, config)
    target = check_dtype(dtype, floating_dtypes(dtypes), directory)
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    targets = {
        name: array.update(sharding=place_of(sharding, name, array.shape) or default)
        for name, array in arrays_of(config, target, "int8" in dtypes.values()).items()
    }
    arrays = (directory / ARRAYS).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            restored = checkpointer.restore(arrays, targets)
        except Exception as error:  # of Orbax and TensorStore, which have no common kind
            raise ValueError(f"{arrays} cannot be restored: {error}") from error
    if progress is not None:
        for name, array in targets.items():
            progress(array.size * jnp.dtype(dtypes[name]).itemsize)

    def read(name: str, shape: tuple[int, ...]) -> jax.Array | Int8Matrix:
        scale = restored.get(name + SCALE)
        return restored[name] if scale is None else Int8Matrix(restored[name], scale)

    params = build_params(config, read)
    return quantize(params) if int8 else params


def floating_dtypes(dtypes: dict[str, str]) -> set[str]:
    """Returns the dtypes of what is not in int8, scales left out, given those of all arrays."""
    return {dtype for name, dtype in dtypes.items() if dtype != "int8" and not name.endswith(SCALE)}


def stored_dtypes(directory: pathlib.Path, config: LlamaConfig) -> dict[str, str]:
    """Returns the dtype of every array of a checkpoint, scales of int8 matrices included, from its metadata alone.

    Raises:
      ValueError: when the metadata is broken, or the arrays are not those of `config`.
    """
    import orbax.checkpoint as ocp

    arrays = (directory / ARRAYS).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored: dict[str, Any] = checkpointer.metadata(arrays).item_metadata.tree
            shapes = {name: tuple(array.shape) for name, array in stored.items()}
            dtypes = {name: array.dtype.name for name, array in stored.items()}
        except Exception as error:
            raise ValueError(f"{arrays} is not a checkpoint of Orbax: {error}") from error
    expected = expected_tensors(config)
    if "int8" in dtypes.values():
        expected = {name: array.shape for name, array in arrays_of(config, jnp.dtype("float32"), int8=True).items()}
    if wrong := sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name)):
        raise ValueError(
            f"{arrays}: {some(wrong)} differ from what config.json implies: {wrong[0]} has shape "
            f"{shapes.get(wrong[0])}, expected is {expected.get(wrong[0])}"
        )
    return dtypes
