"""The layout that the attention kernels share: heads first, a group's queries as one axis, sizes in full tiles."""

import jax
import jax.numpy as jnp

from jlade.models.attention.operands import Operands


def fold(
    operands: Operands, row_multiple: int, column_multiple: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns queries [B, KH, R, D], keys and values [B, KH, C, D], and mask [1 or B, R, C].

    Row g * T + t is token t for the g-th head of the group, so that each KV head is read once for its whole group.
    R and C are padded to the multiples with zeros, which the mask hides.
    """
    batch_size, _, heads, head_dim = operands.queries.shape
    kv_heads = operands.keys.shape[2]
    queries = jnp.transpose(operands.queries, (0, 2, 1, 3)).reshape(batch_size, kv_heads, -1, head_dim)
    queries = _pad(queries, 2, row_multiple)
    keys, values = (_pad(jnp.transpose(x, (0, 2, 1, 3)), 2, column_multiple) for x in operands[1:3])
    mask = jnp.tile(jnp.asarray(operands.block_mask), (1, heads // kv_heads, 1))
    return queries, keys, values, _pad(_pad(mask, 1, row_multiple), 2, column_multiple)


def unfold(mixed: jax.Array, heads: int, block_size: int) -> jax.Array:
    """Returns [B, T, H, D] from [B, KH, R, D] in the layout of `fold`."""
    batch_size, kv_heads, _, head_dim = mixed.shape
    mixed = mixed[:, :, : heads // kv_heads * block_size].reshape(batch_size, heads, block_size, head_dim)
    return jnp.transpose(mixed, (0, 2, 1, 3))


def _pad(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Returns `x` with zeros appended until the size of `axis` is a multiple of `multiple`."""
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x
