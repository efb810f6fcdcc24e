"""Predictions of answers: texts that these are expected to resemble."""

import functools

import jax
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig, SamplingConfig
from jlade.drafts import prediction
from jlade.drafts.prediction import SECOND, Reading
from jlade.generation import earlier
from tests.texts import text_of
from tests.tiny import tiny_llama, tiny_tokenizer

PARAMS = tiny_llama()
find = jax.jit(prediction.find)
TREE = LookaheadConfig.tree(30)


def generate(prompt, **options):
    return jlade.generate(PARAMS, prompt, **{"max_new_tokens": 40, "lookahead": TREE} | options)


@pytest.mark.slow
def test_a_right_prediction_is_accepted_a_tree_at_a_time():
    plain = generate([3, 1, 4], lookahead=None)
    out = generate([3, 1, 4], prediction=text_of(plain), with_statistics=True)
    assert text_of(out) == text_of(plain)
    assert out.accepted[0, :2].tolist() == [29, 11], "two runners-up have places too"
    assert out.statistics.contributed["prediction"].tolist() == [38]


def test_an_answer_that_differs_here_and_there_keeps_its_place():
    tokens = np.random.default_rng(0).integers(0, 13, 200).tolist()
    text = np.array([*tokens, -1, -1], np.int32)
    for last, anchor, place in (
        (tokens[:50], 50, 50),  # it agrees
        ([*tokens[:50], 99, 99], 50, 50),  # it has new tokens: the prediction goes on at the anchor
        ([*tokens[:50], *tokens[60:68]], 50, 68),  # it left some out
    ):
        places, matched = find(text, np.int32(anchor), np.array(last[::-1][:8], np.int32))
        assert places[0] == place
        assert matched[0] >= 1


def test_nothing_is_read_after_the_end_of_a_prediction():
    places, matched = find(np.array([5, 6, -1, -1], np.int32), np.int32(2), np.array([6, 5, -1], np.int32))
    assert matched.tolist() == [0, 0]
    places, matched = find(np.array([-1], np.int32), np.int32(0), np.array([6, 5, -1], np.int32))
    assert (places.tolist(), matched.tolist()) == ([0, 0], [0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_sampled_texts_are_exact(verification):
    """Coupled ones are those of plain sampling; by rejection a prediction makes no difference to what is possible."""
    sampling, key = SamplingConfig(temperature=0.8, top_k=3), jax.random.key(5)
    plain = generate([3, 1, 4], lookahead=None, sampling=sampling, key=key)
    lookahead = LookaheadConfig.tree(30, verification=verification)
    out = generate([3, 1, 4], lookahead=lookahead, sampling=sampling, key=key, prediction=text_of(plain))
    if verification == "coupled":
        assert text_of(out) == text_of(plain)
        assert out.steps[0] <= 3
    else:
        assert out.steps[0] < 40


@pytest.mark.slow
def test_each_sequence_of_a_batch_has_its_own():
    prompts = [[3, 1, 4], [1], [5, 9, 2]]
    plain = generate(prompts, lookahead=None)
    predicted = [text_of(plain, 0), [7], text_of(plain, 2)[5:]]
    together = generate(prompts, prediction=predicted)
    for row, (prompt, one) in enumerate(zip(prompts, predicted, strict=True)):
        alone = generate(prompt, prediction=one)
        assert text_of(together, row) == text_of(alone) == text_of(plain, row)
        assert together.steps[row] == alone.steps[0]


@pytest.mark.slow
def test_the_next_turn_has_another_one_or_none():
    generate = functools.partial(jlade.generate, PARAMS, max_new_tokens=20)
    first = generate([3, 1, 4], lookahead=TREE, prediction=[1, 2, 3], keep_state=True)
    prompt = [3, 1, 4, *text_of(first), 5]
    plain = generate(prompt, lookahead=None)
    without = generate(prompt, lookahead=TREE, state=first.state)
    turn = generate(prompt, lookahead=TREE, state=first.state, prediction=text_of(plain))
    assert text_of(without) == text_of(turn) == text_of(plain)
    assert turn.steps[0] <= 2 < without.steps[0]


def test_texts_are_read_without_the_beginning_of_a_prompt():
    tokenizer = tiny_tokenizer()
    reading = earlier.read_prediction("ab", tokenizer, 1, 13)
    assert reading.text.shape == (1, 1024)
    begin, ids = tokenizer.encode("").ids, tokenizer.encode("ab").ids
    assert reading.text[0, : len(ids) - len(begin)].tolist() == ids[len(begin) :]
    assert (reading.text[0, len(ids) :] == -1).all()


def test_auto_ignores_it_where_its_setting_has_no_tree(monkeypatch):
    monkeypatch.setattr("jlade.costs.choice.choose", lambda *arguments: LookaheadConfig.paper(0, 4, 1))
    inputs, config = jlade.prepare(PARAMS, [1], prediction=[1, 2])
    assert "prediction" not in inputs.sources
    assert config.lookahead == LookaheadConfig.paper(0, 4, 1)


@pytest.mark.slow
def test_the_source_without_a_prediction_drafts_nothing():
    lookahead = LookaheadConfig.tree(9, sources=("prediction", "suffix"))
    assert text_of(generate([3, 1], lookahead=lookahead)) == text_of(generate([3, 1], lookahead=None))
    assert Reading.begin(np.zeros((2, 5), np.int32)).places.shape == (2, 2)
    assert lookahead.reach["prediction"] > SECOND


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prediction": 3}, TypeError, "prediction must be a string or token ids, in a list of one for each of 1"),
        ({"prediction": "text"}, TypeError, "prediction is a string, 'text': pass tokenizer="),
        ({"prediction": [99]}, ValueError, "prediction holds token id 99; accepted are 0 to 12"),
        ({"prediction": []}, ValueError, "prediction is empty"),
        ({"prediction": [[1], [2]]}, ValueError, "prediction must hold a text for each of 1 prompts, got 2"),
        ({"prediction": [[99]]}, ValueError, r"prediction\[0\] holds token id 99"),
        ({"prediction": np.array(3)}, TypeError, "prediction must be a string or token ids, in a list of one for each"),
        ({"prediction": "\ud800", "tokenizer": tiny_tokenizer()}, ValueError, "prediction must be text that UTF-8 can"),
        ({"prediction": [1], "lookahead": None}, ValueError, "prediction needs .* got lookahead=None"),
        ({"prediction": [1], "lookahead": LookaheadConfig.paper(2, 3, 2)}, ValueError, "prediction needs a lookahead"),
    ],
)
def test_bad_input_is_named(options, error, message):
    with pytest.raises(error, match=message):
        generate([1], **options)
