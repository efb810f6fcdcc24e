"""The decoder against a LLaMA in NumPy, and in blocks against itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlade.drafts.tree import TreeShape
from jlade.lookahead import block as blocks
from jlade.models.llama import quantize
from jlade.models.nn import linear, multiply_row_twice
from jlade.models.quantization import quantize_matrix
from tests import plain_llama
from tests.forward import run_blocks
from tests.tiny import RECURRENT, slow, tiny_llama

VARIANTS = [
    {},
    {"tie_embeddings": True},
    {"num_kv_heads": 4, "head_dim": 4},
    {"num_kv_heads": 1, "rope_theta": 500.0, "num_layers": 3},
    RECURRENT,
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_equals_the_plain_llama(changes):
    params = tiny_llama(**changes)
    tokens = np.random.default_rng(0).integers(0, 13, (2, 20), dtype=np.int32)
    expected = [plain_llama.logits(params, text) for text in tokens]
    np.testing.assert_allclose(run_blocks(params, tokens, [20]), expected, atol=2e-5)


@pytest.mark.parametrize("changes", [{}, RECURRENT], ids=["llama", "recurrent"])
@pytest.mark.parametrize("sizes", [[3, 1, 8], *map(slow, [[1] * 12, [5, 7], [12]])])
def test_block_by_block_equals_the_whole(sizes, changes):
    params = tiny_llama(**changes)
    tokens = np.random.default_rng(1).integers(0, 13, (3, 12), dtype=np.int32)
    np.testing.assert_allclose(run_blocks(params, tokens, sizes), run_blocks(params, tokens, [12]), atol=2e-5)


@pytest.mark.parametrize("changes", [{}, RECURRENT], ids=["llama", "recurrent"])
def test_a_lookahead_block_predicts_what_each_tokens_own_text_predicts(changes):
    params, rng = tiny_llama(**changes), np.random.default_rng(2)
    block = blocks.build(4, 4, TreeShape.chains(3, 3))
    prefix, tokens = rng.integers(0, 13, 6), rng.integers(0, 13, len(block.positions))
    decoder = params.decoder
    cache = decoder.init_cache(params, 1, 32)
    indices = np.arange(6)[None]
    _, block_kv = decoder.forward(params, prefix[None], indices, cache, np.tri(6, dtype=bool))
    cache = decoder.commit(cache, block_kv, indices, np.array([6]))
    hidden, _ = decoder.forward(params, tokens[None], 6 + block.positions[None], cache, block.mask)
    logits = np.asarray(decoder.logits(params, hidden))[0]
    for got, visible in zip(logits, block.mask, strict=True):
        own = np.flatnonzero(visible)
        own = own[np.argsort(block.positions[own])]
        expected = plain_llama.logits(params, [*prefix, *tokens[own]])[-1]
        np.testing.assert_allclose(got, expected, atol=4e-5)


def test_bfloat16_parameters_give_float32_logits_close_to_float32():
    params = tiny_llama()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tokens = np.random.default_rng(0).integers(0, 13, (1, 10), dtype=np.int32)
    logits = run_blocks(half, tokens, [10])
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, run_blocks(params, tokens, [10]), atol=0.15)


@pytest.mark.parametrize("in_int8", [False, True])
def test_a_row_multiplied_twice_for_tpus_gives_the_same_product(in_int8):
    layer = tiny_llama().layers[0]
    gate = quantize_matrix(layer.mlp.gate) if in_int8 else layer.mlp.gate  # [24, 16]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 16)), jnp.float32)
    product = multiply_row_twice(x, gate)
    assert product.shape == (1, 1, 24)
    np.testing.assert_allclose(product, linear(x, gate), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3)])
def test_a_product_in_bfloat16_is_the_exact_one_rounded(shape):
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((*shape, 16), (24, 16)))
    product = linear(x, weight)
    assert product.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(product.astype(jnp.float32), exact, rtol=2**-8, atol=1e-6)


def test_parameters_print_as_family_shape_and_size():
    params = tiny_llama()
    count = sum(array.size for array in jax.tree.leaves(params))
    shape = "llama: 2 layers of width 16 and 24, 4 heads of 6, vocabulary of 13"
    assert repr(params) == f"LlamaParams({shape}; {count:,} parameters, float32, {4 * count:,} bytes)"
    assert repr(jax.eval_shape(lambda params: params, params)) == repr(params)
    in_int8 = quantize(params)
    size = sum(array.nbytes for array in jax.tree.leaves(in_int8))
    assert repr(in_int8) == f"LlamaParams({shape}; {count:,} parameters, float32 and int8, {size:,} bytes)"
