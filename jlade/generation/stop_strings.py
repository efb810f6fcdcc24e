"""Stop strings as an automaton over tokens (Aho and Corasick, 1975), built from their bytes."""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from jlade.decoding.stopping import StopStrings
from jlade.generation.text import Tokenizer, token_bytes

FEWEST_STATES = 128  # stop strings of up to 128 bytes in all share one program, of up to 256 bytes the next, and so on
MOST_STATES = 1024


@functools.lru_cache(maxsize=8)
def build(tokenizer: Tokenizer, vocab_size: int, stops: tuple[tuple[str, ...], ...]) -> StopStrings:
    """Returns the automaton for the stop strings of each of B sequences.

    Raises:
      ValueError: when the strings have more than `MOST_STATES` bytes in all.
    """
    different = list(dict.fromkeys(stops))
    prefixes = [_proper_prefixes(strings) for strings in different]
    num_states = sum(map(len, prefixes))
    if num_states > MOST_STATES:
        raise ValueError(f"stop strings of {num_states} bytes in all are too long; accepted are {MOST_STATES}")
    padded = FEWEST_STATES
    while padded < num_states:
        padded *= 2

    of_token = token_bytes(tokenizer)
    vocabulary = [of_token[i] for i in range(vocab_size)]
    next_state = np.zeros((padded, vocab_size), np.int16)
    begins = np.cumsum([0, *map(len, prefixes)])
    for begin, states, strings in zip(begins, prefixes, different, strict=False):
        after, completes = _read_tokens(*_read_bytes(states, strings), vocabulary)
        after += np.int16(begin)
        next_state[begin : begin + len(states)] = np.where(completes, ~after, after)
    start = np.array([begins[different.index(strings)] for strings in stops], np.int32)
    return StopStrings(*jax.device_put((next_state, start)))


def _proper_prefixes(strings: Sequence[str]) -> list[bytes]:
    """Returns the states for `strings`: their proper prefixes, the empty one first."""
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
    """Returns the same after each state and token [S, V], reading the i-th byte of all tokens at once."""
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
