"""The vectorized pool against the plain one, n-gram by n-gram."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlade.drafts import pool as ngram_pool
from jlade.drafts.pool import NGramPool
from tests.reference import Pool

VOCAB = 4  # few tokens, so that keys collide, n-grams repeat and full keys evict


def content(pool: NGramPool) -> dict[int, list[tuple[int, ...]]]:
    rows = {
        key: [tuple(ngram) for ngram in row.tolist() if ngram[0] != NGramPool.EMPTY]
        for key, row in enumerate(np.asarray(pool.ngrams))
    }
    return {key: row for key, row in rows.items() if row}


@st.composite
def insertions(draw):
    """Sizes, and rounds of up to `width` insertions with some marked as not valid."""
    sizes = [2, 4], [1, 2, 5], [1, 4, 9]  # few, as each compiles a program
    ngram_size, slots, width = (draw(st.sampled_from(values)) for values in sizes)
    ngram = st.lists(st.integers(0, VOCAB - 1), min_size=ngram_size, max_size=ngram_size)
    entry = st.tuples(ngram, st.booleans() | st.just(True))
    return ngram_size, slots, draw(st.lists(st.lists(entry, min_size=width, max_size=width), min_size=1, max_size=6))


@given(insertions())
def test_insert_equals_inserting_one_by_one(case):
    ngram_size, slots, rounds = case
    pool, plain = ngram_pool.empty(VOCAB, ngram_size, slots), Pool(slots)
    for entries in rounds:
        ngrams = jnp.array([ngram for ngram, _ in entries], jnp.int32)
        valid = jnp.array([is_valid for _, is_valid in entries])
        pool = jax.jit(ngram_pool.insert)(pool, ngrams[:, 0], ngrams[:, 1:], valid)
        for ngram, is_valid in entries:
            if is_valid:
                plain.insert(ngram)
        assert content(pool) == plain.ngrams


def test_long_random_sequences():
    rng = np.random.default_rng(0)
    pool, plain = ngram_pool.empty(VOCAB, 3, 4), Pool(4)
    insert = jax.jit(ngram_pool.insert)
    for _ in range(200):
        ngrams = rng.integers(0, VOCAB, (15, 3), dtype=np.int32)
        valid = rng.random(15) < 0.8
        pool = insert(pool, ngrams[:, 0], ngrams[:, 1:], valid)
        for ngram in ngrams[valid].tolist():
            plain.insert(ngram)
        assert content(pool) == plain.ngrams


def test_empty_slots_come_last_and_hold_no_token():
    pool = ngram_pool.empty(5, 3, 2)
    pool = ngram_pool.insert(pool, jnp.array([1]), jnp.array([[0, 0]]), jnp.array([True]))
    assert ngram_pool.lookup(pool, jnp.int32(1)).tolist() == [[0, 0], [-1, -1]]
    assert ngram_pool.lookup(pool, jnp.int32(0)).tolist() == [[-1, -1], [-1, -1]]


def test_pools_under_vmap_do_not_touch_each_other():
    pools = jax.tree.map(lambda x: jnp.stack([x, x]), ngram_pool.empty(3, 2, 2))
    keys, rest = jnp.array([[1], [1]]), jnp.array([[[2]], [[0]]])
    pools = jax.vmap(ngram_pool.insert)(pools, keys, rest, jnp.array([[True], [False]]))
    assert content(jax.tree.map(lambda x: x[0], pools)) == {1: [(2,)]}
    assert content(jax.tree.map(lambda x: x[1], pools)) == {}


@pytest.mark.parametrize("ngram_size", [2, 3, 5])
def test_ngrams_at_reads_what_fits_in_the_text(ngram_size):
    tokens, length = [5, 6, 7, 8, 9, 0, 0], 5
    starts = jnp.arange(-3, 7)
    keys, rest, valid = ngram_pool.ngrams_at(jnp.array(tokens), jnp.int32(length), starts, ngram_size)
    found = [[key, *more] for key, more, fits in zip(keys.tolist(), rest.tolist(), valid, strict=True) if fits]
    assert found == [tokens[i : i + ngram_size] for i in range(length - ngram_size + 1)]
