"""The costs of steps that calls of `lookahead="auto"` teach."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jlade
from jlade.costs import choice, learned
from jlade.decoding import ahead, prefill
from jlade.generation import request
from jlade.generation.options import Options
from tests.compilations import recorded
from tests.texts import assert_same_texts
from tests.tiny import tiny_llama

PRIOR = np.array([1.0, 8.0, 2.0, 0.3, 1.77, 1.42, 1.24, 1.0])  # a call, two sizes of passes, context, and four levels


@pytest.fixture
def fit(tmp_path):
    return learned.Learned(PRIOR, 4, 1e-3, tmp_path / "costs.json")


def calls(rng, number):
    """The parts of calls whose texts differ, but for the context."""
    for _ in range(number):
        shares = rng.dirichlet([0.7, 0.7, 0.7, 0.7])
        yield np.array([1.0, rng.integers(4), rng.integers(1, 5)]), np.round(100 * shares)


def learn(fit, true, number, seed=0, second=1e-3, noise=0.02, disturbances=()):
    """Makes calls whose parts take the times `true`, without context."""
    rng = np.random.default_rng(seed)
    for index, (others, num_steps) in enumerate(calls(rng, number)):
        disturbance = disturbances[index] if index < len(disturbances) else 1
        seconds = second * float(others @ true[:3] + num_steps @ true[4:]) * rng.normal(1, noise) * disturbance
        fit.learn_round(num_steps, 0, seconds, *others)


def assert_nearer(fit, true, before=PRIOR[4:], share=0.7):
    """The costs have come nearer to those of the true times, by their ratios, than `before`."""
    expected = np.array(true) / true[-1]
    assert (np.abs(np.log(fit.costs() / expected)) <= share * np.abs(np.log(before / expected)) + 0.06).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("second", "overhead", "slope"), [(1e-4, 0, 0.3), (1e-1, 0, -0.3), (1e-3, 1, 0), (1e-2, 2, 0.2)]
)
def test_the_costs_approach_those_of_the_calls(seed, second, overhead, slope, fit):
    true = PRIOR + slope * (PRIOR - 1)
    true[4:7] += overhead
    learn(fit, true, 60, seed, second)
    assert_nearer(fit, true[4:])


def test_before_a_call_they_are_those_of_the_prior_and_disturbed_calls_change_little(fit):
    np.testing.assert_array_equal(fit.costs(), PRIOR[4:].astype(np.float32))
    learn(fit, PRIOR, 30, noise=0)
    before = fit.costs()
    for disturbances in ([10], [3, 1, 3, 3, 0.3, 1]):
        learn(fit, PRIOR, 10, noise=0, disturbances=disturbances)
        assert fit.costs() == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("busy", [1.0, 1.3])
def test_costs_follow_a_machine_that_changes(busy, fit):
    """Another process takes a core and later ends; wide steps lose half of their speed, plain ones little."""
    slower = PRIOR * np.array([1, 1, 1, 1, 2.0, 1.7, 1.5, busy])
    for true, number in ((PRIOR, 30), (slower, 10), (PRIOR, 30)):
        before = fit.costs()
        learn(fit, true, number)
        assert_nearer(fit, true[4:], before)
    assert fit.costs() == pytest.approx(PRIOR[4:], rel=0.1)


def test_a_narrower_step_takes_no_longer_whatever_the_calls_say(fit):
    true = PRIOR * np.where(np.arange(8) == 7, 3.0, 1.0)  # something disturbed all calls with plain steps
    learn(fit, true, 60)
    assert (fit.costs() >= 1).all()


def test_the_costs_of_a_level_that_calls_leave_out_return_to_the_prior(fit):
    learn(fit, PRIOR * np.array([1, 1, 1, 1, 3.0, 1, 1, 1]), 30)
    slow = fit.costs()[0]
    assert slow > 2
    for _ in range(60):
        fit.learn_round(np.array([0, 20, 30, 50]), 0, 1e-3 * float(np.array([20, 30, 50]) @ PRIOR[5:]))
    assert fit.costs()[0] - PRIOR[4] < 0.5 * (slow - PRIOR[4])


@given(st.integers(0, 3000), st.sampled_from([((512, 64), (64, 0)), ((128, 56), (16, 0))]))
def test_passes_are_those_of_the_loops_that_read_a_prompt(number, chunks):
    left, passes = number, []
    for chunk, least in chunks:
        passes.append(0)
        while left > least:
            left, passes[-1] = left - chunk, passes[-1] + 1
    assert prefill.num_passes(chunks, 4096, number) == passes
    assert prefill.num_passes(chunks, 64, min(number, 64))[0] == 0, "a small cache has no pass over a large chunk"


PARAMS = tiny_llama(3)


def find(params):
    return request.make(params, [1, 2, 3], Options(max_new_tokens=40)).learned


@pytest.fixture
def compiled():
    """A list of the programs that compile."""
    with recorded() as events:
        yield events


@pytest.mark.slow
def test_calls_teach_and_the_file_outlives_the_process(cache_directory, compiled):
    params = tiny_llama(3, num_layers=3)
    directory = cache_directory / "jlade" / "costs"
    first, again = (jlade.generate(params, [1, 2, 3], max_new_tokens=40) for _ in range(2))
    assert_same_texts(again, first)
    assert (find(params).num_calls, directory.exists()) == (0, False), "the first one is plain, the second one compiles"
    assert compiled
    before = find(params).costs()
    compiled.clear()
    for number in (1, 2):
        out = jlade.generate(params, [1, 2, 3], max_new_tokens=40)
        assert_same_texts(out, first)
        assert find(params).num_calls == number
    assert not compiled
    after = find(params).costs()
    assert not np.array_equal(after, before)
    assert after[-1] == 1
    (file,) = directory.iterdir()
    assert file.stat().st_size < 4096
    learned.forget()
    np.testing.assert_array_equal(find(params).costs(), after)

    file.write_text(file.read_text()[:100])
    learned.forget()
    with pytest.warns(UserWarning, match="is ignored; later calls write it anew"):
        np.testing.assert_array_equal(find(params).costs(), before)


@pytest.mark.parametrize(("plain_time", "num_tokens"), [(1e-3, 29_999), (0.3, 99)])
def test_the_first_call_has_to_pay_for_its_programs(plain_time, num_tokens, tmp_path):
    def fresh(name="costs.json"):
        return learned.Learned(PRIOR, 4, plain_time, tmp_path / name)

    assert fresh().pays(num_tokens + 2)
    first = fresh()
    assert [first.pays(num_tokens), first.pays(1)] == [False, True], "a second one seems not to be the last"
    learn(fresh(), PRIOR, 8, second=2 * plain_time, noise=0)
    assert fresh().pays(num_tokens), "by the time of earlier processes"


@pytest.mark.slow
def test_the_first_short_text_of_a_process_is_plain():
    params, runs, readings = tiny_llama(3, num_layers=3), [], []

    def record(call):
        if call.program == "_read":
            readings.append(call.settings)
        return call.run()

    learned.forget()
    for options in ({}, {}, {"learn": False}):
        with ahead.intercept(record):
            runs.append(jlade.generate(params, [1, 2, 3], max_new_tokens=40, eos_ids=(), **options))
        assert_same_texts(runs[-1], runs[0])
    assert runs[0].steps.tolist() == [40] > runs[2].steps.tolist()
    assert readings[0] == readings[1], "the second call compiles no other program that reads"
    learned.forget()
    state = jlade.generate(params, [1, 2, 3], max_new_tokens=40, keep_state=True).state
    assert state.sources, "a chat goes on with it"


def test_rounds_of_an_engine_have_costs_of_their_own():
    """Their steps take longer, by a share of the round."""
    times, numbers = np.array([3e-3, 2e-3, 1e-3]), np.random.default_rng(0)
    config = request.make(PARAMS, [1], Options()).config
    arguments = PARAMS, config.decoder, 1, None, config.lookahead, config.chunks
    rounds = learned.find(*arguments, "rounds")
    for _ in range(50):
        num_steps = numbers.integers(1, 40, 3)
        rounds.learn_round(num_steps, 10, float(num_steps @ times))
    assert_nearer(rounds, [3, 2, 1], rounds.costs(learned=False))
    assert (rounds.num_calls, learned.find(*arguments).num_calls) == (50, 0)


def test_long_and_short_texts_in_turns_are_no_change_of_the_machine():
    """4,000 earlier tokens make each step 2.2 times as long."""
    times, numbers = np.array([2e-3, 1.5e-3, 1e-3]), np.random.default_rng(0)
    config = request.make(PARAMS, [1], Options()).config
    fit = learned.find(PARAMS, config.decoder, 1, None, config.lookahead, config.chunks, "texts")
    for number in range(60):
        num_steps, context = numbers.integers(1, 40, 3), 4000 if number // 3 % 2 else 10
        fit.learn_round(num_steps, context, float(num_steps @ times) * (1 + 0.3 * context / 1000))
        if number >= 10:
            np.testing.assert_allclose(fit.costs(), [2, 1.5, 1], rtol=0.2)


def test_learn_false_neither_uses_what_calls_taught_nor_teaches():
    before = find(PARAMS).costs()
    for number in range(20):
        wide = 8 * (number % 2)
        find(PARAMS).learn_round(np.array([wide, 0, 10 - wide]), 10, wide * 9e-3 + (10 - wide) * 1e-3)
    requests = [request.make(PARAMS, [1, 2, 3], Options(max_new_tokens=40, learn=learn)) for learn in (True, False)]
    assert [each.learned is not None for each in requests] == [True, False]
    assert requests[0].inputs.costs[0] > 1.2 * before[0]
    np.testing.assert_array_equal(requests[1].inputs.costs, before)


@pytest.mark.slow
def test_learn_false_neither_uses_nor_writes_anything(cache_directory):
    params = tiny_llama(3, num_layers=3)
    runs = [jlade.generate(params, [1, 2, 3], max_new_tokens=40, learn=False) for _ in range(3)]
    assert not (cache_directory / "jlade" / "costs").exists()
    for run in runs:
        np.testing.assert_array_equal(run.accepted, runs[0].accepted)
    for _ in range(3):
        jlade.generate(params, [1, 2, 3], max_new_tokens=40)
    inputs, _ = jlade.prepare(params, [1, 2, 3], max_new_tokens=40, learn=False)
    assert inputs.costs == pytest.approx([1.77, 1.42, 1.0], abs=0.05), "the estimate for a CPU"
    with pytest.raises(TypeError, match="learn must be True or False, got 1"):
        jlade.generate(params, [1], learn=1)


@pytest.mark.slow
def test_a_directory_that_cannot_be_written_to_stops_no_call(cache_directory):
    cache_directory.mkdir(exist_ok=True)
    (cache_directory / "jlade").write_text("a file")
    params = tiny_llama(3, num_layers=3)
    for _ in range(4):
        jlade.generate(params, [1, 2, 3], max_new_tokens=40)
    assert find(params).num_calls == 2


def test_tuned_step_times_are_the_prior_and_a_tuned_full_width_stays():
    params = tiny_llama(3, num_layers=3)
    key, setting = choice.key(params, params.decoder, 1), jlade.LookaheadConfig.tree(7, relative_step_time=1.5)
    facts = {"step_times": {1: 1.0, 8: 1.5}, "trials": []}
    choice.save(key, setting, facts)
    inputs, _ = jlade.prepare(params, [1, 2], max_new_tokens=4)
    assert inputs.costs == pytest.approx(np.interp([8, 4, 1], [1, 8], [1.0, 1.5]))
    choice.save(key, jlade.LookaheadConfig.tree(7), facts)
    choice.forget()
    assert jlade.prepare(params, [1, 2], max_new_tokens=4)[0].costs is None
