"""Controls of sampling over all their values: the distribution of the limit, and never NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

import jlade
from jlade import SamplingConfig
from jlade.decoding import sampling
from jlade.vocabulary import VocabularyShard
from tests.tiny import PAPER, tiny_llama

VOCAB, POSITIONS = 13, 3
GREEDY = sampling.MIN_TEMPERATURE


def among(*usual, least, most):
    return st.none() | st.sampled_from(usual) | st.floats(least, most)


CONFIGS = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.0, 1e-45, 1e-38, 1.2e-38, 1e-10, 1e-5, 1e-3, 0.7, 1.0, 1e4]) | st.floats(0, 1e4),
    top_k=st.none() | st.sampled_from([1, 2, 13, 2**40]),
    top_p=among(1e-45, 1e-38, 1.2e-38, 0.5, 1 - 1e-9, 1.0, least=1e-300, most=1),
    min_p=among(0.0, 1e-45, 1e-38, 0.1, 1.0, least=0, most=1),
    repetition_penalty=among(1e-4, 0.5, 1.3, 1e4, least=1e-4, most=1e4),
    presence_penalty=among(-1e4, 0.0, 1e-45, 0.5, 1e4, least=-1e4, most=1e4),
    frequency_penalty=among(-1e4, 0.0, 1e-45, 0.5, 1e4, least=-1e4, most=1e4),
    logit_bias=st.none()
    | st.dictionaries(
        st.integers(1, VOCAB - 1),  # so that a token is left
        st.sampled_from([-np.inf, -1e300, -3.4e38, -1e4, -1.0, 0.0, 1e-45, 1e4]) | st.floats(-1e4, 1e4),
    ),
)


@jax.jit
def probabilities(logits, settings, prompt, generated):
    processed = sampling.process(logits, settings, prompt, generated)
    return jax.nn.softmax(sampling.sharpen(processed, settings.temperature, VocabularyShard(VOCAB)), axis=-1)


def expected(logits, config, prompt, generated):
    """Returns the probabilities [V] after one position in float64, the logits before filters, and float32's error.

    The probabilities are None where a filter's bound is so near that rounding decides.
    """
    logits, sizes = logits.astype(np.float64), [1.0]
    if config.logit_bias:
        tokens, added = zip(*config.logit_bias, strict=True)
        logits[list(tokens)] += added
    sizes.append(np.abs(logits[np.isfinite(logits)]).max())
    factor = config.repetition_penalty or 1.0
    logits = np.where(prompt + generated > 0, np.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - (config.presence_penalty or 0) * (generated > 0) - (config.frequency_penalty or 0) * generated
    sizes += [np.abs(logits[np.isfinite(logits)]).max(), abs(config.presence_penalty or 0)]
    is_greedy = config.temperature < GREEDY
    temperature = 1.0 if is_greedy else config.temperature
    logits = (logits - logits.max()) / temperature
    error = 8 * np.finfo(np.float32).eps * max(sizes) / temperature
    near, unfiltered = False, logits

    def keep(logits, last):
        nonlocal near
        near |= ((logits < last) & (logits > last - 2 * error)).any()
        return np.where(logits < last, -np.inf, logits)

    if config.top_k:
        logits = keep(logits, np.sort(logits)[-min(config.top_k, VOCAB)])
    if config.top_p and config.top_p < 1:
        order = np.argsort(-logits, kind="stable")
        before = np.append(0, np.cumsum(scipy.special.softmax(logits)[order])[:-1])
        near |= (np.abs(before - config.top_p)[1:] < 1e-4).any()
        logits = keep(logits, logits[order][(before < config.top_p) | (order == order[0])].min())
    if config.min_p:
        bound = np.log(config.min_p)  # of the logit, the highest is 0
        near |= (np.abs(logits - bound)[logits < 0] < 1e-3).any()
        logits = keep(logits, bound)
    if is_greedy:
        near |= np.sort(logits)[-2] > -2 * error
        return None if near else np.eye(VOCAB)[np.argmax(logits)], unfiltered, error
    return None if near else scipy.special.softmax(logits), unfiltered, error


@pytest.mark.slow
@settings(max_examples=400)
@given(CONFIGS, st.sampled_from([1e-6, 1.0, 30.0]), st.integers(0, 2**32 - 1))
def test_every_value_of_every_control_draws_as_in_float64(config, scale, seed):
    rng = np.random.default_rng(seed)
    logits = scale * rng.normal(size=(POSITIONS, VOCAB)).astype(np.float32)
    prompt, generated = (rng.integers(0, 3, shape).astype(np.int32) for shape in (VOCAB, (POSITIONS, VOCAB)))
    row = jax.tree.map(lambda x: x[0], sampling.complete(sampling.to_arrays([config], VOCAB), 1, VOCAB))
    got = np.asarray(probabilities(logits.astype(np.float32), row, prompt, generated))
    assert not np.isnan(got).any()
    np.testing.assert_allclose(got.sum(axis=-1), 1, atol=1e-5)
    for position in range(POSITIONS):
        wanted, unfiltered, error = expected(logits[position].astype(np.float32), config, prompt, generated[position])
        assert unfiltered[np.argmax(got[position])] >= -2 * (error + 1e-6), (
            "the best token is not the most probable one"
        )
        if wanted is not None and error < 1e-4:
            np.testing.assert_allclose(got[position], wanted, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(temperature=1.0, top_p=1e-38),
        SamplingConfig(temperature=1.2e-38),
        SamplingConfig(temperature=1e-45, top_p=1e-45, min_p=1e-45),
        SamplingConfig(temperature=1e-5, logit_bias={5: -1e300}),
    ],
    ids=str,
)
def test_the_limit_is_the_greedy_text(config):
    generate = functools.partial(jlade.generate, tiny_llama(2), [3, 1, 4, 1, 5], max_new_tokens=20)
    for lookahead in (None, PAPER):
        out = generate(sampling=config, lookahead=lookahead, logprobs=True)
        bias = SamplingConfig(logit_bias=config.logit_bias)
        assert out.tokens.tolist() == generate(sampling=bias, lookahead=None).tokens.tolist()
        assert np.isfinite(out.processed_logprobs).all()


def test_a_text_without_a_token_to_draw_is_an_error():
    """Arrays of the caller's own can ban what `prepare` would have refused."""
    inputs, config = jlade.prepare(
        tiny_llama(2), [1, 2], max_new_tokens=5, sampling=SamplingConfig(logit_bias={1: 1.0}), lookahead=None
    )
    banned = inputs.sampling.replace(logit_bias=jnp.full((1, VOCAB), -jnp.inf))
    state = jlade.decode(tiny_llama(2), inputs.replace(sampling=banned), config)
    assert (state.done.tolist(), state.num_tokens.tolist()) == ([True], [2])
