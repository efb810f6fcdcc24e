"""Suffix matches: the text after earlier occurrences of its last tokens.

As in SAM decoding (arXiv 2411.10666) the longest match comes first. A comparison of the whole text with its last tokens
takes the place of a suffix automaton, which has no static shape.
"""

import jax
import jax.numpy as jnp

from jlade.drafts.tree import NONE, Shape

LONGEST = 8  # tokens of a match; longer ones count as this long


def shape(number: int, length: int) -> Shape:
    """Returns the shape of `number` spans of `length` tokens each, one after the other."""
    return Shape.join([Shape(tuple(range(-1, length - 1)))] * number)


def last(text: jax.Array, length: jax.Array) -> jax.Array:
    """Returns the last tokens of a text [C] of `length` [] tokens, from its end on; `NONE` before its beginning."""
    back = jnp.arange(LONGEST, dtype=jnp.int32)
    return jnp.where(back < length, text[jnp.maximum(length - 1 - back, 0)], NONE)


def find(text: jax.Array, length: jax.Array, last: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """Returns the places after the longest matches of some tokens, and their lengths; of equal ones the latest.

    Args:
      text: [C] int32, to search; no match crosses `NONE`.
      length: [] int32, tokens of the text.
      last: [K] int32, of that text or another one, from its end on; `NONE` for fewer.
      number: R, at most C.

    Returns:
      Places [R] int32 in the text, and lengths [R] int32 up to K, 0 where there are fewer matches.
    """
    place = jnp.arange(len(text), dtype=jnp.int32)
    before = [jnp.pad(text, (i + 1, 0), constant_values=NONE)[: len(text)] for i in range(len(last))]
    is_equal = (jnp.stack(before) == last[:, None]) & (last != NONE)[:, None]
    matching = jnp.sum(jnp.cumprod(is_equal, axis=0, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    matching = jnp.where(place < length, matching, 0)
    ranks, places = jax.lax.top_k(jnp.where(matching > 0, matching * len(text) + place, 0), number)
    return places.astype(jnp.int32), ranks // len(text)


def read(text: jax.Array, length: jax.Array, places: jax.Array, span: int) -> jax.Array:
    """Returns the tokens [R, span] from `places` [R] on, `NONE` past the end of the text."""
    at = places[:, None] + jnp.arange(span, dtype=jnp.int32)[None, :]
    return jnp.where(at < length, text.at[at].get(mode="clip"), NONE)
