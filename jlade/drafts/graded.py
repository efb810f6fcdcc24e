"""Tokens with grades: how probable the model found each where it last saw its place.

A rank says little: the most probable token may be all but certain or one of many. A grade is a range of probabilities,
so a record by grades tells the odds of a draft, and where the noise of a draw is known, which of them it will choose.

A token and its grade share one int32, so that a table of both is as large as a table of tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jlade.drafts.source import RANKS
from jlade.drafts.tree import NONE
from jlade.vocabulary import VocabularyShard

BITS = 3
GRADES = 2**BITS
# Least probability of each grade but the last, in about even steps of the odds.
LIMITS = (0.98, 0.92, 0.73, 0.5, 0.27, 0.08, 0.02)


def of(tokens: Any, chances: Any) -> jax.Array:
    """Returns tokens [...] int32 with the grades of their probabilities, which broadcast to [...]; `NONE` stays."""
    tokens, chances = jnp.asarray(tokens), jnp.broadcast_to(chances, jnp.shape(tokens))
    grades = sum(((chances < limit).astype(jnp.int32) for limit in LIMITS), jnp.int32(0))
    return jnp.where(tokens == NONE, NONE, tokens << BITS | grades)


def tokens(graded: Any) -> Any:
    """Returns the tokens [...] of JAX or NumPy; `NONE` stays."""
    return graded >> BITS


def grades(graded: Any) -> Any:
    """Returns the grades [...] of JAX or NumPy, 0 for the most probable; any for `NONE`."""
    return graded & (GRADES - 1)


def best(logits: jax.Array, vocabulary: VocabularyShard) -> jax.Array:
    """Returns the k tokens of the highest logits, graded [..., k], given this device's slice of logits [..., V].

    Their probabilities are those among themselves: no other logit is read again.
    """
    found, highest = vocabulary.top(logits, RANKS)
    return of(found, jax.nn.softmax(highest.astype(jnp.float32), axis=-1))
