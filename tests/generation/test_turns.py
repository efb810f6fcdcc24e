"""Continuing a text with the state of an earlier call, and pools that are shared on purpose."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jlade
from jlade import LookaheadConfig, NGramConfig, NGramPool, SamplingConfig
from jlade.decoding import prefill
from jlade.drafts import graded
from tests import reference
from tests.texts import assert_same_texts
from tests.tiny import PAPER, slow, tiny_llama, tiny_tokenizer

TREE = LookaheadConfig.tree(12, ngrams=NGramConfig(2, 3, 3))
PARAMS = tiny_llama(2, max_positions=128)
generate = functools.partial(jlade.generate, PARAMS, max_new_tokens=15, lookahead=PAPER, keep_state=True)


@pytest.mark.parametrize("lookahead", [PAPER, slow(TREE)], ids=["candidates", "tree"])
@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), slow(SamplingConfig(temperature=0.7, repetition_penalty=1.2))], ids=str
)
def test_a_continued_conversation_equals_the_whole_read_anew(sampling, lookahead):
    """Three turns of a ragged batch; the conversations differ in length, and one ends its answers early."""
    texts, state, rng = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8]], None, np.random.default_rng(0)
    for turn in range(3):
        arguments = {"sampling": sampling, "key": jax.random.key(turn), "eos_ids": [[], [7], []], "logprobs": True}
        arguments["lookahead"] = lookahead
        whole = generate(texts, **arguments)
        out = generate(texts, state=state, **arguments)
        assert_same_texts(out, whole)
        np.testing.assert_allclose(out.logprobs, whole.logprobs, atol=1e-4)
        state = out.state
        texts = [
            [*text, *row[:length].tolist(), *rng.integers(0, 13, 2 + turn).tolist()]
            for text, row, length in zip(texts, out.tokens, out.lengths, strict=True)
        ]


@pytest.mark.slow
def test_a_turn_continues_with_the_recycled_logits():
    """The table has every token that a turn read, also those that the next one does not read again."""
    first = generate([3, 1, 4, 1, 5], lookahead=TREE)
    text = [3, 1, 4, 1, 5, *first.tokens[0, : first.lengths[0]].tolist(), 9]
    before = np.asarray(first.state.sources["recycled"].after_token)
    assert all(before[0, token, 0] >= 0 for token in [3, 1, 4, 1, 5])
    inputs, config = jlade.prepare(PARAMS, text, state=first.state, lookahead=TREE, max_new_tokens=15)
    prefix = jlade.prefill(PARAMS, inputs, config)
    known = before[0, :, 0] >= 0
    assert (np.asarray(prefix.sources["recycled"].after_token)[0, known, 0] >= 0).all()
    np.testing.assert_array_equal(first.state.sources["recycled"].after_token, before, "the state stays as it was")
    assert jlade.prefill(PARAMS, *jlade.prepare(PARAMS, text, lookahead=PAPER)).sources == {}


def test_only_what_is_new_is_read(monkeypatch):
    """The cache before prefill holds all that the state had read; the model computes the others."""
    first = generate([[3, 1, 4], [1]])
    texts = [[*p, *row.tolist(), 5, 6] for p, row in zip([[3, 1, 4], [1]], first.tokens, strict=True)]
    seen = []
    prefix = generate([3, 1, 4, 1, 5], max_new_tokens=1)
    read = prefill.prefill
    monkeypatch.setattr(prefill, "prefill", lambda *given: seen.append(given[1]) or read(*given))
    generate(texts, state=first.state)
    cache = seen[0].cache
    assert cache.length.tolist() == [len(text) - 3 for text in texts]
    generate([texts[0][:7], [2, *texts[1]]], state=first.state)
    cache = seen[1].cache
    assert cache.length.tolist() == [6, 0], "a shorter prompt leaves its last token to read; another one shares nothing"
    generate([[3, 1, 4, 1, 5, 9], [3, 1, 8]], state=prefix.state)
    cache = seen[2].cache
    assert cache.length.tolist() == [5, 2], "what both rows begin with was read once"


@pytest.mark.slow
def test_a_state_of_one_sequence_serves_a_batch():
    prefix = [3, 1, 4, 1, 5, 9, 2, 6]
    texts = [[*prefix, 5, 3], [*prefix, 5, 8, 9], [*prefix[:3], 7], [12]]
    shared = generate(prefix, max_new_tokens=1)
    together = generate(texts, state=shared.state)
    assert_same_texts(together, generate(texts))
    for row, text in enumerate(texts):
        alone = generate(text, state=shared.state)
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[0])
        assert together.steps[row] == alone.steps[0]


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 11, 17])
def test_a_text_that_leaves_the_earlier_one_is_read_from_there(cut):
    first = generate([3, 1, 4], max_new_tokens=20)
    text = [3, 1, 4, *first.tokens[0].tolist()]
    text = [*text[:cut], (text[cut] + 1) % 13, 2, 3]
    assert_same_texts(generate(text, state=first.state), generate(text))


def test_a_state_can_be_continued_twice_and_streamed():
    first = generate([3, 1, 4])
    text = [3, 1, 4, *first.tokens[0].tolist(), 7]
    keys = jax.random.split(jax.random.key(0), 1)
    arguments = {"max_new_tokens": 15, "lookahead": PAPER, "state": first.state, "key": keys}
    once, again = (list(jlade.stream(PARAMS, text, **arguments)) for _ in range(2))
    whole = generate(text, state=first.state, key=keys)
    for pieces in (once, again):
        assert np.concatenate([piece.tokens for piece in pieces]).tolist() == whole.tokens[0].tolist()
    assert jax.random.key_data(keys).shape == (1, 2), "the caller's arrays are left alone"


@pytest.mark.slow
def test_a_state_grows_with_the_text():
    generate = functools.partial(jlade.generate, tiny_llama(2, max_positions=2048), lookahead=PAPER, keep_state=True)
    first = generate([3, 1, 4], max_new_tokens=15)
    assert first.state.tokens.shape == (1, 1024)
    text = [3, 1, 4, *first.tokens[0].tolist()] * 60
    longer = generate(text, max_new_tokens=15, state=first.state)
    assert longer.state.tokens.shape == (1, 2048)
    assert_same_texts(longer, generate(text, max_new_tokens=15))


@pytest.mark.slow
def test_the_pool_carries_over():
    """With n-grams from the text alone, a continued pool is that of the whole conversation, oldest first."""
    lookahead = LookaheadConfig.paper(0, 3, 4)
    first = generate([3, 1, 4, 1, 5], lookahead=lookahead)
    text = [3, 1, 4, 1, 5, *first.tokens[0].tolist(), 8, 9, 1]
    second = generate(text, lookahead=lookahead, state=first.state)
    text += second.tokens[0].tolist()
    pool = reference.Pool(4)
    for end in range(3, len(text) + 1):
        pool.insert(text[end - 3 : end])
    for key in range(13):
        found = second.state.sources["pool"].ngrams[0, key].tolist()
        assert [tuple(ngram[1:]) for ngram in found if ngram[0] == key] == pool.lookup(key)


def test_what_a_call_brings_is_in_its_inputs():
    """Nothing compiles; other tests, which are slow, find what the drafts make of it."""
    pool = NGramPool.of(jnp.full((13, 3, 3), 5), 13)
    known = {"pool": pool, "prediction": [[4, 5], [6]], "corpus": [[1, 2, 3]]}
    inputs, _ = jlade.prepare(PARAMS, [[1], [2]], lookahead=TREE, **known)
    np.testing.assert_array_equal(inputs.sources["pool"].rows, np.stack([pool.rows] * 2))
    assert inputs.sources["prediction"].text[:, :3].tolist() == [[4, 5, -1], [6, -1, -1]]
    followers = graded.tokens(inputs.sources["recycled"].after_token[:, 1, 0])
    assert followers.tolist() == [2, 2], "2 follows 1 in the corpus"
    assert [token for token in inputs.shared["corpus"].tokens.tolist() if token >= 0] == [1, 2, 3]


def test_rows_are_the_inputs_of_their_prompts():
    keys, shared = jax.random.split(jax.random.key(5), 3), {"tokenizer": tiny_tokenizer(), "corpus": [[1, 2, 3]]}
    each = {"prompt": [[1], [2, 3], [4]], "prediction": [[4], [5], [6]], "stop": [["ab"], ["c"], ["ab"]]}
    each |= {"max_new_tokens": [7, 8, 9], "min_new_tokens": [0, 1, 2], "eos_ids": [[4], [5], []]}
    each["sampling"] = [SamplingConfig(temperature=t) for t in (0.5, 0.7, 0.9)]

    def inputs_of(order):
        options = {name: [values[i] for i in order] for name, values in each.items()}
        return jlade.prepare(PARAMS, lookahead=TREE, key=keys[jnp.array(order)], **shared, **options)[0]

    pair = inputs_of([0, 1, 2]).rows(np.array([0, 2, 1])), inputs_of([0, 2, 1])
    found, expected = (dataclasses.replace(each, key=jax.random.key_data(each.key)) for each in pair)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_turn_has_the_pool_of_the_one_before():
    first = generate([3, 1, 4])
    text = [3, 1, 4, *first.tokens[0].tolist(), 9]
    inputs, _ = jlade.prepare(PARAMS, text, lookahead=PAPER, state=first.state)
    np.testing.assert_array_equal(inputs.sources["pool"].rows, first.state.sources["pool"].rows)
    assert generate([3, 1, 4], keep_state=False).state is None


@pytest.mark.slow
def test_a_shared_pool_saves_steps_and_changes_no_text(tmp_path):
    prompts = [[3, 1, 4], [3, 1, 4, 1]]
    alone = generate(prompts, with_statistics=True)
    file = tmp_path / "pool.safetensors"
    jlade.save_pool(alone.state.sources["pool"], file)
    assert [path.name for path in tmp_path.iterdir()] == ["pool.safetensors"]
    loaded = jlade.load_pool(file)
    np.testing.assert_array_equal(loaded.ngrams, alone.state.sources["pool"].ngrams)
    of_one_row = NGramPool.of(loaded.ngrams[0], 13)
    for pool in (loaded, of_one_row):
        out = generate(prompts, pool=pool, with_statistics=True)
        assert_same_texts(out, alone)
        assert out.steps.sum() < alone.steps.sum()
        assert (out.statistics.steps_with_draft == out.steps).all()
    pieces = list(jlade.stream(PARAMS, prompts[0], max_new_tokens=15, lookahead=PAPER, pool=of_one_row))
    assert len(pieces) == out.steps[0]
    without_prompt_pool = LookaheadConfig.paper(4, 4, 3, pool_from_prompt=False)
    of_batch = NGramPool.of(loaded.ngrams[:1], 13)
    list(jlade.stream(PARAMS, [1], max_new_tokens=5, lookahead=without_prompt_pool, pool=of_batch))
    assert not loaded.rows.is_deleted(), "the caller's pool is left alone"
    np.testing.assert_array_equal(generate(prompts).steps, alone.steps)


def test_the_cache_is_that_of_the_model():
    """The state's cache after a decode and a continuation is what one pass over the text gives."""
    first = generate([3, 1, 4])
    text = [3, 1, 4, *first.tokens[0].tolist(), 7, 7]
    second = generate(text, state=first.state)
    text += second.tokens[0].tolist()
    anew = generate([*text, 0], max_new_tokens=1)
    length = len(text) - 1
    for got, expected in zip(second.state.cache.keys, anew.state.cache.keys, strict=True):
        np.testing.assert_allclose(got[:, :, :length], expected[:, :, :length], atol=1e-4)


@pytest.mark.slow
def test_what_does_not_fit_is_refused():
    def refused(error, message, **arguments):
        with pytest.raises(error, match=message):
            generate([1, 2], **arguments)

    pool = generate([1]).state.sources["pool"]
    state = generate([1]).state
    refused(TypeError, "state must be the `state` of a Generation made with keep_state=True, got str", state="later")
    refused(
        ValueError,
        "state has 2 sequences; accepted are one for each of 1 prompts, or one for all",
        state=generate([[1], [2]]).state,
    )
    refused(ValueError, "state is of another lookahead setting", state=state, lookahead=LookaheadConfig.paper(4, 4, 2))
    other = jlade.generate(tiny_llama(0, head_dim=8), [1], max_new_tokens=2, lookahead=PAPER, keep_state=True)
    refused(
        ValueError,
        r"state is of another model or kv_dtype: .* float32\[1, 2, 64, 8\], accepted .*6\]",
        state=other.state,
    )
    refused(TypeError, "pool must be an NGramPool, got ndarray", pool=np.zeros(3))
    refused(ValueError, "pool and state cannot both be given", state=state, pool=pool)
    smaller = NGramPool.of(pool.ngrams[0, :, :2], 13)
    refused(ValueError, r"pool must be .* = \[13, 3, 4\] .* got 13 and \[13, 2, 4\]", pool=smaller)
    other = NGramPool.of(pool.ngrams[0], 14)
    refused(ValueError, r"pool must be for a vocabulary of 13 tokens .* got 14 and \[13, 3, 4\]", pool=other)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (None, r"path must be a file written by jlade\.save_pool, got .*nowhere"),
        (b"something else", r"path must be a file written by jlade\.save_pool"),
        (
            {"ngrams": np.zeros((13, 3, 3), np.float32)},
            r"holds no pool: accepted are ngrams int32.*got {'ngrams': 'float32\[13, 3, 3\]'}",
        ),
        ({"ngrams": np.zeros((13, 3, 3), np.int32)}, "holds no pool"),
        ({"ngrams": np.zeros((3, 3), np.int32), "vocab_size": np.int32(13)}, "holds no pool"),
        ({"ngrams": np.zeros((3, 3, 3)), "vocab_size": np.int32(13)}, "holds no pool"),
        (
            {"ngrams": np.full((13, 3, 3), 13, np.int32), "vocab_size": np.int32(13)},
            "holds token ids from 13 to 13; accepted are -1 to 12",
        ),
        (
            {"ngrams": np.full((13, 3, 3), -2, np.int32), "vocab_size": np.int32(13)},
            "holds token ids from -2 to -2; accepted are -1 to 12",
        ),
    ],
)
def test_what_is_not_a_pool_is_not_loaded(tmp_path, arrays, message):
    file = tmp_path / "nowhere"
    if isinstance(arrays, bytes):
        file.write_bytes(arrays)
    elif arrays is not None:
        save_file({name: np.asarray(array) for name, array in arrays.items()}, file)
    with pytest.raises(ValueError, match=message):
        jlade.load_pool(file)


@pytest.mark.slow
def test_a_pool_is_saved_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "pool"
    pool = NGramPool.of(jnp.zeros((13, 3, 3), jnp.int32), 13)
    jlade.save_pool(pool, file)
    before = file.read_bytes()

    write = pathlib.Path.write_bytes

    def fails(path, data):
        write(path, data[: len(data) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", fails)
    with pytest.raises(OSError, match="no space left"):
        jlade.save_pool(NGramPool.of(pool.ngrams + 1, 13), file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["pool"]
