"""The n-gram pool: for every token, up to G n-grams that begin with it, newest first.

An n-gram is a key, its first token, and the N-1 tokens after it. Inserting an n-gram that is already in the pool makes
it the newest; inserting under a full key drops the oldest. (arXiv 2402.02057, section 3.2 and Algorithm 2.)

On a mesh that divides the model, each device has the n-grams whose keys are in its part of the vocabulary.
"""

import dataclasses
from typing import ClassVar, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jlade.config import LookaheadConfig
from jlade.drafts.source import Prompt, Source, Step, Text
from jlade.drafts.tree import Shape
from jlade.mesh import DATA
from jlade.vocabulary import VocabularyShard

SLOTS = 8  # slots with acceptance rates of their own; later ones share the last rate
RATES = np.array([0.4, 0.25, 0.2, 0.15, 0.12, 0.1, 0.1, 0.1])  # initial ones by slot, measured with SmolLM2
CHUNK = 32  # n-grams of a prompt that are inserted at once; the work for each grows with their number


@dataclasses.dataclass(frozen=True)
class Pool(Source):
    """N-grams of the window, and of the text if asked for: G chains of N-1 tokens."""

    ngram_size: int  # N
    guess_set_size: int  # G
    from_text: bool
    vocabulary: VocabularyShard

    @classmethod
    def of(cls, lookahead: LookaheadConfig, vocabulary: VocabularyShard) -> Self:
        return cls(lookahead.ngram_size, lookahead.guess_set_size, lookahead.pool_from_prompt, vocabulary)

    @property
    def shape(self) -> Shape:
        return Shape.chains(self.guess_set_size, self.ngram_size - 1)

    @property
    def rates(self) -> np.ndarray:
        return RATES

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(DATA, self.vocabulary.axes) if self.vocabulary.axes else PartitionSpec(DATA)

    def empty(self) -> "NGramPool":
        return empty(self.vocabulary.slice_size, self.ngram_size, self.guess_set_size)

    def start(self, state: "NGramPool", prompt: Prompt) -> "NGramPool":
        """Returns the pool with, if asked for, the n-grams that end past the known tokens of the prompt."""
        if not self.from_text:
            return state
        number = min(CHUNK, len(prompt.tokens))

        def insert_chunk(carry: tuple[jax.Array, NGramPool]) -> tuple[jax.Array, NGramPool]:
            done, pool = carry
            ends = prompt.known + done + jnp.arange(number, dtype=jnp.int32)  # places of the n-grams' last tokens
            return done + number, self._insert(pool, *self._ending_at(prompt.tokens, prompt.length, ends))

        return jax.lax.while_loop(lambda carry: carry[0] < prompt.longest, insert_chunk, (jnp.int32(0), state))[1]

    def propose(self, state: "NGramPool", text: Text, rates: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = text.tokens[text.length - 1]
        if self.vocabulary.axes:
            key, is_here = self.vocabulary.local(key)
            found = jnp.where(is_here, lookup(state, key), NGramPool.EMPTY)
            ngrams = jax.lax.pmax(found, self.vocabulary.axes)
        else:
            ngrams = lookup(state, key)
        slots = np.minimum(np.arange(self.guess_set_size, dtype=np.int32), SLOTS - 1)
        return ngrams.reshape(-1), jnp.asarray(np.repeat(slots, self.ngram_size - 1))

    def learn(self, state: "NGramPool", step: Step) -> "NGramPool":
        ngrams = step.ngrams
        if self.from_text:
            ends = step.before + jnp.arange(step.max_accepted, dtype=jnp.int32)
            of_text = self._ending_at(step.text, step.length, ends)
            keys, values, valid = (jnp.concatenate(pair) for pair in zip(ngrams, of_text, strict=True))
            ngrams = keys, values, valid
        return self._insert(state, *ngrams)

    def _ending_at(
        self, tokens: jax.Array, length: jax.Array, ends: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return ngrams_at(tokens, length, ends - (self.ngram_size - 1), self.ngram_size)

    def _insert(self, pool: "NGramPool", keys: jax.Array, ngrams: jax.Array, valid: jax.Array) -> "NGramPool":
        if self.vocabulary.axes:
            keys, is_here = self.vocabulary.local(keys)
            valid &= is_here
        return insert(pool, keys, ngrams, valid)


@flax.struct.dataclass
class NGramPool:
    """The pool of one sequence; [B, ...] for a batch.

    The slots of a key are one row: TPUs pad the last dimension of an array to 128, and would pad each n-gram.
    """

    rows: jax.Array  # [V, G * (N-1)] int32, newest n-gram first, then EMPTY
    ngram_size: int = flax.struct.field(pytree_node=False)  # N
    EMPTY: ClassVar[int] = -1  # equals no token, so an empty slot is never accepted

    @classmethod
    def of(cls, ngrams: jax.Array) -> Self:
        """Returns the pool of the n-grams [..., V, G, N-1] int32."""
        *keys, slots, length = ngrams.shape
        return cls(ngrams.reshape(*keys, slots * length), length + 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., V, G, N-1]."""
        *keys, size = self.rows.shape
        return *keys, size // (self.ngram_size - 1), self.ngram_size - 1

    @property
    def ngrams(self) -> jax.Array:
        """[..., V, G, N-1] int32, the tokens after each key."""
        return self.rows.reshape(self.shape)


def empty(vocab_size: int, ngram_size: int, guess_set_size: int) -> NGramPool:
    """Returns an empty pool."""
    return NGramPool.of(jnp.full((vocab_size, guess_set_size, ngram_size - 1), NGramPool.EMPTY, jnp.int32))


def lookup(pool: NGramPool, key: jax.Array) -> jax.Array:
    """Returns the n-grams [G, N-1] of the token `key` [], newest first, then `EMPTY`."""
    return pool.rows[key].reshape(pool.shape[1:])


def ngrams_at(
    tokens: jax.Array, length: jax.Array, starts: jax.Array, ngram_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the n-grams of the text `tokens[:length]` that begin at `starts` [M], as arguments of `insert`.

    Args:
      tokens: [C] int32.
      length: [] int32.
      starts: [M] int32, any integers.
      ngram_size: N.

    Returns:
      Keys [M], the tokens after them [M, N-1], and whether the n-gram lies within the text [M].
    """
    found = tokens.at[starts[:, None] + jnp.arange(ngram_size, dtype=jnp.int32)[None, :]].get(mode="clip")
    return found[:, 0], found[:, 1:], (starts >= 0) & (starts + ngram_size <= length)


def insert(pool: NGramPool, keys: jax.Array, ngrams: jax.Array, valid: jax.Array) -> NGramPool:
    """Returns the pool after inserting n-grams, with the result of inserting them one by one, in order.

    The slots of a key hold its G most recent distinct n-grams: first the new ones, last first, then the old ones that
    are not among them. The newest n-gram of each key writes all slots of that key; the other ones write nothing.

    Args:
      pool: of one sequence.
      keys: [M] int32, first tokens.
      ngrams: [M, N-1] int32, the tokens after them.
      valid: [M] bool, which of the n-grams to insert.
    """
    vocab_size, slots, _ = pool.shape
    if slots == 0 or len(keys) == 0:
        return pool
    keys, ngrams, valid = keys[::-1], ngrams[::-1], valid[::-1]  # newest first, as in the slots
    number = len(keys)
    index = jnp.arange(number, dtype=jnp.int32)
    newer = index[None, :] < index[:, None]
    same_key = (keys[:, None] == keys[None, :]) & valid[:, None] & valid[None, :]

    # Which n-grams stay, new and old: for each new n-gram, those of its key that no newer n-gram equals.
    same = same_key & jnp.all(ngrams[:, None] == ngrams[None, :], axis=-1)
    new_stays = valid & ~jnp.any(same & newer, axis=1)  # [M]
    old = pool.rows[keys].reshape(number, *pool.shape[1:])  # [M, G, N-1]
    renewed = jnp.any(same_key[:, None, :] & jnp.all(old[:, :, None] == ngrams[None, None], axis=-1), axis=-1)
    old_stays = (old[..., 0] != NGramPool.EMPTY) & ~renewed  # [M, G]
    stays = jnp.concatenate([same_key & new_stays[None, :], old_stays], axis=1)  # [M, M + G], newest first

    # Slot g takes the n-gram that g staying ones precede.
    preceding = jnp.cumsum(stays, axis=1, dtype=jnp.int32)
    slot = jnp.arange(slots, dtype=jnp.int32)
    source = jnp.sum(preceding[:, None, :] <= slot[None, :, None], axis=-1, dtype=jnp.int32)[..., None]
    from_old = jnp.take_along_axis(old, source - number, axis=1, mode="clip")
    from_old = jnp.where(source < number + slots, from_old, NGramPool.EMPTY)
    content = jnp.where(source < number, ngrams.at[source[..., 0]].get(mode="clip"), from_old)  # [M, G, N-1]

    writes = valid & ~jnp.any(same_key & newer, axis=1)
    target = jnp.where(writes, keys, vocab_size + index)  # indices out of range are dropped; no index occurs twice
    rows = content.reshape(number, -1)
    return NGramPool(pool.rows.at[target].set(rows, mode="drop", unique_indices=True), pool.ngram_size)
