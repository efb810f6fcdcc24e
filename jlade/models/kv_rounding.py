"""Keys and values in 8 bits: a quarter of the bytes of float32, half of those of bfloat16.

Each vector, that of a head and a token, is rounded once, where it is made: to 8-bit numbers times a float32 scale.
Attention to the tokens of a block reads rounded vectors too, so that no text depends on its division into blocks.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = INT8, FLOAT8 = "int8", "float8_e4m3fn"
MAX_ROUNDED = {INT8: 127.0, FLOAT8: 448.0}  # magnitude of a rounded element
# Arrays hold the bits of floating-point numbers: to scatter these, XLA for CPUs converts the whole cache to 16 bits.
TILE = 32  # entries of an array of bytes that TPUs hold together: smaller parts are in another layout
STORED = {INT8: jnp.int8, FLOAT8: jnp.uint8}


def check(kv_dtype: Any) -> None:
    """Raises a ValueError if `kv_dtype` is no dtype of a cache."""
    if kv_dtype is not None and kv_dtype not in DTYPES:
        raise ValueError(
            f"kv_dtype must be {', '.join(map(repr, DTYPES))}, or None for the dtype of the model; got {kv_dtype!r}"
        )


def round_all(arrays: Sequence[jax.Array], kv_dtype: str, splits: Sequence[int] = ()) -> tuple[jax.Array, ...]:
    """Returns keys and values, or either, rounded, followed by the scales of each; arguments are those of `rounded`."""
    pairs = [rounded(array, kv_dtype, splits) for array in arrays]
    return (*(numbers for numbers, _ in pairs), *(scales for _, scales in pairs))


def numbers(stored: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the 8-bit numbers of an array of `STORED` in a floating-point dtype, which holds them exactly."""
    if stored.dtype == STORED[FLOAT8]:
        stored = jax.lax.bitcast_convert_type(stored, FLOAT8)
    return stored.astype(dtype)


def rounded(x: jax.Array, kv_dtype: str, splits: Sequence[int] = ()) -> tuple[jax.Array, jax.Array]:
    """Returns the 8-bit numbers [B, T, KH, D], as `STORED`, and float32 scales [B, T, KH] of vectors [B, T, KH, D].

    No element changes by more than half the scale in int8, and by more than 2^-4 of itself or 2^-10 of the scale in
    float8_e4m3fn. A vector of zeros has the scale 1. One with NaN or infinite elements has zeros and the scale NaN:
    what sees it is NaN, and what does not see it, but multiplies its elements by zero, is not.

    Args:
      x: keys or values, floating.
      kv_dtype: one of `DTYPES`.
      splits: first elements of the parts after the first, of vectors whose parts each have a scale of their own: a
        latent, the rotated elements and the key of an index, whose magnitudes have nothing in common. KH is then 1, and
        the scales are [B, T, parts].
    """
    parts = jnp.split(x, splits, axis=-1) if splits else [x]
    pairs = [_rounded(part, kv_dtype) for part in parts]
    stored, scales = (jnp.concatenate(each, axis=-1) for each in zip(*pairs, strict=True))
    return stored, scales


def _rounded(x: jax.Array, kv_dtype: str) -> tuple[jax.Array, jax.Array]:
    x = x.astype(jnp.float32)
    is_finite = jnp.all(jnp.isfinite(x), axis=-1)
    scale = jnp.max(jnp.abs(x), axis=-1) / np.float32(MAX_ROUNDED[kv_dtype])
    scale = jnp.where(scale < np.finfo(np.float32).tiny, 1.0, scale)  # processors flush smaller scales to 0
    scaled = jnp.where(is_finite[..., None], x / scale[..., None], 0)
    if kv_dtype == FLOAT8:
        stored = jax.lax.bitcast_convert_type(scaled.astype(FLOAT8), STORED[FLOAT8])
    else:
        stored = jnp.round(scaled).astype(STORED[kv_dtype])
    return stored, jnp.where(is_finite, scale, jnp.nan)


def take_tiles(layer: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """Returns `count` entries of a layer [B, KH, S, D] from `start` on, all multiples of `TILE`, as TPUs hold them."""
    tiles = layer.reshape(*layer.shape[:2], -1, TILE, layer.shape[3])
    taken = jax.lax.dynamic_slice_in_dim(tiles, start // TILE, count // TILE, 2)
    return taken.reshape(*layer.shape[:2], count, layer.shape[3])
