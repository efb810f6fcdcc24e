"""Earlier texts as a source of drafts."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jlade
from jlade import LookaheadConfig
from jlade.costs import choice
from jlade.drafts import graded, suffix
from jlade.drafts import recycled as recycling
from jlade.drafts.tree import NONE
from jlade.generation import corpus as corpus_lib
from tests.texts import assert_same_texts, text_of
from tests.tiny import tiny_llama, tiny_tokenizer

PARAMS = tiny_llama(2, max_positions=128)
TREE = LookaheadConfig.tree(7)
LAST = jax.jit(suffix.last)
SEARCH = jax.jit(functools.partial(suffix.find, number=suffix.MATCHES))


@jax.jit
def find(index, last):
    places = suffix.candidates(index, last)
    return suffix.best(places, suffix.before(index.tokens, places, last), len(index.tokens), suffix.MATCHES)


generate = functools.partial(jlade.generate, PARAMS, max_new_tokens=30, lookahead=TREE)


@pytest.mark.slow
def test_the_text_is_the_same_in_fewer_steps():
    cold = generate([3, 1, 4], keep_state=True, with_statistics=True)
    for corpus in ([[3, 1, 4, *text_of(cold)]], [cold.state], [[7, 7], cold.state, [5]]):
        warm = generate([3, 1, 4], corpus=corpus, with_statistics=True)
        assert_same_texts(warm, cold)
        assert warm.steps[0] < cold.steps[0]
        assert warm.statistics.contributed["corpus"][0] > cold.statistics.contributed["corpus"][0] == 0


@pytest.mark.slow
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
    (table,) = np.asarray(corpus_lib.recycled(texts, jlade.Corpus(texts), 1, 13).after_token)
    for token, row in enumerate(graded.tokens(table)):
        assert row[: recycling.RANKS].tolist() == row[recycling.RANKS :].tolist()
        found = [after for after in row[: recycling.RANKS].tolist() if after != NONE]
        expected = sorted(counts[token].values(), reverse=True)[: recycling.RANKS]
        assert [counts[token][after] for after in found] == expected
        assert len(set(found)) == len(found)


@pytest.mark.slow
def test_the_states_of_a_corpus_bring_their_recycled_logits():
    states = [generate(prompt, keep_state=True).state for prompt in ([3, 1, 4], [1, 5])]
    inputs, _ = jlade.prepare(PARAMS, [[3], [4]], lookahead=TREE, corpus=states)
    for first_column, name in (("after_token", "after_token"), ("pairs", "pairs"), ("pairs", "after_pair")):
        keys = [np.asarray(getattr(state.sources["recycled"], first_column))[0, :, :1] for state in states]
        first, second = (np.asarray(getattr(state.sources["recycled"], name))[0] for state in states)
        expected, known = np.where(keys[1] == NONE, first, second), (np.concatenate(keys, axis=1) != NONE).any(axis=1)
        assert known.any()
        for row in np.asarray(getattr(inputs.sources["recycled"], name)):
            np.testing.assert_array_equal(row[known], expected[known])


def test_a_larger_corpus_of_the_same_power_of_two_compiles_nothing():
    prepare = functools.partial(jlade.prepare, PARAMS, [1], lookahead=TREE)
    sizes = [prepare(corpus=[[1] * size])[0].shared["corpus"].tokens.shape for size in (1, 1023, 1024)]
    assert sizes == [(1024,), (1024,), (2048,)]
    assert prepare(corpus=[])[0].shared["corpus"].tokens.shape == (1024,)
    text = prepare(corpus=["ab", [1]], tokenizer=tiny_tokenizer())[0].shared["corpus"].tokens
    assert text[-1] == text[-3] == NONE != text[-4]


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 5, 300]), st.lists(st.integers(1, 2500), max_size=6))
def test_matches_are_those_of_a_search_through_all_texts(seed, vocab_size, lengths):
    """Few tokens give long runs of equal places, many give few matches; both spread over blocks of the index."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, vocab_size, length) for length in lengths]
    for text in texts:  # repeated passages
        begin = rng.integers(0, len(text))
        text[begin : begin + 40] = text[: len(text[begin : begin + 40])].copy()
    index = jlade.Corpus(texts).on_device
    ends = [text[: rng.integers(1, len(text) + 1)] for text in texts] + [rng.integers(0, vocab_size, 12)]
    for end in ends * 2:
        padded = jnp.asarray(np.pad(end, (0, 2500 - len(end) + 100)), jnp.int32)
        last = LAST(padded, len(end))
        (places, matched), expected = find(index, last), SEARCH(index.tokens, len(index.tokens), last)
        np.testing.assert_array_equal(matched, expected[1])
        np.testing.assert_array_equal(np.where(matched > 0, places, 0), np.where(matched > 0, expected[0], 0))


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 5, 300]), st.integers(1, 900), st.integers(0, 60))
def test_a_long_text_is_searched_in_its_prompt_and_its_end(seed, vocab_size, prompt_length, num_new):
    rng = np.random.default_rng(seed)
    text = rng.integers(0, vocab_size, prompt_length + num_new)
    begin = rng.integers(0, prompt_length)
    text[begin:] = np.resize(text, len(text) - begin) if rng.integers(2) else text[begin:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "RECENT", 64)
        patch.setattr(corpus_lib, "LONG", 512)
        (index,) = (corpus_lib.of_prompts([text[:prompt_length]], 1024, TREE)["suffix"],)
        padded = jnp.asarray(np.pad(text, (0, 1024 - len(text)), constant_values=7), jnp.int32)
        index = jax.tree.map(lambda array: jnp.asarray(array[0]), index)
        last = LAST(padded, len(text))
        places, matched = suffix.find_long(index, padded, jnp.int32(len(text)), last, suffix.MATCHES)
    expected = SEARCH(padded, len(text), last)
    np.testing.assert_array_equal(matched, expected[1])
    np.testing.assert_array_equal(np.where(matched > 0, places, 0), np.where(matched > 0, expected[0], 0))


@pytest.mark.slow
def test_an_index_of_the_prompts_changes_no_step(monkeypatch):
    generate = functools.partial(jlade.generate, tiny_llama(2, max_positions=1024), max_new_tokens=40, lookahead=TREE)
    prompts = [[3, 1, 4, 1, 5] * 9, [9, 2]]
    expected, first = generate(prompts), generate(prompts[0])
    turn = [*prompts[0], *text_of(first), 4, 1]
    later = generate(turn)
    monkeypatch.setattr(corpus_lib, "LONG", 1024)
    monkeypatch.setattr(suffix, "RECENT", 64)
    indexed = generate(prompts)
    assert_same_texts(indexed, expected)
    np.testing.assert_array_equal(indexed.accepted, expected.accepted)
    state = generate(prompts[0], keep_state=True).state
    assert state.sources["suffix"] is not None
    assert_same_texts(generate(turn, state=state), later)
    *_, last = jlade.stream(tiny_llama(2, max_positions=1024), prompts[0], max_new_tokens=40, lookahead=TREE)
    np.testing.assert_array_equal(last.generation.accepted, first.accepted)


def test_the_source_of_a_corpus_needs_one():
    lookahead = jlade.LookaheadConfig.tree(9, sources=("suffix", "corpus"))
    with pytest.raises(ValueError, match=r"lookahead has 'corpus' among its sources, .*, and corpus is None"):
        jlade.prepare(PARAMS, [1], lookahead=lookahead)
    _, config = jlade.prepare(PARAMS, [1], lookahead=lookahead, corpus=[[1, 2]])
    assert config.lookahead.sources == lookahead.sources
    _, config = jlade.prepare(PARAMS, [1], lookahead=TREE, corpus=[[1, 2]])
    assert "corpus" in config.lookahead.sources


@pytest.mark.slow
def test_a_corpus_serves_as_the_list_of_its_texts_does():
    texts = [[3, 1, 4, 1, 5, 9, 2, 6], [1, 5, 9, 2, 6]]
    of_list, indexed = (generate([3, 1, 4], corpus=each) for each in (texts, jlade.Corpus(texts)))
    assert_same_texts(of_list, indexed)
    np.testing.assert_array_equal(of_list.accepted, indexed.accepted)
    assert repr(jlade.Corpus(texts)) == "Corpus of 2 texts, 13 tokens"
    assert repr(jlade.Corpus([])) == "Corpus of 0 texts, 0 tokens"
    with pytest.raises(ValueError, match="corpus holds token id 99; accepted are 0 to 12"):
        generate([1], corpus=jlade.Corpus([[1, 99]]))
    with pytest.raises(ValueError, match=r"texts\[0\] is empty"):
        jlade.Corpus([[]])


@pytest.mark.slow
def test_a_saved_corpus_is_read_from_the_file_where_it_is_needed(tmp_path):
    corpus = jlade.Corpus([[3, 1, 4, 1, 5, 9, 2, 6], [1, 5, 9, 2, 6]])
    jlade.save_corpus(corpus, tmp_path / "corpus")
    loaded = jlade.load_corpus(tmp_path / "corpus")
    assert all(isinstance(array, np.memmap) for array in jax.tree.leaves(loaded.index))
    for array, expected in zip(jax.tree.leaves(loaded.index), jax.tree.leaves(corpus.index), strict=True):
        np.testing.assert_array_equal(array, expected)
    np.testing.assert_array_equal(
        generate([3, 1, 4], corpus=loaded).accepted, generate([3, 1, 4], corpus=corpus).accepted
    )
    with pytest.raises(ValueError, match="path must not exist yet"):
        jlade.save_corpus(corpus, tmp_path / "corpus")
    for name in ("tokens", "after"):
        (tmp_path / "corpus" / f"{name}.npy").write_bytes(b"")
        with pytest.raises(ValueError, match=r"path must be a directory written by jlade\.save_corpus, got"):
            jlade.load_corpus(tmp_path / "corpus")
    with pytest.raises(ValueError, match=r"path must be a directory written by jlade\.save_corpus, got"):
        jlade.load_corpus(tmp_path)
    with pytest.raises(TypeError, match="corpus must be a Corpus, got list"):
        jlade.save_corpus([], tmp_path / "other")


def test_a_setting_that_was_chosen_without_a_tree_ignores_it(monkeypatch):
    monkeypatch.setattr(choice, "choose", lambda *_: LookaheadConfig.paper(0, 4, 1))
    assert jlade.prepare(PARAMS, [1], corpus=[[1, 2]])[0].shared == {}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"corpus": "text"}, TypeError, "corpus must be a list of texts, .* got str"),
        ({"corpus": np.array([1, 2])}, TypeError, "corpus must be a list of texts, .* got ndarray"),
        ({"corpus": [[1], [99]]}, ValueError, r"corpus\[1\] holds token id 99; accepted are 0 to 12"),
        ({"corpus": ["text"]}, TypeError, r"corpus\[0\] is a string, 'text': pass tokenizer="),
        ({"corpus": ["\ud800"], "tokenizer": tiny_tokenizer()}, ValueError, r"corpus\[0\] must be text that UTF-8 can"),
        (
            {"corpus": [[1]], "lookahead": None},
            ValueError,
            "corpus needs a lookahead with 'suffix' .* got lookahead=None",
        ),
        ({"corpus": [[1]], "lookahead": LookaheadConfig.paper(2, 3, 2)}, ValueError, "corpus needs a lookahead with"),
    ],
)
def test_what_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        generate([1], **options)
