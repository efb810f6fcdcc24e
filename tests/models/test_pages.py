"""Caches in pages, wherever these lie, against caches of whole rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlade.models import base
from jlade.models.attention import Operands, attend, plain, tpu
from tests.models.pages import in_pages
from tests.tiny import BESIDE_ATTENTION, LIKE_DEEPSEEK, RECURRENT, slow_but, tiny_llama

SIZE = 4  # of a page
ATTEND = {
    "plain": attend,
    "plain on GPUs": functools.partial(plain.attend_in_chunks, unrolled=True, window=None),
    "in chunks of two pages": functools.partial(plain.attend_in_chunks, unrolled=False, window=None, chunk=8),
    "in smaller chunks than pages": functools.partial(plain.attend_in_chunks, unrolled=False, window=None, chunk=3),
    "tpu": functools.partial(tpu.attend, interpret=True),
}
MODELS = {
    "whole layers": ({}, None),
    "a window": ({"sliding_windows": (5, None)}, None),
    "8 bits": ({}, "int8"),
    "recurrent": (RECURRENT, None),
    "beside attention": (BESIDE_ATTENTION, None),
    "a latent in 8 bits": (LIKE_DEEPSEEK, "int8"),
}


def random_table(batch_size, number, seed=0):
    rng = np.random.default_rng(seed)
    return (1 + rng.permutation(batch_size * number)).reshape(batch_size, number).astype(np.int32)


@pytest.mark.parametrize("way", ATTEND)
@pytest.mark.parametrize("has_scales", [False, True])
def test_attention_reads_through_the_table(way, has_scales):
    rng, number, shape = np.random.default_rng(0), 5, (3, 6, 2, 8)
    queries, keys, values = (rng.normal(size=(3, 6, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    cached = [rng.normal(size=(3, 2, number * SIZE, 8)).astype(np.float32) for _ in range(2)]
    length, mask, scales = np.array([0, 7, 20], np.int32), np.tri(6, dtype=bool)[None], ()
    cached_scales = []
    if has_scales:
        keys, values, *cached = ((40 * x).astype(np.int8) for x in (keys, values, *cached))
        scales = [rng.uniform(0.01, 0.03, shape[:3]).astype(np.float32) for _ in range(2)]
        cached_scales = [rng.uniform(0.01, 0.03, cached[0].shape[:3]).astype(np.float32) for _ in range(2)]
    table = random_table(3, number)
    rest = length, mask, None, None, *scales
    expected = attend(Operands(queries, keys, values, *cached, *rest, *cached_scales))
    paged, paged_scales = ([in_pages(x, table, SIZE) for x in arrays] for arrays in (cached, cached_scales))
    got = ATTEND[way](Operands(queries, keys, values, *paged, *rest, *paged_scales)._replace(table=table))
    np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize("kind", slow_but(MODELS, "a window"))
def test_a_model_reads_and_writes_pages(kind, monkeypatch):
    """Blocks of several sizes, of which some tokens are accepted, as with a cache of whole rows."""
    monkeypatch.setattr(base, "MULTIPLE", 8)  # a ring
    changes, kv_dtype = MODELS[kind]
    params = tiny_llama(**changes)
    decoder = dataclasses.replace(params.decoder, kv_dtype=kv_dtype)
    rows, table = decoder.init_cache(params, 3, 22), random_table(3, 6)
    pages = decoder.init_pages(params, 3, 22, np.max(table) + 1, SIZE)
    assert pages.table.shape == table.shape
    pages = pages.replace(table=jnp.asarray(table))
    rng, mask = np.random.default_rng(1), np.tri(6, dtype=bool)
    for number in ([3, 0, 6], [6, 1, 6], [0, 4, 5], [5, 2, 1]):
        tokens = rng.integers(13, size=(3, 6)).astype(np.int32)
        accepted, indices = np.array(number, np.int32), np.broadcast_to(np.arange(6, dtype=np.int32), (3, 6))
        results = []
        for cache in (rows, pages):
            hidden, block_kv = decoder.forward(params, tokens, cache.length[:, None] + indices, cache, mask)
            results.append((hidden, decoder.commit(cache, block_kv, indices, accepted)))
        (expected, rows), (got, pages) = results
        np.testing.assert_allclose(got, expected, atol=1e-5)
        np.testing.assert_array_equal(rows.length, pages.length)


def test_a_cache_without_whole_layers_has_no_pages():
    params = tiny_llama(sliding_windows=(5, 5))
    cache = params.decoder.init_pages(params, 3, 22, 7, SIZE)
    assert (cache.pages, cache.table) == ((), None)
    shapes = base.cache_shapes(params.decoder, params, 3, 22)
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, shapes)
