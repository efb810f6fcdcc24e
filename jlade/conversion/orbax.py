"""jlade's own checkpoints with their arrays in Orbax's format, for other programs in JAX; needs the extra `orbax`."""

import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jlade.conversion.hf_config import write_configs
from jlade.conversion.memory import NAMES, HeldTensor
from jlade.conversion.tensors import named_arrays
from jlade.conversion.weight_files import StoredTensor, stamp_of
from jlade.files import written_whole
from jlade.models.llama import LlamaParams

ARRAYS = "params"  # the subdirectory of Orbax's files
METADATA = f"{ARRAYS}/_METADATA"  # without it there are no arrays
CHUNK_BYTES = 2**20  # of an array's chunks, which are read as a whole


def library() -> Any:
    """Returns Orbax, or raises a ValueError where it is not installed."""
    try:
        import orbax.checkpoint  # takes a second
    except ImportError as error:
        raise ValueError("checkpoints in Orbax's format need orbax-checkpoint: pip install 'jlade[orbax]'") from error
    return orbax.checkpoint


def save(params: LlamaParams, path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> None:
    """Writes a checkpoint; see `jlade.conversion.save`. `progress` is called once, at the end."""
    ocp, arrays = library(), named_arrays(params)
    # Orbax divides only by divisors of the dimensions. One without small divisors would give thousands of tiny chunks.
    whole = {name for name, array in arrays.items() if array.ndim < 2 or any(size % 64 for size in array.shape[-2:])}
    save_args = {name: ocp.SaveArgs(chunk_byte_size=None if name in whole else CHUNK_BYTES) for name in arrays}
    with written_whole(path) as directory, ocp.StandardCheckpointer() as checkpointer:
        directory.mkdir()
        write_configs(params.config, params.norm.dtype.name, directory)
        checkpointer.save((directory / ARRAYS).absolute(), arrays, save_args=save_args)
    if progress is not None:
        progress(sum(array.nbytes for array in arrays.values()))


def stored_tensors(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns the arrays of a checkpoint by name. Only metadata is read."""
    ocp, arrays = library(), (directory / ARRAYS).absolute()
    import tensorstore  # reads parts of arrays; Orbax would read whole ones

    def read(array: Any) -> np.ndarray:
        try:
            values: np.ndarray = array.read().result()
        except Exception as error:  # Orbax and TensorStore share no class of errors
            raise ValueError(f"{arrays} cannot be restored: {error}") from error
        return values

    arrays_by_name: dict[str, Any] = {}
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            names = checkpointer.metadata(arrays).item_metadata.tree
        for name in names:
            place = {"driver": "ocdbt", "base": f"file://{arrays}/", "path": f"{name}/"}
            array: Any = tensorstore.open({"driver": "zarr", "kvstore": place}, read=True).result()
            if math.prod(array.chunk_layout.read_chunk.shape) > math.prod(array.shape):  # a small file may say so
                raise ValueError(f"{name} has chunks that are larger than the array")
            arrays_by_name[name] = array
    except Exception as error:
        raise ValueError(f"{arrays} is not a checkpoint of Orbax: {error}") from error
    stamp = stamp_of(arrays)
    return {
        name: HeldTensor(arrays, stamp, 0, tuple(array.shape), NAMES.get(array.dtype.name, "other"), array, read)
        for name, array in arrays_by_name.items()
    }
