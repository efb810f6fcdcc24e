"""Drafts of an engine's requests from other texts, and requests without drafts: they change steps, and no text."""

import random

import jax
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig, SamplingConfig
from jlade.config import PLAIN
from jlade.costs import choice
from tests.compilations import recorded
from tests.texts import assert_same_texts, text_of
from tests.tiny import PAPER, tiny_llama, tiny_tokenizer

PARAMS, TOKENIZER = tiny_llama(3), tiny_tokenizer()
LOOKAHEAD = LookaheadConfig.tree(7, sources=("suffix",))  # which compiles soon
LONG = {"max_new_tokens": 40, "eos_ids": ()}


def engine(**changes):
    options = {"max_sequences": 2, "max_grammar": 0, "lookahead": LOOKAHEAD, "remember": 10**6}
    return jlade.Engine(PARAMS, TOKENIZER, **options | changes)


def alone(prompt, **options):
    return jlade.generate(PARAMS, prompt, tokenizer=TOKENIZER, lookahead=None, **LONG | options)


@pytest.fixture(scope="module")
def expected():
    return [alone([number]) for number in range(6)]


@pytest.fixture(scope="module")
def shared(expected):
    """An engine whose corpus has the text of prompt 5, after other texts."""
    chance = np.random.default_rng(0)
    others = [chance.integers(0, 13, 200).tolist() for _ in range(3)]
    with engine(corpus=[*others, [5, *text_of(expected[5])]]) as running:
        yield running


def contributed(result, source):
    return int(result.statistics.contributed[source][0])


def test_nothing_compiles_for_any_of_it(expected):
    corpus = [[5, *text_of(expected[5])]]
    with recorded() as compilations, engine(corpus=corpus, max_sequences=1) as running:
        running.warm_up()
        compilations.clear()
        chance = random.Random(0)
        for _ in range(2):
            requests = [
                running.submit(
                    [number],
                    remember_key=chance.choice([None, "a", "b"]),
                    remember=chance.random() < 0.8,
                    lookahead=chance.random() < 0.8,
                    **LONG,
                )
                for number in range(6)
            ]
            for request, each in zip(requests, expected, strict=True):
                assert_same_texts(request.result(timeout=300), each)
        assert compilations == []


def test_a_corpus_serves_all_requests(shared, expected):
    first, other = [shared.submit([number], with_statistics=True, **LONG).result(timeout=300) for number in (5, 0)]
    assert_same_texts(first, expected[5])
    assert_same_texts(other, expected[0])
    assert contributed(first, "corpus") >= 25
    assert first.steps[0] <= 10


def test_answers_are_drafts_for_later_requests_with_the_key_alone(shared, expected):
    def ask(**options):
        result = shared.submit([1], with_statistics=True, **LONG | options).result(timeout=300)
        assert_same_texts(result, expected[1])
        return contributed(result, "prediction")

    number = len(shared.remembered)
    assert ask(remember_key="tenant", remember=False) == 0
    assert len(shared.remembered) == number, "it asked not to be kept"
    assert ask(remember_key="tenant") == 0
    assert ask() == ask(remember_key="other") == 0, "no drafts without the key, or with another one"
    assert ask(remember_key="tenant") >= 30
    assert len(shared.remembered) == number + 2
    assert ask(remember_key="tenant", lookahead=False) == 0


def test_sampled_texts_and_lists_are_those_without_drafts(shared):
    options = {"sampling": SamplingConfig(temperature=0.8, top_k=5), "key": jax.random.key(4)} | LONG
    prompts = [[number, 3] for number in range(3)]
    expected = [alone(prompt, **options) for prompt in prompts[:1]]
    for _ in range(2):
        results = shared.generate(prompts, remember_key="list", **options)
        assert_same_texts(results[0], expected[0])
    assert [len(text.tokens) for text in shared.remembered.texts() if text.key == "list"] == [42] * 3


def test_a_prediction_takes_the_place_of_answers(shared, expected):
    absent = next(token for token in range(13) if token not in text_of(expected[2]))
    with engine(max_prediction=64) as running:
        options = {"remember_key": "tenant", "with_statistics": True} | LONG
        running.submit([2], **options).result(timeout=300)
        wrong = running.submit([2], prediction=[absent] * 64, **options).result(timeout=300)
        with pytest.raises(ValueError, match="prediction must be of at most max_prediction=64 tokens, got 65"):
            running.submit([2], prediction=[absent] * 65, **options)
    assert_same_texts(wrong, expected[2])
    assert contributed(wrong, "prediction") == 0


def test_a_cancelled_request_is_not_kept(shared):
    number = len(shared.remembered)
    request = shared.submit([4], remember_key="tenant", **LONG)
    request.cancel()
    shared.submit([4], **LONG).result(timeout=300)
    assert len(shared.remembered) == number


def test_auto_remembers_nothing_where_its_setting_has_no_tree(monkeypatch, expected):
    monkeypatch.setattr(choice, "choose", lambda *_: PLAIN)
    with engine(lookahead="auto", corpus=[[1, 2]]) as running:
        assert_same_texts(running.submit([1], remember_key="a", **LONG).result(timeout=300), expected[1])
        assert len(running.remembered) == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"remember_key": 3}, TypeError, "remember_key must be a string, or None .* got 3"),
        ({"remember": 1}, TypeError, "remember must be True or False, got 1"),
        ({"prefix_key": None}, TypeError, "prefix_key must be a string, got None"),
        ({"lookahead": None}, TypeError, "lookahead of a request must be True or False, got None"),
        ({"corpus": ["ab"]}, TypeError, "corpus is not an option of a request"),
        ({"prediction": [1]}, ValueError, "prediction needs an engine that was made with max_prediction"),
    ],
)
def test_a_wrong_request_is_refused_at_once(shared, options, error, message):
    with pytest.raises(error, match=message):
        shared.submit([1], **options)
    with pytest.raises(error, match=message):
        shared.generate([[1]], **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"remember": -1}, ValueError, "remember must be at least 0, got -1"),
        ({"remember": "1G"}, TypeError, "remember must be an integer"),
        ({"lookahead": None}, ValueError, "remember needs a lookahead with a tree, .* got lookahead=None"),
        ({"lookahead": PAPER}, ValueError, "remember needs a lookahead with a tree"),
        ({"lookahead": PAPER, "remember": 0, "corpus": ["ab"]}, ValueError, "corpus needs a lookahead with 'suffix'"),
        ({"corpus": "ab"}, TypeError, "corpus must be a list of texts"),
        ({"corpus": [[99]]}, ValueError, r"corpus\[0\] holds token id 99; accepted are 0 to 12"),
    ],
)
def test_a_wrong_engine_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        engine(**options)
