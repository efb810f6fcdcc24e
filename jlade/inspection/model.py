"""A model as its programs are compiled for a device that need not be there: no weights are read."""

import dataclasses
import os
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.conversion import location
from jlade.conversion.hf_config import read_config
from jlade.conversion.tensors import check_dtype, param_shapes
from jlade.errors import check_int
from jlade.mesh import MODEL
from jlade.models import implementations
from jlade.models.architecture import LlamaConfig
from jlade.models.llama import Llama, LlamaParams

Source = LlamaParams | str | os.PathLike[str]  # parameters, or what names a checkpoint


def find(model: Source, dtype: Any, bits: int | None, capacity: int) -> tuple[pathlib.Path | None, LlamaConfig]:
    """Returns the directory of a model, None for parameters, and its configuration.

    Raises:
      ValueError: an argument is out of range, or of no use for parameters.
    """
    if isinstance(model, LlamaParams):
        directory, config = None, model.config
        if dtype is not None or bits is not None:
            raise ValueError("dtype and bits are for a directory; parameters have their own")
    else:
        directory = location.find(model, argument="model")
        config = read_config(directory)
    if check_int("capacity", capacity, 2) > config.max_positions:
        raise ValueError(f"capacity must be at most {config.max_positions}, the model's positions, got {capacity}")
    return directory, config


def shapes(
    model: Source,
    directory: pathlib.Path | None,
    config: LlamaConfig,
    dtype: Any,
    bits: int | None,
    device: jax.Device,
    mesh: Mesh | None = None,
) -> LlamaParams:
    """Returns the shapes of the parameters, for the results of `find` and `targets.find`."""
    if isinstance(model, LlamaParams):
        params: LlamaParams = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
        return params
    assert directory is not None
    return param_shapes(config, check_dtype(dtype, "float32", directory, device), bits, mesh_lib.size(mesh, *MODEL))


def resolved(
    decoder: Llama, params: LlamaParams, device: jax.Device, is_attached: bool, mesh: Mesh | None = None
) -> Llama:
    """Returns a decoder with the implementations that its "auto" stands for on a device, as `targets.find` returns it.

    On a device that is not attached it is the kernel, if there is one for the model.
    """
    if is_attached:
        return decoder.on(params, mesh)
    chosen = implementations.Implementations(decoder.attention, decoder.experts, decoder.products)
    found = implementations.resolve_unattached(decoder.config, chosen, params, device, mesh)
    axes = MODEL if mesh_lib.size(mesh, *MODEL) > 1 else ()
    return dataclasses.replace(decoder, **found._asdict(), axes=axes)
