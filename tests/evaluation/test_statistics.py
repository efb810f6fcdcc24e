"""Intervals and fits against NumPy, another fit of SciPy, the paper's constants, and the formulas in plain Python."""

import math

import numpy as np
import pytest
import scipy.optimize

from jlade.evaluation import statistics

SIZES = [(w, n) for w in (1, 3, 5, 10, 15, 30) for n in (2, 3, 5, 7)]


def compression(alpha, f, w, n):
    """Equations 5 and 7 of arXiv 2402.02057."""
    expected = n - sum((1 - alpha**i) ** w for i in range(1, n))
    return (f - 1 + expected) / f


def test_interval_has_the_percentiles_of_resampled_means():
    rng = np.random.default_rng(3)
    values = rng.lognormal(size=40)
    means = rng.choice(values, size=(20_000, 40)).mean(axis=1)
    assert statistics.interval(values) == pytest.approx(np.percentile(means, [2.5, 97.5]), rel=0.02)
    assert statistics.interval(values) == statistics.interval(list(values)) != statistics.interval(values, seed=1)


def test_intervals_contain_the_mean_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    intervals = [statistics.interval(rng.normal(loc=2.0, size=50), seed) for seed in range(100)]
    assert 87 <= sum(low < 2.0 < high for low, high in intervals) <= 99


def test_interval_of_one_value_and_of_equal_ones():
    assert statistics.interval([1.7]) == (1.7, 1.7)
    assert statistics.interval([2.0, 2.0, 2.0]) == (2.0, 2.0)


def test_summary():
    values = [1.0, 1.2, 1.3, 2.5]
    assert statistics.summary(values) == pytest.approx((1.5, 1.25, *statistics.interval(values)))


def test_expected_tokens():
    pairs = np.array(SIZES)
    got = statistics.expected_tokens(0.425, *pairs.T)
    assert got == pytest.approx([compression(0.425, 1, w, n) for w, n in SIZES])
    # With b = 1 it is Equation 4.
    one = statistics.expected_tokens(0.3, np.array([1]), np.array([6]))
    assert one == pytest.approx([(1 - 0.3**6) / (1 - 0.3)])


@pytest.mark.parametrize(("alpha", "f"), [(0.425, 3.106), (0.05, 1.0), (0.9, 20.0), (0.7, 1.5)])
def test_fit_recovers_known_constants(alpha, f):
    fit = statistics.fit_scaling(SIZES, [compression(alpha, f, *size) for size in SIZES])
    assert fit == pytest.approx((alpha, f, 1.0), rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_fit_is_that_of_scipy(seed):
    rng = np.random.default_rng(seed)
    measured = [compression(0.425, 3.106, *size) + rng.normal(scale=0.1) for size in SIZES]
    measured = np.maximum(measured, 1)

    def residuals(constants):
        return [compression(*constants, *size) - s for size, s in zip(SIZES, measured, strict=True)]

    starts = [(a, f) for a in (0.1, 0.4, 0.8) for f in (1.5, 4, 10)]
    found = [scipy.optimize.least_squares(residuals, start, bounds=([0, 1], [1, np.inf])) for start in starts]
    best = min(found, key=lambda one: one.cost)
    fit = statistics.fit_scaling(SIZES, measured)
    assert fit[:2] == pytest.approx(best.x, rel=1e-3)
    assert fit.r2 == pytest.approx(1 - 2 * best.cost / (np.var(measured) * len(measured)), rel=1e-6)


def test_fit_at_the_bounds():
    assert statistics.fit_scaling([(1, 2), (5, 3)], [2.0, 3.0]) == pytest.approx((1.0, 1.0, 1.0))
    # More than all tokens of a speculation in every step: f stays at 1.
    assert statistics.fit_scaling([(1, 2), (5, 3)], [4.0, 5.0])[:2] == pytest.approx((1.0, 1.0))
    alpha, f, r2 = statistics.fit_scaling([(1, 2), (5, 3)], [1.0, 1.0])
    assert (alpha, f) == (0.0, 1.0)
    assert math.isnan(r2)


def test_fit_log():
    windows = [1, 2, 4, 8, 15]
    values = [1.3, 1.5, 1.8, 1.9, 2.2]
    r2 = np.corrcoef(np.log2(windows), values)[0, 1] ** 2
    assert statistics.fit_log(windows, values) == pytest.approx((*np.polyfit(np.log2(windows), values, 1), r2))
    assert statistics.fit_log([1, 4], [1.0, 2.0]) == pytest.approx((0.5, 1.0, 1.0))
    assert math.isnan(statistics.fit_log([1, 4], [2.0, 2.0]).r2)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (statistics.interval, ([],), r"values must be one or more finite numbers, got \[\]"),
        (statistics.interval, ([1.0, math.nan],), "values must be one or more finite numbers, got .*nan"),
        (statistics.summary, ([[1.0]],), "values must be one or more finite numbers"),
        (statistics.fit_scaling, ([], []), "sizes must be two or more different pairs"),
        (statistics.fit_scaling, ([(5, 4), (5, 4)], [1.5, 1.6]), "sizes must be two or more different pairs"),
        (statistics.fit_scaling, ([(0, 4), (5, 4)], [1.5, 1.6]), r"pairs of W >= 1 and N >= 2, got \[\(0, 4\)"),
        (statistics.fit_scaling, ([(1, 4), (5, 1)], [1.5, 1.6]), "pairs of W >= 1 and N >= 2"),
        (statistics.fit_scaling, ([(1, 4), (5, 4)], [1.5]), "compressions must be 2 finite numbers"),
        (statistics.fit_scaling, ([(1, 4), (5, 4)], [1.5, 0.9]), "compressions must be at least 1, as every step"),
        (statistics.fit_log, ([3, 3], [1.5, 1.6]), "windows must have two or more different values"),
        (statistics.fit_log, ([0, 3], [1.5, 1.6]), r"each at least 1, got \[0, 3\]"),
        (statistics.fit_log, ([1, 3], [1.5, math.inf]), "compressions must be 2 finite numbers, got .*inf"),
    ],
)
def test_bad_arguments(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


@pytest.mark.parametrize(("fewer", "more"), [(0, 0), (0, 5), (3, 4), (10, 2)])
def test_the_sign_test_counts_tosses_of_coins(fewer, more):
    number = fewer + more
    expected = sum(math.comb(number, k) for k in range(more, number + 1)) / 2**number
    assert statistics.sign_test(fewer, more) == pytest.approx(expected)
