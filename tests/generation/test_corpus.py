"""Earlier texts as a source of drafts."""

import collections
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jlade
from jlade import LookaheadConfig
from jlade.choosing import choice
from jlade.drafts import recycled as recycling
from jlade.drafts.tree import NONE
from jlade.generation import corpus as corpus_lib
from tests.tiny import tiny_llama, tiny_tokenizer

PARAMS = tiny_llama(2, max_positions=128)
TREE = LookaheadConfig.tree(12)
generate = functools.partial(jlade.generate, PARAMS, max_new_tokens=30, lookahead=TREE)


def text_of(prompt, out):
    return [*prompt, *out.tokens[0, : out.lengths[0]].tolist()]


def test_the_text_is_the_same_in_fewer_steps():
    cold = generate([3, 1, 4], keep_state=True, with_statistics=True)
    for corpus in ([text_of([3, 1, 4], cold)], [cold.state], [[7, 7], cold.state, [5]]):
        warm = generate([3, 1, 4], corpus=corpus, with_statistics=True)
        np.testing.assert_array_equal(warm.tokens, cold.tokens)
        assert warm.steps[0] < cold.steps[0]
        assert warm.statistics.contributed["corpus"][0] > cold.statistics.contributed["corpus"][0] == 0


def test_each_sequence_of_a_batch_gets_what_it_gets_alone():
    prompts, corpus = [[3, 1, 4], [1], [5, 9, 2]], [[3, 1, 4, 1, 5, 9, 2, 6], [1, 5, 9, 2, 6]]
    together = generate(prompts, corpus=corpus)
    for row, prompt in enumerate(prompts):
        alone = generate(prompt, corpus=corpus)
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[0])
        assert together.steps[row] == alone.steps[0]


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=40), max_size=4))
def test_recycled_logits_begin_with_the_most_frequent_next_tokens(texts):
    counts = collections.defaultdict(collections.Counter)
    for text in texts:
        for token, after in itertools.pairwise(text):
            counts[token][after] += 1
    tokens = corpus_lib.read(texts, None, 13)
    (table,) = np.asarray(corpus_lib.recycled(texts, tokens, 1, 13).after_token)
    for token in range(13):
        found = [after for after in table[token].tolist() if after != NONE]
        expected = sorted(counts[token].values(), reverse=True)[: recycling.RANKS]
        assert [counts[token][after] for after in found] == expected
        assert len(set(found)) == len(found)


def test_the_states_of_a_corpus_bring_their_recycled_logits():
    states = [generate(prompt, keep_state=True).state for prompt in ([3, 1, 4], [1, 5])]
    inputs, _ = jlade.prepare(PARAMS, [[3], [4]], lookahead=TREE, corpus=states)
    for first_column, name in (("after_token", "after_token"), ("pairs", "pairs"), ("pairs", "after_pair")):
        keys = [np.asarray(getattr(state.memory.drafts.states["recycled"], first_column))[0, :, :1] for state in states]
        first, second = (np.asarray(getattr(state.memory.drafts.states["recycled"], name))[0] for state in states)
        expected, known = np.where(keys[1] == NONE, first, second), (np.concatenate(keys, axis=1) != NONE).any(axis=1)
        assert known.any()
        for row in np.asarray(getattr(inputs.sources["recycled"], name)):
            np.testing.assert_array_equal(row[known], expected[known])


def test_a_larger_corpus_of_the_same_power_of_two_compiles_nothing():
    prepare = functools.partial(jlade.prepare, PARAMS, [1], lookahead=TREE)
    sizes = [prepare(corpus=[[1] * size])[0].corpus.shape for size in (1, 1023, 1024)]
    assert sizes == [(1024,), (1024,), (2048,)]
    assert prepare(corpus=[])[0].corpus.shape == (1024,)
    text = prepare(corpus=["ab", [1]], tokenizer=tiny_tokenizer())[0].corpus
    assert text[-1] == text[-3] == NONE != text[-4]


def test_a_setting_that_was_chosen_without_a_tree_ignores_it(monkeypatch):
    monkeypatch.setattr(choice, "choose", lambda *_: LookaheadConfig.paper(0, 4, 1))
    assert jlade.prepare(PARAMS, [1], corpus=[[1, 2]])[0].corpus is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"corpus": "text"}, TypeError, "corpus must be a list of texts, .* got str"),
        ({"corpus": np.array([1, 2])}, TypeError, "corpus must be a list of texts, .* got ndarray"),
        ({"corpus": [[1], [99]]}, ValueError, r"corpus\[1\] holds token id 99; accepted are 0 to 12"),
        ({"corpus": ["text"]}, TypeError, r"corpus\[0\] is a string, 'text': pass tokenizer="),
        ({"corpus": [[1]], "lookahead": None}, ValueError, "corpus needs a lookahead with 'suffix' among its sour"),
        ({"corpus": [[1]], "lookahead": LookaheadConfig.paper(2, 3, 2)}, ValueError, "corpus needs a lookahead with"),
    ],
)
def test_what_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        generate([1], **options)
