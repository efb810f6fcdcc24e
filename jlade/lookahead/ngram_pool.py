"""The n-gram pool: for every token, up to G n-grams that begin with it, the newest first.

An n-gram is a key, its first token, and the N-1 tokens after it. Inserting an n-gram that is there makes it the newest;
inserting into a full key drops the oldest. (arXiv 2402.02057, section 3.2.)
"""

import functools
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class NGramPool:
    """The pool of one sequence."""

    ngrams: jax.Array  # [V, G, N-1] int32, newest first, then EMPTY
    EMPTY: ClassVar[int] = -1  # never a token, so an empty slot is never accepted


def empty(vocab_size: int, ngram_size: int, guess_set_size: int) -> NGramPool:
    """Returns a pool with nothing in it."""
    return NGramPool(jnp.full((vocab_size, guess_set_size, ngram_size - 1), NGramPool.EMPTY, jnp.int32))


def lookup(pool: NGramPool, key: jax.Array) -> jax.Array:
    """Returns the candidates [G, N-1] for the token `key`, newest first, empty slots filled with `EMPTY`."""
    return pool.ngrams[key]


def ngrams_at(
    tokens: jax.Array, length: jax.Array, starts: jax.Array, ngram_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reads n-grams from the first `length` of `tokens` [C], as `insert` takes them.

    Returns:
      Keys [M], the tokens that follow [M, N-1], and which of them lie within the text [M], for `starts` [M].
    """
    found = tokens.at[starts[:, None] + jnp.arange(ngram_size, dtype=jnp.int32)].get(mode="clip")
    return found[:, 0], found[:, 1:], (starts >= 0) & (starts + ngram_size <= length)


def insert(pool: NGramPool, keys: jax.Array, ngrams: jax.Array, valid: jax.Array) -> NGramPool:
    """Inserts n-grams as if one by one, in order, all at once.

    A key's slots hold the G most recently inserted of its distinct n-grams. So the new content of a slot row is its new
    n-grams, last first, each once, followed by the old ones that are not among them; what exceeds G falls off. The last
    n-gram of a key writes the whole row for all n-grams of that key, and every other one writes nothing.

    Args:
      pool: the pool [V, G, N-1].
      keys: [M] first tokens.
      ngrams: [M, N-1] the tokens that follow.
      valid: [M] bool, which of them to insert.
    """
    vocab_size, slots, _ = pool.ngrams.shape
    if slots == 0 or len(keys) == 0:
        return pool
    index = jnp.arange(len(keys), dtype=jnp.int32)
    later = index[None, :] > index[:, None]
    count = functools.partial(jnp.sum, dtype=jnp.int32)
    same_key = (keys[:, None] == keys[None, :]) & valid[:, None] & valid[None, :]
    same = same_key & jnp.all(ngrams[:, None] == ngrams[None, :], axis=-1)

    # Where each n-gram goes in the row of its key: the number of distinct ones that are newer.
    kept = valid & ~jnp.any(same & later, axis=1)
    new_slot = count(same_key & later & kept[None, :], axis=1)
    num_new = count(same_key & kept[None, :], axis=1)
    old = pool.ngrams[keys]  # [M, G, N-1]
    renewed = jnp.any(same_key[:, None, :] & jnp.all(old[:, :, None] == ngrams[None, None], axis=-1), axis=-1)
    old_kept = (old[..., 0] != NGramPool.EMPTY) & ~renewed
    old_slot = num_new[:, None] + jnp.cumsum(old_kept, axis=1, dtype=jnp.int32) - 1

    # The whole row of every key: for each slot, the one n-gram that goes there.
    slot_of = jnp.concatenate(
        [jnp.where(same_key & kept[None, :], new_slot[None, :], slots), jnp.where(old_kept, old_slot, slots)], axis=1
    )  # [M, M + G], `slots` for n-grams that go nowhere
    goes_here = slot_of[:, None, :] == jnp.arange(slots, dtype=jnp.int32)[None, :, None]  # [M, G, M + G]
    entries = jnp.concatenate([jnp.broadcast_to(ngrams[None], (len(keys), *ngrams.shape)), old], axis=1)
    source = jnp.argmax(goes_here, axis=-1)
    rows = jnp.take_along_axis(entries, source[..., None], axis=1)
    rows = jnp.where(jnp.any(goes_here, axis=-1)[..., None], rows, NGramPool.EMPTY)

    writes = kept & (new_slot == 0)
    target = jnp.where(writes, keys, vocab_size + index)  # out of range: dropped, and no index twice
    return NGramPool(pool.ngrams.at[target].set(rows, mode="drop", unique_indices=True))
