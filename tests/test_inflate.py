"""Inflated models against their sources."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from benchmarks import inflate as script
from benchmarks.inflate import SHAPES, inflate
from jlade import LookaheadConfig
from jlade.conversion.tensors import expected_tensors, named_arrays
from tests import plain_llama
from tests.tiny import tiny_llama

OPTIMIZED = True

LARGER = {
    "vocab_size": 31,
    "hidden_size": 40,
    "intermediate_size": 50,
    "num_layers": 3,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 18,
    "max_positions": 100,
}
CASES = {  # changes to the source of 4 heads and 2 KV heads, and from the source to the target
    "all larger": ({}, LARGER),
    "tied": ({"tie_embeddings": True}, LARGER),
    "tied, then untied": ({"tie_embeddings": True}, LARGER | {"tie_embeddings": False}),
    "constants": ({"rope_theta": 500.0, "norm_eps": 0.3}, LARGER),
    "larger groups": ({}, {"num_heads": 24, "num_kv_heads": 3, "head_dim": 12}),
    "smaller groups": ({"num_heads": 10}, {"num_heads": 15, "num_kv_heads": 5, "hidden_size": 17}),
}


def inflated(params, seed=0, **changes):
    return inflate(params, dataclasses.replace(params.config, **changes), jax.random.key(seed))


def assert_same_logits(params, larger, tokens):
    """Asserts that the source's logits come first, and their mean follows for each added token."""
    expected, logits = (plain_llama.logits(model, tokens) for model in (params, larger))
    size = params.config.vocab_size
    np.testing.assert_allclose(logits[:, :size], expected, rtol=0, atol=1e-4)
    means = np.broadcast_to(expected.mean(axis=1, keepdims=True), logits[:, size:].shape)
    np.testing.assert_allclose(logits[:, size:], means, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "changes"), CASES.values(), ids=CASES)
def test_logits_equal_those_of_the_source(source, changes):
    params = tiny_llama(**source)
    larger = inflated(params, **changes)
    shapes = {name: array.shape for name, array in named_arrays(larger).items()}
    assert shapes == expected_tensors(dataclasses.replace(params.config, **changes))
    assert_same_logits(params, larger, np.random.default_rng(0).integers(0, 13, 20))


def test_zeros_are_only_where_noise_would_have_an_effect():
    params = tiny_llama()
    larger = inflated(params, **LARGER)
    for i, layer in enumerate(larger.layers):
        is_added = i >= 2
        for matrix in (layer.attention.key, layer.attention.value, layer.mlp.gate, layer.mlp.up):
            assert jnp.all(matrix != 0)
        zero_rows = 0 if is_added else 4 * (18 - 6)  # the added dimensions of real heads
        assert jnp.sum(layer.attention.query == 0) == zero_rows * 40
        assert jnp.sum(layer.attention.output != 0) == (0 if is_added else 16 * 4 * 6)
        assert jnp.sum(layer.mlp.down != 0) == (0 if is_added else 16 * 24)
    assert jnp.all(larger.output != 0)
    np.testing.assert_allclose(jnp.std(larger.layers[2].mlp.gate), 40**-0.5, rtol=0.1)


def test_noise_depends_on_the_key_alone():
    one, same, other = (inflated(tiny_llama(), seed, **LARGER) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert jnp.all(one.layers[2].mlp.gate != other.layers[2].mlp.gate)
    assert jnp.all(one.layers[2].mlp.gate != one.layers[2].mlp.up)


def test_bfloat16_stays_bfloat16():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_llama())
    larger = jax.eval_shape(lambda: inflated(params, **LARGER))
    assert {array.dtype for array in jax.tree.leaves(larger)} == {jnp.dtype(jnp.bfloat16)}


def test_too_few_heads_for_the_copies_are_refused():
    with pytest.raises(ValueError, match=r"num_kv_heads must be at least 4 if 4 .* got 3"):
        inflated(tiny_llama(num_heads=10), num_heads=12, num_kv_heads=3)


@pytest.mark.slow
def test_a_written_checkpoint_generates_as_the_demo(demo, golden, tmp_path, monkeypatch):
    shape = {
        "vocab_size": 5000,
        "hidden_size": 384,
        "intermediate_size": 800,
        "num_layers": 7,
        "num_heads": 9,
        "num_kv_heads": 9,
        "head_dim": 64,
    }
    monkeypatch.setitem(SHAPES, "134m", dataclasses.replace(SHAPES["134m"], **shape))
    script.main(["134m", str(tmp_path / "new")])
    params, tokenizer = jlade.load(tmp_path / "new", "float32")
    assert params.config.eos_ids == demo[0].config.eos_ids
    assert tokenizer.to_str() == demo[1].to_str()
    prompt, expected = next(iter(golden.values()))
    text = prompt["ids"] + expected[:32]
    assert_same_logits(demo[0], params, text)
    assert plain_llama.logits(params, text[:-1])[-32:].argmax(axis=1).tolist() == expected[:32]
    out = jlade.generate(params, prompt["ids"], max_new_tokens=32, lookahead=LookaheadConfig.paper(4, 3, 2), eos_ids=())
    assert out.tokens[0].tolist() == expected[:32]
