"""jlade's own checkpoints: config.json as in Hugging Face's, and the arrays of the parameters, int8 included.

The weights are those of safetensors files whose names begin with "jlade", which no other program writes or reads.
"""

import os
import pathlib
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from jlade.conversion import huggingface, orbax
from jlade.conversion.hf_config import auto_dtype, read_config, write_configs
from jlade.conversion.hf_experts import ExpertTensor
from jlade.conversion.hf_tensors import check_kind, check_names
from jlade.conversion.tensors import SCALE, Sharding, array_shapes, named_arrays
from jlade.conversion.weight_files import FLOATS, SINGLE_FILE, Tensor, stored_tensors, write_tensors
from jlade.files import written_whole
from jlade.models.llama import LlamaConfig, LlamaParams

OWN_FILE = "jlade.safetensors"


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a directory is a checkpoint written by `save`, or in Orbax's format.

    Raises:
      ValueError: there are two checkpoints.
    """
    directory = pathlib.Path(path)
    kinds = {name: single for single in (OWN_FILE, SINGLE_FILE) for name in (f"{single}.index.json", single)}
    kinds[orbax.METADATA] = orbax.ARRAYS
    found = {kind: name for name, kind in kinds.items() if (directory / name).exists()}
    if len(found) > 1:
        raise ValueError(f"{directory} has two checkpoints, {' and '.join(found.values())}: remove one of them")
    return bool(found) and SINGLE_FILE not in found


def save(params: LlamaParams, path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> None:
    """Writes a checkpoint. The directory appears whole or not at all.

    Args:
      params: the parameters, of any sharding and dtype, int8 included.
      path: a new directory.
      progress: called with the bytes of each array when its file is written.

    Raises:
      ValueError: if `path` exists, or the parameters are divided among processes.
    """
    with written_whole(path) as directory:
        directory.mkdir()
        write_configs(params.config, params.norm.dtype.name, directory)
        write_tensors(named_arrays(params).items(), directory, OWN_FILE, progress)


def load(
    path: str | os.PathLike[str],
    dtype: jax.typing.DTypeLike | None = None,
    sharding: Sharding | None = None,
    progress: Callable[[int], None] | None = None,
    int8: bool = False,
    strict: bool = False,
    mesh: Mesh | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> LlamaParams:
    """Returns the parameters of a checkpoint that `save`, or `jlade convert --to orbax`, wrote.

    Like `load_hf` it holds one array at a time besides the parameters, and reads only the parts of this process. The
    arguments are those of `load_hf`, except that:

    * A function `sharding` is also called for the scales of int8 matrices, whose names end with "_scale".
    * A checkpoint in int8 stays in int8 without `int8`.
    * An adapter is refused.

    Raises:
      ValueError, warns: as `load_hf` does; Orbax is not installed where the arrays are in its format.
    """
    directory = pathlib.Path(path)
    if not is_checkpoint(directory):
        raise ValueError(f"path must be a directory written by jlade.conversion.save, got {os.fspath(path)!r}")
    config, tensors = headers_of(directory, strict, adapter)
    dtype = auto_dtype(dtype, directory)
    return huggingface.read_params(tensors, config, directory, dtype, sharding, progress, int8, strict, mesh)


def headers_of(
    directory: pathlib.Path, strict: bool = False, adapter: str | os.PathLike[str] | None = None
) -> tuple[LlamaConfig, Mapping[str, Tensor]]:
    """Returns the configuration of a checkpoint in any format and its tensors by name, all checked.

    Raises:
      ValueError, warns: see `load` and `load_hf`.
    """
    if not is_checkpoint(directory):
        return huggingface.headers_of(directory, strict, adapter)
    if adapter is not None:
        raise ValueError(
            f"adapter must be None for {directory}, a checkpoint of jlade: merge it into the original, "
            f"`jlade convert ORIGINAL NEW_DIR --adapter {os.fspath(adapter)}`"
        )
    config = read_config(directory, strict)
    is_orbax = (directory / orbax.METADATA).exists()
    stored = orbax.stored_tensors(directory) if is_orbax else stored_tensors(directory, strict, OWN_FILE)
    arrays = array_shapes(config, np.dtype("float32"), huggingface.holds_int8(stored))
    check_names(directory, arrays.keys() - stored.keys(), stored.keys() - arrays.keys())
    found: dict[str, Tensor] = {}
    for name, array in arrays.items():
        accepted = ("I8",) if array.dtype == np.int8 else ("F32",) if name.endswith(SCALE) else FLOATS
        tensor = stored[name]
        check_kind(name, tensor, array.shape, accepted)
        is_stack = len(array.shape) == 3  # of experts or heads
        found[name] = ExpertTensor(tensor.rows(), slice(None), False, array.shape) if is_stack else tensor
    return config, found
