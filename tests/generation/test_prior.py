"""A prior: what a model predicts after pairs of tokens in other texts."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jlade
from jlade import LookaheadConfig, SamplingConfig
from jlade.drafts import graded, recycled
from jlade.drafts.source import RANKS
from jlade.drafts.tree import NONE
from jlade.generation import prior as prior_lib
from tests import plain_llama
from tests.texts import assert_same_texts
from tests.tiny import tiny_llama, tiny_tokenizer

PARAMS = tiny_llama(2, max_positions=128)
TREE = LookaheadConfig.tree(7)
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 1, 4]]

generate = functools.partial(jlade.generate, PARAMS, max_new_tokens=30, lookahead=TREE)


@functools.cache
def wrong():
    """A prior of random tokens."""
    prior, rng = jlade.prior(PARAMS, TEXTS), np.random.default_rng(0)
    most = {"pairs": 13, "after_pair": 13 * graded.LEVELS, "after_token": 13 * graded.LEVELS}
    arrays = {name: rng.integers(NONE, end, getattr(prior.table, name).shape, np.int32) for name, end in most.items()}
    return dataclasses.replace(prior, table=recycled.PriorTable(**arrays))


def test_it_has_the_mean_probabilities_of_the_model():
    seen = collections.defaultdict(list)
    for text in TEXTS:
        logits = plain_llama.logits(PARAMS, text)
        for end, row in enumerate(np.asarray(jax.nn.softmax(logits, axis=-1)), start=1):
            kept = np.where(np.argsort(np.argsort(-row)) < RANKS, row, 0)  # those that the model's best ones are
            for key in {tuple(text[end - 1 : end]), tuple(text[max(0, end - 2) : end])}:
                seen[key].append(kept)
    prior = jlade.prior(PARAMS, TEXTS)
    found = {(token,): row for token, row in enumerate(prior.table.after_token.tolist()) if row[0] != NONE}
    pairs = zip(prior.table.pairs.tolist(), prior.table.after_pair.tolist(), strict=True)
    found |= {tuple(pair): row for pair, row in pairs if pair[1] != NONE}
    assert found.keys() == seen.keys()
    for key, rows in seen.items():
        mean = np.mean(rows, axis=0)
        best = np.argsort(-mean)[:RANKS]
        assert found[key] == graded.of(best.astype(np.int32), mean[best]).tolist()
    assert f"{prior}".startswith("Prior of 7 pairs of tokens, ")


@given(st.lists(st.integers(0, 40), min_size=2, max_size=60))
def test_a_pair_is_at_its_place_unless_a_more_frequent_one_is(text):
    pairs = np.array(list(zip([NONE, *text[:-1]], text, strict=True)), np.int32)
    best, counts = pairs[:, 1:], collections.Counter(map(tuple, pairs[1:].tolist()))
    table = prior_lib.table_of(pairs, best, np.ones(best.shape, np.float32), 41)
    for pair, count in counts.items():
        (at,) = recycled.place_in_prior(np.array([pair], np.int32), len(table.pairs))
        kept = tuple(table.pairs[at].tolist())
        assert kept == pair or counts[kept] >= count
        assert table.after_pair[at].tolist() == [graded.of(kept[1], 1.0)] + [NONE] * (RANKS - 1)


def test_the_places_are_the_same_on_the_device():
    pairs = np.random.default_rng(0).integers(0, 2**31, (1000, 2), np.int64).astype(np.int32)
    places = recycled.place_in_prior(pairs, 2**12)
    np.testing.assert_array_equal(jax.jit(lambda pairs: recycled.place_in_prior(pairs, 2**12))(pairs), places)
    assert len(np.unique(places)) > 800, "they are spread"


def test_long_texts_are_read_in_windows():
    text = [*range(13)] * 12
    windows = prior_lib._windows(np.array([NONE, *text, NONE, 7, NONE]), 64)
    assert [len(window) for window in windows] == [64, 64, 28, 1]
    pairs = np.concatenate(windows).tolist()
    assert pairs == [[before, token] for before, token in zip([NONE, *text[:-1]], text, strict=True)] + [[NONE, 7]]


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=1.0)], ids=["greedy", "sampled"])
def test_no_text_depends_on_it(sampling):
    prompts = [[3, 1, 4], [1], [5, 9, 2]]
    plain = generate(prompts, sampling=sampling, lookahead=None)
    steps = []
    for prior in (wrong(), jlade.prior(PARAMS, [row.tolist() for row in plain.tokens])):
        out = generate(prompts, sampling=sampling, prior=prior)
        assert_same_texts(out, plain)
        steps.append(out.steps.tolist())
    assert steps[0] != steps[1], "the drafts depend on it"


@pytest.mark.slow
def test_requests_of_an_engine_share_it():
    prompts = [[3, 1, 4], [1], [5, 9, 2]]
    prior = jlade.prior(PARAMS, [row.tolist() for row in generate(prompts).tokens])
    alone = [generate(prompt, prior=prior) for prompt in prompts]
    with jlade.Engine(PARAMS, max_sequences=2, capacity=64, lookahead=TREE, prior=prior) as engine:
        for out, expected in zip(engine.generate(prompts, max_new_tokens=30), alone, strict=True):
            assert_same_texts(out, expected)
            assert out.steps[0] == expected.steps[0]


def test_a_file_holds_all_of_it(tmp_path):
    prior = jlade.prior(PARAMS, TEXTS, tiny_tokenizer())
    jlade.save_prior(prior, tmp_path / "prior")
    loaded = jlade.load_prior(tmp_path / "prior")
    jax.tree.map(np.testing.assert_array_equal, loaded.table, prior.table)
    assert loaded.vocabulary == prior.vocabulary == prior_lib.fingerprint(tiny_tokenizer(), 13) != ""
    out = generate("ab", tokenizer=tiny_tokenizer(), prior=loaded)
    assert_same_texts(out, generate("ab", tokenizer=tiny_tokenizer(), lookahead=None))
    with pytest.raises(TypeError, match="prior must be a Prior, got dict"):
        jlade.save_prior({}, tmp_path / "prior")


def test_files_that_hold_none_are_refused(tmp_path):
    (tmp_path / "text").write_text("no prior")
    state = generate([1], lookahead=LookaheadConfig.paper(4, 4, 3), keep_state=True).state
    jlade.save_pool(state.sources["pool"], tmp_path / "pool")
    prior = wrong()
    table = dataclasses.replace(prior.table, pairs=prior.table.pairs[:-1])
    jlade.save_prior(dataclasses.replace(prior, table=table), tmp_path / "cut")
    for name in ("text", "pool", "cut", "missing"):
        with pytest.raises(ValueError, match=f"path must be a file written by jlade.save_prior, got '.*{name}'"):
            jlade.load_prior(tmp_path / name)


def test_a_file_of_other_grades_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(graded, "SCALE", "2 levels")
        jlade.save_prior(wrong(), tmp_path / "other")
    with pytest.raises(ValueError, match=r"written by jlade.save_prior, got .*other.*has grades by 2 levels"):
        jlade.load_prior(tmp_path / "other")


def test_another_vocabulary_is_refused(tmp_path):
    path = tmp_path / "of_another"
    for other in (jlade.Prior(wrong().table, "0123456789abcdef"), jlade.prior(tiny_llama(vocab_size=14), TEXTS)):
        jlade.save_prior(other, path)
        with pytest.raises(ValueError, match=r"prior .*of_another is of another vocabulary, of 1[34] tokens"):
            generate("ab", tokenizer=tiny_tokenizer(), prior=jlade.load_prior(path))


def test_wrong_arguments_are_refused():
    unknown = dataclasses.replace(wrong().table, after_token=np.full((13, RANKS), 13 * graded.LEVELS, np.int32))
    for arguments, error in (
        ({"prior": wrong().table}, "prior must be a jlade.Prior, as jlade.prior makes it, got PriorTable"),
        ({"prior": jlade.Prior(unknown)}, "prior holds token id 13; accepted are 0 to 12"),
        ({"prior": wrong(), "lookahead": None}, "prior needs a lookahead with 'recycled' among its sources"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            generate([1], **arguments)
    with pytest.raises(ValueError, match=r"texts\[0\]"):
        jlade.prior(PARAMS, [[13]])
    for texts in ([], [[1], [2]]):
        with pytest.raises(ValueError, match="texts must hold a text of two tokens or more"):
            jlade.prior(PARAMS, texts)
    with pytest.raises(TypeError, match="params must be those of one of jlade's models, got dict"):
        jlade.prior({}, TEXTS)
