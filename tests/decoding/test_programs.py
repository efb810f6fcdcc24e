"""The text of compiled programs: their loops copy neither cache nor pool."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig, NGramConfig
from jlade.config import PLAIN
from tests.decoding.copies import copies_in_loops, copies_in_steps
from tests.tiny import tiny_llama

OPTIMIZED = True


CAPACITY = 4096
LOOKAHEADS = {
    "prompt pool": LookaheadConfig.paper(3, 4, 3),
    "window": LookaheadConfig.paper(3, 4, 3, pool_from_prompt=False),
    # Table and pool have the same size in the first, and the logits of neither are a multiple of the pool.
    "tree": LookaheadConfig.tree(11, ngrams=NGramConfig(3, 5, 2)),
    "adaptive": LookaheadConfig.tree(11, ngrams=NGramConfig(0, 5, 3), relative_step_time=2.0),
    "plain": PLAIN,
}


def request_for(batch_size, lookahead, windows=()):
    params = tiny_llama(vocab_size=2000, max_positions=CAPACITY, sliding_windows=windows)
    options = {"max_new_tokens": CAPACITY - 1, "lookahead": lookahead}
    entry = batch_size * params.config.num_kv_heads * params.config.head_dim
    layers = frozenset(entry * number for number in params.config.entries_by_layer(CAPACITY))
    return params, *jlade.prepare(params, [[1]] * batch_size, **options), layers


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "windows"), [(3, (1000, None)), (1, ())])
def test_no_loop_over_chunks_copies_a_cache_layer(batch_size, windows):
    params, inputs, config, layers = request_for(batch_size, PLAIN, windows)
    read = jax.jit(jlade.prefill, static_argnames="config").lower(params, inputs, config)
    assert copies_in_loops(read.compile().as_text(), layers) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch_size", "windows"),
    [
        ("prompt pool", 3, ()),
        ("plain", 1, ()),
        ("tree", 3, (1000, None)),
        ("prompt pool", 1, ()),
        ("window", 3, ()),
        ("adaptive", 1, (1000, None)),
        ("plain", 1, (1000, 1000)),
    ],
)
def test_no_loop_over_steps_copies_a_cache_layer_or_the_pool(name, batch_size, windows):
    """The start is part of the program, as its loop inserts n-grams into the pool."""
    lookahead = LOOKAHEADS[name]
    params, inputs, config, layers = request_for(batch_size, lookahead, windows)
    cache = params.decoder.init_cache(params, batch_size, CAPACITY)
    pool = batch_size * 2000 * lookahead.ngrams.guess_set_size * (lookahead.ngram_size - 1)
    assert copies_in_steps(params, cache, inputs, config, layers, pool) == []


@pytest.mark.slow
def test_no_loop_copies_or_converts_a_cache_in_8_bits():
    params, inputs, config, layers = request_for(3, LOOKAHEADS["tree"], (1000, None))
    config = dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, kv_dtype="float8_e4m3fn"))
    text = jax.jit(jlade.decode, static_argnames="config").lower(params, inputs, config).compile().as_text()
    assert copies_in_loops(text, layers) == []


def test_the_search_for_copies_finds_one():
    def body(carry):
        i, x = carry
        return i + 1, jnp.tanh(jnp.roll(x, 1).T @ x.T).T

    program = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 9, body, (0, x))).lower(np.zeros((64, 64)))
    assert copies_in_loops(program.compile().as_text(), frozenset({64 * 64}))
