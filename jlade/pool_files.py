"""N-gram pools on disk: one safetensors file with one array."""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jlade.lookahead.ngram_pool import NGramPool

ARRAY = "ngrams"


def save_pool(pool: NGramPool, path: str | os.PathLike[str]) -> None:
    """Writes a pool, of one row [V, G, N-1] or of several [B, V, G, N-1]; the file appears whole or not at all."""
    if not isinstance(pool, NGramPool):
        raise TypeError(f"pool must be an NGramPool, got {type(pool).__name__}")
    file = pathlib.Path(path)
    partial = file.with_name(file.name + ".partial")
    try:
        save_file({ARRAY: np.ascontiguousarray(jax.device_get(pool.ngrams))}, partial)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def load_pool(path: str | os.PathLike[str]) -> NGramPool:
    """Reads a pool that `save_pool` wrote.

    Raises:
      ValueError: when the file is not there or holds no pool.
    """
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"path must be a file written by jlade.save_pool, got {os.fspath(path)!r}: {error}") from error
    ngrams = arrays.get(ARRAY)
    if ngrams is None or ngrams.dtype != np.int32 or ngrams.ndim not in (3, 4):
        found = {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
        raise ValueError(f"{os.fspath(path)} holds no pool: accepted is {ARRAY} int32[..., V, G, N-1], got {found}")
    if ngrams.size and (ngrams.min() < NGramPool.EMPTY or ngrams.max() >= ngrams.shape[-3]):
        raise ValueError(
            f"{os.fspath(path)} holds token ids from {ngrams.min()} to {ngrams.max()}; accepted are -1 to "
            f"{ngrams.shape[-3] - 1}"
        )
    return NGramPool(jnp.asarray(ngrams))
