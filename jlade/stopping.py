"""When a text ends: limits, end tokens and stop strings, as arrays, so that others compile nothing."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade import text

FEWEST_STATES = 32  # stop strings of up to so many bytes in all share one program; then twice as many, and so on
MOST_STATES = 1024


@flax.struct.dataclass
class StopStrings:
    """An automaton that reads tokens and tells when a stop string is complete (Aho and Corasick, 1975).

    A state is the longest end of a generated text that some stop string of its row begins with.
    """

    next_state: jax.Array  # [S, V] int16, the state after a token, or ~state when the token completes a stop string
    start: jax.Array  # [B] int32, the state of each row before its first token


@flax.struct.dataclass
class Stopping:
    """When the texts of B rows end. Tokens are counted from the end of the prompt."""

    max_new_tokens: jax.Array  # [B] int32, at least 1
    eos_ids: jax.Array  # [B, K] int32, padded with -1
    min_new_tokens: jax.Array | None = None  # [B] int32; before that no end token is drawn and no stop string counts
    strings: StopStrings | None = None


class Cut(NamedTuple):
    """What is kept of the tokens that a step accepted."""

    num_kept: jax.Array  # [B] int32
    ended: jax.Array  # [B] bool
    stop_state: Any  # [B] int32, for the tokens after those that are kept


def cut(
    stopping: Stopping,
    stop_state: Any,
    tokens: jax.Array,
    num_accepted: jax.Array,
    num_generated: jax.Array,
) -> Cut:
    """Cuts at the limit, behind the first end token, and behind the token that completes a stop string.

    Args:
      stopping: of B rows.
      stop_state: [B], what was read of `next_state` last; None without stop strings.
      tokens: [B, A].
      num_accepted: [B] how many of `tokens` were accepted.
      num_generated: [B] how many came before them.
    """
    num_tokens = tokens.shape[1]
    offset = jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
    ends = jnp.any(tokens[:, :, None] == stopping.eos_ids[:, None, :], axis=-1)
    if stopping.strings is not None:
        read = [stop_state]
        for i in range(num_tokens):
            before = jnp.where(read[-1] < 0, ~read[-1], read[-1])
            read.append(stopping.strings.next_state[before, tokens[:, i]].astype(jnp.int32))
        states = jnp.stack(read, axis=1)  # [B, 1 + A], before the first token and after each, as `next_state` has them
        completes = states[:, 1:] < 0
        if stopping.min_new_tokens is not None:
            completes &= num_generated[:, None] + offset + 1 >= stopping.min_new_tokens[:, None]
        ends |= completes

    first_end = jnp.min(jnp.where(ends, offset, num_tokens), axis=1)
    left = stopping.max_new_tokens - num_generated
    num_kept = jnp.minimum(jnp.minimum(num_accepted, first_end + 1), left)
    if stopping.strings is not None:
        stop_state = jnp.take_along_axis(states, num_kept[:, None], axis=1)[:, 0]
    return Cut(num_kept, (first_end < num_kept) | (num_kept == left), stop_state)


@functools.lru_cache(maxsize=8)
def stop_strings(tokenizer: Any, vocab_size: int, stops: tuple[tuple[str, ...], ...]) -> StopStrings:
    """Returns the automaton for the stop strings of each of B rows.

    Raises:
      ValueError: when the strings are too long.
    """
    different = list(dict.fromkeys(stops))
    prefixes = [_proper_prefixes(strings) for strings in different]
    num_states = sum(map(len, prefixes))
    if num_states > MOST_STATES:
        raise ValueError(f"stop strings of {num_states} bytes in all are too long; accepted are {MOST_STATES}")
    padded = FEWEST_STATES
    while padded < num_states:
        padded *= 2

    of_token = text.token_bytes(tokenizer)
    vocabulary = [of_token[i] for i in range(vocab_size)]
    next_state = np.zeros((padded, vocab_size), np.int16)
    begins = np.cumsum([0, *map(len, prefixes)])
    for begin, states, strings in zip(begins, prefixes, different, strict=False):
        after, completes = _read_tokens(*_read_bytes(states, strings), vocabulary)
        after += np.int16(begin)
        next_state[begin : begin + len(states)] = np.where(completes, ~after, after)
    start = np.array([begins[different.index(strings)] for strings in stops], np.int32)
    return StopStrings(jnp.asarray(next_state), jnp.asarray(start))


def _proper_prefixes(strings: Sequence[str]) -> list[bytes]:
    """Returns the states for `strings`, the empty one first: where each of them stands before its last byte."""
    return sorted({b"", *(string.encode()[:i] for string in strings for i in range(len(string.encode())))})


def _read_bytes(states: list[bytes], strings: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the state after each state and byte [S, 256], and whether the byte completes a string."""
    index = {state: i for i, state in enumerate(states)}
    after = np.zeros((len(states), 256), np.int16)
    completes = np.zeros((len(states), 256), bool)
    endings = tuple(string.encode() for string in strings)
    for state, i in index.items():
        for byte in {byte for string in endings for byte in string}:
            read = state + bytes([byte])
            completes[i, byte] = read.endswith(endings)
            after[i, byte] = next(index[read[k:]] for k in range(len(read) + 1) if read[k:] in index)
    return after, completes


def _read_tokens(after: np.ndarray, completes: np.ndarray, vocabulary: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the same after each state and token [S, V], by reading the i-th byte of all tokens at once."""
    lengths = np.array([len(token) for token in vocabulary])
    begins = np.cumsum(lengths) - lengths
    data = np.frombuffer(b"".join(vocabulary), np.uint8)
    state = np.repeat(np.arange(len(after), dtype=np.int16)[:, None], len(vocabulary), axis=1)
    completed = np.zeros(state.shape, bool)
    for i in range(lengths.max()):
        longer = np.flatnonzero(lengths > i)
        byte = data[begins[longer] + i][None, :]
        completed[:, longer] |= completes[state[:, longer], byte]
        state[:, longer] = after[state[:, longer], byte]
    return state, completed
