"""Answers against `jlade.generate` and transformers; nothing is compiled while the clock runs."""

import dataclasses
import sys
import types

import jax
import numpy as np
import pytest

import jlade
from jlade import SamplingConfig
from jlade.config import PLAIN
from jlade.evaluation import answers
from jlade.evaluation.answers import GROWTH_STEPS, EvaluatedModel
from jlade.evaluation.methods import parse
from tests import plain_llama
from tests.compilations import recorded
from tests.tiny import TOKENS, tiny_llama, tiny_tokenizer

PROMPT, KEY, NEW = [3, 1, 4, 1, 5], jax.random.key(7), 30
PARAMS = tiny_llama(2, max_positions=128)
# Programs are shared by the tests of this module.
MODEL = EvaluatedModel(lambda dtype: PARAMS, "float32", tiny_tokenizer(), NEW)


def generate(method, **options):
    setting = None if method.setting == PLAIN else method.setting
    sampling = SamplingConfig(temperature=method.temperature)
    options = {"lookahead": setting, "sampling": sampling, "key": KEY, "max_new_tokens": NEW} | options
    return jlade.generate(PARAMS, PROMPT, tokenizer=tiny_tokenizer(), with_statistics=True, keep_state=True, **options)


def tokens(generation):
    return generation.tokens[0, : generation.lengths[0]].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["4,4,3", "plain", "auto", "4,4,3:no-prompt", "plain:t=1", "4,4,3:t=1"])
def test_an_answer_is_that_of_generate(name):
    method = parse(name)
    answer, pool = MODEL.answer(PROMPT, method, KEY)
    expected = generate(method)
    assert list(answer.tokens) == tokens(expected)
    assert (answer.text, answer.prompt_tokens) == (expected.text[0], len(PROMPT))
    assert answer.steps == expected.steps[0] == len(answer.accepted) == len(answer.num_drafted)
    assert answer.accepted == tuple(expected.accepted[0])
    assert sum(answer.accepted) == len(answer.tokens) == answer.timed_tokens
    assert answer.num_drafted == tuple(expected.statistics.num_drafted[0])
    assert answer.pool == (expected.statistics.ngrams[0], expected.statistics.keys[0])
    assert (pool is None) == ("pool" not in expected.state.sources)
    if pool is not None:
        np.testing.assert_array_equal(pool.ngrams, expected.state.sources["pool"].ngrams)
    assert answer.growth == ()


def test_without_a_number_of_tokens_prompt_and_answer_have_a_length_together():
    model = dataclasses.replace(MODEL, max_new_tokens=None)
    plain = parse("plain")
    expected = tokens(generate(plain, max_new_tokens=123, eos_ids=()))
    ended, _ = model.answer(PROMPT, plain, KEY)
    assert 4 < len(ended.tokens) <= 123
    for max_length in (9, 6):
        answer, _ = model.answer(PROMPT, plain, KEY, max_length=max_length)
        assert list(answer.tokens) == expected[: max_length - len(PROMPT)]
    longest, _ = model.answer(PROMPT, plain, KEY, max_length=4096)
    assert longest.tokens == ended.tokens, "the model has 128 positions"
    with pytest.raises(ValueError, match="prompt of 5 tokens leaves no room for a new one; prompt and answer have 5"):
        model.answer(PROMPT, plain, KEY, max_length=5)
    letter, _ = model.answer(PROMPT, plain, KEY, choices=["a"], max_length=5)
    assert len(letter.tokens) == 1, "choices have one token at any length"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "4,4,3", "tree=5"])
def test_of_choices_the_most_probable_is_the_answer(name):
    """Among the tokens of three letters, by the logits of the model itself."""
    letters = [4, 3, 2]
    logits = plain_llama.logits(PARAMS, PROMPT)[-1]
    best = max(letters, key=lambda token: logits[token])
    answer, _ = MODEL.answer(PROMPT, parse(name), KEY, choices=[TOKENS[token].decode() for token in letters])
    assert answer.tokens == (best,)
    assert answer.steps == 1
    with pytest.raises(ValueError, match="a question with choices needs a token for each of y, z"):
        MODEL.answer(PROMPT, parse(name), KEY, choices="yz")  # both are the unknown token


def test_sampled_answers_depend_on_the_key():
    method = parse("4,4,3:t=1")
    one, other = (MODEL.answer(PROMPT, method, jax.random.key(seed))[0] for seed in (7, 8))
    assert one.tokens != other.tokens


def test_a_warm_pool_is_that_after_the_answer_before():
    """It saves steps and changes no text."""
    method = parse("4,4,3:warm")
    cold, pool = MODEL.answer(PROMPT, method, KEY)
    warm, after = MODEL.answer(PROMPT, method, KEY, pool)
    expected = generate(method, pool=generate(method).state.sources["pool"])
    assert warm.tokens == cold.tokens == tuple(tokens(expected))
    assert warm.accepted == tuple(expected.accepted[0])
    assert warm.steps < cold.steps
    np.testing.assert_array_equal(after.ngrams, expected.state.sources["pool"].ngrams)


@pytest.mark.slow
def test_growth_is_counted_up_to_the_final_pool_and_changes_nothing_else():
    plain, growing = (MODEL.answer(PROMPT, parse(name), KEY)[0] for name in ("2,3,1", "2,3,1:growth"))
    assert (growing.tokens, growing.accepted, growing.pool) == (plain.tokens, plain.accepted, plain.pool)
    assert growing.growth[-1] == (len(growing.tokens), *growing.pool)
    assert [each[0] for each in growing.growth[:-1]] == [
        sum(growing.accepted[:steps]) for steps in range(1, growing.steps, GROWTH_STEPS)
    ]
    assert len(growing.growth) > 2
    ngrams = [each[1] for each in growing.growth]
    assert ngrams == sorted(ngrams)
    assert all(keys <= number for _, number, keys in growing.growth)


def test_times_are_positive_and_those_of_the_clock(monkeypatch):
    """On a clock that goes on by a second with each look."""
    now = iter(range(100))
    monkeypatch.setattr(answers, "time", types.SimpleNamespace(perf_counter=lambda: next(now)))
    model = EvaluatedModel(lambda dtype: PARAMS, "float32", tiny_tokenizer(), 12)
    for name in ("4,4,3", "plain"):  # the second one copies the cache of the first
        answer, _ = model.answer(PROMPT, parse(name), KEY)
        assert (answer.prefill_seconds, answer.first_seconds, answer.seconds) == (1, 2, 2)
    assert next(now) == 2 + 3 + 3
    monkeypatch.undo()
    answer, _ = model.answer(PROMPT[1:], parse("4,4,3"), KEY)
    assert 0 < answer.prefill_seconds < answer.first_seconds < answer.prefill_seconds + answer.seconds


def test_memory_is_that_of_the_arrays_between_two_steps():
    answer, pool = MODEL.answer(PROMPT, parse("4,4,3"), KEY)
    plain, _ = MODEL.answer(PROMPT, parse("plain"), KEY)
    states = [generate(parse(name)).state for name in ("4,4,3", "plain")]
    assert [answer.state_bytes, plain.state_bytes] == [sum(x.nbytes for x in jax.tree.leaves(one)) for one in states]
    window = 4 * 3 * np.dtype(np.int32).itemsize
    drafts = sum(x.nbytes for x in jax.tree.leaves(pool)) + window
    assert drafts <= answer.state_bytes - plain.state_bytes < drafts + 1000, "the drafts of a step besides"


@pytest.fixture
def compiled():
    """What JAX has traced, lowered and compiled."""
    with recorded("/jax/core/compile/") as events:
        yield events


@pytest.mark.slow
@pytest.mark.parametrize("name", ["4,4,3", "plain", "4,4,3:warm", "4,4,3:t=1"])
def test_nothing_is_compiled_while_the_clock_runs(name, compiled, monkeypatch):
    looks = []
    clock = types.SimpleNamespace(perf_counter=lambda: looks.append(len(compiled)) or len(looks))
    monkeypatch.setattr(answers, "time", clock)
    model, method, pool = EvaluatedModel(lambda dtype: PARAMS, "float32", tiny_tokenizer(), 12), parse(name), None
    jax.clear_caches()
    totals = []
    for prompt in (PROMPT, PROMPT, [9, 2]):
        looks.clear()
        _, after = model.answer(prompt, method, KEY, pool)
        pool = after if method.is_warm else None
        *reading, begin, first, end = looks
        assert len(set(reading)) == (prompt != PROMPT or not totals)
        assert begin == first == end
        totals.append(len(compiled))
    assert totals[0] > 0
    assert totals[2] == totals[1], "an answer by known programs compiles nothing"
    assert (totals[1] == totals[0]) != method.is_warm, "only warm pools need another program for the second answer"


@pytest.fixture(scope="module")
def demo_model(small_demo):
    """A layer of the demo model, and prompts of code."""
    pytest.importorskip("torch", reason="transformers needs torch to decode")
    params, tokenizer = jlade.load(small_demo, "float32")
    prompts = [tokenizer.encode(text).ids for text in ("import os\nimport ", "def f(x):\n    return")]
    return EvaluatedModel(lambda dtype: params, "float32", tokenizer, 12), prompts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers", "transformers-lookup"])
def test_answers_of_transformers_are_those_of_jlade(name, demo_model, monkeypatch):
    monkeypatch.setattr(answers, "IDLE_SECONDS", 0.0)
    model, prompts = demo_model
    for prompt in prompts:
        plain, _ = model.answer(prompt, parse("plain"), KEY)
        answer, pool = model.answer(prompt, parse(name), KEY)
        assert (answer.tokens, answer.text, answer.prompt_tokens) == (plain.tokens, plain.text, plain.prompt_tokens)
        assert pool is None
        assert (answer.accepted, answer.num_drafted, answer.pool, answer.growth) == ((), (), (0, 0), ())
        assert 0 < answer.prefill_seconds == answer.first_seconds
        assert answer.seconds > 0
        assert answer.timed_tokens == len(answer.tokens) - 1, "prefill gives the first one"
        if name == "transformers":
            assert answer.steps == len(answer.tokens)
        else:
            assert answer.steps < len(answer.tokens)


def test_every_pass_of_transformers_is_counted(demo_model, monkeypatch):
    monkeypatch.setattr(answers, "IDLE_SECONDS", 0.0)
    (model, (prompt, _)), passes = demo_model, []
    embedding = model.transformers("float32").get_input_embeddings()
    model.answer(prompt, parse("transformers-lookup"), KEY)
    hook = embedding.register_forward_hook(lambda *_: passes.append(1))
    answer, _ = model.answer(prompt, parse("transformers-lookup"), KEY)
    hook.remove()
    assert answer.steps == len(passes)


def test_without_torch_the_methods_of_transformers_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="methods of transformers need torch: pip install torch"):
        MODEL.answer(PROMPT, parse("transformers"), KEY)
