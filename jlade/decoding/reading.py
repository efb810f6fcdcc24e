"""Prompts that rows read in the steps of other rows.

A row reads while its state has fewer tokens than its prompt, whose tokens are in the state already. In the place of a
step's block it has a chain of the next tokens of the prompt, of which no prediction is used. In all else it is like a
sequence that is done.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jlade.decoding.block import Block
from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.drafts.source import Passage
from jlade.drafts.sources import Drafts
from jlade.drafts.tree import NONE
from jlade.lookahead import adaptive
from jlade.lookahead.adaptive import Level


def unread(state: DecodeState) -> DecodeState:
    """Returns a result of `prefill.start` with as many tokens as its cache has read, and the one after these."""
    return dataclasses.replace(state, num_tokens=state.memory.cache.length + 1)


def is_reading(state: DecodeState) -> jax.Array:
    """Returns which sequences have not read their prompts [B], or whether that of one has not []."""
    return ~state.done & (state.num_tokens < state.inputs.lengths)


def level(state: DecodeState, config: DecodeConfig) -> Level:
    """Returns the width of the other rows: the widest whose blocks make no more tokens than a chunk, all together."""
    if state.pace is None:
        return Level(config.lookahead)
    *wider, narrowest = adaptive.levels(config.lookahead)
    most = chunk_size(state, config) // len(state.done)
    return Level(next((setting for setting in wider if setting.block_size <= most), narrowest))


def chunk_size(state: DecodeState, config: DecodeConfig) -> int:
    """Returns the tokens of a prompt that a row reads in a step, at least."""
    return min(config.chunks[-1][0], state.tokens.shape[1])


def add(block: Block, state: DecodeState, until: jax.Array, config: DecodeConfig) -> Block:
    """Returns the block of a step in which some rows read.

    Args:
      block: of the step, [B, T].
      state: before the step.
      until: [B] int32, tokens of its prompt that a row reads at most, and the one after these.
      config: of the step.

    Raises:
      ValueError: several devices divide the block.
    """
    if block.share is not None:
        raise ValueError("until must be None on a mesh with an axis lookahead, which divides the blocks of steps")
    batch_size, size = block.tokens.shape
    width = max(size, chunk_size(state, config))
    offset = jnp.arange(width, dtype=jnp.int32)[None]
    reads = is_reading(state)
    chain = jax.vmap(lambda tokens, at: tokens.at[at].get(mode="clip"))(
        state.tokens, state.num_tokens[:, None] - 1 + offset
    )
    # A row that makes a step has its current token again in the places of its block that are free.
    more = ((0, 0), (0, width - size))
    tokens = jnp.concatenate([block.tokens, jnp.broadcast_to(block.tokens[:, :1], (batch_size, width - size))], axis=1)
    positions = jnp.pad(jnp.broadcast_to(block.positions, (batch_size, size)), more)
    mask = (
        jnp.pad(jnp.broadcast_to(block.mask, (batch_size, size, size)), (*more, more[1]))
        | np.eye(width, dtype=bool)[None]
    )
    return dataclasses.replace(
        block,
        tokens=jnp.where(reads[:, None], chain, tokens),
        positions=jnp.where(reads[:, None], offset, positions),
        mask=jnp.where(reads[:, None, None], np.tri(width, dtype=bool)[None], mask),
        num_read=jnp.where(reads, jnp.clip(until - state.num_tokens, 0, width), 0),
    )


def committed(block: Block, indices: jax.Array, num_accepted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the arguments `indices` [B, T] and `num_accepted` [B] of `Decoder.commit`, given those of the steps."""
    assert block.num_read is not None
    batch_size, width = block.tokens.shape
    chain = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch_size, width))
    padded = jnp.pad(indices, ((0, 0), (0, width - indices.shape[1])))
    return jnp.where(block.num_read[:, None] > 0, chain, padded), jnp.maximum(num_accepted, block.num_read)


def waiting(state: DecodeState) -> DecodeState:
    """Returns the state of one sequence, which is done if it reads: a step leaves its text as it is."""
    return dataclasses.replace(state, done=state.done | is_reading(state))


def advance(state: DecodeState, after: DecodeState, block: Block) -> DecodeState:
    """Returns the state of one sequence after a step with the tokens that it read.

    Args:
      state: before the step.
      after: the step, as `waiting` made it.
      block: of the step.
    """
    assert block.num_read is not None
    return dataclasses.replace(
        after,
        num_tokens=after.num_tokens + block.num_read,
        done=jnp.where(is_reading(state), state.done, after.done),
    )


def learn(drafts: Drafts, state: DecodeState, block: Block, best: jax.Array | None, config: DecodeConfig) -> Drafts:
    """Returns the drafts of one sequence with what its sources learn from the tokens that it read.

    Args:
      drafts: after the step.
      state: before it.
      block: of the step.
      best: [T, k] int32, the most probable tokens after those of the block, graded; None if no source reads prompts.
      config: of the step.
    """
    if best is None:
        return drafts
    assert block.num_read is not None
    readers = config.sources.readers
    before = jnp.where(state.num_tokens > 1, state.tokens[state.num_tokens - 2], NONE)
    passage = Passage(block.tokens, jnp.append(before, block.tokens[:-1]), best, block.num_read)
    read = readers.read({name: drafts.states[name] for name in readers.specs}, passage)
    return dataclasses.replace(drafts, states=drafts.states | read)
