import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlade.config import LookaheadConfig, NGramConfig
from jlade.drafts.tree import NEVER, Tree, TreeShape
from jlade.lookahead import adaptive


def test_costs_grow_with_the_block_from_a_plain_step_to_the_full_width():
    lookahead = LookaheadConfig.tree(15, relative_step_time=2.5)
    assert adaptive.costs(lookahead).tolist() == pytest.approx([2.5, 1.7, 1.3, 1.0])  # 16, 8, 4 and 1 tokens
    assert adaptive.costs(lookahead, {1: 2.0, 2: 3.0, 16: 10.0}).tolist() == pytest.approx([5, 3, 2, 1])
    assert adaptive.costs(LookaheadConfig.tree(15)) is None


@pytest.mark.parametrize(
    ("lookahead", "sizes"),
    [
        *((LookaheadConfig.tree(size), [size, 15, 3, 0]) for size in (63, 119)),
        *((LookaheadConfig.tree(size), [size, 3, 0]) for size in (7, 4)),
        *((LookaheadConfig.tree(size), [size, 0]) for size in (3, 1)),
        (LookaheadConfig.jacobi(31), [31, 15, 3, 0]),
        (LookaheadConfig.tree(7, ngrams=NGramConfig(0, 3, 2)), [7, 3, 0]),
    ],
    ids=str,
)
def test_levels_are_narrower_trees_and_plain_steps(lookahead, sizes):
    assert [setting.num_drafted for setting in adaptive.settings(lookahead)] == sizes


def test_a_tree_is_as_wide_as_its_forecast_says():
    lookahead = LookaheadConfig.tree(15, sources=("suffix",), relative_step_time=2.5)
    settings = adaptive.settings(lookahead)
    costs = adaptive.costs(lookahead)
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
