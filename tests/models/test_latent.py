"""Latent attention against heads with keys and values of their own, and what its cache keeps."""

import dataclasses

import jax
import numpy as np
import pytest

import jlade
from jlade.models.layers.attention import Context
from jlade.models.llama import LlamaConfig
from tests.tiny import LATENT_SIZES, LIKE_DEEPSEEK, PAPER, tiny_llama


@pytest.mark.parametrize("query_rank", [12, None])
def test_scores_and_values_are_those_of_expanded_heads(query_rank):
    """Every head has its own keys [unrotated + rotated] and values here, products of its matrices with the latents."""
    sizes = dataclasses.replace(LATENT_SIZES, query_rank=query_rank)
    params = tiny_llama(**LIKE_DEEPSEEK | {"latent": sizes, "norm_eps": 0.3})  # which latents do not have
    attention, rng = jax.tree.map(np.asarray, params.layers[1].attention), np.random.default_rng(0)
    hidden = rng.normal(size=(2, 7, 16)).astype(np.float32)
    context = Context(*[None] * len(Context._fields))  # no rotation and no scales
    queries, keys = map(np.asarray, attention.project(hidden, context, params.decoder))
    assert keys.shape == (2, 7, 1, 14)
    assert params.config.score_scale == 10**-0.5

    def by_head(matrix):
        return matrix.reshape(4, -1, matrix.shape[1])

    def normed(x, weight):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * weight

    inputs = hidden if query_rank is None else normed(hidden @ attention.query_down.T, attention.query_down_norm)
    own_queries = (inputs @ attention.query.T).reshape(2, 7, 4, 10)
    down = hidden @ attention.key_down.T
    latents = normed(down[..., :10], attention.key_down_norm)
    unrotated = np.einsum("hdr,btr->bthd", by_head(attention.key_up), latents)
    shared = np.repeat(down[:, :, None, 10:], 4, axis=2)
    own_keys = np.concatenate([unrotated, shared], axis=-1)
    scores = np.einsum("bthd,bsd->bhts", queries, keys[:, :, 0])
    np.testing.assert_allclose(scores, np.einsum("bthd,bshd->bhts", own_queries, own_keys), rtol=1e-3, atol=1e-3)

    mixed = np.einsum("bhts,bsd->bthd", scores, keys[:, :, 0])
    own_values = np.einsum("hvr,btr->bthv", by_head(attention.value_up), latents)
    wanted = np.einsum("bhts,bshv->bthv", scores, own_values)
    np.testing.assert_allclose(attention.values(mixed), wanted, rtol=1e-3, atol=1e-2)


def test_the_cache_has_one_latent_for_a_token_and_layer():
    params = tiny_llama(**LIKE_DEEPSEEK)
    cache = params.decoder.init_cache(params, 3, 20)
    assert [array.shape for array in cache.keys] == [(3, 1, 20, 14)] * 2
    assert cache.values == ()
    assert sum(array.nbytes for array in jax.tree.leaves(cache)) == 2 * 3 * 20 * 14 * 4 + 3 * 4


def test_a_continued_batch_equals_the_whole_read_anew():
    params, texts, state = tiny_llama(2, **LIKE_DEEPSEEK), [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8]], None
    for _ in range(2):
        options = {"max_new_tokens": 12, "eos_ids": ()}
        plain = jlade.generate(params, texts, lookahead=None, **options)
        out = jlade.generate(params, texts, lookahead=PAPER, state=state, keep_state=True, **options)
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        state, texts = out.state, [[*text, *row.tolist(), 2] for text, row in zip(texts, out.tokens, strict=True)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selection_bias": True}, "selection_bias, expert_groups and expert_scale need one of the routings sigmoids"),
        ({"expert_groups": 2}, "need one of the routings sigmoids, probabilities, got 'softmax'"),
        ({"expert_scale": 2.0, "routing": "sigmoid"}, "of the routings sigmoids, probabilities, got 'sigmoid'"),
        ({"latent": LATENT_SIZES}, "latent attention has num_kv_heads=1 and head_dim=14, got 2 and 8"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig(13, 16, 24, 2, 4, 2, 8, 64, **changes)
