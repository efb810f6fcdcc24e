"""The n-gram pool: for every token, up to G n-grams that begin with it, newest first.

An n-gram is a key, its first token, and the N-1 tokens after it. Inserting an n-gram that is already in the pool makes
it the newest; inserting under a full key drops the oldest. (arXiv 2402.02057, section 3.2 and Algorithm 2.)
"""

from typing import ClassVar, Self

import flax.struct
import jax
import jax.numpy as jnp


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
    """Returns the candidates [G, N-1] of the token `key` [], newest first, then `EMPTY`."""
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
