"""jlade's own checkpoints: config.json as in Hugging Face's, and the arrays in Orbax's format.

Each process restores the parts of its devices.
"""

import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.conversion.hf_config import auto_dtype, read_config, write_configs
from jlade.conversion.parts import Shape, quantize
from jlade.conversion.tensors import (
    SCALE,
    Sharding,
    array_shapes,
    build_params,
    check_dtype,
    check_finite,
    device_of,
    expected_tensors,
    first_few,
    is_quantized,
    named_arrays,
    place_of,
    sharding_for,
)
from jlade.files import written_whole
from jlade.mesh import default_device
from jlade.models.llama import LlamaConfig, LlamaParams
from jlade.models.quantization import Int8Matrix

ARRAYS = "params"  # the subdirectory of Orbax's files
CHUNK_BYTES = 2**20  # of an array's chunks, which are read as a whole
BATCH_BYTES = 2**26  # of the arrays restored at once, or those of the largest array


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

    if not all(array.is_fully_addressable for array in jax.tree.leaves(params)):
        raise ValueError("params are divided among processes, which save cannot write: load them in one process")
    with written_whole(path) as directory:
        directory.mkdir()
        write_configs(params.config, params.norm.dtype.name, directory)
        with ocp.StandardCheckpointer() as checkpointer:
            arrays = named_arrays(params)
            save_args = {name: ocp.SaveArgs(chunk_byte_size=chunk_bytes(array.shape)) for name, array in arrays.items()}
            checkpointer.save((directory / ARRAYS).absolute(), arrays, save_args=save_args)
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
    mesh: Mesh | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> LlamaParams:
    """Returns the parameters of a checkpoint that `save` wrote.

    Arrays are restored and moved to their devices some at a time, together no larger than the largest or 64 MiB.
    The arguments are those of `load_hf`, except that:

    * A function `sharding` is also called for the scales of int8 matrices, whose names end with "_scale".
    * A checkpoint in int8 stays in int8 without `int8`.
    * An adapter is refused.

    Raises:
      ValueError: names the directory, and the config key or the array, that is missing, broken or not supported; the
        model cannot be divided among the devices of `mesh`; both `sharding` and `mesh` are given.

    Warns:
      UserWarning: names the unknown keys of config.json; names the arrays with NaN or infinite values, and their rows.
    """
    directory = pathlib.Path(path)
    if not is_checkpoint(directory):
        raise ValueError(f"path must be a directory written by jlade.conversion.save, got {os.fspath(path)!r}")
    if adapter is not None:
        raise ValueError(
            f"adapter must be None for {directory}, a checkpoint of jlade: merge it into the original, "
            f"`jlade convert ORIGINAL NEW_DIR --adapter {os.fspath(adapter)}`"
        )
    config = read_config(directory, strict)
    sharding = sharding_for(config, sharding, mesh)
    dtypes = stored_dtypes(directory, config)
    target = check_dtype(auto_dtype(dtype, directory), floating_dtype(dtypes), directory, device_of(sharding, config))
    default = jax.sharding.SingleDeviceSharding(default_device())
    targets = {
        name: array.update(sharding=place_of(sharding, name, array.shape) or default)
        for name, array in array_shapes(config, target, "int8" in dtypes.values()).items()
    }
    arrays: dict[str, Any] = {}
    broken: dict[str, set[int]] = {}
    for restored in _restore(directory, targets):
        while restored:
            name, array = restored.popitem()  # so that each array in floating point is freed when it is quantized
            if rows := _broken_rows(array):
                broken[name] = rows
            in_int8 = int8 and array.dtype != jnp.int8 and is_quantized(name, config)
            arrays[name] = jax.block_until_ready(quantize(array) if in_int8 else array)
            if progress is not None:
                progress(array.size * np.dtype(dtypes[name]).itemsize)

    def read(name: str, shape: Shape) -> jax.Array | Int8Matrix:
        return Int8Matrix(arrays[name], arrays[name + SCALE]) if name + SCALE in arrays else arrays[name]

    check_finite(directory, broken, {name: array.shape for name, array in targets.items()}, strict)
    return build_params(config, read)


def _broken_rows(array: jax.Array) -> set[int]:
    """Returns the rows with NaN or infinite elements."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return set()
    return set(np.flatnonzero(~mesh_lib.fetch(_are_finite(array))).tolist())


@jax.jit
def _are_finite(array: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(array), axis=tuple(range(1, array.ndim)))


def _restore(directory: pathlib.Path, targets: dict[str, jax.ShapeDtypeStruct]) -> Iterator[dict[str, jax.Array]]:
    """Yields some arrays at a time, by name: the host holds those that Orbax restores at once."""
    import orbax.checkpoint as ocp

    arrays = (directory / ARRAYS).absolute()
    sizes = {name: target.size * target.dtype.itemsize for name, target in targets.items()}
    most = max(BATCH_BYTES, *sizes.values())
    batches: list[dict[str, jax.ShapeDtypeStruct]] = [{}]
    for name, target in targets.items():
        if sum(map(sizes.__getitem__, batches[-1])) + sizes[name] > most:
            batches.append({})
        batches[-1][name] = target
    # An array is read in its chunks, whose size the files give; its values may be wider than those of the parameters.
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=1 + 4 * most // 10**9)
    with ocp.Checkpointer(handler) as checkpointer:
        for batch in batches:
            how = ocp.checkpoint_utils.construct_restore_args(batch)
            try:
                restored = checkpointer.restore(
                    arrays, ocp.args.PyTreeRestore(item=batch, restore_args=how, partial_restore=True)
                )
            except Exception as error:  # Orbax and TensorStore share no class of errors
                raise ValueError(f"{arrays} cannot be restored: {error}") from error
            yield restored


def chunk_bytes(shape: Shape) -> int | None:
    """Returns the largest size of an array's chunks, None for one chunk for each part on a device.

    Orbax divides only by divisors of the dimensions. One without small divisors would give thousands of tiny chunks.
    """
    return CHUNK_BYTES if len(shape) > 1 and not any(size % 64 for size in shape[-2:]) else None


def floating_dtype(dtypes: Mapping[str, str]) -> str:
    """Returns the dtype of the arrays that are neither in int8 nor its scales, given the dtype of each array."""
    return next(dtype for name, dtype in dtypes.items() if dtype != "int8" and not name.endswith(SCALE))


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
