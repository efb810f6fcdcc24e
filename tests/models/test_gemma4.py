"""Layers whose heads differ, that read keys and values of others, and that have embeddings of their own (Gemma 4)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade import mesh as mesh_lib
from jlade.models import kernels
from jlade.models.attention import Variation
from jlade.models.kernels import HeadShape, Kernel
from jlade.models.llama import Llama, LlamaConfig, init_params, quantize
from jlade.models.rotary import ProportionalScaling, inverse_frequencies
from jlade.testing import check_decoder
from tests.models.devices import TPU
from tests.tiny import LIKE_GEMMA_4, PAPER, tiny_llama

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [3, 5]]


@pytest.fixture(scope="module")
def params():
    """Random parameters with every part."""
    return tiny_llama(3, **LIKE_GEMMA_4)


@pytest.mark.slow
def test_the_form_of_the_decoder():
    """Without experts, which JAX cannot map over a batch."""
    params = tiny_llama(3, **LIKE_GEMMA_4 | {"num_experts": 0, "separate_experts": False})
    check_decoder(params.decoder, params)


def test_the_cache_has_the_heads_of_the_layers_with_keys_of_their_own(params):
    cache = params.decoder.init_cache(params, 3, 40)
    assert [layer.shape for layer in cache.keys] == [(3, 4, 16, 6), (3, 2, 40, 8)]
    assert params.layers[1].attention.value is None
    assert params.layers[2].attention.key is None


def test_values_that_keys_make_have_no_weights_and_no_rotation(params):
    """A token that sees itself alone has the same hidden states at every position."""
    decoder, cache = params.decoder, params.decoder.init_cache(params, 2, 8)
    positions = np.array([[0], [5]], np.int32)
    _, block_kv = decoder.forward(params, np.full((2, 1), 3, np.int32), positions, cache, np.ones((1, 1), bool))
    keys, values = block_kv[1]
    assert np.abs(keys[0] - keys[1]).max() > 0.1
    np.testing.assert_allclose(values[0], values[1], atol=1e-5)
    np.testing.assert_allclose(np.mean(np.square(values), axis=-1), 1, rtol=1e-3)


def test_the_dtype_of_the_model_is_that_of_its_results():
    """Types are not promoted in tests, so that no part may compute in another one."""
    params = init_params(jax.random.key(0), tiny_llama(**LIKE_GEMMA_4).config, jnp.bfloat16)
    ints, cache = jnp.zeros((1, 2), jnp.int32), params.decoder.init_cache(params, 1, 8)
    hidden, block_kv = jax.eval_shape(params.decoder.forward, params, ints, ints, cache, np.eye(2, dtype=bool))
    assert {array.dtype for array in (hidden, *jax.tree.leaves(block_kv))} == {jnp.dtype(jnp.bfloat16)}
    assert len(block_kv) == 2


def test_a_layer_without_keys_reads_the_last_one_of_its_kind():
    windows = (5, 5, None, 5, None, 5, None, 5)
    config = LlamaConfig(13, 16, 24, 8, 4, 2, 6, 64, sliding_windows=windows, shared_kv_layers=3)
    assert config.kv_sources == (0, 1, 2, 3, 4, 3, 4, 3)


@pytest.mark.slow
def test_turns_a_mesh_and_an_engine_give_one_text(params):
    generate = functools.partial(jlade.generate, params, max_new_tokens=12, eos_ids=(), lookahead=PAPER)
    expected = generate(PROMPTS, lookahead=None)
    assert len(set(np.ravel(expected.tokens).tolist())) > 4
    first = generate(PROMPTS, max_new_tokens=6, keep_state=True)
    np.testing.assert_array_equal(first.tokens, expected.tokens[:, :6])
    longer = [prompt + row[:7].tolist() for prompt, row in zip(PROMPTS, expected.tokens, strict=True)]
    second = generate(longer, max_new_tokens=5, state=first.state)
    np.testing.assert_array_equal(second.tokens, expected.tokens[:, 7:])
    divided = generate(PROMPTS, mesh=jlade.make_mesh(lookahead=2, model=2))
    np.testing.assert_array_equal(divided.tokens, expected.tokens)
    with jlade.Engine(params, max_sequences=2, lookahead=PAPER, capacity=64) as engine:
        jobs = [engine.submit(prompt, max_new_tokens=12, eos_ids=()) for prompt in PROMPTS]
        assert [job.result().tokens[0].tolist() for job in jobs] == expected.tokens.tolist()


@pytest.mark.slow
def test_int8_weights_decode_with_lookahead_as_plainly(params):
    plain, found = (
        jlade.generate(quantize(params), PROMPTS, max_new_tokens=12, eos_ids=(), lookahead=setting)
        for setting in (None, PAPER)
    )
    np.testing.assert_array_equal(found.tokens, plain.tokens)


def test_no_mesh_has_copies_of_the_kv_heads_of_some_layers_alone(params):
    message = "4 heads, 4 or 2 KV heads and 24 MLP columns and 4 experts, which divide among 1, 2 devices"
    with pytest.raises(ValueError, match=f"mesh has model=4, but the model has {message}"):
        jlade.generate(params, PROMPTS, max_new_tokens=2, mesh=jlade.make_mesh(model=4))


SHAPES = [
    HeadShape(4, 4, 6, "float32", Variation(window=True)),
    HeadShape(4, 2, 8, "float32", Variation()),
]


@pytest.mark.parametrize("refused", [None, *SHAPES])
def test_a_kernel_must_take_the_heads_of_every_layer(params, refused, monkeypatch):
    """It is asked about them with the variations of the layers that have these heads."""
    asked = []

    def supports(shape, device):
        asked.append(shape)
        return "is not for these heads" if shape == refused else None

    monkeypatch.setattr(mesh_lib, "devices_of", lambda params: [TPU])
    monkeypatch.setitem(kernels.KERNELS, "attention", (Kernel("tpu", supports, pytest.fail),))
    config = dataclasses.replace(params.config, num_experts=0)
    assert Llama(config).on(params).attention == ("plain" if refused else "tpu")
    assert asked == SHAPES


def test_proportional_scaling_turns_the_fastest_pairs_of_a_head_alone():
    plain = inverse_frequencies(64, 1e6)
    found = inverse_frequencies(64, 1e6, ProportionalScaling(0.25, 2.0))
    np.testing.assert_allclose(found[:8], plain[:8] / 2, rtol=1e-6)
    assert not found[8:].any()
