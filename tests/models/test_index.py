"""The index of sparse attention: its choice against plain NumPy, and texts of more tokens than it chooses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade.models import kv_rounding
from jlade.models.attention import Operands, choice, plain
from jlade.models.attention.choice import best, choose
from jlade.models.kv_rounding import FLOAT8, INT8
from tests.models.pages import in_pages
from tests.texts import assert_same_texts, assert_text
from tests.tiny import INDEX_SIZES, LIKE_GLM_5, PAPER, slow, tiny_llama

PROMPTS = [[1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2] * 2, [8, 1, 8], [5, 9, 2, 6, 5, 3, 5]]
NEW = {"max_new_tokens": 24, "eos_ids": ()}


def test_the_best_tokens_are_chosen_and_the_first_of_equal_ones():
    rng = np.random.default_rng(0)
    scores = rng.integers(-2, 3, (40, 20)).astype(np.float32)
    scores[0, 3] = np.nan
    scores[1] *= -0.0
    visible = rng.random((40, 20)) < np.linspace(0, 1, 40)[:, None]
    order = np.argsort(-np.where(np.isnan(scores), np.inf, scores), axis=1, kind="stable")
    wanted = np.zeros_like(visible)
    for row, of_row in enumerate(order):
        wanted[row, [i for i in of_row if visible[row, i]][:6]] = True
    np.testing.assert_array_equal(best(jnp.asarray(scores), jnp.asarray(visible), 6), wanted)


@pytest.mark.parametrize("in_8_bits", [True, slow(False)])
def test_scores_are_those_of_the_last_elements_of_keys_in_rows_or_pages(in_8_bits):
    rng, table = np.random.default_rng(1), np.array([[3, 1, 5, 8, 2], [4, 6, 10, 7, 9]], np.int32)
    keys, cached = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 3, 1, 11), (2, 1, 20, 11)))
    queries, weights = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 3, 9, 5), (2, 3, 9)))
    lengths, mask, scales, cached_scales = np.array([7, 18], np.int32), np.tri(3, dtype=bool), None, None
    if in_8_bits:
        keys, scales = kv_rounding.rounded(keys, INT8, splits=(4, 6))
        cached, cached_scales = kv_rounding.rounded(cached.swapaxes(1, 2), INT8, splits=(4, 6))
        cached, cached_scales = cached.swapaxes(1, 2), cached_scales.swapaxes(1, 2)
    operands = Operands(None, keys, None, cached, None, lengths, mask, key_scales=scales)
    operands = operands._replace(cached_key_scales=cached_scales)
    all_keys = np.concatenate([cached[:, 0, :, 6:], keys[:, :, 0, 6:]], axis=1).astype(np.float32)
    if in_8_bits:
        all_keys *= np.concatenate([cached_scales[:, 2], scales[..., 2]], axis=1)[..., None]
    scores = np.einsum("bth,bthk->btk", weights, np.maximum(np.einsum("bthd,bkd->bthk", queries, all_keys), 0))
    in_use = np.broadcast_to(np.arange(20) < lengths[:, None, None], (2, 3, 20))
    scores[~np.concatenate([in_use, np.broadcast_to(mask, (2, 3, 3))], axis=2)] = -np.inf
    wanted = (scores >= np.sort(scores, axis=2)[..., -6:-5]) & (scores > -np.inf)

    pages, of_scales = (None if x is None else in_pages(x, table, 4) for x in (cached, cached_scales))
    in_places = operands._replace(cached_keys=pages, cached_key_scales=of_scales, table=table)
    for each in (operands, in_places):
        np.testing.assert_array_equal(np.concatenate(choose(each, queries, weights, 6), axis=2), wanted)
    for unrolled in (False, True):
        found = choice.score_cache(in_places, queries, weights, unrolled=unrolled, chunk=8)
        np.testing.assert_allclose(found[1, :, :18], scores[1, :, :18], atol=1e-4)


@pytest.mark.parametrize("unrolled", [False, True])
def test_attention_reads_the_chosen_tokens_alone(unrolled):
    """Some see nothing in the block, themselves included, and the keys have three elements more than the queries."""
    rng, length = np.random.default_rng(2), np.array([5, 20], np.int32)
    shapes = (2, 6, 4, 8), (2, 6, 1, 11), (2, 1, 20, 11)
    queries, keys, cached = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    chosen, mask = rng.random((2, 6, 20)) < 0.3, np.tri(6, dtype=bool) & (rng.random((2, 6, 6)) < 0.5)
    chosen[:, :, 3], mask[:, :2] = True, False
    operands = Operands(queries, keys, keys, cached, cached, length, mask, chosen=chosen)
    found = plain.attend_in_chunks(operands, unrolled=unrolled, window=None, chunk=7)
    all_keys = np.concatenate([cached[:, 0], keys[:, :, 0]], axis=1)[..., :8]
    seen = np.concatenate([chosen & (np.arange(20) < length[:, None, None]), mask], axis=2)
    weights = np.where(seen[:, None], np.exp(np.einsum("bthd,bkd->bhtk", queries, all_keys) * 8**-0.5), 0)
    mixed = np.einsum("bhtk,bkd->bthd", weights / weights.sum(axis=-1, keepdims=True), all_keys)
    np.testing.assert_allclose(found, mixed, atol=1e-5)


def test_the_cache_has_the_keys_of_the_layers_with_an_index_behind_their_latents():
    params = tiny_llama(**LIKE_GLM_5)
    cache = params.decoder.init_cache(params, 3, 20)
    assert [array.shape for array in cache.keys] == [(3, 1, 20, 20), (3, 1, 20, 14), (3, 1, 20, 20)]
    assert [layer.index is None for layer in params.layers] == [False, True, False]


def test_a_program_has_a_choice_where_a_text_may_be_longer():
    """Than the tokens that are chosen, 7."""
    params, block = tiny_llama(**LIKE_GLM_5), np.zeros((1, 3), np.int32)

    def has_choice(capacity):
        cache = params.decoder.init_cache(params, 1, capacity)
        arguments = params, block, block, cache, np.tri(3, dtype=bool)
        return f"k={INDEX_SIZES.chosen}" in str(jax.make_jaxpr(params.decoder.forward)(*arguments))

    assert [has_choice(7), has_choice(8)] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [None, INT8, FLOAT8])
def test_drafts_pages_and_prefixes_change_no_text(kv_dtype):
    params = tiny_llama(7, **LIKE_GLM_5)
    plain = jlade.generate(params, PROMPTS, lookahead=None, kv_dtype=kv_dtype, **NEW)
    options = {"max_sequences": 2, "capacity": 64, "cache_tokens": 128, "lookahead": PAPER, "kv_dtype": kv_dtype}
    with jlade.Engine(params, **options) as engine:
        for _ in range(2):
            requests = [engine.submit(prompt, **NEW) for prompt in PROMPTS]
            for row, request in enumerate(requests):
                assert_text(request.result(timeout=300), plain.tokens[row], name=f"prompt {row}")
        assert requests[0].num_cached


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"model": 2}, {"model": 4}, {"lookahead": 2}, {"data": 3}])
def test_a_mesh_changes_no_text(sizes):
    params = tiny_llama(7, **LIKE_GLM_5)
    plain = jlade.generate(params, PROMPTS, lookahead=None, **NEW)
    out = jlade.generate(params, PROMPTS, lookahead=PAPER, mesh=jlade.make_mesh(**sizes), **NEW)
    assert_same_texts(out, plain)
