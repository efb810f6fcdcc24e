"""The block of a step for a batch: its tokens, their layout, and on several devices the share that each computes."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade import mesh as mesh_lib
from jlade.config import LookaheadConfig
from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.drafts.tree import Form, Tree, TreeShape
from jlade.lookahead import block as layouts
from jlade.lookahead import division
from jlade.lookahead.division import Share
from jlade.mesh import LOOKAHEAD


@flax.struct.dataclass
class Block:
    """T tokens for the model, T' of them on each of several devices along `lookahead`; without B for one sequence.

    Its outputs are the current token, the newest window row and the drafts: R = 1 + W + M, or R' on a device. What is
    the same for all sequences is in NumPy, and a constant of the program.
    """

    tokens: jax.Array  # [B, T] int32
    positions: Any  # [T] or [B, T] int32, relative to the position of the current token
    mask: Any  # [T, T] or [B, T, T] bool, mask[q, k]: token q attends to token k
    outputs: Any  # [R] int32, indices of the tokens whose logits are used
    tree: Tree  # the M drafts among them, fields [B, ...]
    share: Share | None  # fields [B, ...]; None if the device computes the whole block
    first_draft: int = flax.struct.field(pytree_node=False)  # index of the first draft in the whole block
    # [B] int32, tokens of its prompt that a row reads, 0 in a row that makes a step; None where all make steps
    num_read: jax.Array | None = None

    @property
    def axes(self) -> Any:
        """The argument `in_axes` of `jax.vmap` over the sequences."""
        axes = None if self.share is None else division.BATCH_AXES
        each = 0 if np.ndim(self.positions) == 2 else None
        changed: Any = dataclasses.replace  # to axes, which are no arrays
        return changed(self, tokens=0, positions=each, mask=each, outputs=None, tree=0, share=axes, num_read=0)

    def gather(self, own: jax.Array, rows: slice | jax.Array = slice(None)) -> jax.Array:
        """Returns some `rows` of the outputs [R, ...] of one sequence, given those of this device [R', ...]."""
        return own[rows] if self.share is None else _gather(own, self.share.delivered_outputs[rows])

    def accepted(self, block_kv: Any, path: jax.Array) -> tuple[Any, jax.Array]:
        """Returns the arguments `block_kv` and `indices` of `Decoder.commit`: on each device those of accepted tokens.

        Args:
          block_kv: of the device's tokens [B, T', ...], in every array.
          path: [B, A-1] int32, places of accepted drafts in the tree.

        Raises:
          ValueError: an array of `block_kv` is no [B, T', ...].
        """
        accepted = jnp.pad(self.first_draft + path, ((0, 0), (1, 0)))  # the current token is the first one
        if self.share is None:
            return block_kv, accepted
        shape = self.share.members.shape
        other = next((list(kv.shape) for kv in jax.tree.leaves(block_kv) if kv.shape[:2] != shape), None)
        if other is not None:
            raise ValueError(
                "mesh has an axis lookahead, along which keys and values of accepted tokens are exchanged, but forward "
                f"returns arrays {other} in their place, not [B, T, ...] = [{shape[0]}, {shape[1]}, ...]: use these "
                "devices for data"
            )
        place = jnp.take_along_axis(self.share.delivered_tokens, accepted, axis=1)
        index = jnp.arange(accepted.shape[1], dtype=jnp.int32)
        return jax.tree.map(lambda kv: jax.vmap(_gather)(kv, place), block_kv), jnp.broadcast_to(index, accepted.shape)


def lay_out(state: DecodeState, config: DecodeConfig, level: LookaheadConfig) -> Block:
    """Returns the block of a step: of the window at the state's columns, and of the first of its drafts."""
    tree = state.memory.drafts.tree.first(level.num_drafted)
    layout = layouts.build(level.window_size, level.ngram_size, tree.form)
    current = jax.vmap(lambda tokens, length: tokens[length - 1])(state.tokens, state.num_tokens)
    tokens = jax.vmap(layouts.tokens)(current, state.window[:, :, : level.window_size], tree.tokens)
    share = _share(tree.form, state.num_tokens, config, level)
    if share is None:
        return Block(tokens, layout.positions, layout.mask, layout.outputs, tree, None, layout.first_draft)
    tokens = jnp.take_along_axis(tokens, share.members, axis=1)
    return Block(tokens, share.positions, share.mask, share.outputs, tree, share, layout.first_draft)


def _share(form: TreeShape | Form, num_tokens: jax.Array, config: DecodeConfig, level: LookaheadConfig) -> Share | None:
    """Returns the share of each sequence's block that this device computes, None for all of it."""
    number = mesh_lib.size(config.mesh, LOOKAHEAD)
    if number == 1:
        return None
    device = jax.lax.axis_index(LOOKAHEAD)

    def of_sequence(_: jax.Array, form: TreeShape | Form) -> Share:  # a static form has no batch axis
        return division.share(level, form, number, device)

    return jax.vmap(of_sequence, out_axes=division.BATCH_AXES)(num_tokens, form)


def _gather(own: jax.Array, place: jax.Array) -> jax.Array:
    """Returns [K, ...] on every device, each entry from the one device where `place` [K] is within `own` [M, ...]."""
    return jax.lax.psum(own.at[place].get(mode="fill", fill_value=0), LOOKAHEAD)
