"""The options of requests to an engine, and its sizes."""

import numbers
from collections.abc import Sequence
from typing import Any, TypedDict

import jax

from jlade.config import SamplingConfig, check_int
from jlade.generation.options import unknown
from jlade.generation.prompts import Prompts

# More than any engine needs: a slip is an error before it takes memory.
MOST_SEQUENCES = 4096
MOST_PREDICTION = 2**20


class RequestOptions(TypedDict, total=False):
    """The options of a request; see `jlade.generate`."""

    max_new_tokens: int | Sequence[int] | None
    min_new_tokens: int | Sequence[int]
    sampling: SamplingConfig | Sequence[SamplingConfig]
    parse_special: bool
    eos_ids: int | Sequence[int] | Sequence[Sequence[int]] | None
    stop: str | Sequence[str] | Sequence[Sequence[str]] | None
    key: jax.Array | None
    prediction: Prompts | None
    logprobs: bool
    top_logprobs: int
    with_statistics: bool


def check_names(options: RequestOptions) -> None:
    """Raises a TypeError for an option that requests do not have."""
    accepted = RequestOptions.__annotations__
    for name in options:
        if name not in accepted:
            raise unknown(name, "an option of a request", accepted)


def check_priority(priority: Any) -> None:
    """Raises a TypeError for a priority that is no integer."""
    if isinstance(priority, bool) or not isinstance(priority, numbers.Integral):
        raise TypeError(f"priority must be an integer, got {priority!r}")


def check_sizes(max_sequences: Any, max_waiting: Any, prefix_memory: Any, max_prediction: Any) -> None:
    """Raises a TypeError or a ValueError for sizes that no engine has; see `Engine`."""
    check_int("max_sequences", max_sequences, 1, MOST_SEQUENCES)
    check_int("max_waiting", max_waiting, 1)
    check_int("prefix_memory", 0 if prefix_memory is None else prefix_memory, 0)
    check_int("max_prediction", max_prediction, 0, MOST_PREDICTION)
