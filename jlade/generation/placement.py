"""Where a request is decoded: the model, and the devices that it runs on."""

import dataclasses

from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.mesh import DATA, MODEL
from jlade.models import kv_rounding, sharding
from jlade.models.base import Decoder, Params
from jlade.models.llama import Llama, LlamaParams


def check(
    params: Params, decoder: Decoder | None, mesh: Mesh | None, kv_dtype: str | None = None
) -> tuple[Decoder, Mesh | None]:
    """Returns the decoder for its devices, and the mesh with the axes of `MODEL`: that of the parameters by default.

    Its cache is of `kv_dtype`, if that is given.
    """
    if decoder is None and isinstance(params, LlamaParams):
        decoder = Llama(params.config)
    if decoder is None:
        if not hasattr(params, "decoder"):
            raise TypeError(
                f"params of type {type(params).__name__} do not say which model they belong to: pass decoder=, or "
                f"parameters made by jlade.load"
            )
        decoder = params.decoder
    decoder = with_cache_in(kv_dtype, decoder)
    mesh = mesh_lib.mesh_of(params) if mesh is None else mesh
    if isinstance(decoder, Llama):
        mesh = None if mesh is None else sharding.mesh_for(decoder.config, mesh)
        return decoder.on(params, mesh), mesh
    mesh = None if mesh is None else mesh_lib.split(mesh, None)
    if mesh_lib.size(mesh, *MODEL) > 1:
        raise ValueError(
            f"mesh has model={mesh_lib.size(mesh, *MODEL)}, and only jlade's own models can be divided, not "
            f"{type(decoder).__name__}: use these devices for data or lookahead"
        )
    return decoder, mesh


def with_cache_in(kv_dtype: str | None, decoder: Decoder) -> Decoder:
    """Returns the decoder with a cache of `kv_dtype`, None for that of the decoder.

    Raises:
      ValueError: `kv_dtype` is no dtype of a cache, or not one that this decoder can have.
    """
    kv_rounding.check(kv_dtype)
    if kv_dtype is None:
        return decoder
    if not isinstance(decoder, Llama):
        raise ValueError(
            f"kv_dtype={kv_dtype!r} is for jlade's own models, and {type(decoder).__name__} makes its own cache: "
            "leave it out"
        )
    if decoder.kv_dtype not in (None, kv_dtype):
        raise ValueError(f"kv_dtype must be that of the decoder, {decoder.kv_dtype!r}, or None; got {kv_dtype!r}")
    return dataclasses.replace(decoder, kv_dtype=kv_dtype)


def check_batch(batch_size: int, mesh: Mesh | None) -> None:
    """Raises a ValueError if the axis `data` of the mesh does not divide the batch."""
    groups = mesh_lib.size(mesh, DATA)
    if batch_size % groups:
        accepted = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        raise ValueError(
            f"mesh has data={groups}, which does not divide a batch of {batch_size}: make the batch a multiple of "
            f"{groups}, or data one of {', '.join(map(str, accepted))}"
        )
