"""The number of rows that a state has, and the width of their steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlade
from jlade import LookaheadConfig, NGramConfig, SamplingConfig
from jlade.config import PLAIN
from jlade.costs import choice, learned
from jlade.decoding import sampling
from jlade.engine import rows, width
from jlade.engine.programs import Programs
from jlade.lookahead import adaptive
from tests.compilations import recorded
from tests.engine.engines import PARAMS, alone, assert_equal, assert_equal_alone, engine, watched
from tests.tiny import PAPER, slow


def test_a_state_has_all_rows_a_part_or_one():
    assert [width.sizes(number, None) for number in (1, 3, 8, 64)] == [(1,), (3, 1), (8, 4, 1), (64, 16, 1)]
    assert width.sizes(8, jlade.make_mesh(model=2)) == (8, 4, 1)
    assert width.sizes(8, jlade.make_mesh(data=2)) == (8,)


@pytest.fixture
def sizes(monkeypatch):
    """A list of the rows of the state in each round of steps."""
    return watched(monkeypatch, "run", lambda params, state, *_: len(state.done))


@pytest.mark.parametrize("setting", ["paper", slow("adaptive")])
def test_a_text_is_that_of_its_request_alone_while_rows_come_and_go(setting, sizes):
    limits, samplings = [3, 40, 9, 15], [SamplingConfig(), SamplingConfig(temperature=0.8)]
    options = [
        {"max_new_tokens": limit, "sampling": samplings[index % 2], "key": jax.random.key(index)}
        | {"eos_ids": (), "logprobs": True}
        for index, limit in enumerate(limits * 2)
    ]
    drawn = [([5, 6, 7], options[1]), *(([index] * 20, each) for index, each in enumerate(options))]
    with engine(setting, max_sequences=4) as running:
        requests = []
        for prompt, each in drawn:
            requests.append((prompt, each, running.submit(prompt, **each)))
            next(iter(requests[0][-1]))  # the first one runs alone at first
        assert_equal_alone(requests, setting)
    assert set(sizes) == {1, 2, 4}
    assert sizes[0] == 1
    assert sizes[-1] < 4


def test_rows_move_with_all_that_they_hold():
    """The memory of the cache that they leave is free."""
    inputs, config = jlade.prepare(PARAMS, [[1], [2, 3], [4] * 9], lookahead=PAPER, max_new_tokens=5)
    stopping = dataclasses.replace(inputs.stopping, min_new_tokens=np.zeros(3, np.int32))
    controls = sampling.complete(inputs.sampling, 3, 13)
    inputs = dataclasses.replace(inputs, stopping=stopping, sampling=controls, has_logprobs=np.ones(3, bool))
    state = jlade.start(jlade.prefill(PARAMS, inputs, config), inputs, config)
    before, cache = host(state), state.cache
    after = rows.resize(rows.EngineState(state, tables=None, shared={}), [2, -1, 0, -1], config).rows
    np.testing.assert_array_equal(after.done, [False, True, False, True])
    for old, new in zip(before, host(after), strict=True):
        if old.dtype != bool:  # as `done`
            np.testing.assert_array_equal(new[[0, 2]], old[[2, 0]])
    assert all(layer.is_deleted() for layer in jax.tree.leaves(cache))


def host(state):
    """Returns the arrays of the rows."""
    arrays = [
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves(state)
    ]
    return [np.asarray(array) for array in arrays]


def leaves(state):
    return [array for array in jax.tree.leaves(state) if array.ndim]


def test_rounds_without_drafts_make_the_same_steps(monkeypatch):
    """Where a wide step costs too much, most rounds are plain ones, whose program knows of no drafts."""
    setting = LookaheadConfig.tree(3, relative_step_time=9.0)
    options = {"max_new_tokens": 50, "sampling": SamplingConfig(temperature=2.0), "eos_ids": ()}
    requests = [options | {"key": jax.random.key(index)} for index in range(2)]

    def results():
        with engine("adaptive", lookahead=setting, max_sequences=1) as running:
            return [
                running.submit([index] * 5, **each, with_statistics=True).result(timeout=300)
                for index, each in enumerate(requests)
            ]

    seen = watched(monkeypatch, "rest", lambda params, state, *_: len(state.done))
    found = results()
    assert len(seen) > 20
    monkeypatch.setattr(Programs, "may_rest", lambda *_: False)
    for got, expected, (index, each) in zip(found, results(), enumerate(requests), strict=True):
        assert_equal(got, alone([index] * 5, each, "adaptive"))
        np.testing.assert_array_equal(got.accepted, expected.accepted)
        np.testing.assert_array_equal(got.statistics.num_drafted, expected.statistics.num_drafted)


@pytest.mark.slow
def test_steps_without_drafts_stand_in_for_those_of_all_widths_until_these_are_there():
    prompt, options = [1, 2, 3, 1, 2], {"max_new_tokens": 40, "eos_ids": (), "logprobs": True}
    with engine("adaptive", max_sequences=2, max_grammar=0) as running:
        parts, found = running.compile(), []
        next(parts)
        assert not running.is_ready
        next(parts)
        assert running.is_ready
        others = [running.submit([number], max_new_tokens=9, eos_ids=()) for number in (4, 5)]  # of which one waits
        found.append(running.submit(prompt, **options).result(timeout=300))
        list(parts)
        found.append(running.submit(prompt, **options).result(timeout=300))
        assert [len(other.result(timeout=300).tokens[0]) for other in others] == [9, 9]
    for result in found:
        assert_equal(result, alone(prompt, options, "adaptive"))
    assert found[0].steps[0] == 40 > found[1].steps[0]


@pytest.mark.slow
def test_rounds_without_drafts_compile_nothing_after_the_warm_up(monkeypatch):
    seen = watched(monkeypatch, "rest", lambda params, state, *_: len(state.done))
    setting = LookaheadConfig.tree(3, relative_step_time=9.0)
    options = {"max_sequences": 1, "max_grammar": 0, "max_top_logprobs": 0}
    with engine("adaptive", lookahead=setting, **options) as running, recorded() as compilations:
        running.warm_up()
        compilations.clear()
        seen.clear()
        for sampling in (SamplingConfig(), SamplingConfig(temperature=2.0)):
            running.submit([5], max_new_tokens=50, sampling=sampling, eos_ids=()).result(timeout=300)
        assert compilations == []
    assert seen


@pytest.mark.parametrize(("age", "wait", "number"), [(1, 16, 2), (14, 16, 2), (3, 4, 1), (1, 16, 0)])
def test_steps_that_rest_are_recorded_as_in_the_loop(age, wait, number):
    costs = np.array([4, 2, 1], np.float32)
    pace = dataclasses.replace(adaptive.start(costs), level=jnp.int32(3), age=jnp.int32(age), wait=jnp.int32(wait))
    one = width.Width(costs)
    one._pace = jax.device_get(pace)
    assert one.rests == wait - age
    one.rest(number)
    for _ in range(number):
        pace = adaptive.rest(pace)
    jax.tree.map(np.testing.assert_array_equal, one._pace, jax.device_get(pace))
    assert (one.rests == 0) == (age + number == wait)


@pytest.mark.parametrize(
    ("of_sizes", "expected"),
    [
        (
            {1: LookaheadConfig.tree(80, ngrams=NGramConfig(10, 5, 10)), 2: LookaheadConfig.tree(31), 4: PLAIN},
            LookaheadConfig.tree(119),
        ),
        ({1: LookaheadConfig.tree(7), 2: PLAIN, 4: PLAIN}, LookaheadConfig.tree(7)),
        ({1: LookaheadConfig(), 2: LookaheadConfig(relative_step_time=2.0), 4: LookaheadConfig()}, LookaheadConfig()),
        ({1: PLAIN, 2: PLAIN, 4: PLAIN}, PLAIN),
    ],
)
def test_auto_is_as_wide_as_any_number_of_rows_wants(of_sizes, expected, monkeypatch):
    monkeypatch.setattr(choice, "choose", lambda params, decoder, size, mesh: of_sizes[size])
    _, config = jlade.prepare(PARAMS, [1], lookahead=None)
    assert width.choose(PARAMS, config, (4, 2, 1)) == expected


@pytest.mark.slow
def test_rounds_teach_the_costs_of_their_number_of_rows(monkeypatch):
    lessons = {}

    def learn_round(self, num_steps, context, seconds):
        assert num_steps.sum() >= width.LESSON
        assert 2 < context < 62
        assert 0 < seconds < 300
        lessons.setdefault(id(self), []).append(num_steps)

    monkeypatch.setattr(width, "LESSON", 8)
    monkeypatch.setattr(learned.Learned, "learn_round", learn_round)
    with engine(max_sequences=2, lookahead="auto") as running:
        for number in range(2):
            running.generate([[number], [number, 1]], max_new_tokens=60, eos_ids=())
            running.generate([[number]], max_new_tokens=60, eos_ids=())
    assert len(lessons) == 2
