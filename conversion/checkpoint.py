"""jlade's own checkpoints: config.json as Hugging Face writes it, and the arrays in Orbax's format.

Unlike safetensors files they are written and restored by every process and device for its own part.
"""

import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jlade.conversion.hf_config import read_config, write_configs
from jlade.conversion.huggingface import (
    Sharding,
    build_params,
    check_dtype,
    expected_tensors,
    named_arrays,
    place_of,
    some,
)
from jlade.conversion.whole import written_whole
from jlade.models.llama import LlamaConfig, LlamaParams

ARRAYS = "params"  # the directory of Orbax's files within the checkpoint's


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Tells jlade's own checkpoints from other directories."""
    return (pathlib.Path(path) / ARRAYS).is_dir()


def save(params: LlamaParams, path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> None:
    """Writes a checkpoint; the directory appears whole or not at all.

    Args:
      params: with any sharding, of any dtype.
      path: a directory that is not there yet.
      progress: is called with the bytes of each array, once all are written.

    Raises:
      ValueError: when `path` exists.
    """
    import orbax.checkpoint as ocp  # takes a second to import

    with written_whole(path) as directory:
        write_configs(params.config, params.embedding.dtype.name, directory)
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
) -> LlamaParams:
    """Restores a checkpoint that `save` wrote. For the arguments see `load_hf`; `progress` is called once all is read.

    Raises:
      ValueError: names the directory, and the config key or the array, that is missing, broken or not supported.
    """
    import orbax.checkpoint as ocp

    directory = pathlib.Path(path)
    if not is_checkpoint(directory):
        raise ValueError(f"path must be a directory written by jlade.conversion.save, got {os.fspath(path)!r}")
    config = read_config(directory)
    shapes, dtypes = expected_tensors(config), stored_dtypes(directory, config)
    target = check_dtype(dtype, set(dtypes.values()), directory)
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    targets = {
        name: jax.ShapeDtypeStruct(shape, target, sharding=place_of(sharding, name, shape) or default)
        for name, shape in shapes.items()
    }
    arrays = (directory / ARRAYS).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            restored = checkpointer.restore(arrays, targets)
        except Exception as error:  # of Orbax and TensorStore, which have no common kind
            raise ValueError(f"{arrays} cannot be restored: {error}") from error
    if progress is not None:
        for name, shape in shapes.items():
            progress(math.prod(shape) * jnp.dtype(dtypes[name]).itemsize)
    return build_params(config, lambda name, shape: restored[name])


def stored_dtypes(directory: pathlib.Path, config: LlamaConfig) -> dict[str, str]:
    """Returns the dtype of every array of a checkpoint, from its metadata alone.

    Raises:
      ValueError: when the metadata is broken, or the arrays are not those of `config`.
    """
    import orbax.checkpoint as ocp

    arrays, expected = (directory / ARRAYS).absolute(), expected_tensors(config)
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored: dict[str, Any] = checkpointer.metadata(arrays).item_metadata.tree
            shapes = {name: tuple(array.shape) for name, array in stored.items()}
            dtypes = {name: array.dtype.name for name, array in stored.items()}
        except Exception as error:
            raise ValueError(f"{arrays} is not a checkpoint of Orbax: {error}") from error
    if wrong := sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name)):
        raise ValueError(
            f"{arrays}: {some(wrong)} differ from what config.json implies: {wrong[0]} has shape "
            f"{shapes.get(wrong[0])}, expected is {expected.get(wrong[0])}"
        )
    return dtypes
