"""When the texts of a request end: limits, end tokens and stop strings, checked and as arrays."""

import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jlade.decoding.stopping import Stopping
from jlade.errors import check_int
from jlade.generation import stop_strings
from jlade.generation.options import Options
from jlade.generation.prompts import HostArray, round_up
from jlade.models.base import Decoder

MOST_NEW_TOKENS = 256  # by default
EOS_SLOTS = 32  # end tokens, or this times a power of two, so that few programs are compiled


def check(
    options: Options, prompts: list[np.ndarray], decoder: Decoder, capacity: int | None
) -> tuple[Stopping, tuple[tuple[str, ...], ...]]:
    """Returns when the texts end, as arrays, and the stop strings of each."""
    lengths: HostArray = np.array([len(ids) for ids in prompts], np.int32)
    if options.max_new_tokens is None:
        most = decoder.max_positions if capacity is None else capacity
        limits: HostArray = np.clip(most - lengths, 1, MOST_NEW_TOKENS)
    else:
        limits = _check_ints("max_new_tokens", options.max_new_tokens, 1, len(prompts))
    fewest = _check_ints("min_new_tokens", options.min_new_tokens, 0, len(prompts))
    stop = stop_strings.check(options.stop, len(prompts), options.tokenizer, decoder)
    eos_ids = decoder.eos_ids if options.eos_ids is None else options.eos_ids
    stopping = Stopping(
        max_new_tokens=limits,
        eos_ids=_check_eos_ids(eos_ids, len(prompts), decoder.vocab_size),
        min_new_tokens=fewest if fewest.any() else None,
        strings=stop_strings.build(options.tokenizer, decoder.vocab_size, stop) if any(stop) else None,
    )
    return stopping, stop


def _check_ints(name: str, values: Any, least: int, batch_size: int) -> HostArray:
    """Returns integers [B], given one for all sequences or one for each."""
    if isinstance(values, numbers.Number) or not isinstance(values, Sequence | np.ndarray):
        values = [values] * batch_size
    if len(values) != batch_size:
        raise ValueError(f"{name} must be one integer or {batch_size}, one for each prompt, got {values!r}")
    return np.array([check_int(name, value, least) for value in values], np.int32)


def _check_eos_ids(eos_ids: Any, batch_size: int, vocab_size: int) -> HostArray:
    """Returns the end tokens of each sequence [B, K], padded with -1, given those of all or of each."""
    wrong = f"eos_ids must be a token id, a sequence of them, or one for each of {batch_size} prompts, got {eos_ids!r}"
    if hasattr(eos_ids, "__array__"):
        eos_ids = np.asarray(eos_ids).tolist()
    if isinstance(eos_ids, numbers.Integral):
        eos_ids = (eos_ids,)
    if isinstance(eos_ids, str) or not isinstance(eos_ids, Iterable):
        raise TypeError(wrong)
    sets = [np.asarray(ids).tolist() if hasattr(ids, "__array__") else ids for ids in eos_ids]
    if not sets or isinstance(sets[0], numbers.Number):
        sets = [sets] * batch_size
    if any(isinstance(ids, str) or not isinstance(ids, Iterable) for ids in sets):
        raise TypeError(wrong)
    if len(sets) != batch_size:
        raise ValueError(wrong)
    sets = [[check_int("eos_ids", i, 0) for i in ids] for ids in sets]
    outside = [i for ids in sets for i in ids if i >= vocab_size]
    if outside:
        raise ValueError(f"eos_ids holds {outside[0]}; accepted are 0 to {vocab_size - 1}")
    padded = np.full((batch_size, round_up(max(map(len, sets)), EOS_SLOTS)), -1, np.int32)
    for padded_ids, ids in zip(padded, sets, strict=True):
        padded_ids[: len(ids)] = ids
    return padded
