"""The block of a step for a batch: its tokens, their layout, and on several devices the share that each computes.

Sequences can read their prompts in the steps of others. One reads while its state has fewer tokens than its prompt,
whose tokens are in the state already. Its block is a chain of the next prompt tokens, whose predictions are discarded.
Otherwise it behaves like a sequence that is done.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade import mesh as mesh_lib
from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.drafts.source import Passage
from jlade.drafts.tree import NONE, Form, Tree, TreeShape
from jlade.lookahead import adaptive, division
from jlade.lookahead import block as layouts
from jlade.lookahead.adaptive import Level
from jlade.lookahead.division import Share
from jlade.mesh import LOOKAHEAD


@flax.struct.dataclass
class Block:
    """T tokens for the model, T' of them on each of several devices along `lookahead`; without B for one sequence.

    Its outputs are the current token, the newest window row and the drafts: R = 1 + W + M, or R' on a device. What is
    the same for all sequences is in NumPy, and a constant of the program.

    A sequence that reads its prompt has its chain in the place of the window and the drafts.
    """

    tokens: jax.Array  # [B, T] int32
    positions: Any  # [T] or [B, T] int32, relative to the position of the current token
    mask: Any  # [T, T] or [B, T, T] bool, mask[q, k]: token q attends to token k
    outputs: Any  # [R] int32, indices of the tokens whose logits are used
    tree: Tree  # the M drafts among them, fields [B, ...]
    makes_step: jax.Array  # [B] bool, False for a sequence that is done or reads its prompt
    num_read: jax.Array | None  # [B] int32, prompt tokens that the sequence reads; None where no sequence reads
    share: Share | None  # fields [B, ...]; None if the device computes the whole block
    first_draft: int = flax.struct.field(pytree_node=False)  # index of the first draft in the whole block

    @property
    def axes(self) -> "Block":
        """The argument `in_axes` of `jax.vmap` over the sequences."""
        layout_axis = 0 if np.ndim(self.positions) == 2 else None
        axes: Block = jax.tree.map(lambda _: 0, self)
        share_axes = None if self.share is None else division.BATCH_AXES
        return dataclasses.replace(axes, positions=layout_axis, mask=layout_axis, outputs=None, share=share_axes)

    def gather(self, outputs: jax.Array, rows: slice | jax.Array = slice(None)) -> jax.Array:
        """Returns some `rows` of the outputs [R, ...] of one sequence, given the outputs [R', ...] of this device."""
        return outputs[rows] if self.share is None else _gather(outputs, self.share.delivered_outputs[rows])

    def of_device(self, outputs: jax.Array) -> jax.Array:
        """Returns the rows [R', ...] of this device, given the outputs [R, ...] of one sequence."""
        return outputs if self.share is None else outputs[self.share.rows]

    def committed(self, block_kv: Any, path: jax.Array, num_accepted: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        """Returns the arguments `block_kv`, `indices` and `num_accepted` of `Decoder.commit`.

        On each device they are of all tokens that enter the cache: the current one and the accepted drafts, or the
        prompt tokens that the sequence reads.

        Args:
          block_kv: of the device's tokens [B, T', ...], in every array.
          path: [B, A-1] int32, places of accepted drafts in the tree.
          num_accepted: [B] int32.

        Raises:
          ValueError: an array of `block_kv` is no [B, T', ...], and devices share the block.
        """
        indices = jnp.pad(self.first_draft + path, ((0, 0), (1, 0)))  # the current token is the first one
        if self.num_read is not None:
            batch_size, size = self.tokens.shape
            chain = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch_size, size))
            indices = jnp.pad(indices, ((0, 0), (0, size - indices.shape[1])))
            indices = jnp.where(self.num_read[:, None] > 0, chain, indices)
            return block_kv, indices, jnp.maximum(num_accepted, self.num_read)
        if self.share is None:
            return block_kv, indices, num_accepted
        shape = self.share.members.shape
        other = next((list(kv.shape) for kv in jax.tree.leaves(block_kv) if kv.shape[:2] != shape), None)
        if other is not None:
            raise ValueError(
                "mesh has an axis lookahead, along which keys and values of accepted tokens are exchanged, but forward "
                f"returns arrays {other} in their place, not [B, T, ...] = [{shape[0]}, {shape[1]}, ...]: use these "
                "devices for data"
            )
        delivered = jnp.take_along_axis(self.share.delivered_tokens, indices, axis=1)
        block_kv = jax.tree.map(lambda kv: jax.vmap(_gather)(kv, delivered), block_kv)
        return block_kv, jnp.broadcast_to(jnp.arange(indices.shape[1], dtype=jnp.int32), indices.shape), num_accepted


def lay_out(state: DecodeState, config: DecodeConfig, level: Level, until: jax.Array | None = None) -> Block:
    """Returns the block of a step: the window at the state's columns, and the first of the state's drafts.

    Args:
      state, config, level: of the step.
      until: [B] int32, for sequences that read their prompts: the largest `num_tokens` after the step; None where none
        reads.

    Raises:
      ValueError: rows read, and several devices divide the block.
    """
    setting = level.setting
    tree = state.drafts.tree.first(setting.num_drafted)
    layout = layouts.build(setting.window_size, setting.ngram_size, tree.form)
    current = jax.vmap(lambda tokens, length: tokens[length - 1])(state.tokens, state.num_tokens)
    tokens = jax.vmap(layouts.tokens)(current, state.window[:, :, : setting.window_size], tree.tokens)
    block = Block(
        tokens, layout.positions, layout.mask, layout.outputs, tree, ~state.done, None, None, layout.first_draft
    )
    num_devices = mesh_lib.size(config.mesh, LOOKAHEAD)
    if until is not None:
        if num_devices > 1:
            raise ValueError("until must be None on a mesh with an axis lookahead, which divides the blocks of steps")
        return _with_prompts(block, state, until, chunk_size(state, config))
    return block if num_devices == 1 else _divided(block, level, num_devices)


def is_reading(state: DecodeState) -> jax.Array:
    """Returns which sequences have not read their prompts [B]."""
    return ~state.done & (state.num_tokens < state.inputs.lengths)


def reading_level(state: DecodeState, config: DecodeConfig) -> Level:
    """Returns the level of steps in which rows read: the widest whose blocks together have at most a chunk's tokens."""
    if state.pace is None:
        return Level(config.lookahead)
    *wider, narrowest = adaptive.settings(config.lookahead)
    max_size = chunk_size(state, config) // len(state.done)
    return Level(next((setting for setting in wider if setting.block_size <= max_size), narrowest))


def chunk_size(state: DecodeState, config: DecodeConfig) -> int:
    """Returns the number of prompt tokens that a row reads in a step; a block that has more tokens reads more."""
    return min(config.chunks[-1][0], state.tokens.shape[1])


def _with_prompts(block: Block, state: DecodeState, until: jax.Array, chunk_size: int) -> Block:
    """Returns the block in which rows that read have a chain of their prompts, of `chunk_size` tokens or more."""
    batch_size, step_size = block.tokens.shape
    size = max(step_size, chunk_size)
    reads, padding = is_reading(state), (0, size - step_size)
    offset = jnp.arange(size, dtype=jnp.int32)[None]
    chain = jax.vmap(lambda tokens, index: tokens.at[index].get(mode="clip"))(
        state.tokens, state.num_tokens[:, None] - 1 + offset
    )
    # A row that makes a step has its current token again where its block is padded.
    current = jnp.broadcast_to(block.tokens[:, :1], (batch_size, size - step_size))
    tokens = jnp.concatenate([block.tokens, current], axis=1)
    positions = jnp.pad(jnp.broadcast_to(block.positions, (batch_size, step_size)), ((0, 0), padding))
    mask = jnp.broadcast_to(block.mask, (batch_size, step_size, step_size))
    mask = jnp.pad(mask, ((0, 0), padding, padding)) | np.eye(size, dtype=bool)[None]
    return dataclasses.replace(
        block,
        tokens=jnp.where(reads[:, None], chain, tokens),
        positions=jnp.where(reads[:, None], offset, positions),
        mask=jnp.where(reads[:, None, None], np.tri(size, dtype=bool)[None], mask),
        makes_step=block.makes_step & ~reads,
        num_read=jnp.where(reads, jnp.clip(until - state.num_tokens, 0, size), 0),
    )


def passage(state: DecodeState, block: Block, best: jax.Array) -> Passage:
    """Returns the prompt tokens of a block in which rows read, for sources of drafts: fields [B, ...].

    The state is that before the step. `best` [B, T, k] int32 has the most probable tokens after those of the block.
    """
    assert block.num_read is not None
    before = jax.vmap(lambda tokens, length: jnp.where(length > 1, tokens[length - 2], NONE))(
        state.tokens, state.num_tokens
    )
    previous = jnp.concatenate([before[:, None], block.tokens[:, :-1]], axis=1)
    return Passage(block.tokens, previous, best, block.num_read)


def _divided(block: Block, level: Level, num_devices: int) -> Block:
    """Returns the share of a block that this one of the devices along `lookahead` computes."""
    device = jax.lax.axis_index(LOOKAHEAD)

    def of_sequence(_: jax.Array, form: TreeShape | Form) -> Share:  # a static form has no batch axis
        return division.share(level.setting, form, num_devices, device)

    share = jax.vmap(of_sequence, out_axes=division.BATCH_AXES)(block.makes_step, block.tree.form)
    return dataclasses.replace(
        block,
        tokens=jnp.take_along_axis(block.tokens, share.members, axis=1),
        positions=share.positions,
        mask=share.mask,
        outputs=share.outputs,
        share=share,
    )


def _gather(array: jax.Array, index: jax.Array) -> jax.Array:
    """Returns [K, ...] on every device: each entry from the one device whose `array` [M, ...] has its `index` [K]."""
    return jax.lax.psum(array.at[index].get(mode="fill", fill_value=0), LOOKAHEAD)
