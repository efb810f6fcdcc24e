"""The n-gram pool: recent n-grams by their first tokens, in bounded memory.

The pool is a hash table. A token's n-grams are in its bucket, which it shares with other tokens where the vocabulary is
large. A bucket has its S most recent distinct n-grams, newest first: inserting one that is there makes it the newest,
inserting into a full bucket drops the oldest. S is G, or more where tokens share buckets. (arXiv 2402.02057, section
3.2 and Algorithm 2.)
"""

import dataclasses
from typing import Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade import mesh as mesh_lib
from jlade.drafts.source import Prompt, Setting, Source, Step, Text
from jlade.drafts.tree import NONE, Proposals, TreeShape
from jlade.vocabulary import VocabularyShard

SLOTS = 8  # slots with acceptance rates of their own; later ones share the last rate
RATES = np.array([0.4, 0.25, 0.2, 0.15, 0.12, 0.1, 0.1, 0.1])  # initial ones by slot, measured with SmolLM2
CHUNK = 32  # n-grams of a prompt that are inserted at once; the work for each grows with their number
BYTES = 8 * 2**20  # of a pool at most
LANES = 128  # TPUs pad the last dimension of an array to a multiple of this


@dataclasses.dataclass(frozen=True)
class Pool(Source):
    """N-grams of the window, and of the text if asked for: G chains of N-1 tokens."""

    about = "n-grams of window and text"
    rates = RATES
    ngram_size: int  # N
    guess_set_size: int  # G
    from_text: bool
    vocab_size: int

    @classmethod
    def max_length(cls, lookahead: Setting) -> int:
        return lookahead.ngram_size - 1

    @classmethod
    def of(cls, lookahead: Setting, vocabulary: VocabularyShard) -> Self:
        ngrams = lookahead.ngrams
        return cls(ngrams.ngram_size, ngrams.guess_set_size, ngrams.pool_from_prompt, vocabulary.size)

    @property
    def shape(self) -> TreeShape:
        return TreeShape.chains(self.guess_set_size, self.ngram_size - 1)

    def empty(self) -> "NGramPool":
        return empty(self.vocab_size, self.ngram_size, self.guess_set_size)

    def start(self, state: "NGramPool", prompt: Prompt) -> "NGramPool":
        """Returns the pool with, if asked for, the n-grams that end past the known tokens of the prompt."""
        if not self.from_text:
            return state
        number = min(CHUNK, len(prompt.tokens))

        def insert_chunk(carry: tuple[jax.Array, NGramPool]) -> tuple[jax.Array, NGramPool]:
            done, pool = carry
            ends = prompt.known + done + jnp.arange(number, dtype=jnp.int32)  # places of the n-grams' last tokens
            return done + number, insert(pool, *self._ending_at(prompt.tokens, prompt.length, ends))

        return jax.lax.while_loop(lambda carry: carry[0] < prompt.longest, insert_chunk, (jnp.int32(0), state))[1]

    def propose(self, state: "NGramPool", text: Text, rates: jax.Array) -> Proposals:
        ngrams = lookup(state, text.tokens[text.length - 1], self.guess_set_size)
        slots = np.minimum(np.arange(self.guess_set_size, dtype=np.int32), SLOTS - 1)
        kinds = jnp.asarray(np.repeat(slots, self.ngram_size - 1))
        return Proposals.of(self.shape, ngrams.reshape(-1), kinds)

    def learn(self, state: "NGramPool", step: Step) -> "NGramPool":
        ngrams, valid = step.ngrams
        if self.from_text:
            ends = step.before + jnp.arange(step.max_accepted, dtype=jnp.int32)
            text_ngrams = self._ending_at(step.text, step.length, ends)
            ngrams, valid = jnp.concatenate([ngrams, text_ngrams[0]]), jnp.concatenate([valid, text_ngrams[1]])
        return insert(state, ngrams, valid)

    def _ending_at(self, tokens: jax.Array, length: jax.Array, ends: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ngrams_at(tokens, length, ends - (self.ngram_size - 1), self.ngram_size)


@flax.struct.dataclass
class NGramPool:
    """The pool of one sequence, R buckets of S n-grams; of a batch with another first axis, B.

    The n-grams of a bucket are one row: TPUs pad the last dimension of an array to 128, and would pad each n-gram.

    Attributes:
      rows: int32[R, S * N], newest n-gram first, then -1.
      ngram_size: N.
      vocab_size: V.
    """

    rows: jax.Array
    ngram_size: int = flax.struct.field(pytree_node=False)
    vocab_size: int = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, ngrams: jax.Array, vocab_size: int) -> Self:
        """Returns the pool of the n-grams int32[..., R, S, N]; those of token t are in bucket t modulo R."""
        *buckets, slots, ngram_size = ngrams.shape
        return cls(ngrams.reshape(*buckets, slots * ngram_size), ngram_size, vocab_size)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of `ngrams`: the axis B of a batch, then R, S and N."""
        *buckets, size = self.rows.shape
        return *buckets, size // self.ngram_size, self.ngram_size

    @property
    def ngrams(self) -> jax.Array:
        """int32[..., R, S, N]."""
        return self.rows.reshape(self.shape)

    def fan_out(self) -> list[np.ndarray]:
        """Returns for each of a batch of pools the number of n-grams of each token that has any, int[keys]."""
        pools = mesh_lib.fetch(self.rows).reshape(self.shape)  # on the host, as nothing may compile after a warm-up
        return [np.unique(first[first != NONE], return_counts=True)[1] for first in pools[..., 0]]


def shape(vocab_size: int, ngram_size: int, guess_set_size: int) -> tuple[int, int, int]:
    """Returns the shape of a pool: R, S and N.

    With a bucket for each token S is G. Shared buckets have as many n-grams as their lanes hold.
    """
    lanes = LANES * max(1, -(-guess_set_size * ngram_size // LANES))
    buckets = BYTES // (4 * lanes)
    if vocab_size <= buckets or not guess_set_size:
        return min(vocab_size, buckets), guess_set_size, ngram_size
    return buckets, lanes // ngram_size, ngram_size


def empty(vocab_size: int, ngram_size: int, guess_set_size: int) -> NGramPool:
    """Returns an empty pool."""
    sizes = shape(vocab_size, ngram_size, guess_set_size)
    return NGramPool.of(jnp.full(sizes, NONE, jnp.int32), vocab_size)


def lookup(pool: NGramPool, key: jax.Array, guess_set_size: int) -> jax.Array:
    """Returns the G newest n-grams of the token `key` [] without it [G, N-1], newest first, then `NONE`."""
    bucket = pool.rows[key % len(pool.rows)].reshape(pool.shape[1:])
    source = _first_of(bucket[:, 0] == key, guess_set_size)
    return bucket[:, 1:].at[source].get(mode="fill", fill_value=NONE)


def _first_of(stays: jax.Array, number: int) -> jax.Array:
    """Returns the places [number] of the first ones that stay [K], and K where there are no more."""
    preceding = jnp.cumsum(stays, dtype=jnp.int32)  # slot g takes the one that g staying ones precede
    slot = jnp.arange(number, dtype=jnp.int32)
    return jnp.sum(preceding[None, :] <= slot[:, None], axis=-1, dtype=jnp.int32)


def ngrams_at(tokens: jax.Array, length: jax.Array, starts: jax.Array, ngram_size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the n-grams of the text `tokens[:length]` that begin at `starts` [M], as arguments of `insert`.

    The starts are any integers. The n-grams are [M, N]; whether each lies within the text is [M].
    """
    ngrams = tokens.at[starts[:, None] + jnp.arange(ngram_size, dtype=jnp.int32)[None, :]].get(mode="clip")
    return ngrams, (starts >= 0) & (starts + ngram_size <= length)


def insert(pool: NGramPool, ngrams: jax.Array, valid: jax.Array) -> NGramPool:
    """Returns the pool after inserting n-grams, with the result of inserting them one by one, in order.

    A bucket holds its S most recent distinct n-grams: first the new ones, last first, then the old ones that are not
    among them. The newest n-gram of each bucket writes all slots of that bucket; the other ones write nothing.

    Args:
      pool: of one sequence.
      ngrams: [M, N] int32.
      valid: [M] bool, which of the n-grams to insert.
    """
    num_buckets, slots, _ = pool.shape
    if slots == 0 or len(ngrams) == 0:
        return pool
    ngrams, valid = ngrams[::-1], valid[::-1]  # newest first, as in the slots
    number, buckets = len(ngrams), ngrams[:, 0] % num_buckets
    index = jnp.arange(number, dtype=jnp.int32)
    newer = index[None, :] < index[:, None]
    same_bucket = (buckets[:, None] == buckets[None, :]) & valid[:, None] & valid[None, :]

    # Which n-grams stay, new and old: for each new n-gram, those of its bucket that no newer n-gram equals.
    same = same_bucket & jnp.all(ngrams[:, None] == ngrams[None, :], axis=-1)
    new_stays = valid & ~jnp.any(same & newer, axis=1)  # [M]
    old = pool.rows[buckets].reshape(number, *pool.shape[1:])  # [M, S, N]
    renewed = jnp.any(same_bucket[:, None, :] & jnp.all(old[:, :, None] == ngrams[None, None], axis=-1), axis=-1)
    old_stays = (old[..., 0] != NONE) & ~renewed  # [M, S]
    stays = jnp.concatenate([same_bucket & new_stays[None, :], old_stays], axis=1)  # [M, M + S], newest first

    source = jax.vmap(lambda each: _first_of(each, slots))(stays)[..., None]  # [M, S, 1]
    from_old = jnp.take_along_axis(old, source - number, axis=1, mode="clip")
    from_old = jnp.where(source < number + slots, from_old, NONE)
    content = jnp.where(source < number, ngrams.at[source[..., 0]].get(mode="clip"), from_old)  # [M, S, N]

    writes = valid & ~jnp.any(same_bucket & newer, axis=1)
    target = jnp.where(writes, buckets, num_buckets + index)  # indices out of range are dropped; none occurs twice
    rows = pool.rows.at[target].set(content.reshape(number, -1), mode="drop", unique_indices=True)
    return dataclasses.replace(pool, rows=rows)
