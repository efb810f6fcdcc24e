"""The n-gram pool: for every token, up to G n-grams that begin with it, newest first.

An n-gram is a key, its first token, and the N-1 tokens after it. Inserting an n-gram that is already in the pool makes
it the newest; inserting under a full key drops the oldest. (arXiv 2402.02057, section 3.2 and Algorithm 2.)
"""

import functools
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class NGramPool:
    """The pool of one sequence; [B, ...] for a batch."""

    ngrams: jax.Array  # [V, G, N-1] int32, newest first, then EMPTY
    EMPTY: ClassVar[int] = -1  # equals no token, so an empty slot is never accepted


def empty(vocab_size: int, ngram_size: int, guess_set_size: int) -> NGramPool:
    """Returns an empty pool."""
    return NGramPool(jnp.full((vocab_size, guess_set_size, ngram_size - 1), NGramPool.EMPTY, jnp.int32))


def lookup(pool: NGramPool, key: jax.Array) -> jax.Array:
    """Returns the candidates [G, N-1] of the token `key` [], newest first, then `EMPTY`."""
    return pool.ngrams[key]


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
    are not among them. The last new n-gram of each key writes all slots of that key; the other ones write nothing.

    Args:
      pool: ngrams [V, G, N-1].
      keys: [M] int32, first tokens.
      ngrams: [M, N-1] int32, the tokens after them.
      valid: [M] bool, which of the n-grams to insert.
    """
    vocab_size, slots, _ = pool.ngrams.shape
    if slots == 0 or len(keys) == 0:
        return pool
    index = jnp.arange(len(keys), dtype=jnp.int32)
    later = index[None, :] > index[:, None]
    count = functools.partial(jnp.sum, dtype=jnp.int32)
    same_key = (keys[:, None] == keys[None, :]) & valid[:, None] & valid[None, :]
    same = same_key & jnp.all(ngrams[:, None] == ngrams[None, :], axis=-1)

    # The slot of an n-gram is the number of distinct n-grams of its key that are newer.
    kept = valid & ~jnp.any(same & later, axis=1)
    new_slot = count(same_key & later & kept[None, :], axis=1)
    num_new = count(same_key & kept[None, :], axis=1)
    old = pool.ngrams[keys]  # [M, G, N-1]
    renewed = jnp.any(same_key[:, None, :] & jnp.all(old[:, :, None] == ngrams[None, None], axis=-1), axis=-1)
    old_kept = (old[..., 0] != NGramPool.EMPTY) & ~renewed
    old_slot = num_new[:, None] + jnp.cumsum(old_kept, axis=1, dtype=jnp.int32) - 1

    # For each new n-gram, all slots of its key: the one n-gram, new or old, that goes into each.
    slot_of = jnp.concatenate(
        [jnp.where(same_key & kept[None, :], new_slot[None, :], slots), jnp.where(old_kept, old_slot, slots)], axis=1
    )  # [M, M + G], G for n-grams that go into no slot
    goes_here = slot_of[:, None, :] == jnp.arange(slots, dtype=jnp.int32)[None, :, None]  # [M, G, M + G]
    entries = jnp.concatenate([jnp.broadcast_to(ngrams[None], (len(keys), *ngrams.shape)), old], axis=1)
    source = jnp.argmax(goes_here, axis=-1)
    content = jnp.take_along_axis(entries, source[..., None], axis=1)  # [M, G, N-1]
    content = jnp.where(jnp.any(goes_here, axis=-1)[..., None], content, NGramPool.EMPTY)

    writes = kept & (new_slot == 0)
    target = jnp.where(writes, keys, vocab_size + index)  # indices out of range are dropped; no index occurs twice
    return NGramPool(pool.ngrams.at[target].set(content, mode="drop", unique_indices=True))
