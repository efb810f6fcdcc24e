"""The vectorized pool against the plain one, n-gram by n-gram."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlade.drafts import pool as ngram_pool
from jlade.drafts.pool import NGramPool
from jlade.drafts.tree import NONE
from tests.reference import Pool

VOCAB, BUCKETS = 5, 3  # few tokens, so that n-grams repeat, tokens share buckets, and full buckets evict
insert, lookup = jax.jit(ngram_pool.insert), jax.jit(ngram_pool.lookup, static_argnums=2)
insert_each = jax.jit(jax.vmap(ngram_pool.insert))


def empty(slots: int, ngram_size: int, buckets: int = BUCKETS) -> NGramPool:
    return NGramPool.of(np.full((buckets, slots, ngram_size), NONE, np.int32), VOCAB)


def put(plain: Pool, ngram: list[int]) -> None:
    """Inserts into a plain pool by bucket, as if its number were the first token."""
    plain.insert([ngram[0] % BUCKETS, *ngram])


def content(pool: NGramPool) -> dict[int, list[tuple[int, ...]]]:
    rows = {
        bucket: [tuple(ngram) for ngram in row.tolist() if ngram[0] != NONE]
        for bucket, row in enumerate(np.asarray(pool.ngrams))
    }
    return {bucket: row for bucket, row in rows.items() if row}


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
    pool, plain = empty(slots, ngram_size), Pool(slots)
    for entries in rounds:
        ngrams = np.array([ngram for ngram, _ in entries], np.int32)
        valid = np.array([is_valid for _, is_valid in entries])
        pool = insert(pool, ngrams, valid)
        for ngram, is_valid in entries:
            if is_valid:
                put(plain, ngram)
        assert content(pool) == plain.ngrams


def test_long_random_sequences():
    rng = np.random.default_rng(0)
    pool, plain = empty(4, 3), Pool(4)
    for _ in range(200):
        ngrams = rng.integers(0, VOCAB, (15, 3), dtype=np.int32)
        valid = rng.random(15) < 0.8
        pool = insert(pool, ngrams, valid)
        for ngram in ngrams[valid].tolist():
            put(plain, ngram)
        assert content(pool) == plain.ngrams
        for key in range(VOCAB):
            of_key = [list(ngram[1:]) for ngram in plain.lookup(key % BUCKETS) if ngram[0] == key]
            assert lookup(pool, jnp.int32(key), 3).tolist() == [*of_key, *[[-1, -1]] * 3][:3]


def test_empty_slots_come_last_and_hold_no_token():
    pool = insert(empty(2, 3), np.array([[1, 0, 0]], np.int32), np.array([True]))
    assert lookup(pool, np.int32(1), 3).tolist() == [[0, 0], [-1, -1], [-1, -1]]
    assert lookup(pool, np.int32(4), 1).tolist() == [[-1, -1]]  # of the same bucket


def test_pools_under_vmap_do_not_touch_each_other():
    pools = jax.tree.map(lambda x: np.stack([x, x]), empty(2, 2))
    ngrams = np.array([[[1, 2]], [[1, 0]]], np.int32)
    pools = jax.device_get(insert_each(pools, ngrams, np.array([[True], [False]])))
    assert content(jax.tree.map(lambda x: x[0], pools)) == {1: [(1, 2)]}
    assert content(jax.tree.map(lambda x: x[1], pools)) == {}


@pytest.mark.parametrize("vocab_size", [13, 32_000, 128_256])
@pytest.mark.parametrize(("ngram_size", "guess_set_size"), [(2, 1), (5, 15), (7, 64), (5, 300)])
def test_memory_is_bounded(vocab_size, ngram_size, guess_set_size):
    buckets, slots, _ = ngram_pool.shape(vocab_size, ngram_size, guess_set_size)
    padded = 4 * buckets * -(-slots * ngram_size // 128) * 128  # on TPUs
    assert padded <= 8 * 2**20
    assert slots == guess_set_size if buckets == vocab_size else padded > 7.6 * 2**20


def test_a_token_that_shares_its_bucket_has_all_of_its_slots_while_the_others_have_few():
    """A bucket of 512 bytes holds 25 n-grams of 5 tokens, of which one token can have 15."""
    buckets, slots, ngram_size = ngram_pool.shape(49_152, 5, 15)
    assert (buckets, slots) == (16_384, 25)
    mine = np.array([[7, i, i, i, i] for i in range(15)], np.int32)
    others = np.array([[7 + buckets, i, i, i, i] for i in range(10)], np.int32)
    pool = ngram_pool.empty(49_152, ngram_size, 15)
    pool = insert(insert(pool, mine, np.ones(15, bool)), others, np.ones(10, bool))
    assert lookup(pool, np.int32(7), 15).tolist() == mine[::-1, 1:].tolist()


@pytest.mark.slow
def test_fan_out_counts_the_ngrams_of_each_token():
    pool = jax.tree.map(lambda x: np.stack([x, x]), empty(4, 2))
    ngrams = np.array([[[1, 2], [4, 2], [1, 3], [2, 2]]] * 2, np.int32)
    pool = insert_each(pool, ngrams, np.array([[True] * 4, [False] * 4]))
    assert [counts.tolist() for counts in pool.fan_out()] == [[2, 1, 1], []]


@pytest.mark.parametrize("ngram_size", [2, 3, 5])
def test_ngrams_at_reads_what_fits_in_the_text(ngram_size):
    tokens, length = [5, 6, 7, 8, 9, 0, 0], 5
    read = jax.jit(ngram_pool.ngrams_at, static_argnums=3)
    ngrams, valid = read(np.array(tokens, np.int32), np.int32(length), np.arange(-3, 7, dtype=np.int32), ngram_size)
    found = [ngram for ngram, fits in zip(ngrams.tolist(), valid, strict=True) if fits]
    assert found == [tokens[i : i + ngram_size] for i in range(length - ngram_size + 1)]
