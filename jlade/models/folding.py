"""The shapes that attention kernels take: heads first, the queries of a KV head's group as rows, sizes full tiles."""

import jax
import jax.numpy as jnp
import numpy as np


def fold(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    block_mask: jax.Array | np.ndarray,
    row_multiple: int,
    column_multiple: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns queries [B, KH, R, D], keys and values [B, KH, C, D], and mask [R, C].

    Row g * T + t is token t for the g-th head of the group, so that each KV head is read once for its whole group.
    What fills up to the multiples is zero and not seen.

    Args:
      queries: [B, T, H, D].
      keys, values: [B, T, KH, D].
      block_mask: [T, T] bool.
    """
    batch_size, _, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    queries = jnp.transpose(queries, (0, 2, 1, 3)).reshape(batch_size, kv_heads, -1, head_dim)
    queries = pad(queries, 2, row_multiple)
    keys, values = (pad(jnp.transpose(x, (0, 2, 1, 3)), 2, column_multiple) for x in (keys, values))
    mask = jnp.tile(jnp.asarray(block_mask), (heads // kv_heads, 1))
    return queries, keys, values, pad(pad(mask, 0, row_multiple), 1, column_multiple)


def unfold(mixed: jax.Array, heads: int, block_size: int) -> jax.Array:
    """Returns [B, T, H, D] from [B, KH, R, D], the rows laid out by `fold`."""
    batch_size, kv_heads, _, head_dim = mixed.shape
    mixed = mixed[:, :, : heads // kv_heads * block_size].reshape(batch_size, heads, block_size, head_dim)
    return jnp.transpose(mixed, (0, 2, 1, 3))


def pad(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Appends zeros until the size of `axis` is a multiple."""
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x
