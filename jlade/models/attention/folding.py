"""The layout that the attention kernels share: heads first, a group's queries as one axis, sizes in full tiles."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jlade.models.attention.operands import Operands


class Folded(NamedTuple):
    """A block of tokens in the layout of the kernels.

    Row g * T + t is token t for the g-th head of the group, so that each KV head is read once for its whole group.
    R and C are padded to multiples with zeros, which the mask hides.
    """

    queries: jax.Array  # [B, KH, R, D]
    keys: jax.Array  # [B, KH, C, D]
    values: jax.Array  # [B, KH, C, D]
    mask: jax.Array  # [1 or B, R, C]
    oldest: jax.Array | None  # [B, R] int32, the first position in the window of each row; None without a window
    sinks: jax.Array | None  # [KH, R] float32
    key_scales: jax.Array | None  # [B, KH, 1, C] float32; None without
    value_scales: jax.Array | None


def fold(operands: Operands, window: int | None, row_multiple: int, column_multiple: int) -> Folded:
    """Returns the block of `operands`, with its mask narrowed to the window."""
    batch_size, block_size, heads, head_dim = operands.queries.shape
    kv_heads = operands.keys.shape[2]
    queries = jnp.transpose(operands.queries, (0, 2, 1, 3)).reshape(batch_size, kv_heads, -1, head_dim)
    queries = _pad(queries, 2, row_multiple)
    keys, values = (_pad(jnp.transpose(x, (0, 2, 1, 3)), 2, column_multiple) for x in operands[1:3])
    mask, oldest, sinks = jnp.asarray(operands.block_mask), None, None
    if window is not None:
        assert operands.positions is not None
        first = operands.positions - (window - 1)
        mask = mask & (operands.positions[:, None, :] >= first[:, :, None])
        oldest = _pad(jnp.tile(first, (1, heads // kv_heads)), 1, row_multiple)
    mask = jnp.tile(mask, (1, heads // kv_heads, 1))
    if operands.sinks is not None:
        repeated = jnp.repeat(operands.sinks.astype(jnp.float32), block_size)
        sinks = _pad(repeated.reshape(kv_heads, -1), 1, row_multiple)
    mask = _pad(_pad(mask, 1, row_multiple), 2, column_multiple)
    scales = (
        None if x is None else _pad(jnp.swapaxes(x, 1, 2)[:, :, None], 3, column_multiple)
        for x in (operands.key_scales, operands.value_scales)
    )
    return Folded(queries, keys, values, mask, oldest, sinks, *scales)


def unfold(mixed: jax.Array, heads: int, block_size: int) -> jax.Array:
    """Returns [B, T, H, D] from [B, KH, R, D] in the layout of `Folded`."""
    batch_size, kv_heads, _, head_dim = mixed.shape
    mixed = mixed[:, :, : heads // kv_heads * block_size].reshape(batch_size, heads, block_size, head_dim)
    return jnp.transpose(mixed, (0, 2, 1, 3))


def entry_positions(entries: jax.Array, length: jax.Array, capacity: int) -> jax.Array:
    """Returns the positions of cache entries in use, also of a ring: see `Operands.cached_keys`.

    The division is one of scalars: kernels divide arrays slowly.
    """
    newest = length - 1
    positions = newest - jax.lax.rem(newest, jnp.int32(capacity)) + entries
    return jnp.where(positions > newest, positions - capacity, positions)


def _pad(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Returns `x` with zeros appended until the size of `axis` is a multiple of `multiple`."""
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x
