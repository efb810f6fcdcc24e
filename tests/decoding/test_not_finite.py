"""Logits that are not finite end a text, at the token that would come from them, and no other text."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig, NGramConfig, SamplingConfig
from tests import plain_llama
from tests.tiny import PAPER, slow, tiny_llama, with_arrays

LIMIT = 16
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 7, 1, 5], [8, 1, 8, 1], [2, 2]]
TREE = LookaheadConfig.tree(8)
SETTINGS = {
    "plain": None,
    "window": PAPER,
    "both": LookaheadConfig.tree(8, ngrams=NGramConfig(3, 3, 2)),
    "chain": LookaheadConfig.jacobi(5),
    "adaptive": dataclasses.replace(TREE, relative_step_time=1.5),
}
SAMPLED = SamplingConfig(temperature=1.0)


@functools.cache
def model(**changes):
    shape = {"num_heads": 8, "num_kv_heads": 2, "intermediate_size": 32, "vocab_size": 16}
    shape |= {"num_layers": 1, "tie_embeddings": False}
    return tiny_llama(seed=2, **shape | changes)


def with_embedding(token, value=np.nan):
    """Returns the model with a value in the embedding of a token: the text ends after the token."""
    params = model()
    return dataclasses.replace(params, embedding=params.embedding.at[token, 3].set(value))


def with_head(token, value):
    """Returns the model with an infinite value in a token's row of the output matrix: its logit is inf or -inf."""
    params = model()
    return dataclasses.replace(params, output=params.output.at[token, 3].set(value))


def with_layer(value=np.nan):
    """Returns the model with a value in a matrix of its last layer."""
    params = model()
    last = params.layers[-1]
    broken = with_arrays(last, {"attention.value": last.attention.value.at[2, 5].set(value)})
    return dataclasses.replace(params, layers=(*params.layers[:-1], broken))


def is_sound(logits):
    return not np.isnan(logits).any() and -np.inf < logits.max() < np.inf


def plain(params, prompt, sampling=None, key=None, limit=LIMIT):
    """Returns text and reason of plain decoding in NumPy, of a text without end tokens."""
    text = list(prompt)
    while len(text) < len(prompt) + limit:
        with np.errstate(all="ignore"):
            logits = plain_llama.logits(params, text)[-1]
        if not is_sound(logits):
            return text[len(prompt) :], "error"
        if sampling is not None:
            logits = logits + np.asarray(jax.random.gumbel(jax.random.fold_in(key, len(text)), logits.shape))
        text.append(int(np.argmax(logits)))
    return text[len(prompt) :], "length"


def results(out):
    return [
        (tokens[:length].tolist(), reason)
        for tokens, length, reason in zip(out.tokens, out.lengths, out.finish_reason, strict=True)
    ]


def generate(params, prompts=PROMPTS, **options):
    return jlade.generate(params, prompts, **{"max_new_tokens": LIMIT, "eos_ids": ()} | options)


BROKEN = {
    "embedding": with_embedding(12),
    "embedding of the padding": with_embedding(0),
    "infinite embedding": with_embedding(13, np.inf),
    "head": with_head(9, -np.inf),
    "layer": with_layer(),
}


@functools.cache
def expected(name):
    """Returns `plain` of a broken model and each prompt, greedily."""
    return [plain(BROKEN[name], prompt) for prompt in PROMPTS]


def test_the_texts_end_at_different_places():
    """Those of "head" have logits of -inf before they end: these are no error."""
    lengths = {name: [len(text) for text, _ in expected(name)] for name in BROKEN}
    assert lengths == {
        "embedding": [8, 6, 3, 5],
        "embedding of the padding": [7, LIMIT, LIMIT, LIMIT],
        "infinite embedding": [14, 14, LIMIT, 2],
        "head": [6, 1, 1, 0],
        "layer": [0, 0, 0, 0],
    }
    assert np.isneginf(plain_llama.logits(BROKEN["head"], PROMPTS[0])[-1, 9])


@pytest.mark.parametrize("setting", ["window", slow("plain"), slow("both"), slow("chain"), slow("adaptive")])
def test_greedy(setting):
    for name, params in BROKEN.items():
        out = generate(params, lookahead=SETTINGS[setting])
        assert results(out) == expected(name), name
        np.testing.assert_array_equal(out.accepted.sum(axis=1), out.lengths)
        assert np.all(out.steps >= 1)
        if SETTINGS[setting] is None:  # the step that fails is one too
            np.testing.assert_array_equal(out.steps, out.lengths + (np.array(out.finish_reason) == "error"))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["plain", "window", "both"])
def test_coupled_sampling(setting):
    keys = jax.random.split(jax.random.key(1), len(PROMPTS))
    for name, params in BROKEN.items():
        out = generate(params, lookahead=SETTINGS[setting], sampling=SAMPLED, key=keys)
        own = (jax.random.fold_in(key, 0) for key in keys)
        assert results(out) == [plain(params, *each) for each in zip(PROMPTS, itertools.repeat(SAMPLED), own)], name


@pytest.mark.slow
def test_rejection_sampling():
    """The text depends on the setting, but it ends where the logits after it are not finite, and nowhere before."""
    lookahead = dataclasses.replace(PAPER, verification="rejection")
    for name, params in BROKEN.items():
        out = generate(params, lookahead=lookahead, sampling=SAMPLED, key=jax.random.key(2))
        for prompt, (text, reason) in zip(PROMPTS, results(out), strict=True):
            with np.errstate(all="ignore"):
                logits = [plain_llama.logits(params, prompt + text[:n])[-1] for n in range(len(text) + 1)]
            *before, last = map(is_sound, logits)
            assert all(before), name
            assert reason == ("length" if len(text) == LIMIT else "error"), name
            assert last or len(text) == LIMIT or reason == "error", name
            assert not (reason == "error" and last), name


@pytest.mark.slow
def test_guesses_do_not_end_a_text():
    """Drafts that are rejected hold a token whose embedding is NaN, and so are the logits after it."""
    params = BROKEN["embedding of the padding"]
    text = PROMPTS[1] + expected("embedding of the padding")[1][0]
    options = {"prediction": [[*text[:9], 0, 0, *text[9:14], 0, 0]], "lookahead": TREE, "with_statistics": True}
    out = generate(params, [PROMPTS[1]], **options)
    assert results(out) == expected("embedding of the padding")[1:2]
    assert out.statistics.contributed["prediction"][0] > 0


@pytest.mark.slow
def test_a_token_of_the_prompt_may_have_logits_that_are_not_finite():
    """The MLP overflows for one token, after the last attention: no other token sees it."""
    params, token = model(), 7
    layer = params.layers[0]
    changes = {
        "attention.output": layer.attention.output.at[3].set(0),
        "mlp.gate": layer.mlp.gate.at[:, 3].set(1e25),
        "mlp.up": layer.mlp.up.at[:, 3].set(1e25),
    }
    layer = with_arrays(layer, changes)
    embedding = params.embedding.at[:, 3].set(0).at[token, 3].set(1)
    params = params.replace(layers=(layer,), embedding=embedding)
    prompt = [token, *(PROMPTS[0] * 3)[:20]]
    assert results(generate(params, [prompt], lookahead=PAPER)) == [plain(params, prompt)]
    assert results(generate(params, [[1, token]], lookahead=PAPER)) == [([], "error")]


@pytest.mark.slow
def test_controls_neither_hide_nor_cause_an_error():
    """The model's own logits decide: a bias or a ban of -inf ends no text, and saves none."""
    everything = dict.fromkeys(range(15), -np.inf)
    sampling = SamplingConfig(logit_bias=everything, temperature=1.0, top_p=0.9)
    out = generate(model(), sampling=sampling, lookahead=PAPER, eos_ids=[3], min_new_tokens=4, logprobs=True)
    assert results(out) == [([15] * LIMIT, "length")] * len(PROMPTS)
    out = generate(BROKEN["layer"], sampling=sampling, lookahead=PAPER, eos_ids=[3], min_new_tokens=4, logprobs=True)
    assert results(out) == [([], "error")] * len(PROMPTS)
    assert np.isnan(out.logprobs).all()


@pytest.mark.slow
def test_logits_of_minus_infinity_alone():
    """Some tokens without a chance are usual, all of them are an error."""
    bias = jnp.full(16, -jnp.inf)
    params = dataclasses.replace(model(output_bias=True), output_bias=bias.at[5].set(0.0))
    assert results(generate(params, lookahead=PAPER)) == [([5] * LIMIT, "length")] * len(PROMPTS)
    params = dataclasses.replace(params, output_bias=bias)
    assert results(generate(params, lookahead=PAPER)) == [([], "error")] * len(PROMPTS)


@pytest.mark.slow
def test_ends_that_come_first():
    """An end token or the limit before the failure keeps its reason."""
    text, _ = expected("embedding")[0]
    out = generate(BROKEN["embedding"], PROMPTS[:1], lookahead=PAPER, eos_ids=text[-1])
    assert results(out) == [(text, "eos")]
    out = generate(BROKEN["embedding"], PROMPTS[:1], lookahead=PAPER, max_new_tokens=len(text))
    assert results(out) == [(text, "length")]


@pytest.mark.slow
def test_streams():
    for name in ("embedding", "layer"):
        options = {"max_new_tokens": LIMIT, "eos_ids": (), "lookahead": PAPER}
        *_, last = pieces = list(jlade.stream(BROKEN[name], PROMPTS[0], **options))
        assert results(last.generation) == expected(name)[:1]
        assert np.concatenate([piece.tokens for piece in pieces]).tolist() == expected(name)[0][0]


def test_turns_after_an_error():
    """NaN that a prompt left in the cache does not reach a text that leaves the prompt before it."""
    params = BROKEN["embedding of the padding"]
    healthy = PROMPTS[1]
    failed = generate(params, [[*healthy, 0, 3]], lookahead=PAPER, keep_state=True)
    assert results(failed) == [([], "error")]
    out = generate(params, [healthy], lookahead=PAPER, state=failed.state)
    assert results(out) == expected("embedding of the padding")[1:2]


@pytest.mark.slow
def test_a_mesh():
    for name, params in BROKEN.items():
        out = generate(params, lookahead=PAPER, mesh=jlade.make_mesh(2, 2, 2))
        assert results(out) == expected(name), name


@pytest.mark.slow
def test_engines():
    """A request that fails frees its row, and what was read of its prompt serves others without its NaN."""
    params = BROKEN["embedding of the padding"]
    shared = (PROMPTS[1] * 4)[:18]
    prompts = [*PROMPTS, [*shared, 0, 0, 1], [*shared, 3], shared]
    with jlade.Engine(params, max_sequences=2, capacity=64, lookahead=PAPER) as engine:
        requests = [engine.submit(prompt, max_new_tokens=LIMIT, eos_ids=()) for prompt in prompts]
        found = [results(request.result(60))[0] for request in requests]
        assert engine.prompt_tokens[1] > 0
        *_, last = list(engine.submit(prompts[0], max_new_tokens=LIMIT, eos_ids=(), with_statistics=True))
    assert found == [plain(params, prompt) for prompt in prompts]
    assert {reason for _, reason in found} == {"error", "length"}
    assert results(last.generation) == found[:1]


@pytest.mark.slow
def test_debug_nans():
    """JAX's search for NaN finds none in a sound model, and that of a broken one."""
    with jax.debug_nans(True):
        assert results(generate(model(), lookahead=PAPER)) == [plain(model(), prompt) for prompt in PROMPTS]
        with pytest.raises(FloatingPointError):
            generate(BROKEN["layer"], lookahead=PAPER)
