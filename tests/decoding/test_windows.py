"""Decoding with sliding windows, whose layers keep a ring of 8 tokens: see `tests/conftest.py`."""

import functools

import jax
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig, NGramConfig, SamplingConfig
from jlade.decoding import prefill
from tests.families import checkpoint
from tests.texts import assert_same_texts
from tests.tiny import PAPER, tiny_llama

SIZES = {"max_position_embeddings": 1024, "sliding_window": 7}
MODELS = {
    "in every layer": ("Mistral", SIZES),
    "in one of two": ("Exaone4", SIZES | {"layer_types": ["sliding_attention", "full_attention"]}),
}
PROMPT_LENGTHS = (300, 1, 170, 9)  # read in chunks of 128 and 16 tokens, some of which have no token of some sequences


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lookahead"),
    [
        ("in every layer", PAPER),
        ("in one of two", LookaheadConfig.tree(7)),
        ("in one of two", LookaheadConfig.tree(80, ngrams=NGramConfig(10, 5, 10))),
    ],
)
def test_a_ragged_batch_of_long_prompts(name, lookahead, tmp_path):
    """Each token is the most likely one by a pass of transformers over the whole text, without a cache."""
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")

    model, params = checkpoint(*MODELS[name], tmp_path)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 50, length).tolist() for length in PROMPT_LENGTHS]
    options = {"max_new_tokens": 40, "eos_ids": (), "keep_state": True}
    texts = jlade.generate(params, prompts, lookahead=None, **options).tokens.tolist()
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + text]), use_cache=False).logits[0].numpy()
        assert np.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist() == text
        assert len(set(text)) > 3
    out = jlade.generate(params, prompts, lookahead=lookahead, **options)
    assert out.tokens.tolist() == texts
    entries = [layer.shape[2] for layer in out.state.cache.keys]
    assert entries == ([8, 8] if name == "in every layer" else [8, 1024])


PARAMS = tiny_llama(3, max_positions=256, sliding_windows=(5, None))
generate = functools.partial(jlade.generate, PARAMS, max_new_tokens=20, lookahead=PAPER, keep_state=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "lookahead"),
    [
        ((2, 2, 2), LookaheadConfig.tree(7)),
        ((4, 1, 1), PAPER),
        ((1, 1, 2), PAPER),
        ((1, 4, 1), PAPER),
    ],
    ids=str,
)
def test_meshes(sizes, lookahead):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 13, length).tolist() for length in (90, 2, 31, 8)]
    expected = generate(prompts, lookahead=lookahead)
    found = generate(prompts, lookahead=lookahead, mesh=jlade.make_mesh(*sizes))
    assert_same_texts(found, expected)
    np.testing.assert_array_equal(found.accepted, expected.accepted)


@pytest.mark.slow
def test_sampling_and_streams():
    options = {"sampling": SamplingConfig(temperature=0.8), "key": jax.random.key(2), "max_new_tokens": 60}
    expected = generate([3, 1, 4], **options, lookahead=None).tokens
    np.testing.assert_array_equal(generate([3, 1, 4], **options).tokens, expected)
    pieces = jlade.stream(PARAMS, [3, 1, 4], lookahead=PAPER, **options)
    np.testing.assert_array_equal(np.concatenate([piece.tokens for piece in pieces]), expected[0])


@pytest.mark.slow
def test_the_cache_has_the_last_accepted_tokens_and_no_rejected_ones():
    """After a decode with lookahead it is that of one pass over the text."""
    text = [3, 1, 4]
    for _ in range(3):
        out = generate(text)
        text += out.tokens[0].tolist()
        anew = generate(text[:-1], max_new_tokens=1, lookahead=None)
        one, other = (x.state.cache for x in (out, anew))
        assert one.length.tolist() == [len(text) - 1] == other.length.tolist()
        for got, expected in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
            in_use = slice(0, min(len(text) - 1, got.shape[2]))
            np.testing.assert_allclose(got[:, :, in_use], expected[:, :, in_use], atol=1e-4)


@pytest.mark.slow
def test_turns_of_a_conversation():
    """A turn reads what is new, unless it leaves the earlier text after the ring of 8 tokens was full."""
    rng, texts, state = np.random.default_rng(0), [[3, 1, 4], [1], list(range(12))], None
    for _ in range(4):
        whole, out = generate(texts), generate(texts, state=state)
        assert_same_texts(out, whole)
        state = out.state
        texts = [
            [*text, *row.tolist(), *rng.integers(0, 13, 3).tolist()]
            for text, row in zip(texts, out.tokens, strict=True)
        ]
    for cut in (1, 5, 20, 60):
        left = [[*text[:cut], (text[cut] + 1) % 13, 2] for text in texts]
        assert_same_texts(generate(left, state=state), generate(left))


@pytest.mark.slow
def test_only_a_ring_that_is_full_is_emptied(monkeypatch):
    short, long = generate([3, 1, 4], max_new_tokens=5), generate([3, 1, 4], max_new_tokens=7)
    seen = []
    read = prefill.prefill
    monkeypatch.setattr(prefill, "prefill", lambda *given: seen.append(given[1].cache) or read(*given))
    text = [3, 1, 4, *long.tokens[0].tolist()]
    for state in (short.state, long.state):  # with 7 and 9 tokens in the cache
        for prompt in ([*text, 5, 6], text[:5]):
            generate(prompt, state=state)
    assert [cache.length.tolist() for cache in seen] == [[7], [4], [9], [0]]


@pytest.mark.slow
def test_a_ring_grows_with_a_text_until_it_has_the_window():
    params = tiny_llama(2, max_positions=2048, sliding_windows=(1500, 5))
    generate = functools.partial(jlade.generate, params, max_new_tokens=15, lookahead=PAPER, keep_state=True)
    first = generate([3, 1, 4])
    text = [3, 1, 4, *first.tokens[0].tolist()] * 90
    longer = generate(text, state=first.state)
    shapes = [[layer.shape[2] for layer in out.state.cache.values] for out in (first, longer)]
    assert shapes == [[1024, 8], [1504, 8]]
    assert_same_texts(longer, generate(text))
