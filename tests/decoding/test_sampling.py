"""Processed logits against transformers and NumPy; sampled texts against the reference and exact enumeration."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import jlade
from jlade import LookaheadConfig, NGramConfig, SamplingConfig
from jlade.config import SOURCES
from jlade.decoding import sampling, verdict
from jlade.decoding.stopping import Stopping
from jlade.drafts.pool import NGramPool
from jlade.drafts.prediction import Reading
from jlade.lookahead.verification import verify_by_rejection
from jlade.vocabulary import VocabularyShard
from tests import plain_llama, reference
from tests.decoding.observed import RIGHT, first_window, sources_of
from tests.texts import assert_same_texts
from tests.tiny import PAPER, RECURRENT, slow, tiny_llama

VOCAB = 13
ALONE = [
    SamplingConfig(temperature=0.7),
    SamplingConfig(temperature=1.0, top_k=4),
    SamplingConfig(temperature=1.5, top_p=0.8),
    SamplingConfig(temperature=1.0, min_p=0.2),
    SamplingConfig(temperature=0.3, repetition_penalty=1.3),
    SamplingConfig(temperature=1.0, presence_penalty=0.8),
    SamplingConfig(temperature=1.0, frequency_penalty=0.5),
    SamplingConfig(temperature=1.0, logit_bias={3: 2.0, 5: float("-inf")}),
]
GREEDY_WITH_PENALTIES = SamplingConfig(repetition_penalty=1.3, frequency_penalty=0.2)
TOGETHER = SamplingConfig(
    temperature=0.9,
    top_k=9,
    top_p=0.95,
    min_p=0.02,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={3: 1.0},
)
LOOKAHEADS = [
    PAPER,
    LookaheadConfig.paper(1, 5, 6, pool_from_prompt=False),
    LookaheadConfig.paper(6, 2, 4),
    LookaheadConfig.paper(0, 3, 2),
    LookaheadConfig.paper(5, 6, 1, window_draw="greedy"),
    LookaheadConfig.paper(3, 3, 0),
    LookaheadConfig.tree(14, ngrams=NGramConfig(2, 5, 3)),
]
SAMPLED = [*ALONE, TOGETHER]
CONTROLS = [*SAMPLED, GREEDY_WITH_PENALTIES, SamplingConfig()]  # a sequence each


def processed(logits, config, prompt, generated):
    """Runs `sampling.process` on logits [R, V] for one history."""
    settings = sampling.to_arrays([config], logits.shape[1])
    row = jax.tree.map(lambda x: x[0], settings)
    counts = [np.bincount(ids, minlength=logits.shape[1]).astype(np.int32) for ids in (prompt, generated)]
    return np.asarray(sampling.process(logits, row, counts[0], np.broadcast_to(counts[1], logits.shape)))


def plain_processed(logits, config, prompt, generated):
    """The same for one position [V], written out in NumPy and float64."""
    logits = np.array(logits, np.float64)
    for token, bias in config.logit_bias or ():
        logits[token] += bias
    for token in range(len(logits)):
        if config.repetition_penalty and token in (*prompt, *generated):
            factor = config.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        if token in generated:
            logits[token] -= config.presence_penalty or 0
        logits[token] -= (config.frequency_penalty or 0) * list(generated).count(token)
    logits /= config.temperature or 1.0
    if config.top_k:
        logits[logits < np.sort(logits)[-config.top_k]] = -np.inf
    if config.top_p:
        order = np.argsort(-logits)
        total = np.cumsum(np.exp(logits[order]) / np.exp(logits).sum())
        logits[order[1 + np.searchsorted(total, config.top_p) :]] = -np.inf
    if config.min_p:
        logits[logits < logits.max() + np.log(config.min_p)] = -np.inf
    return logits


@pytest.mark.parametrize("config", [*ALONE, TOGETHER, GREEDY_WITH_PENALTIES], ids=str)
def test_processing_equals_numpy(config):
    rng = np.random.default_rng(0)
    for _ in range(20):
        logits = rng.normal(size=(3, VOCAB)).astype(np.float32) * 2
        prompt, generated = rng.integers(0, VOCAB, 4).tolist(), rng.integers(0, VOCAB, 5).tolist()
        expected = [plain_processed(row, config, prompt, generated) for row in logits]
        got = processed(logits, config, prompt, generated)
        kept = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(got), kept)
        np.testing.assert_allclose(got[kept], np.array(expected)[kept], atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.9},
        {"top_p": 1.0},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 0.8},
    ],
    ids=str,
)
def test_processing_equals_transformers(settings):
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    transformers = pytest.importorskip("transformers", reason="the test extra installs it with torch")
    makers = {  # in transformers' own order
        "repetition_penalty": transformers.RepetitionPenaltyLogitsProcessor,
        "temperature": transformers.TemperatureLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(6, 50)).astype(np.float32) * 3
    history = rng.integers(0, 50, 12)
    expected = torch.tensor(logits)
    for name, maker in makers.items():
        if name in settings:
            expected = maker(settings[name])(torch.tensor(np.tile(history, (6, 1))), expected)
    config = SamplingConfig(**({"temperature": 1.0} | settings))
    got = processed(logits, config, history[:7], history[7:])
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("probabilities", "top_p", "kept"),
    [
        ([0.4, 0.3, 0.3, 0.0], 0.6, [0, 1]),
        ([0.3, 0.0, 0.3, 0.4], 0.6, [0, 3]),
        ([1 / 64] * 64, 0.5, [*range(32)]),
        ([1 / 64] * 64, 0.01, [0]),
        ([1 / 64] * 64, 1.0, [*range(64)]),
    ],
)
def test_of_equally_probable_tokens_the_first_are_kept(probabilities, top_p, kept):
    with np.errstate(divide="ignore"):
        logits = np.log([probabilities]).astype(np.float32)
    got = processed(logits, SamplingConfig(temperature=1.0, top_p=top_p), [], [])
    assert np.flatnonzero(np.isfinite(got)).tolist() == kept


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99])
def test_as_many_equal_logits_are_kept_as_by_transformers(top_p):
    """Logits in bfloat16 tie often. transformers leaves open which of these it keeps."""
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    transformers = pytest.importorskip("transformers", reason="the test extra installs it with torch")
    logits = np.array(jax.random.normal(jax.random.key(4), (64, 500)).astype(jnp.bfloat16).astype(jnp.float32)) * 4
    logits[:8] = np.round(logits[:8])
    got = processed(logits, SamplingConfig(temperature=1.0, top_p=top_p), [], [])
    expected = transformers.TopPLogitsWarper(top_p)(None, torch.tensor(logits)).numpy()
    np.testing.assert_array_equal(np.sort(got), np.sort(expected))


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0.9e-5, True), (1.1e-5, False)])
def test_temperatures_below_the_least_one_are_greedy(temperature, is_greedy):
    row = jax.tree.map(lambda x: x[0], sampling.to_arrays([SamplingConfig(temperature)], 3))
    close = sampling.process(jnp.array([[1.0, 1.0 - 1e-6, 0.0]]), row, None, None)
    sharpened = sampling.sharpen(close, row.temperature, VocabularyShard(3))
    assert np.isfinite(sharpened[0]).tolist() == [True, not is_greedy, not is_greedy]


def noise(key, row, position, vocab_size):
    return np.asarray(sampling.noise_at(jax.random.fold_in(key, row), jnp.array([position]), vocab_size))[0]


@pytest.mark.parametrize(
    "lookahead",
    [
        LOOKAHEADS[0],
        dataclasses.replace(PAPER, drafts=dataclasses.replace(PAPER.drafts, window_draw="greedy")),
        slow(LOOKAHEADS[-1]),
        slow(LookaheadConfig.tree(20, sources=("recycled",))),
        slow(LookaheadConfig.jacobi(6)),
    ],
    ids=str,
)
def test_coupled_sampling_equals_the_reference(lookahead):
    """Noise that belongs to a position makes the next token a function of the text, as the reference wants it."""
    params, key, prompt = tiny_llama(2), jax.random.key(3), [3, 1, 4, 1, 5]
    start = first_window(key, prompt, lookahead)
    batch = [prompt] * len(CONTROLS)
    out = jlade.generate(
        params, batch, max_new_tokens=30, lookahead=lookahead, sampling=CONTROLS, key=key, keep_state=True
    )
    for row, config in enumerate(SAMPLED):
        noise_of = functools.cache(functools.partial(noise, key, row, vocab_size=VOCAB))
        next_token = sampled_next_token(params, config, key, row, len(prompt))
        windows: list[list[list[int]]] = []
        tokens, accepted = reference.decode(
            next_token,
            prompt,
            30,
            window_size=lookahead.window_size,
            ngram_size=lookahead.ngram_size,
            guess_set_size=lookahead.ngrams.guess_set_size,
            pool_from_prompt=True,
            start=start,
            sources=sources_of(2, lookahead, (), lambda at, token, of=noise_of: of(at)[token], next_token),
            window_token=most_likely_token(params, config) if lookahead.ngrams.window_draw == "greedy" else None,
            watch=lambda text, window, new, *rest, windows=windows: windows.append([*window[1:], new]),
        )
        assert out.tokens[row].tolist() == tokens
        if not sampling.to_arrays([config], VOCAB).counts_tokens:  # the reference counts guesses as well
            assert out.accepted[row, : out.steps[row]].tolist() == accepted
            # The token of column 0 and row 0 is never read.
            assert np.ravel(out.state.window[row]).tolist()[1:] == np.ravel(windows[-1]).tolist()[1:]


def most_likely_token(params, config):
    @functools.cache
    def next_token(text):
        return int(np.argmax(plain_processed(plain_llama.logits(params, text)[-1], config, (), ())))

    return lambda text: next_token(tuple(text))


def sampled_next_token(params, config, key, row, prompt_length):
    @functools.cache
    def next_token(text):
        logits = plain_llama.logits(params, text)[-1]
        logits = plain_processed(logits, config, text[:prompt_length], text[prompt_length:])
        return int(np.argmax(logits + noise(key, row, len(text), VOCAB)))

    return lambda text: next_token(tuple(text))


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [LOOKAHEADS[4], LOOKAHEADS[5], LOOKAHEADS[-1]], ids=str)
def test_sampled_texts_are_the_same_for_every_setting(lookahead):
    """Each control alone, all together, and none: a sequence each, so that all share one program per setting."""
    prompts = [[3, 1, 4, 1, 5][: 1 + row % 5] for row in range(len(CONTROLS))]
    arguments = {"max_new_tokens": 30, "sampling": CONTROLS, "key": jax.random.key(1)}
    plain = jlade.generate(tiny_llama(2), prompts, lookahead=None, **arguments)
    out = jlade.generate(tiny_llama(2), prompts, lookahead=lookahead, **arguments)
    assert_same_texts(out, plain)


@pytest.mark.slow
def test_sampled_texts_of_the_demo_model_are_those_of_plain_sampling(demo, golden):
    prompts = [prompt["ids"] for prompt, _ in golden.values()][::7]
    configs = [TOGETHER, *(SamplingConfig(temperature=t) for t in (0.3, 0.7, 1.5))]
    arguments = {"max_new_tokens": 24, "sampling": configs, "key": jax.random.key(1), "eos_ids": ()}
    plain = jlade.generate(demo[0], prompts, lookahead=None, **arguments)
    out = jlade.generate(
        demo[0], prompts, lookahead=LookaheadConfig.tree(12, ngrams=NGramConfig(3, 4, 10)), **arguments
    )
    assert_same_texts(out, plain)
    assert out.compression.mean() > 1.1


def test_keys_decide_the_text():
    options = {"max_new_tokens": 30, "sampling": SamplingConfig(temperature=1.0), "lookahead": LOOKAHEADS[0]}
    generate = functools.partial(jlade.generate, tiny_llama(2), **options)
    first, again, other = (generate([[1], [1]], key=jax.random.key(i)).tokens.tolist() for i in (0, 0, 1))
    assert first == again != other
    assert first[0] != first[1], "equal prompts in a batch should get texts of their own"


@pytest.mark.slow
@pytest.mark.parametrize(
    "lookahead",
    [
        LookaheadConfig.paper(4, 4, 3, verification="rejection"),
        LOOKAHEADS[0],
        LookaheadConfig.tree(14, ngrams=NGramConfig(2, 5, 3), verification="rejection"),
    ],
    ids=str,
)
def test_sequences_with_settings_and_keys_of_their_own_get_what_they_get_alone(lookahead):
    rng = np.random.default_rng(3)
    temperatures = (0.3, 0.5, 0.7, 0.9, 1.0, 1.1, 1.3, 1.5)
    configs = [dataclasses.replace(TOGETHER, temperature=t, top_k=3 + i) for i, t in enumerate(temperatures)]
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (1, 7, 20, 2, 11, 5, 3, 9)]
    keys = jax.random.split(jax.random.key(5), 8)
    generate = functools.partial(jlade.generate, tiny_llama(2), max_new_tokens=30, eos_ids=[4])
    batch = generate(prompts, sampling=configs, key=keys, lookahead=lookahead)
    for row, (prompt, config) in enumerate(zip(prompts, configs, strict=True)):
        for key in (keys[row], keys[row : row + 1]):
            alone = generate(prompt, sampling=config, key=key, lookahead=lookahead)
            assert batch.tokens[row].tolist() == alone.tokens[0].tolist()
            assert batch.accepted[row, : batch.steps[row]].tolist() == alone.accepted[0].tolist()


@pytest.mark.parametrize(
    "lookahead",
    [
        slow(None),
        LOOKAHEADS[0],
        slow(LOOKAHEADS[-1]),
        slow(LookaheadConfig.paper(4, 4, 3, verification="rejection")),
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_model_before_and_after_processing(lookahead):
    """Sequences with each control alone, all together and greedy, with a minimum length that bans a token at first."""
    configs = CONTROLS
    prompt, banned = [3, 1, 4, 1, 5], 3
    out = jlade.generate(
        tiny_llama(2),
        [prompt] * len(configs),
        max_new_tokens=20,
        min_new_tokens=5,
        eos_ids=[banned],
        lookahead=lookahead,
        sampling=configs,
        key=jax.random.key(4),
        logprobs=True,
        top_logprobs=15,
    )
    for row, config in enumerate(configs):
        text = out.tokens[row, : out.lengths[row]].tolist()
        logits = plain_llama.logits(tiny_llama(2), [*prompt, *text])
        for i, token in enumerate(text):
            before = logits[len(prompt) - 1 + i].astype(np.float64)
            expected = scipy.special.log_softmax(before)
            assert out.logprobs[row, i] == pytest.approx(expected[token], abs=1e-4)
            best = out.top_tokens[row, i]
            assert best[13:].tolist() == [-1, -1], "a vocabulary of 13"
            np.testing.assert_allclose(out.top_logprobs[row, i, :13], np.sort(expected)[::-1], atol=1e-4)
            np.testing.assert_allclose(expected[best[:13]], np.sort(expected)[::-1], atol=1e-4)
            before[banned] = -np.inf if i < 5 else before[banned]
            after = plain_processed(before, config, prompt, text[:i])
            assert out.processed_logprobs[row, i] == pytest.approx(scipy.special.log_softmax(after)[token], abs=1e-3)
        assert np.isnan(out.logprobs[row, len(text) :]).all()
        assert np.isnan(out.top_logprobs[row, len(text) :]).all()
        assert (out.top_tokens[row, len(text) :] == -1).all()
    assert jlade.generate(tiny_llama(2), prompt, max_new_tokens=3, lookahead=None).logprobs is None


@pytest.mark.slow
def test_streamed_samples_are_the_generated_ones():
    arguments = {"max_new_tokens": 30, "sampling": TOGETHER, "lookahead": LOOKAHEADS[0], "key": jax.random.key(8)}
    whole = jlade.generate(tiny_llama(2), [1, 2], **arguments)
    pieces = [piece.tokens for piece in jlade.stream(tiny_llama(2), [1, 2], **arguments)]
    assert np.concatenate(pieces).tolist() == whole.tokens[0].tolist()


# The joint distribution of five tokens over a vocabulary of four, against exact enumeration.

NUM_SAMPLES, LENGTH, SMALL_VOCAB = 5_000, 5, 4
SMALL = SamplingConfig(temperature=1.2, top_k=3)  # so that one token in four is impossible


@pytest.fixture(scope="module")
def small_model():
    return tiny_llama(0, vocab_size=SMALL_VOCAB, num_layers=1, num_heads=1, num_kv_heads=1, max_positions=16)


@pytest.fixture(scope="module")
def expected_counts(small_model):
    return counts_of(small_model)


def counts_of(params):
    """Returns the samples expected of each of the 4 ** 5 texts after the prompt [1, 2]."""
    probabilities = np.ones((SMALL_VOCAB,) * LENGTH)
    for text in itertools.product(range(SMALL_VOCAB), repeat=LENGTH):
        logits = plain_llama.logits(params, [1, 2, *text])
        for position, token in enumerate(text):
            row = plain_processed(logits[1 + position], SMALL, [1, 2], text[:position])
            probabilities[text] *= np.exp(row[token]) / np.exp(row).sum()
    assert probabilities.sum() == pytest.approx(1)
    return NUM_SAMPLES * probabilities.reshape(-1)


def planted_pool():
    """Likely, unlikely, duplicated and impossible n-grams: all there are, each key with one of its own twice."""
    pool = np.full((SMALL_VOCAB, 4, 3), -1, np.int32)
    for key, slot in itertools.product(range(SMALL_VOCAB), range(3)):
        pool[key, slot] = [key, (key + slot) % SMALL_VOCAB, slot]
    pool[:, 3] = pool[:, 1]
    pool[2, 2:] = -1
    return pool


def p_value(params, expected, lookahead, kind=None):
    """Draws texts that all start with the planted pool; returns the chi-square p-value of their joint distribution."""
    config = jlade.DecodeConfig(params.decoder, lookahead)
    prompts = np.zeros((NUM_SAMPLES, 16), np.int32)
    prompts[:, :2] = [1, 2]
    full = functools.partial(np.full, NUM_SAMPLES, dtype=np.int32)
    settings = sampling.to_arrays([SMALL] * NUM_SAMPLES, SMALL_VOCAB)
    stopping = Stopping(full(LENGTH), full(-1)[:, None])
    ngrams = jnp.broadcast_to(planted_pool(), (NUM_SAMPLES, *planted_pool().shape))
    planted = {"pool": NGramPool.of(ngrams, SMALL_VOCAB)} if "pool" in lookahead.reach else {}
    if "prediction" in lookahead.reach:
        planted["prediction"] = Reading.begin(jnp.zeros((NUM_SAMPLES, LENGTH), jnp.int32).at[:, ::2].set(2))
    keys = jax.random.split(jax.random.key(0, impl=kind), NUM_SAMPLES)
    inputs = jlade.Inputs(prompts, full(2), stopping, keys, settings, sources=planted)

    @jax.jit
    def run(params, inputs):
        state = jlade.start(jlade.prefill(params, inputs, config), inputs, config)
        return jax.lax.while_loop(lambda s: ~jnp.all(s.done), lambda s: jlade.step(params, s, config), state)

    state = run(params, inputs)
    assert state.num_steps.min() < LENGTH, "drafts should be accepted"
    texts = np.asarray(state.tokens)[:, 2 : 2 + LENGTH]
    observed = np.bincount(texts @ SMALL_VOCAB ** np.arange(LENGTH)[::-1], minlength=len(expected))
    assert not observed[expected == 0].any(), "an impossible text was drawn"
    common = expected >= 5
    pooled = [np.append(counts[common], counts[~common].sum()) for counts in (observed, expected)]
    p = scipy.stats.chisquare(*pooled, sum_check=False).pvalue
    print(f"{lookahead.verification}, window {lookahead.ngrams.window_draw}: p = {p:.3g}")
    return p


@pytest.mark.parametrize(
    ("verification", "window_draw"),
    [("rejection", "greedy"), slow("coupled", "coupled"), slow("coupled", "greedy"), slow("rejection", "coupled")],
)
def test_texts_follow_the_models_distribution(verification, window_draw, small_model, expected_counts):
    lookahead = LookaheadConfig.paper(2, 3, 4, verification=verification, window_draw=window_draw)
    assert p_value(small_model, expected_counts, lookahead) > RIGHT


@pytest.mark.parametrize(
    ("name", "temperature", "expected"),
    [
        ("rejection", 1.0, "verify_by_rejection"),
        ("coupled", 1.0, "verify_by_matching"),
        ("rejection", 0.0, "verify_by_matching"),
    ],
)
def test_the_setting_names_the_verification(name, temperature, expected, monkeypatch):
    """The texts of both have one distribution, which does not tell. Tracing a step calls one of them."""
    called = []
    for each in ("verify_by_matching", "verify_by_rejection"):
        original = getattr(verdict, each)
        monkeypatch.setattr(
            verdict, each, lambda *args, each=each, original=original: called.append(each) or original(*args)
        )
    params, lookahead = tiny_llama(2), dataclasses.replace(PAPER, verification=name)
    sampling = SamplingConfig(temperature=temperature)
    inputs, config = jlade.prepare(params, [1], lookahead=lookahead, sampling=sampling, max_new_tokens=4)

    def one_step(inputs):
        return jlade.step(params, jlade.start(jlade.prefill(params, inputs, config), inputs, config), config)

    jax.eval_shape(one_step, inputs)
    assert called == [expected]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_texts_with_keys_of_other_kinds_follow_it_too(kind, small_model, expected_counts):
    assert p_value(small_model, expected_counts, LookaheadConfig.paper(2, 3, 4), kind) > RIGHT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verification", "drafted", "guess_set_size"),
    [("coupled", SOURCES, 4), ("rejection", SOURCES, 4), ("rejection", ("recycled",), 0)],
)
def test_texts_of_a_tree_follow_the_models_distribution(
    verification, drafted, guess_set_size, small_model, expected_counts
):
    """After a first step without drafts, all sources have some."""
    lookahead = LookaheadConfig.tree(
        5, ngrams=NGramConfig(1, 3, guess_set_size), verification=verification, sources=drafted
    )
    assert p_value(small_model, expected_counts, lookahead) > RIGHT


@pytest.mark.slow
def test_texts_of_a_recurrent_model_follow_its_distribution():
    params = tiny_llama(0, vocab_size=SMALL_VOCAB, max_positions=16, **RECURRENT)
    lookahead = LookaheadConfig.tree(5, ngrams=NGramConfig(1, 3, 4), verification="rejection")
    assert p_value(params, counts_of(params), lookahead) > RIGHT


@pytest.mark.slow
def test_the_test_of_the_distribution_finds_a_wrong_sampler(small_model, expected_counts, monkeypatch):
    def without_renormalisation(key, tree, next_logits, logits, max_accepted):
        """Draws from the whole distribution where nothing was accepted, though some of its mass was tried already."""
        agreed = verify_by_rejection(key, tree, next_logits, logits, max_accepted)
        redrawn = jax.random.categorical(jax.random.fold_in(key, 99), next_logits).astype(jnp.int32)
        first = jnp.where(agreed.num_accepted == 1, redrawn, agreed.tokens[0])
        return agreed._replace(tokens=agreed.tokens.at[0].set(first))

    monkeypatch.setattr(verdict, "verify_by_rejection", without_renormalisation)
    lookahead = LookaheadConfig.paper(2, 3, 4, verification="rejection")
    assert p_value(small_model, expected_counts, lookahead) < RIGHT
