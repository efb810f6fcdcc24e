"""jlade's own checkpoints with their arrays in Orbax's format, which other programs in JAX read.

Each array is divided into chunks of up to 1 MiB. Orbax comes with the extra `orbax`.
"""

import logging
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jlade.conversion.hf_config import write_configs
from jlade.conversion.memory import NAMES, HeldTensor
from jlade.conversion.parts import Shape
from jlade.conversion.tensors import named_arrays
from jlade.conversion.weight_files import StoredTensor, stamp_of
from jlade.files import written_whole
from jlade.models.llama import LlamaParams

ARRAYS = "params"  # the subdirectory of Orbax's files
METADATA = f"{ARRAYS}/_METADATA"  # without it there are no arrays
CHUNK_BYTES = 2**20  # of an array's chunks, which are read as a whole


def library() -> Any:
    """Returns the package.

    Raises:
      ValueError: it is not installed.
    """
    try:
        import orbax.checkpoint  # takes a second to import
    except ImportError as error:
        raise ValueError("checkpoints in Orbax's format need orbax-checkpoint: pip install 'jlade[orbax]'") from error
    return orbax.checkpoint


def save(params: LlamaParams, path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> None:
    """Writes a checkpoint; see `jlade.conversion.save`. `progress` is called when all arrays are written."""
    ocp = library()
    if not all(array.is_fully_addressable for array in jax.tree.leaves(params)):
        raise ValueError("params are divided among processes, which cannot be written: load them in one process")
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # errors are raised
    try:
        with written_whole(path) as directory, ocp.StandardCheckpointer() as checkpointer:
            directory.mkdir()
            write_configs(params.config, params.norm.dtype.name, directory)
            arrays = named_arrays(params)
            save_args = {name: ocp.SaveArgs(chunk_byte_size=chunk_bytes(array.shape)) for name, array in arrays.items()}
            checkpointer.save((directory / ARRAYS).absolute(), arrays, save_args=save_args)
            checkpointer.wait_until_finished()
    finally:
        logger.setLevel(level)
    if progress is not None:
        for array in jax.tree.leaves(params):
            progress(array.nbytes)


def chunk_bytes(shape: Shape) -> int | None:
    """Returns the largest size of an array's chunks, None for one chunk for each part on a device.

    Orbax divides only by divisors of the dimensions. One without small divisors would give thousands of tiny chunks.
    """
    return CHUNK_BYTES if len(shape) > 1 and not any(size % 64 for size in shape[-2:]) else None


def stored_tensors(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns the arrays of a checkpoint by name. Only metadata is read.

    Raises:
      ValueError: if the metadata is broken, or Orbax is not installed.
    """
    ocp = library()
    import tensorstore  # Orbax's own, of which it reads whole arrays, or all at once

    arrays = (directory / ARRAYS).absolute()

    def read(array: Any) -> np.ndarray:
        try:
            values: np.ndarray = array.read().result()
        except Exception as error:  # Orbax and TensorStore share no class of errors
            raise ValueError(f"{arrays} cannot be restored: {error}") from error
        return values

    try:
        with ocp.StandardCheckpointer() as checkpointer:
            names = list(checkpointer.metadata(arrays).item_metadata.tree)
        specs = {
            name: {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": f"file://{arrays}/", "path": f"{name}/"}}
            for name in names
        }
        opening = {name: tensorstore.open(spec, read=True) for name, spec in specs.items()}
        found: dict[str, Any] = {name: future.result() for name, future in opening.items()}
    except Exception as error:
        raise ValueError(f"{arrays} is not a checkpoint of Orbax: {error}") from error
    for name, array in found.items():
        if math.prod(array.chunk_layout.read_chunk.shape) > math.prod(array.shape):
            raise ValueError(f"{arrays}: {name} has chunks that are larger than the array")
    stamp = stamp_of(arrays)
    return {
        name: HeldTensor(arrays, stamp, 0, tuple(array.shape), NAMES.get(array.dtype.name, "other"), array, read)
        for name, array in found.items()
    }
