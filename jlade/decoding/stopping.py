"""When a text ends: limits, end tokens and stop strings as arrays, so that other values compile nothing."""

from typing import Annotated, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jlade.mesh import SHARED


@flax.struct.dataclass
class StopStrings:
    """An automaton that reads tokens and accepts when a stop string is complete (Aho and Corasick, 1975).

    A state is the longest suffix of the generated text that is a proper prefix of one of the sequence's stop strings.
    `jlade.generation.stop_strings` builds it.

    Attributes:
      next_state: int16[S, V] for S states, the one after a token, or ~state when the token completes a stop string.
      start: int32[B], the initial state of each sequence.
    """

    next_state: Annotated[jax.Array, SHARED]
    start: jax.Array


@flax.struct.dataclass
class Stopping:
    """When the texts of B sequences end. Tokens are counted from the end of the prompt.

    Attributes:
      max_new_tokens: int32[B], at least 1.
      eos_ids: int32[B, K], up to K end tokens of each, padded with -1.
      min_new_tokens: int32[B]; before it, end tokens are banned and stop strings are ignored. None for 0.
      strings: None without stop strings.
    """

    max_new_tokens: jax.Array
    eos_ids: jax.Array
    min_new_tokens: jax.Array | None = None
    strings: StopStrings | None = None


class Cut(NamedTuple):
    """The part of a step's accepted tokens that is kept."""

    num_kept: jax.Array  # [] int32
    ended: jax.Array  # [] bool
    stop_state: jax.Array | None  # [] int32, after the kept tokens


def cut(
    stopping: Stopping,
    stop_state: jax.Array | None,
    tokens: jax.Array,
    num_accepted: jax.Array,
    num_generated: jax.Array,
) -> Cut:
    """Cuts accepted tokens at the limit, after the first end token, and after the token that completes a stop string.

    Args:
      stopping: of one sequence: fields without B.
      stop_state: [] int32, the last value read from `next_state`; None without stop strings.
      tokens: [A] int32.
      num_accepted: [] int32, how many of `tokens` were accepted.
      num_generated: [] int32, tokens generated before them.
    """
    offset = jnp.arange(len(tokens), dtype=jnp.int32)
    ends = jnp.any(tokens[:, None] == stopping.eos_ids[None, :], axis=1)
    if stopping.strings is not None:
        assert stop_state is not None
        read = [stop_state]
        for token in tokens:
            before = jnp.where(read[-1] < 0, ~read[-1], read[-1])
            read.append(stopping.strings.next_state[before, token].astype(jnp.int32))
        states = jnp.stack(read)  # [1 + A], before the first token and after each, in `next_state`'s code
        completes = states[1:] < 0
        if stopping.min_new_tokens is not None:
            completes &= num_generated + offset + 1 >= stopping.min_new_tokens
        ends |= completes

    first_end = jnp.min(jnp.where(ends, offset, len(tokens)))
    left = stopping.max_new_tokens - num_generated
    num_kept = jnp.minimum(jnp.minimum(num_accepted, first_end + 1), left)
    if stopping.strings is not None:
        stop_state = states[num_kept]
    return Cut(num_kept, (first_end < num_kept) | (num_kept == left), stop_state)
