"""Tokens with grades: how probable the model found each where it last saw its place.

A rank says little: the most probable token may be all but certain or one of many. A grade is a range of probabilities,
so a record by grades tells the odds of a draft, and where the noise of a draw is known, which of them it will choose.
Grades are divided into levels, which keep enough of a probability for the mean of several.

A token and its level share one int32, so that a table of both is as large as a table of tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts.source import RANKS
from jlade.drafts.tree import NONE
from jlade.vocabulary import VocabularyShard

BITS = 6
LEVELS = 2**BITS  # even steps of log-odds, the most probable first
GRADES = 8  # each of as many levels
HIGHEST = 5.2  # log-odds from which on all are of level 0; the last level has those below the negative of it
STEP = 2 * HIGHEST / LEVELS
SCALE = f"{LEVELS} even steps of log-odds from {HIGHEST} down"  # a table with another one is of no use
# A probability of each level, and the least sum of two of them for each level but the last one. In integers, so that
# equal rows have equal means on all devices.
UNIT = 2**15
CHANCES = np.round(UNIT / (1 + np.exp(STEP * (np.arange(LEVELS) + 0.5) - HIGHEST))).astype(np.int32)
LEAST_SUMS = np.round(2 * UNIT / (1 + np.exp(STEP * np.arange(1, LEVELS) - HIGHEST))).astype(np.int32)


def of(tokens: Any, chances: Any) -> jax.Array:
    """Returns tokens [...] int32 with the levels of their probabilities, which broadcast to [...]; `NONE` stays."""
    tokens, chances = jnp.asarray(tokens), jnp.broadcast_to(chances, jnp.shape(tokens))
    log_odds = jnp.log(chances) - jnp.log1p(-chances)
    levels = jnp.clip(jnp.floor((HIGHEST - log_odds) / STEP), 0, LEVELS - 1).astype(jnp.int32)
    return jnp.where(tokens == NONE, NONE, tokens << BITS | levels)


def tokens(graded: Any) -> Any:
    """Returns the tokens [...] of JAX or NumPy; `NONE` stays."""
    return graded >> BITS


def grades(graded: Any) -> Any:
    """Returns the grades [...] of JAX or NumPy, 0 for the most probable; any for `NONE`."""
    return (graded & (LEVELS - 1)) // (LEVELS // GRADES)


def best(logits: jax.Array, vocabulary: VocabularyShard) -> jax.Array:
    """Returns the k tokens of the highest logits, graded [..., k], given this device's slice of logits [..., V].

    Their probabilities are those among themselves: no other logit is read again.
    """
    found, highest = vocabulary.top(logits, RANKS)
    return of(found, jax.nn.softmax(highest.astype(jnp.float32), axis=-1))


def mean(old: jax.Array, new: jax.Array) -> jax.Array:
    """Returns the k tokens of the highest mean probabilities of two rows, graded [R, k]; `new` where `old` has none.

    A token that a row lacks is improbable there. Of equal ones those of `new` come first.
    """
    is_same = same(new, old)
    of_old, of_new = (jnp.where(row == NONE, 0, jnp.asarray(CHANCES)[row & (LEVELS - 1)]) for row in (old, new))
    shared = jnp.sum(jnp.where(is_same, of_old[:, None, :], 0), axis=2)
    alone = jnp.where(jnp.any(is_same, axis=1) | (old == NONE), -1, of_old)
    sums = jnp.concatenate([jnp.where(new == NONE, -1, of_new + shared), alone], axis=1)
    both = tokens(jnp.concatenate([new, old], axis=1))
    # In float32, which holds these numbers exactly: programs for CPUs and GPUs sort all integers.
    highest, places = jax.lax.top_k(sums.astype(jnp.float32), new.shape[1])
    least = LEAST_SUMS.astype(np.float32)[None, None]
    levels = jnp.sum(highest[:, :, None] < least, axis=2, dtype=jnp.int32)
    best = jnp.take_along_axis(both, places, axis=1) << BITS | levels
    return jnp.where(old[:, :1] == NONE, new, jnp.where(highest < 0, NONE, best))


def same(one: jax.Array, other: jax.Array) -> jax.Array:
    """Returns whether graded tokens [R, m] and [R, n] are the same, [R, m, n] bool; `NONE` is none."""
    return (tokens(one)[:, :, None] == tokens(other)[:, None, :]) & (one != NONE)[:, :, None]
