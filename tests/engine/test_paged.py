"""Engines whose pages are too few for all rows: texts are those of each request alone, and no page is lost."""

import random
import time
import types

import jax
import numpy as np
import pytest

import jlade
from jlade import SamplingConfig
from jlade.engine import pages
from jlade.engine.running import Running
from tests.tiny import PAPER, RECURRENT, slow_but, tiny_llama

CAPACITY, SIZE = 48, 8
MODELS = {
    "whole layers": ({}, None),
    "a window": ({"sliding_windows": (5, None)}, None),
    "8 bits": ({}, "int8"),
    "recurrent": (RECURRENT, None),
}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(pages, "SIZE", SIZE)


@pytest.fixture
def taken_out(monkeypatch):
    """A list of the requests that were taken out of their rows."""
    seen, take_out = [], Running.take_out

    def watched(self, job):
        seen.append(job)
        take_out(self, job)

    monkeypatch.setattr(Running, "take_out", watched)
    return seen


def assert_all_are_free(engine):
    """Fails unless all pages are free soon, once nothing is kept: a row is freed at the end of its round."""
    deadline = time.monotonic() + 60
    allocators = engine._running._pool._allocators
    while engine.num_running and time.monotonic() < deadline:
        time.sleep(0.01)
    engine._reader.clear()
    assert [each.num_free for each in allocators] == [each.number for each in allocators]


@pytest.mark.parametrize("model", slow_but(MODELS, "whole layers", "a window"))
def test_texts_are_those_of_each_request_alone(model, taken_out):
    changes, kv_dtype = MODELS[model]
    params = tiny_llama(**changes)
    rng = random.Random(1)
    shared = [rng.randrange(13) for _ in range(19)]
    prompts = [
        [*shared[: rng.choice([0, 19])], *(rng.randrange(13) for _ in range(rng.randint(1, 9)))] for _ in range(14)
    ]
    samplings = [SamplingConfig(), SamplingConfig(temperature=0.8)]
    options = [
        {
            "max_new_tokens": rng.choice([3, 9, 20]),
            "sampling": samplings[index % 2],
            "key": jax.random.key(index),
            "eos_ids": (),
        }
        for index in range(len(prompts))
    ]
    with jlade.Engine(
        params, max_sequences=4, capacity=CAPACITY, cache_tokens=64, lookahead=PAPER, kv_dtype=kv_dtype
    ) as engine:
        requests = [
            engine.submit(prompt, priority=index % 3, **each)
            for index, (prompt, each) in enumerate(zip(prompts, options, strict=True))
        ]
        cancelled = requests[5]
        cancelled.cancel()
        results = [request.result(timeout=300) for request in requests if request is not cancelled]
        assert any(request.num_cached for request in requests)
        assert_all_are_free(engine)
        assert engine.cache_usage == 0
    kept = [pair for index, pair in enumerate(zip(prompts, options, strict=True)) if index != 5]
    for result, (prompt, each) in zip(results, kept, strict=True):
        expected = jlade.generate(params, prompt, lookahead=None, kv_dtype=kv_dtype, **each)
        np.testing.assert_array_equal(result.tokens[0, : result.lengths[0]], expected.tokens[0, : expected.lengths[0]])
    assert taken_out
    assert sum(request.num_taken_out for request in requests) == len(taken_out)


def test_a_prompt_that_is_read_has_the_pages_of_the_only_row(taken_out):
    """Two pages and six are all eight. The row, which needs a third one, goes on when the other text has ended."""
    params, requests = tiny_llama(), [([1] * 7, 30), ([2] * 46, 2)]
    with jlade.Engine(params, max_sequences=2, capacity=CAPACITY, cache_tokens=CAPACITY, lookahead=PAPER) as engine:
        with engine._worker._changed:  # until both are there
            submitted = [engine.submit(prompt, max_new_tokens=number, eos_ids=()) for prompt, number in requests]
        results = [request.result(timeout=300) for request in submitted]
        assert_all_are_free(engine)
    for result, (prompt, number) in zip(results, requests, strict=True):
        expected = jlade.generate(params, prompt, max_new_tokens=number, eos_ids=(), lookahead=None)
        np.testing.assert_array_equal(result.tokens, expected.tokens)
    assert [request.num_taken_out for request in submitted] == [1, 0]


def test_what_is_refused():
    options = {"max_sequences": 2, "capacity": CAPACITY, "lookahead": None}
    with pytest.raises(ValueError, match=r"cache_tokens must be at least 48, one row of capacity=48 .*, got 47"):
        jlade.Engine(tiny_llama(), cache_tokens=47, **options)
    with pytest.raises(ValueError, match=r"cache_tokens must be None for a model without layers .* pages, got 96"):
        jlade.Engine(tiny_llama(sliding_windows=(5, 5)), cache_tokens=96, **options)


@pytest.mark.parametrize(
    ("platform", "attention", "expected"),
    [("gpu", "plain", False), ("gpu", "gpu", True), ("tpu", "plain", True), ("cpu", "plain", True)],
)
def test_pages_are_not_the_default_where_attention_copies_them(platform, attention, expected):
    decoder, device = types.SimpleNamespace(attention=attention), types.SimpleNamespace(platform=platform)
    assert pages.reads_in_place(decoder, device) is expected
