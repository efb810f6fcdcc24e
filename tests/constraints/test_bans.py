"""Banned sequences against the processors of transformers, and in texts against plain constrained decoding."""

import itertools
from typing import Annotated, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jlade
from jlade.constraints.bans import BannedSequences, Every, NoRepeatedNgrams
from jlade.mesh import SHARED
from jlade.testing import check_constraint
from tests.constraints.grammars import COMMON, GRAMMAR, TREE
from tests.tiny import PAPER, tiny_llama

torch = pytest.importorskip("torch")
V = 13
WORDS = [[3], [1, 2], [2, 2, 5], [0, 1, 2, 3]]


def walked(constraint, text, prompt_length):
    """Returns the tokens that may come after each token of a text, from the prompt's end on."""
    tokens = np.zeros(16, np.int32)
    tokens[:prompt_length] = text[:prompt_length]
    state = constraint.start(jnp.asarray(tokens), jnp.int32(prompt_length))
    found = [constraint.allowed(state)]
    for token in text[prompt_length:]:
        state = constraint.advance(state, jnp.int32(token))
        found.append(constraint.allowed(state))
    return np.array(found)


def of_transformers(processor, text, prompt_length):
    ids = [torch.tensor([text[:length]]) for length in range(prompt_length, len(text) + 1)]
    return np.array([(processor(each, torch.zeros(1, V))[0] == 0).numpy() for each in ids])


@settings(max_examples=40)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 12))
def test_repeated_ngrams_are_those_of_transformers(text, size, prompt_length):
    from transformers import NoRepeatNGramLogitsProcessor

    prompt_length = min(prompt_length, len(text))
    expected = of_transformers(NoRepeatNGramLogitsProcessor(size), text, prompt_length)
    np.testing.assert_array_equal(walked(NoRepeatedNgrams(size, V), text, prompt_length), expected)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 12), st.integers(1, 4))
def test_banned_sequences_are_those_of_transformers(text, prompt_length, number):
    from transformers import NoBadWordsLogitsProcessor

    prompt_length = min(prompt_length, len(text))
    expected = of_transformers(NoBadWordsLogitsProcessor(WORDS[:number]), text, prompt_length)
    np.testing.assert_array_equal(walked(BannedSequences.of(WORDS[:number], V), text, prompt_length), expected)


def test_they_are_constraints():
    for each in (NoRepeatedNgrams(2, V), BannedSequences.of(WORDS, V)):
        check_constraint(each, V)
        check_constraint(Every((each, each)), V)


@pytest.mark.parametrize("lookahead", [PAPER, TREE])
def test_texts_are_those_of_plain_decoding(lookahead):
    bans = [NoRepeatedNgrams(3, V), BannedSequences.of([[4, 0], [7]], V)]
    prompts = [[0, 1, 2], [5, 4]]
    common = {name: value for name, value in COMMON.items() if name != "eos_ids"} | {"eos_ids": [], "constraint": bans}
    plain = jlade.generate(tiny_llama(2), prompts, lookahead=None, **common)
    found = jlade.generate(tiny_llama(2), prompts, lookahead=lookahead, **common)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    for prompt, tokens in zip(prompts, found.tokens.tolist(), strict=True):
        whole = [*prompt, *tokens]
        ngrams = [tuple(whole[i : i + 3]) for i in range(len(whole) - 2)]
        assert len(set(ngrams)) == len(ngrams)
        assert 7 not in tokens
        assert (4, 0) not in list(itertools.pairwise(whole))


class Odd(NamedTuple):
    """A constraint that is a tuple: no token below `least` [B]."""

    minimum: jax.Array

    def start(self, tokens, length):
        return self.minimum

    def advance(self, state, token):
        return state

    def allowed(self, state):
        return jnp.arange(V) >= state


@flax.struct.dataclass
class OfTables:
    """A constraint with a tuple of arrays that all sequences share."""

    tables: Annotated[tuple[jax.Array, ...], SHARED]  # each [V] bool

    def start(self, tokens, length):
        return length

    def advance(self, state, token):
        return state + 1

    def allowed(self, state):
        return jnp.where(state % 2 == 0, *self.tables)


@pytest.mark.parametrize("bans", [Odd(jnp.array([4, 9])), OfTables((jnp.arange(V) >= 4, jnp.arange(V) >= 9))])
def test_tuples_may_be_constraints_and_be_shared(bans):
    found = jlade.generate(tiny_llama(2), [[0, 1], [2, 3]], constraint=bans, lookahead=PAPER, max_new_tokens=6)
    minimum = [4, 9] if isinstance(bans, Odd) else [4, 4]
    assert (found.tokens.min(axis=1) >= minimum).all()


def test_rows_keep_what_all_share():
    bans = [NoRepeatedNgrams(3, V), BannedSequences.of(WORDS, V)]
    inputs, _ = jlade.prepare(tiny_llama(2), [[0, 1], [2]], constraint=bans, lookahead=None)
    _, banned = inputs.rows(np.array([1])).constraint.constraints
    np.testing.assert_array_equal(banned.sequences, bans[1].sequences)


def test_a_grammar_and_a_constraint_hold_together():
    both = {"grammar": GRAMMAR, "constraint": BannedSequences.of([[2]], V)}
    plain = jlade.generate(tiny_llama(2), [0, 1], lookahead=None, **COMMON, **both)
    found = jlade.generate(tiny_llama(2), [0, 1], lookahead=TREE, **COMMON, **both)
    assert found.text == plain.text
    assert 2 not in found.tokens[0]


@pytest.mark.parametrize("sequences", [[], [[]], [[13]], [[-1]]])
def test_wrong_sequences_are_refused(sequences):
    with pytest.raises(ValueError, match="sequences must be one or more lists of token ids from 0 to 12"):
        BannedSequences.of(sequences, V)


def test_a_constraint_of_another_vocabulary_is_refused():
    for wrong in (NoRepeatedNgrams(3, V + 1), [BannedSequences.of([[2]], V), NoRepeatedNgrams(2, 5)]):
        with pytest.raises(ValueError, match=r"constraint must allow \[13\] bool, the model's vocabulary, got \[\d+\]"):
            jlade.generate(tiny_llama(2), [[0, 1], [2]], constraint=wrong)


def test_the_names_of_transformers_lead_there():
    for name in ("no_repeat_ngram_size", "bad_words_ids"):
        with pytest.raises(TypeError, match=rf"{name} is not an argument: pass constraint=jlade\."):
            jlade.generate(tiny_llama(), [1], **{name: 2})
