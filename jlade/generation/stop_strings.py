"""Stop strings as an automaton over tokens (Aho and Corasick, 1975), built from their bytes."""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tokenizers

from jlade.decoding.stopping import StopStrings
from jlade.errors import ArgumentTypeError, ArgumentValueError
from jlade.generation import text
from jlade.generation.text import TokenBytes, Tokenizer
from jlade.models.architecture import LlamaConfig
from jlade.models.base import Decoder

MIN_STATES = 128  # stop strings of up to 128 bytes in all share one program, of up to 256 bytes the next, and so on
MAX_STATES = 1024


def check(stop: Any, batch_size: int, tokenizer: Tokenizer | None, decoder: Decoder) -> tuple[tuple[str, ...], ...]:
    """Returns the stop strings of each sequence, given those of all or of each; by default those of the decoder."""
    if stop is None:
        stop = getattr(decoder, "stop_strings", ())  # which other decoders may lack
        if stop and tokenizer is None:
            raise TypeError(
                f"the checkpoint's stop strings {stop!r} need the tokenizer: {text.PASS_TOKENIZER}, or stop=()"
            )
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence):
        raise ArgumentTypeError("stop", f"must be a string, a sequence of them, or one for each prompt, got {stop!r}")
    sets = [strings] * batch_size if all(isinstance(string, str) for string in strings) else strings
    if any(isinstance(strings, str) or not isinstance(strings, Sequence) for strings in sets):
        raise ArgumentTypeError("stop", f"must be a string, a sequence of them, or one for each prompt, got {stop!r}")
    if len(sets) != batch_size:
        raise ArgumentValueError(
            "stop", f"must be strings for all prompts or {batch_size} sequences of them, got {len(sets)}"
        )
    for string in itertools.chain.from_iterable(sets):
        if not isinstance(string, str):
            raise ArgumentTypeError("stop", f"must hold strings, got {string!r}")
        if not string:
            raise ArgumentValueError("stop", "must hold strings of at least one character, got ''")
        text.check_utf8("stop", "must hold", string)
    if any(sets) and tokenizer is None:
        raise TypeError(f"stop={stop!r} needs the tokenizer: {text.PASS_TOKENIZER}")
    different = dict.fromkeys(itertools.chain.from_iterable(sets))
    for name in text.special_names(tokenizer) if tokenizer is not None and different else ():
        if matching := [string for string in different if name in string]:
            warnings.warn(
                f"the stop string {matching[0]!r} never matches the special token {name!r}, which adds nothing to a "
                "text: pass the token's id in eos_ids",
                stacklevel=2,
            )
    return tuple(tuple(strings) for strings in sets)


def end_tokens(config: LlamaConfig, tokenizer: tokenizers.Tokenizer) -> LlamaConfig:
    """Returns a configuration whose stop strings that are special tokens are end tokens: they add nothing to a text."""
    special = set(text.special_names(tokenizer)) & set(config.stop_strings)
    tokens = (tokenizer.token_to_id(name) for name in config.stop_strings if name in special)
    ids = [i for i in tokens if i is not None and i < config.vocab_size]
    strings = tuple(name for name in config.stop_strings if name not in special)
    return dataclasses.replace(config, eos_ids=tuple(dict.fromkeys([*config.eos_ids, *ids])), stop_strings=strings)


def build(tokenizer: Tokenizer | None, vocab_size: int, stops: tuple[tuple[str, ...], ...]) -> StopStrings:
    """Returns the automaton for the stop strings of each of B sequences.

    Raises:
      ValueError: when the strings have more than `MAX_STATES` bytes in all.
    """
    assert tokenizer is not None  # `check` refuses stop strings without one
    return _build(text.token_bytes(tokenizer), vocab_size, stops)


@functools.lru_cache(maxsize=8)
def _build(of_token: TokenBytes, vocab_size: int, stops: tuple[tuple[str, ...], ...]) -> StopStrings:
    different = list(dict.fromkeys(stops))
    # The states of each: the proper prefixes of its strings, the empty one first.
    encoded = [[string.encode() for string in strings] for strings in different]
    prefixes = [sorted({b"", *(string[:i] for string in strings for i in range(len(string)))}) for strings in encoded]
    num_states = sum(map(len, prefixes))
    if num_states > MAX_STATES:
        raise ValueError(f"stop strings of {num_states} bytes in all are too long; accepted are {MAX_STATES}")
    padded = MIN_STATES
    while padded < num_states:
        padded *= 2

    vocabulary = [of_token[i] for i in range(vocab_size)]
    next_state = np.zeros((padded, vocab_size), np.int16)
    begins = np.cumsum([0, *map(len, prefixes)])
    for begin, states, strings in zip(begins, prefixes, different, strict=False):
        after, completes = _read_tokens(*_read_bytes(states, strings), vocabulary)
        after += np.int16(begin)
        next_state[begin : begin + len(states)] = np.where(completes, ~after, after)
    start = np.array([begins[different.index(strings)] for strings in stops], np.int32)
    return StopStrings(*jax.device_put((next_state, start)))


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
