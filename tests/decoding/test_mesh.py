"""Decoding on eight virtual devices: tokens and step counts are those of one device."""

import dataclasses

import jax
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig, SamplingConfig
from jlade.config import PLAIN
from jlade.decoding import loop
from jlade.models import sharding
from jlade.models.llama import quantize
from tests.tiny import tiny_llama, tiny_tokenizer

MESHES = [(1, 8, 1), (1, 3, 1), (1, 1, 8), (2, 2, 2), (8, 1, 1), (1, 2, 4)]
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 7, 1, 5], [8, 1, 8, 1], [2, 2], [3, 9, 4, 3, 9], [12], [7, 1, 2], [4, 4, 5, 4]]
SETTINGS = {
    "greedy": {},
    "adaptive": {"lookahead": LookaheadConfig(4, 4, 3, step_cost=1.5)},
    "penalties": {"sampling": SamplingConfig(repetition_penalty=1.3, frequency_penalty=0.2, logit_bias={3: 1.0})},
    "temperature": {"sampling": SamplingConfig(temperature=0.8), "key": jax.random.key(1)},
    "filters": {
        "sampling": SamplingConfig(temperature=0.9, top_k=9, top_p=0.95, min_p=0.01),
        "logprobs": True,
        "min_new_tokens": 3,
        "eos_ids": [5],
    },
    "rejection": {
        "lookahead": LookaheadConfig(3, 3, 5, verification="rejection", window_draw="greedy"),
        "sampling": SamplingConfig(temperature=1.0),
    },
    "no window": {"lookahead": LookaheadConfig(0, 4, 3)},
    "Jacobi": {"lookahead": LookaheadConfig(5, 2, 3)},
    "no candidates": {"lookahead": LookaheadConfig(5, 3, 0)},
    "plain": {"lookahead": None},
}


@pytest.fixture(scope="module", params=[13, 16], ids=["whole vocabulary", "divided vocabulary"])
def params(request):
    """A model like Qwen3, with 2 KV heads."""
    shape = {"num_heads": 8, "num_kv_heads": 2, "intermediate_size": 32, "qk_norm": True, "qkv_bias": True}
    return tiny_llama(vocab_size=request.param, **shape)


def assert_same(found, expected):
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.steps, expected.steps)
    np.testing.assert_array_equal(found.accepted, expected.accepted)
    assert found.finish_reason == expected.finish_reason
    if expected.logprobs is not None:
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_small_models(params, name):
    """Settings take turns with meshes; each setting is decoded on two of them."""
    options = {"max_new_tokens": 24, "lookahead": LookaheadConfig(4, 4, 3)} | SETTINGS[name]
    expected = jlade.generate(params, PROMPTS, **options)
    first = list(SETTINGS).index(name) + (params.config.vocab_size == 16)
    for sizes in (MESHES[first % len(MESHES)], MESHES[(first + 3) % len(MESHES)]):
        assert_same(jlade.generate(params, PROMPTS, mesh=jlade.make_mesh(*sizes), **options), expected)
