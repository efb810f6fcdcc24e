"""Prompts that rows read in the steps of other rows.

A row reads while its state has fewer tokens than its prompt, whose tokens are in the state already. Its block is a
chain of the next prompt tokens, whose predictions are discarded (`jlade/decoding/block.py`). Otherwise it behaves like
a sequence that is done.
"""

import dataclasses

import jax

from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.lookahead import adaptive
from jlade.lookahead.adaptive import Level


def unread(state: DecodeState) -> DecodeState:
    """Returns a result of `prefill.start` with as many tokens as its cache has read, and the one after these."""
    return dataclasses.replace(state, num_tokens=state.cache.length + 1)


def is_reading(state: DecodeState) -> jax.Array:
    """Returns which sequences have not read their prompts [B]."""
    return ~state.done & (state.num_tokens < state.inputs.lengths)


def level(state: DecodeState, config: DecodeConfig) -> Level:
    """Returns the level of steps in which rows read: the widest whose blocks together have at most a chunk's tokens."""
    if state.pace is None:
        return Level(config.lookahead)
    *wider, narrowest = adaptive.settings(config.lookahead)
    max_size = chunk_size(state, config) // len(state.done)
    return Level(next((setting for setting in wider if setting.block_size <= max_size), narrowest))


def chunk_size(state: DecodeState, config: DecodeConfig) -> int:
    """Returns the number of prompt tokens that a row reads in a step; a block that has more tokens reads more."""
    return min(config.chunks[-1][0], state.tokens.shape[1])
