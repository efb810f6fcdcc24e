"""Prompts that rows read in the steps of others: texts, prefixes, programs, and the order of rows."""

import random

import jax
import numpy as np
import pytest

import jlade
from jlade import SamplingConfig
from jlade.engine import reading
from tests.compilations import recorded
from tests.engine.engines import (
    SAMPLINGS,
    SHARED,
    alone,
    assert_equal,
    assert_equal_alone,
    draw,
    engine,
    failing,
    submit_at_random,
    watched,
)
from tests.tiny import slow


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    monkeypatch.setattr(reading, "APART", frozenset())


@pytest.fixture
def rounds(monkeypatch):
    """A list of the rows that read in each round of steps, in the row's order."""
    return watched(monkeypatch, "run", lambda *arguments: np.sum(until_of(*arguments) > 0))


def until_of(params, state, config, max_steps, stop_at, until=None):
    return np.zeros(1) if until is None else until


@pytest.mark.parametrize("setting", ["windows", slow("adaptive"), slow("latent")])
def test_a_text_is_that_of_its_request_alone(setting, rounds):
    """Random requests arrive at random times from two threads; a part of them is cancelled on the way."""
    with engine(setting) as running:
        together = []
        with running._worker._changed:  # until all are there, so that they are read in one pass
            for seed in range(3):
                prompt, options = [seed] * 20, {"max_new_tokens": 5}
                together.append((prompt, options, running.submit(prompt, **options)))
        requests = [*together, *submit_at_random(running, num_clients=2, number=10)]
        assert 10 < assert_equal_alone(requests, setting) < len(requests)
    assert max(rounds) > 1, "several prompts are read at once"


def test_a_request_that_shares_a_beginning_waits_until_it_is_read(rounds):
    """The first prompt is read beside another one; the second finds what it has left, and so does the third."""
    options = {"max_new_tokens": 9, "eos_ids": ()}
    other, prompts = [7] * 30, [[*SHARED, *end] for end in ([1, 2], [3, 4], [3, 4, 5])]
    with engine(max_sequences=4) as running:
        requests = [running.submit(prompt, **options) for prompt in (other, *prompts)]
        for request, prompt in zip(requests, (other, *prompts), strict=True):
            assert_equal(request.result(timeout=300), alone(prompt, options))
        assert [request.num_cached for request in requests] == [0, 0, len(SHARED), len(SHARED) + 1]
    assert max(rounds) > 0


def test_a_lone_prompt_is_read_in_large_chunks(rounds):
    with engine() as running:
        assert_equal(running.submit(SHARED, max_new_tokens=9).result(300), alone(SHARED, {"max_new_tokens": 9}))
    assert set(rounds) == {0}


@pytest.mark.slow
def test_after_the_warm_up_nothing_compiles():
    chance = random.Random(4)
    drawn = [draw(chance) for _ in range(20)]
    with engine(max_sequences=2) as running, recorded() as compilations:
        running.warm_up()
        compilations.clear()
        requests = [running.submit(prompt, with_statistics=True, **options) for prompt, options in drawn]
        requests.append(running.submit(SHARED, prompt_logprobs=True, max_new_tokens=3))
        for request in requests:
            assert request.result(timeout=300).lengths[0] > 0
        assert requests[-1].prompt_logprobs is not None
        assert compilations == []


@pytest.mark.slow
def test_requests_wait_for_the_programs_in_which_they_read():
    """Until these are there a prompt is read alone."""
    options = {"max_new_tokens": 20, "eos_ids": (), "sampling": SAMPLINGS[2], "key": jax.random.key(3)}
    with engine(max_sequences=2) as running:
        parts = running.compile()
        next(parts)
        first = running.submit([1], **options)
        next(parts)
        requests = [first, running.submit(SHARED, **options)]
        for _ in parts:
            pass
        for request, prompt in zip(requests, ([1], SHARED), strict=True):
            assert_equal(request.result(timeout=300), alone(prompt, options))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 3, "model": 2}, {"lookahead": 2}], ids=str)
def test_meshes(axes, rounds):
    """A block that devices divide has no prompts."""
    chance = random.Random(2)
    drawn = [draw(chance) for _ in range(6)]
    with engine(mesh=jlade.make_mesh(**axes)) as running:
        requests = [(prompt, options, running.submit(prompt, **options)) for prompt, options in drawn]
        assert_equal_alone(requests)
    assert (max(rounds) > 0) == ("data" in axes)


def test_a_fault_while_rows_read_ends_them_and_the_engine_goes_on(monkeypatch):
    options = {"max_new_tokens": 3, "sampling": SamplingConfig()}
    with engine() as running:
        with monkeypatch.context() as patch:
            failing(patch, "run", lambda *arguments: until_of(*arguments).any())
            requests = [running.submit([number, *SHARED], **options) for number in range(3)]
            for request in requests:
                with pytest.raises(RuntimeError, match="a fault"):
                    request.result(timeout=300)
        result = running.submit(SHARED, **options).result(timeout=300)
    assert_equal(result, alone(SHARED, options))
