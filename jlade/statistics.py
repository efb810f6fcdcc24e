"""What a decode found in its pool and got from it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jlade.decoding import DecodeState
from jlade.lookahead.ngram_pool import NGramPool


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts of B rows, as NumPy arrays [B]. Steps are forward passes, prefill not counted.

    The fan-out of a key, a first token, is the number of n-grams that the pool has for it at the end; 0 where there are
    no keys.
    """

    steps: np.ndarray
    accepted_histogram: np.ndarray  # [B, N] steps that accepted 1, 2, ... N tokens
    steps_with_candidate: np.ndarray  # the pool had an n-gram for the current token
    steps_with_accepted: np.ndarray  # more than one token was accepted
    keys: np.ndarray
    ngrams: np.ndarray
    mean_fan_out: np.ndarray
    median_fan_out: np.ndarray
    max_fan_out: np.ndarray

    @property
    def candidate_rate(self) -> np.ndarray:
        """Share of the steps for which the pool had an n-gram."""
        return self.steps_with_candidate / self.steps

    @property
    def accepted_rate(self) -> np.ndarray:
        """Share of the steps that accepted more than one token."""
        return self.steps_with_accepted / self.steps


def gather(state: DecodeState) -> Statistics:
    """Counts what happened in a decode that has ended."""
    fan_out = jnp.sum(state.pool.ngrams[..., 0] != NGramPool.EMPTY, axis=-1)  # [B, V]
    fan_outs, accepted, steps, with_candidate = jax.device_get(
        (fan_out, state.accepted, state.steps, state.steps_with_candidate)
    )
    ngram_size = state.pool.ngrams.shape[-1] + 1
    of_keys = [row[row > 0] if row.any() else np.zeros(1, row.dtype) for row in fan_outs]
    return Statistics(
        steps=steps,
        accepted_histogram=np.stack([np.bincount(row, minlength=ngram_size + 1)[1:] for row in accepted]),
        steps_with_candidate=with_candidate,
        steps_with_accepted=(accepted > 1).sum(axis=1),
        keys=(fan_outs > 0).sum(axis=1),
        ngrams=fan_outs.sum(axis=1),
        mean_fan_out=np.array([row.mean() for row in of_keys]),
        median_fan_out=np.array([np.median(row) for row in of_keys]),
        max_fan_out=np.array([row.max() for row in of_keys]),
    )
