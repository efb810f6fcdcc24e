import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlade.config import LookaheadConfig, NGramConfig
from jlade.drafts.tree import NEVER, Tree, TreeShape
from jlade.lookahead import adaptive

COSTS = (2.971, 1.937, 1.0)  # no mean of some whole numbers


def levels_of(accepted, costs=COSTS):
    """The level of each step, found without arrays: a list of the steps at the present level, judged from its end."""
    level, seen, wait, levels = 0, [], adaptive.FIRST_WAIT, []
    for tokens in accepted:
        levels.append(level)
        seen.append(tokens)
        mean = 0.0
        for i, x in enumerate(seen):
            mean += (x - mean) / min(i + 1, adaptive.MEMORY)
        if level < len(costs) - 1 and len(seen) >= adaptive.TRIAL and mean <= costs[level]:
            level, seen = level + 1, []
        elif level > 0 and len(seen) >= wait:
            level, seen, wait = 0, [], min(2 * wait, adaptive.MAX_WAIT)
        elif level == 0 and len(seen) >= adaptive.MEMORY and mean > costs[0]:
            wait = adaptive.FIRST_WAIT
    return levels


@jax.jit
def run(accepted, costs):
    def step(pace, tokens):
        return adaptive.update(pace, tokens, costs), pace.level

    return jax.lax.scan(step, adaptive.start(costs), accepted)[1]


@pytest.mark.parametrize("seed", range(6))
def test_levels_equal_those_found_without_arrays(seed):
    rng = np.random.default_rng(seed)
    rates = np.repeat(rng.choice([1.0, 1.5, 2.5, 3.5, 4.5], 20), rng.integers(20, 200, 20))
    accepted = np.maximum(1, rng.poisson(rates)).astype(np.float32)
    assert run(jnp.asarray(accepted), jnp.array(COSTS)).tolist() == levels_of(accepted.tolist())


def test_costs_grow_with_the_block_from_a_plain_step_to_the_full_width():
    lookahead = LookaheadConfig.paper(3, 4, 2, relative_step_time=2.4)
    settings = adaptive.settings(lookahead)
    assert [(setting.window_size, setting.ngrams.guess_set_size) for setting in settings] == [(3, 2), (0, 1), (0, 0)]
    assert adaptive.costs(lookahead).tolist() == pytest.approx([2.4, 1.3, 1.0])  # 15, 4 and 1 tokens
    assert adaptive.costs(lookahead, {1: 2.0, 2: 3.0, 16: 10.0}).tolist() == pytest.approx([4.75, 2.0, 1.0])
    assert adaptive.costs(dataclasses.replace(lookahead, relative_step_time=None)) is None
    assert len(adaptive.settings(LookaheadConfig.paper(0, 3, 1))) == 2, "a setting that is its own narrower level"


def test_a_tree_is_as_wide_as_its_forecast_says():
    lookahead = LookaheadConfig.tree(15, sources=("suffix",), relative_step_time=2.5)
    settings = adaptive.settings(lookahead)
    assert [setting.num_drafted for setting in settings] == [15, 7, 3, 0]
    assert [setting.block_size for setting in settings] == [16, 8, 4, 1]
    costs = adaptive.costs(lookahead)
    assert costs.tolist() == pytest.approx([2.5, 1.7, 1.3, 1.0])
    for likely, best in (([0.9] * 15, 15), ([0.5] * 7, 7), ([0.5, 0.4, 0.3], 3), ([0.05] * 15, 0)):
        probabilities = likely + [0] * (15 - len(likely))
        tree = Tree(
            tokens=jnp.zeros(15, jnp.int32),
            form=TreeShape.chains(1, 15),
            sources=jnp.zeros(15, jnp.int32),
            costs=jnp.array([NEVER if p == 0 else round(-256 * np.log2(p)) for p in probabilities], jnp.int32),
        )
        expected = adaptive.forecast(tree, settings)
        assert expected.tolist() == pytest.approx([1 + sum(probabilities[:size]) for size in (15, 7, 3, 0)], abs=0.01)
        pace = adaptive.choose(adaptive.start(costs), jnp.float32(1), expected, costs)
        assert settings[int(pace.level)].num_drafted == best
        assert pace.num_steps.tolist() == [1, 0, 0, 0], "the step just made had the full width"
    for size, narrower in ((63, [15, 3, 0]), (119, [15, 3, 0]), (7, [3, 0]), (4, [3, 0]), (3, [0]), (1, [0])):
        settings = adaptive.settings(LookaheadConfig.tree(size))
        assert [setting.num_drafted for setting in settings] == [size, *narrower]
    with_window = LookaheadConfig.tree(20, ngrams=NGramConfig(3, 3, 2))
    assert [(setting.window_size, setting.num_drafted) for setting in adaptive.settings(with_window)] == [
        (3, 20),
        (0, 7),
        (0, 0),
    ]


def test_a_text_that_pays_stays_wide_and_one_that_does_not_is_tried_ever_more_rarely():
    assert set(run(jnp.full(500, 3.5), jnp.array(COSTS)).tolist()) == {0}
    levels = np.asarray(run(jnp.full(20_000, 1.0), jnp.array(COSTS)))
    assert np.mean(levels[-10_000:] == 0) < 0.04
    assert (levels[-10_000:] == 0).any()


def test_a_chain_has_narrower_levels_too():
    settings = adaptive.settings(LookaheadConfig.jacobi(31, relative_step_time=2.0))
    assert [setting.num_drafted for setting in settings] == [31, 15, 3, 0]


def test_a_text_that_pays_again_is_found():
    levels = np.asarray(run(jnp.concatenate([jnp.full(300, 1.0), jnp.full(1000, 3.5)]), jnp.array(COSTS)))
    assert (levels[-100:] == 0).all()


def test_plain_steps_rest_for_longer_while_forecasts_advise_them():
    costs = jnp.array([2.0, 1.5, 1.0])

    def forecast(pace, best):
        return adaptive.choose(pace, 1 + pace.expected, jnp.where(jnp.arange(3) == best, 9.0, 1.0), costs)

    pace, rested = adaptive.start(costs), []
    for best in (2, 2, 2, 2, 2, 2, 2, 2, 1, 2, 2, 0):
        pace = forecast(pace, best)
        rested.append(0)
        while pace.level == len(costs):
            pace = adaptive.rest(pace)
            rested[-1] += 1
    assert rested == [0, 1, 2, 4, 8, 16, 16, 16, 0, 0, 1, 0]
    assert pace.num_steps.tolist() == [1, 1, 10 + sum(rested)]


def test_the_end_of_all_sequences_promises_nothing():
    costs, nothing = jnp.array([2.0, 1.5, 1.0]), jnp.zeros(3)
    pace = adaptive.choose(adaptive.start(costs), jnp.float32(3), jnp.array([4.0, 2.5, 1.0]), costs)
    assert (int(pace.level), float(pace.expected)) == (0, 3)
    ended = adaptive.choose(pace, jnp.float32(3), nothing, costs)
    assert (float(ended.expected), float(ended.forecast_total), float(ended.accepted_total)) == (0, 3, 2)
    for _ in range(5):
        assert int(ended.level) == 2, "nothing is known of the drafts of the next sequences, so they are looked for"
        ended = adaptive.choose(ended, jnp.float32(1), nothing, costs)
    assert 2.9 < float(ended.forecast_total) < 3


def drafting(ratio, forecasts, costs):
    """The steps with drafts, found without arrays, where `ratio` of the drafted tokens of a forecast are accepted."""
    expected = promised = kept = 0.0
    found = []
    for forecast in forecasts:
        found.append(expected > 0)
        fading = 31 / 32 if expected else 511 / 512
        promised, kept = fading * promised + expected, fading * kept + ratio * expected
        scale = (kept + 4) / (promised + 4)
        scores = [(1 + scale * (each - 1)) / cost for each, cost in zip(forecast, costs, strict=True)]
        expected = forecast[scores.index(max(scores))] - 1
    return found


def test_forecasts_that_promise_too_much_are_scaled_down():
    costs = jnp.array([1.5, 1.25, 1.0])
    forecasts = [(1 + wide, 1 + 0.7 * wide, 1.0) for wide in np.random.default_rng(0).exponential(1.2, 4000).tolist()]

    @jax.jit
    def run(ratio, forecasts):
        def step(pace, forecast):
            return adaptive.choose(pace, 1 + ratio * pace.expected, forecast, costs), pace.expected > 0

        return jax.lax.scan(step, adaptive.start(costs), forecasts)[1]

    shares = []
    for ratio in (0.05, 0.4, 1.0, 1.3):
        found = np.array(run(jnp.float32(ratio), jnp.array(forecasts, jnp.float32)))
        assert np.mean(found == drafting(ratio, forecasts, costs.tolist())) > 0.99, "but for rounding"
        shares.append(found.mean())
    believed = np.mean([max(each[0] / 1.5, each[1] / 1.25) > 1 for each in forecasts])
    assert shares[2] == pytest.approx(believed, abs=0.001)
    assert shares[0] < 0.1 < shares[1] < shares[2] < shares[3]
