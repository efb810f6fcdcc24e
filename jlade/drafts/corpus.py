"""Suffix matches in other texts, such as earlier texts of the same user (suffix decoding, arXiv 2411.04975).

The places of the texts are sorted by the tokens before them, as in a suffix array that reads backwards and K tokens
deep. A place near the one where the end of the text belongs matches it longest. The sorted places are divided into
blocks, and the first place of a block stands for it in the search. The matches may go on in the blocks beside the one
that is found; then the first place of a block is one of them, and the block knows the latest of all of them.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts import suffix
from jlade.drafts.source import Text
from jlade.drafts.suffix import LONGEST, MATCHES, Suffix
from jlade.drafts.tree import NONE

BLOCK = 64  # places
FAN = 64  # blocks that are compared at once
LATEST = 2 * MATCHES - 1  # of these, fewer than `MATCHES` are also matches of a longer end of the text
RATES = 0.6 * suffix.RATES  # initial ones, assumed


@flax.struct.dataclass
class CorpusIndex:
    """Texts of S tokens, and the places in them sorted by the K tokens before each; arrays of NumPy or of JAX."""

    tokens: jax.Array  # [S] int32, each text followed by `NONE`
    order: jax.Array  # [S/B, B] int32, the sorted places; of equal ones the later one is last
    keys: jax.Array  # [S/B, K] int32, the tokens before the first place of each block, the last one first
    latest: jax.Array  # [S/B, K, R] int32, of the places that share 1 to K tokens with that one, the latest; 0 for none


@dataclasses.dataclass(frozen=True)
class Corpus(Suffix):
    """The corpus after the longest matches of the text's end. All sequences share its tokens."""

    @property
    def rates(self) -> np.ndarray:
        return RATES

    def propose(self, state: Any, text: Text, rates: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert text.corpus is not None
        places, lengths = find(text.corpus, suffix.last(text.tokens, text.length))
        return suffix.chains(text.corpus.tokens, jnp.int32(len(text.corpus.tokens)), places, lengths, self.reach)


def find(index: CorpusIndex, last: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what `suffix.find` returns for the texts of an index: `MATCHES` places and their lengths."""
    num_blocks = len(index.keys)
    group = min(FAN, num_blocks)
    begin = group * _last_not_above(index.keys[::group], last)
    block = begin + _last_not_above(jax.lax.dynamic_slice_in_dim(index.keys, begin, group), last)
    beside = jnp.minimum(block + 1, num_blocks - 1)
    places = jnp.concatenate([index.order[block], *(index.latest[each].reshape(-1) for each in (block, beside))])

    at = places[:, None] - 1 - jnp.arange(LONGEST, dtype=jnp.int32)[None, :]
    before = jnp.where(at < 0, NONE, index.tokens[jnp.maximum(at, 0)])
    is_equal = (before == last[None, :]) & (last != NONE)[None, :]
    matched = jnp.sum(jnp.cumprod(is_equal, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    return suffix.best(places, matched, len(index.tokens), MATCHES)


def _last_not_above(keys: jax.Array, last: jax.Array) -> jax.Array:
    """Returns the index [] int32 of the last of some sorted keys [n, K] that is not above `last` [K]; 0 for none."""
    differs = keys != last[None, :]
    first = jnp.argmax(differs, axis=1)
    at_first = jnp.take_along_axis(keys, first[:, None], axis=1)[:, 0]
    is_above = jnp.any(differs, axis=1) & (at_first > last[first])
    return jnp.maximum(jnp.sum(~is_above, dtype=jnp.int32) - 1, 0)
