"""Padded blocks against the blocks themselves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlade.models.llama import num_missing, quantize
from tests.tiny import slow, tiny_llama


@pytest.mark.parametrize(
    ("block_size", "padded"),
    [
        (1, 1),
        (4, 4),
        (5, 8),
        (8, 8),
        (9, 16),
        (24, 24),
        (30, 32),
        (48, 48),
        (60, 64),
        (112, 112),
        (120, 128),
        (240, 240),
    ],
)
def test_sizes(block_size, padded):
    assert block_size + num_missing("cpu", (1, block_size)) == padded
    assert num_missing("cpu", (2, block_size)) == num_missing(None, (1, block_size)) == 0
    assert num_missing("gpu", (1, block_size)) == (block_size == 1)


@functools.partial(jax.jit, static_argnums=(0, 2))
def run(decoder, params, block_size, mask):
    """Returns hidden states, keys and values, and logits of some tokens after a prefix of six."""
    rng = np.random.default_rng(0)
    prefix, tokens = rng.integers(0, 13, (1, 6)), rng.integers(0, 13, (1, block_size))
    indices = np.arange(6, dtype=np.int32)[None]
    _, block_kv = decoder.forward(params, prefix, indices, decoder.init_cache(params, 1, 32), np.tri(6, dtype=bool))
    cache = decoder.commit(decoder.init_cache(params, 1, 32), block_kv, indices, np.array([6]))
    positions = np.arange(6, 6 + block_size, dtype=np.int32)[None]
    hidden, block_kv = decoder.forward(params, tokens, positions, cache, mask)
    return hidden, block_kv, decoder.logits(params, hidden)


@pytest.mark.parametrize(
    ("variant", "block_size", "shape", "platform"),
    [
        slow("plain", 5, "mask", "cpu"),
        ("windows", 7, "mask of each sequence", "cpu"),
        ("int8", 12, "mask", "cpu"),
        slow("windows", 12, "mask", "cpu"),
        ("windows", 1, "mask", "gpu"),
    ],
)
def test_padded_blocks_give_the_same_results(variant, block_size, shape, platform):
    params = tiny_llama(sliding_windows=(4, None)) if variant == "windows" else tiny_llama()
    params = quantize(params) if variant == "int8" else params
    mask = np.tri(block_size, dtype=bool) if shape == "mask" else np.tri(block_size, dtype=bool)[None]
    decoder = params.decoder
    backend = jax.default_backend()
    assert decoder.pads_for == (backend if backend in ("cpu", "gpu") else None)
    expected = run(dataclasses.replace(decoder, pads_for=None), params, block_size, mask)
    found = run(dataclasses.replace(decoder, pads_for=platform), params, block_size, mask)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_products_have_the_padded_size():
    params = tiny_llama()
    decoder = dataclasses.replace(params.decoder, pads_for="cpu")

    def logits(params, tokens):
        mask, cache = np.tri(7, dtype=bool), decoder.init_cache(params, 1, 32)
        return decoder.logits(params, decoder.forward(params, tokens, tokens, cache, mask)[0])

    program = str(jax.make_jaxpr(logits)(params, jnp.zeros((1, 7), jnp.int32)))
    gate, output = "f32[24,1,8]", "f32[13,1,8]"
    assert gate in program
    assert output in program
    assert "f32[24,1,7]" not in program


@pytest.mark.slow
def test_an_infinite_embedding_that_no_token_has_stays_out():
    """Added tokens repeat the last one: with a token of their own, its keys would make NaN of all scores."""
    params = tiny_llama()
    params = dataclasses.replace(params, embedding=params.embedding.at[0].set(jnp.inf))
    decoder, tokens = dataclasses.replace(params.decoder, pads_for="cpu"), np.full((1, 5), 3, np.int32)
    mask, cache = np.tri(5, dtype=bool), decoder.init_cache(params, 1, 32)
    hidden, _ = decoder.forward(params, tokens, np.arange(5, dtype=np.int32)[None], cache, mask)
    assert np.all(np.isfinite(hidden))
