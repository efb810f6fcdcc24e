"""Lookahead parallelism on the device: the share of each block that it computes, and its exchange with the others."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.config import LookaheadConfig
from jlade.drafts.tree import Form, Shape
from jlade.lookahead import division
from jlade.lookahead.division import Share
from jlade.mesh import LOOKAHEAD


def own(form: Shape | Form, num_tokens: jax.Array, level: LookaheadConfig, mesh: Mesh | None) -> Share | None:
    """Returns the part of each sequence's block that this device computes, None for all of it.

    Args:
      form: of the trees of B sequences; a static one has no batch axis.
      num_tokens: [B] int32, of each text.
      level: the sizes of the window.
      mesh: the devices.
    """
    number = mesh_lib.size(mesh, LOOKAHEAD)
    if number == 1:
        return None
    device = jax.lax.axis_index(LOOKAHEAD)

    def of_sequence(_: jax.Array, form: Shape | Form) -> Share:
        return division.share(level, form, number, device)

    return jax.vmap(of_sequence, out_axes=division.BATCH_AXES)(num_tokens, form)


def gather(own: jax.Array, place: jax.Array) -> jax.Array:
    """Returns [K, ...] on every device, each entry from the one device where `place` [K] is within `own` [M, ...]."""
    return jax.lax.psum(own.at[place].get(mode="fill", fill_value=0), LOOKAHEAD)


def of_block(own: jax.Array, share: Share | None, rows: slice | jax.Array = slice(None)) -> jax.Array:
    """Returns some outputs of a block [R, ...], given those that this device computed [R', ...]."""
    return own[rows] if share is None else gather(own, share.delivered_outputs[rows])


def of_accepted(block_kv: Any, accepted: jax.Array, share: Share | None) -> tuple[Any, jax.Array]:
    """Returns the arguments `block_kv` and `indices` of `Decoder.commit`: on each device those of all accepted tokens.

    Args:
      block_kv: of the share [B, T', ...], in every array.
      accepted: [B, A] int32, indices in the block.
      share: of each sequence; None for the whole block.

    Raises:
      ValueError: an array of `block_kv` is no [B, T', ...].
    """
    if share is None:
        return block_kv, accepted
    shape = share.members.shape
    other = next((list(kv.shape) for kv in jax.tree.leaves(block_kv) if kv.shape[:2] != shape), None)
    if other is not None:
        raise ValueError(
            "mesh has an axis lookahead, along which keys and values of accepted tokens are exchanged, but forward "
            f"returns arrays {other} in their place, not [B, T, ...] = [{shape[0]}, {shape[1]}, ...]: use these "
            "devices for data"
        )
    place = jnp.take_along_axis(share.delivered_tokens, accepted, axis=1)
    index = jnp.arange(accepted.shape[1], dtype=jnp.int32)
    return jax.tree.map(lambda kv: jax.vmap(gather)(kv, place), block_kv), jnp.broadcast_to(index, accepted.shape)
