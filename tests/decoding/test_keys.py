"""Keys of every implementation that JAX has: the text is a function of the key and the prompt alone."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jlade
from jlade import SamplingConfig
from tests.tiny import PAPER, slow_but, tiny_llama

KINDS = ["threefry2x32", "rbg", "unsafe_rbg"]
PROMPTS = [[1, 2, 3], [4], [5, 6]]
SAMPLED = {"max_new_tokens": 20, "sampling": SamplingConfig(temperature=1.0), "eos_ids": ()}
generate = functools.partial(jlade.generate, tiny_llama(2), **SAMPLED)
# Recorded before keys of other kinds were derived.
OF_THREEFRY = [
    [6, 2, 1, 11, 8, 0, 6, 6, 8, 12, 9, 7, 6, 1, 11, 4, 11, 0, 6, 6],
    [3, 0, 0, 4, 6, 10, 2, 9, 12, 4, 4, 1, 7, 7, 7, 1, 11, 9, 5, 6],
    [3, 10, 11, 5, 9, 6, 11, 0, 4, 1, 12, 9, 8, 12, 10, 4, 6, 6, 11, 12],
]


@pytest.fixture(params=slow_but(KINDS, KINDS[0]))
def kind(request):
    return request.param


@pytest.fixture
def by_default(kind):
    """Makes the kind JAX's default, in the threads of an engine too."""
    before = jax.config.jax_default_prng_impl
    jax.config.update("jax_default_prng_impl", kind)
    yield
    jax.config.update("jax_default_prng_impl", before)


def test_texts_of_threefry_keys_are_those_of_earlier_versions():
    assert generate(PROMPTS, key=jax.random.key(7), lookahead=None).tokens.tolist() == OF_THREEFRY


@pytest.mark.slow
def test_one_key_for_a_batch(kind):
    key = jax.random.key(7, impl=kind)
    texts = [generate(PROMPTS, key=key, lookahead=lookahead).tokens.tolist() for lookahead in (None, PAPER)]
    assert texts[0] == texts[1]
    other = generate(PROMPTS, key=jax.random.key(8, impl=kind), lookahead=None).tokens.tolist()
    equal = generate([[1], [1], [1]], key=key, lookahead=None).tokens.tolist()
    assert texts[0] != other
    assert equal[0] != equal[1] != equal[2]
    assert generate(PROMPTS[0], key=key, lookahead=None).tokens.tolist() == texts[0][:1]


@pytest.mark.slow
def test_a_key_for_each_sequence(kind):
    """Their keys differ in a word that is not the first, too."""
    keys = jax.random.split(jax.random.key(7, impl=kind), len(PROMPTS))
    data = np.array(jax.random.key_data(keys))
    data[:, :-1] = data[0, :-1]
    keys = jax.random.wrap_key_data(data, impl=kind)
    pairs = list(zip(PROMPTS, keys, strict=True))
    alone = [generate(prompt, key=key, lookahead=None).tokens[0].tolist() for prompt, key in pairs]
    for lookahead in (None, PAPER):
        assert generate(PROMPTS, key=keys, lookahead=lookahead).tokens.tolist() == alone
    equal = generate([[1], [1], [1]], key=keys, lookahead=None).tokens.tolist()
    assert equal[0] != equal[1] != equal[2]
    with jlade.Engine(tiny_llama(2), max_sequences=3, lookahead=PAPER) as engine:
        requests = [engine.submit(prompt, key=key, **SAMPLED) for prompt, key in pairs]
        assert [request.result().tokens[0].tolist() for request in requests] == alone


@pytest.mark.slow
def test_the_kind_by_default(kind, by_default):
    texts = generate(PROMPTS, key=jax.random.key(7, impl=kind), lookahead=None).tokens.tolist()
    for key in (jax.random.key(7), jax.random.PRNGKey(7)):
        assert generate(PROMPTS, key=key, lookahead=PAPER).tokens.tolist() == texts
    with jlade.Engine(tiny_llama(2), max_sequences=3, lookahead=PAPER) as engine:
        together = engine.generate(PROMPTS, key=jax.random.key(7), **SAMPLED)
        assert [out.tokens[0].tolist() for out in together] == texts
    assert (
        generate(PROMPTS[0], lookahead=None).tokens.tolist()
        == generate(PROMPTS[0], lookahead=None, key=jax.random.key(0)).tokens.tolist()
    )


@pytest.mark.slow
def test_samples_under_vmap(kind):
    params, keys = tiny_llama(2), jax.random.split(jax.random.key(7, impl=kind), 3)
    inputs, config = jlade.prepare(params, PROMPTS[0], lookahead=None, **SAMPLED)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def sample(params, key):
        return jlade.decode(params, dataclasses.replace(inputs, key=key), config).tokens[0, 3:23]

    alone = [generate(PROMPTS[0], key=key, lookahead=None).tokens[0].tolist() for key in keys]
    assert sample(params, keys).tolist() == alone


def test_words_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="key must hold 2 words, as those of"):
        generate([1], key=jax.random.key_data(jax.random.key(7, impl="rbg")))
