"""Texts of random grammars: equal to plain constrained decoding, in the language, and with its exact distribution."""

import collections
import dataclasses
import json
import re

import jax
import jsonschema
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

import jlade
from jlade import Grammar, LookaheadConfig, NGramConfig, SamplingConfig
from tests import plain_llama
from tests.constraints.grammars import EOS, TREE
from tests.constraints.strategies import patterns, schemas
from tests.decoding.observed import RIGHT
from tests.tiny import PAPER, TOKENS, slow, tiny_llama, tiny_tokenizer

# All sources of drafts, with those of a prediction and of a corpus, which a call brings.
ALL_SOURCES = ("suffix", "recycled", "chain")  # and the pool
FULL = LookaheadConfig.tree(14, ngrams=NGramConfig(2, 4, 3), sources=ALL_SOURCES)
GREEDY_AND_SAMPLED = [SamplingConfig(), SamplingConfig(temperature=1.0)]


def generate(lookahead, prompts, plain=None, seed=2, **options):
    """Generates texts; those of `FULL` are predicted to be the plain ones of the prompts in reverse order."""
    if lookahead is FULL:
        texts = [tokens[:length].tolist() for tokens, length in zip(plain.tokens, plain.lengths, strict=True)]
        options |= {"corpus": [[0, 1, 4, 2, 3, 9, 7]], "prediction": texts[::-1]}
    options = {"tokenizer": tiny_tokenizer(), "eos_ids": [EOS], "max_new_tokens": 24} | options
    return jlade.generate(tiny_llama(seed), prompts, lookahead=lookahead, **options)


class Checked:
    """Texts of all settings against plain ones and a language, and how many were whole and how many steps they took."""

    def __init__(self):
        self.reasons, self.steps = collections.Counter(), collections.Counter()

    def check(self, is_right, prompts, **options):
        plain = generate(None, prompts, **options)
        for lookahead in (PAPER, TREE, FULL):
            found = generate(lookahead, prompts, plain, **options)
            assert found.text == plain.text
            assert found.finish_reason == plain.finish_reason
            np.testing.assert_array_equal(found.tokens, plain.tokens)
            self.steps[lookahead] += int(found.steps.sum())
        for text, reason in zip(plain.text, plain.finish_reason, strict=True):
            assert reason in ("eos", "length")
            assert reason == "length" or is_right(text)
        self.reasons.update(plain.finish_reason)
        self.steps[None] += int(plain.steps.sum())

    def assert_useful(self):
        """Texts end, and drafts are accepted."""
        assert self.reasons["eos"] > 10, self.reasons
        assert all(self.steps[lookahead] < self.steps[None] for lookahead in (PAPER, TREE, FULL)), self.steps


def is_small(grammar):
    """Whether the grammar's table is padded to the size of all others, so that nothing is compiled for it."""
    return len(grammar.unrolled.moves) < 126


PROMPTS = st.lists(st.integers(0, 11), min_size=1, max_size=6)
CALLS = {
    "prompts": st.tuples(PROMPTS, PROMPTS).map(list),
    "key": st.integers(0, 99),
    "seed": st.sampled_from([0, 2, 3]),
}


def test_texts_of_random_regexes():
    checked = Checked()

    @settings(max_examples=40)
    @given(pattern=patterns(), **CALLS)
    def check(pattern, prompts, key, seed):
        grammar = Grammar.regex(pattern)
        assume(is_small(grammar))
        options = {"grammar": grammar, "sampling": GREEDY_AND_SAMPLED, "key": jax.random.key(key), "seed": seed}
        checked.check(lambda text: re.fullmatch(pattern, text), prompts, **options)

    check()
    checked.assert_useful()


OF_JSON = ["{", "}", '"', '":', ",", "[", "]", "0", "1", "a", "null", ":"]  # a token each, before "</s>"


def json_tokenizer():
    """Returns a tokenizer with as many tokens as the tiny one, so that their programs are the same."""
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(OF_JSON)}, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def test_texts_of_random_schemas():
    checked = Checked()

    @settings(max_examples=40)
    @given(schema=schemas(), **CALLS)
    def check(schema, prompts, key, seed):
        grammar = Grammar.json_schema(schema)
        assume(is_small(grammar))
        validator = jsonschema.Draft202012Validator(schema)
        options = {"grammar": grammar, "sampling": GREEDY_AND_SAMPLED, "key": jax.random.key(key), "seed": seed}
        checked.check(lambda text: validator.is_valid(json.loads(text)), prompts, tokenizer=json_tokenizer(), **options)

    check()
    checked.assert_useful()


# Sequences of options, each beside a grammar, and what a text must be that does not reach the limit.
HOT = SamplingConfig(temperature=3.0)
NO_END = SamplingConfig(logit_bias={EOS: float("-inf")})
PENALTIES = SamplingConfig(temperature=1.3, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.6)
ROWS = [
    # The end is the only token that may come.
    ({"grammar": Grammar.regex("")}, "eos", ""),
    # Whole texts are within longer ones.
    ({"grammar": Grammar.regex("(ab)*"), "sampling": HOT}, "eos", "(ab)*"),
    # Every text may end at once, and is to have seven tokens, whose last one is the end.
    ({"grammar": Grammar.regex("(a|b)*"), "min_new_tokens": 7, "sampling": HOT}, "eos", "[ab]{6,}"),
    ({"grammar": Grammar.regex("(ab|é)*c"), "sampling": PENALTIES}, "eos", "(ab|é)*c"),
    ({"grammar": Grammar.regex("a{2,9}"), "sampling": SamplingConfig(temperature=1.0, top_k=1)}, "eos", "a{2,9}"),
    # The text is cut before the stop string, which begins and ends within tokens.
    ({"grammar": Grammar.regex("(ab|c){9,}"), "stop": ["bca"], "sampling": HOT},
     "stop", "(ab|c)*a"),
    # A stop string that is the whole text, before its end.
    ({"grammar": Grammar.choice(["cab", "ab"]), "stop": ["ab"]}, "stop", "c?"),
    # A letter may be an end token, which the text then has, and spells the grammar with others.
    ({"grammar": Grammar.regex("(ab|ba){1,3}"), "eos_ids": [4, EOS]}, "eos", "(ab|ba){1,3}c?"),
    # No token is left where the text has to end.
    ({"grammar": Grammar.regex("abc"), "sampling": NO_END}, "dead_end", "abc"),
    ({"grammar": None, "sampling": SamplingConfig(temperature=1.0)}, "length", ".*"),
]  # fmt: skip
DEFAULTS = {"min_new_tokens": 0, "stop": [], "eos_ids": [EOS], "sampling": SamplingConfig()}


def test_other_options_beside_grammars_of_their_own():
    prompts = [[0, 1, 2, EOS, 3], *([row, 2, 4, 2] for row in range(1, len(ROWS)))]
    options = {name: [row.get(name, default) for row, *_ in ROWS] for name, default in DEFAULTS.items()}
    options |= {"grammar": [row["grammar"] for row, *_ in ROWS], "key": jax.random.key(4)}
    plain = generate(None, prompts, **options)
    found = generate(FULL, prompts, plain, **options)
    assert found.text == plain.text
    assert found.finish_reason == plain.finish_reason == tuple(reason for _, reason, _ in ROWS)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert (found.steps <= plain.steps).all()
    for text, (_, _, pattern) in zip(found.text, ROWS, strict=True):
        assert re.fullmatch(pattern, text, re.DOTALL), (pattern, text)
    assert found.lengths[2] >= 7


# The distribution of whole texts of a grammar, against exact enumeration.
TEXTS = ["ab", "ba", "abc", "cab", "bb", "é"]
NUM_SAMPLES = 3_000
PROMPT = [0, 1, 4, 7, 12, 8, 12, 2, 4, 12, 0, 1]  # some texts, so that drafts come from it


def sequences(begun=()):
    """Yields sequences of tokens that spell one of `TEXTS`, each with the tokens that may come at every place."""
    spelled = b"".join(TOKENS[token] for token in begun)
    allowed = [
        token for token, each in enumerate(TOKENS)
        if each and any(text.encode().startswith(spelled + each) for text in TEXTS)
    ]  # fmt: skip
    if spelled.decode(errors="replace") in TEXTS:
        yield (*begun, EOS), [[*allowed, EOS]]
    for token in allowed:
        for whole, later in sequences((*begun, token)):
            may_end = [EOS] if spelled.decode(errors="replace") in TEXTS else []
            yield whole, [[*allowed, *may_end], *later]


def probabilities(temperature):
    """Returns the probability of each sequence of tokens in plain constrained sampling."""
    found = {}
    for tokens, allowed in sequences():
        logits = plain_llama.logits(tiny_llama(2), [*PROMPT, *tokens])[len(PROMPT) - 1 :] / temperature
        found[tokens] = np.prod(
            [
                scipy.special.softmax(logits[place, choices])[choices.index(token)]
                for place, (token, choices) in enumerate(zip(tokens, allowed, strict=True))
            ]
        )
    assert sum(found.values()) == pytest.approx(1)
    return found


def p_value(counts, expected):
    """Returns the p-value of the chi-square test, in which rare sequences are one class."""
    values = np.array([(counts[tokens], NUM_SAMPLES * each) for tokens, each in expected.items()])
    is_common = values[:, 1] >= 5
    pooled = np.concatenate([values[is_common], values[~is_common].sum(axis=0, keepdims=True)])
    return scipy.stats.chisquare(*pooled.T[:, pooled[:, 1] > 0], sum_check=False).pvalue


@pytest.mark.parametrize(
    "lookahead",
    [
        PAPER,
        dataclasses.replace(PAPER, verification="rejection"),
        slow(dataclasses.replace(TREE, verification="rejection")),
    ],
    ids=str,
)
def test_texts_follow_the_distribution_of_plain_constrained_sampling(lookahead):
    found = jlade.generate(
        tiny_llama(2),
        [PROMPT] * NUM_SAMPLES,
        grammar=Grammar.choice(TEXTS),
        tokenizer=tiny_tokenizer(),
        eos_ids=[EOS],
        max_new_tokens=4,
        sampling=SamplingConfig(temperature=1.2),
        key=jax.random.key(0),
        lookahead=lookahead,
    )
    assert found.steps.sum() < found.lengths.sum(), "drafts are accepted"
    drawn = zip(found.tokens.tolist(), found.lengths, strict=True)
    counts = collections.Counter(tuple(tokens[:length]) for tokens, length in drawn)
    expected = probabilities(1.2)
    assert counts.keys() <= expected.keys()
    assert p_value(counts, expected) > RIGHT
    assert p_value(counts, probabilities(1.0)) < RIGHT, "the test tells distributions apart"
