"""Suffix matches: the text after earlier occurrences of its last tokens, in the text itself and in a corpus.

As in SAM decoding (arXiv 2411.10666) the longest match comes first. A comparison of the whole text with its last tokens
takes the place of a suffix automaton, which has no static shape. Other texts, and long prompts, have a `TextIndex`.
"""

import dataclasses
import functools
from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts.source import Setting, Source, Text
from jlade.drafts.tree import NONE, Proposals, TreeShape
from jlade.vocabulary import VocabularyShard

MAX_LENGTH = 24  # tokens of a draft
LONGEST = 8  # tokens of a match; longer ones count as this long
MATCHES = 4  # matches whose following text is proposed
OTHERS = 12  # most tokens that are read after each match but the best one
# Matches of each length that an index knows. If `MATCHES` of them match longer, these are better; otherwise at least
# `MATCHES` of them are the latest of just this length.
LATEST = 2 * MATCHES - 1
RECENT = 4096  # tokens at the end of a long text that are searched; of those before, the prompt alone is indexed
# Initial acceptance rates, measured with SmolLM2: after the best match by its length, and relative to it after others.
_BY_LENGTH = np.array([0.25, 0.48, 0.56, 0.61, 0.7, 0.75, 0.8, 0.86])
_BY_RANK = np.array([1.0, 0.6, 0.45, 0.4])
RATES = (_BY_LENGTH[:, None] * _BY_RANK[None, :]).reshape(-1)
RATES_OF_CORPUS = 0.6 * RATES  # assumed
BLOCK = 64  # places of an index
FAN = 64  # blocks that are compared at once


@dataclasses.dataclass(frozen=True)
class Suffix(Source):
    """The text after the longest matches of its end: a chain for each match.

    Kinds are ranks of matches, and lengths: the token at depth d after a match of n tokens has the length n + d - 1, up
    to `LONGEST`, which the match has once the tokens before it are accepted.

    The state is an index of the prompt, which `jlade.generate` makes of long texts. Without one, as in all rows of an
    engine, the whole text is searched.
    """

    about = "after earlier occurrences of the last tokens"
    rates = RATES
    reach: int  # tokens of the first chain

    @classmethod
    def max_length(cls, lookahead: Setting) -> int:
        return MAX_LENGTH

    @classmethod
    def of(cls, lookahead: Setting, vocabulary: VocabularyShard) -> Self:
        return cls(min(MAX_LENGTH, lookahead.num_drafted))

    @property
    def shape(self) -> TreeShape:
        return TreeShape.join([TreeShape.chains(1, length) for length in lengths_of_chains(self.reach)])

    def propose(self, state: Any, text: Text, rates: jax.Array) -> Proposals:
        search = find if state is None else functools.partial(find_long, state)
        matches = search(text.tokens, text.length, last(text.tokens, text.length), MATCHES)
        return Proposals.of(self.shape, *chains(text.tokens, text.length, *matches, self.reach))


@dataclasses.dataclass(frozen=True)
class Corpus(Suffix):
    """The same in other texts, such as earlier texts of the same user (suffix decoding, arXiv 2411.04975).

    All sequences share the index of these texts.
    """

    about = "the same in other texts"
    rates = RATES_OF_CORPUS

    def propose(self, state: Any, text: Text, rates: jax.Array) -> Proposals:
        texts: TextIndex = text.shared["corpus"]
        tokens, last_tokens = texts.tokens, last(text.tokens, text.length)
        places = candidates(texts, last_tokens)
        matches = best(places, before(tokens, places, last_tokens), len(tokens), MATCHES)
        return Proposals.of(self.shape, *chains(tokens, jnp.int32(len(tokens)), *matches, self.reach))


@flax.struct.dataclass
class TextIndex:
    """Texts of S tokens, and the places in them sorted by the K tokens before each; arrays of NumPy or of JAX.

    It is a suffix array that reads backwards and K tokens deep. A place near the one where the end of a text belongs
    matches it longest. The sorted places are divided into blocks, and the first place of a block stands for it in the
    search. The matches may go on in the blocks beside the one that is found; then the first place of a block is one of
    them, and the block knows the latest of all of them.

    Attributes:
      tokens: int32[S], each text followed by -1.
      order: int32[S / 64, 64], the sorted places in blocks; of equal ones the later one is last.
      keys: int32[S / 64, K], the tokens before the first place of each block, the last one first.
      latest: int32[S / 64, K, R], of the places that share 1 to K tokens with that one, the latest R; 0 for none.
    """

    tokens: jax.Array
    order: jax.Array
    keys: jax.Array
    latest: jax.Array


def lengths_of_chains(reach: int) -> list[int]:
    """Returns the tokens of each chain, that of the best match first."""
    return [reach, *[min(reach, OTHERS)] * (MATCHES - 1)]


def chains(
    text: jax.Array, length: jax.Array, places: jax.Array, lengths: jax.Array, reach: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens [L] after matches in a text, which `find` returns, and their kinds [L]."""
    spans = read(text, length, places, reach)
    matched = jnp.minimum(lengths[:, None] + jnp.arange(reach, dtype=jnp.int32)[None, :], LONGEST)
    rank = jnp.arange(MATCHES, dtype=jnp.int32)[:, None]
    tokens = jnp.where(lengths[:, None] > 0, spans, NONE)
    kinds = (jnp.maximum(matched, 1) - 1) * MATCHES + rank
    is_read = np.arange(reach) < np.array(lengths_of_chains(reach))[:, None]
    return tokens[is_read], kinds[is_read]


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
    matched = jnp.where((place < length) & (text != NONE), matching(text, last), 0)
    ranks = jnp.where(matched > 0, matched * len(text) + place, 0)
    # In float32, exact below 2**24, so up to 1.8 million tokens: `top_k` of integers sorts the whole array on CPUs and
    # GPUs.
    ranks, places = jax.lax.top_k(ranks.astype(jnp.float32), number)
    return places.astype(jnp.int32), ranks.astype(jnp.int32) // len(text)


def find_long(
    index: TextIndex, text: jax.Array, length: jax.Array, last: jax.Array, number: int
) -> tuple[jax.Array, jax.Array]:
    """Returns what `find` returns, of the places in an index of the text's beginning and of the `RECENT` last ones.

    `number` is at most `MATCHES`, and the text has room for `RECENT + LONGEST` tokens or more.
    """
    indexed = candidates(index, last)
    matched_indexed = jnp.where(indexed < length, before(text, indexed, last), 0)
    begin = jnp.clip(length - RECENT - LONGEST, 0, len(text) - RECENT - LONGEST)
    recent = jax.lax.dynamic_slice_in_dim(text, begin, RECENT + LONGEST)
    offset = jnp.arange(len(recent), dtype=jnp.int32)
    is_whole = (begin == 0) | (offset >= LONGEST)  # the tokens before the others are not in the slice
    matched = jnp.where((begin + offset < length) & is_whole, matching(recent, last), 0)
    places = jnp.concatenate([indexed, begin + offset])
    return best(places, jnp.concatenate([matched_indexed, matched]), len(text), number)


def best(places: jax.Array, matched: jax.Array, size: int, number: int) -> tuple[jax.Array, jax.Array]:
    """Returns what `find` returns for a text of `size` tokens, given places [n] int32 of it and their matches [n].

    The places may repeat, and have all of the result among them.
    """
    ranks = jnp.where(matched > 0, matched * size + places, 0)
    highest = []
    for _ in range(number):
        highest.append(jnp.max(ranks))
        ranks = jnp.where(ranks == highest[-1], 0, ranks)
    chosen = jnp.stack(highest)
    return chosen % size, chosen // size


def before(text: jax.Array, places: jax.Array, last: jax.Array) -> jax.Array:
    """Returns `matching` at some places [n] int32 alone, 0 where one of several texts ends: [n]."""
    at = places[:, None] - 1 - jnp.arange(len(last), dtype=jnp.int32)[None, :]
    tokens = jnp.where(at < 0, NONE, text[jnp.maximum(at, 0)])
    is_equal = (tokens == last[None, :]) & (last != NONE)[None, :] & (text[places] != NONE)[:, None]
    return jnp.sum(jnp.cumprod(is_equal, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def matching(text: jax.Array, last: jax.Array) -> jax.Array:
    """Returns how many tokens before each place of a text [C] match the `last` [K] ones, from their end on: [C]."""
    shifted = [jnp.pad(text, (i + 1, 0), constant_values=NONE)[: len(text)] for i in range(len(last))]
    is_equal = (jnp.stack(shifted) == last[:, None]) & (last != NONE)[:, None]
    return jnp.sum(jnp.cumprod(is_equal, axis=0, dtype=jnp.int32), axis=0, dtype=jnp.int32)


def read(text: jax.Array, length: jax.Array, places: jax.Array, span: int) -> jax.Array:
    """Returns the tokens [R, span] from `places` [R] on, `NONE` past the end of the text."""
    at = places[:, None] + jnp.arange(span, dtype=jnp.int32)[None, :]
    return jnp.where(at < length, text.at[at].get(mode="clip"), NONE)


def candidates(index: TextIndex, last: jax.Array) -> jax.Array:
    """Returns places [n] int32 among which the longest matches of the `last` [K] tokens are; some more than once.

    These are the latest of each length: R for a length, or all if there are fewer.
    """
    num_blocks = len(index.keys)
    group = min(FAN, num_blocks)
    begin = group * _last_not_above(index.keys[::group], last)
    block = begin + _last_not_above(jax.lax.dynamic_slice_in_dim(index.keys, begin, group), last)
    beside = jnp.minimum(block + 1, num_blocks - 1)
    return jnp.concatenate([index.order[block], *(index.latest[each].reshape(-1) for each in (block, beside))])


def _last_not_above(keys: jax.Array, last: jax.Array) -> jax.Array:
    """Returns the index [] int32 of the last of some sorted keys [n, K] that is not above `last` [K]; 0 for none."""
    differs = keys != last[None, :]
    first = jnp.argmax(differs, axis=1)
    at_first = jnp.take_along_axis(keys, first[:, None], axis=1)[:, 0]
    is_above = jnp.any(differs, axis=1) & (at_first > last[first])
    return jnp.maximum(jnp.sum(~is_above, dtype=jnp.int32) - 1, 0)
