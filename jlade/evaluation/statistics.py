"""Statistics of evaluations: confidence intervals, and fits of the scaling law of arXiv 2402.02057."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Summary(NamedTuple):
    """Speedups of several questions."""

    mean: float
    median: float
    low: float  # the 95% interval of the mean
    high: float

    @property
    def interval(self) -> str | None:
        """The 95% interval in words, None without numbers."""
        return None if math.isnan(self.mean) else f"{self.low:.2f} to {self.high:.2f}"


class ScalingFit(NamedTuple):
    """The scaling law of Section 4.2 of the paper, fitted."""

    alpha: float  # the mean rate at which speculated tokens are accepted, 0 to 1
    f: float  # one step in f has a good speculation; at least 1
    r2: float  # the explained share of the variance; nan if all compressions are equal

    def compression(self, window_size: int, ngram_size: int) -> float:
        """Returns the tokens per step of Equations 5 and 7 at W = G and N."""
        (expected,) = expected_tokens(self.alpha, np.array([window_size]), np.array([ngram_size]))
        return (self.f - 1 + float(expected)) / self.f


class LogFit(NamedTuple):
    """The line S = slope * log2(W) + intercept."""

    slope: float
    intercept: float
    r2: float  # the explained share of the variance; nan if all compressions are equal


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Returns the 95% percentile bootstrap interval of the mean; for one value, that value twice.

    Raises:
      ValueError: if there are no values, or one is not finite.
    """
    from scipy import stats  # takes a second

    array = _check("values", values)
    if len(array) == 1:
        return float(array[0]), float(array[0])
    rng = np.random.default_rng(seed)  # `batch` bounds the memory
    found = stats.bootstrap((array,), np.mean, n_resamples=10_000, batch=100, method="percentile", rng=rng)
    low, high = found.confidence_interval
    return float(low), float(high)


def summary(speedups: Sequence[float]) -> Summary:
    """Returns mean, median and the 95% interval of the mean; see `interval`."""
    low, high = interval(speedups)
    return Summary(float(np.mean(speedups)), float(np.median(speedups)), low, high)


def sign_test(fewer: int, more: int) -> float:
    """Returns the probability that at least `more` of `fewer + more` fair coins show heads, a one-sided sign test."""
    from scipy import stats

    return float(stats.binom.sf(more - 1, fewer + more, 0.5))


def expected_tokens(alpha: float | np.ndarray, window_size: np.ndarray, ngram_size: np.ndarray) -> np.ndarray:
    """Returns the expected number of tokens that a good speculation accepts, Equation 5, with b = W = G, gamma = N - 1.

    The acceptance rate `alpha` broadcasts against the sizes W, at least 1, and N, at least 2.
    """
    alpha, window_size, ngram_size = np.asarray(alpha)[..., None], window_size[..., None], ngram_size[..., None]
    i = np.arange(1, ngram_size.max())
    rejected = (1 - alpha**i) ** window_size  # by all b speculations, at token i or before
    return ngram_size[..., 0] - np.where(i < ngram_size, rejected, 0).sum(axis=-1)


def fit_scaling(sizes: Sequence[tuple[int, int]], compressions: Sequence[float]) -> ScalingFit:
    """Returns the least-squares fit of alpha and f in Equations 5 and 7 of the paper: S = (f - 1 + E) / f.

    For a given alpha, S - 1 = (E - 1) / f is linear in 1/f, so only alpha is searched, on ever finer grids.

    Args:
      sizes: W = G and N of each setting; at least two different ones, as one fits many pairs of alpha and f.
      compressions: tokens per step S of each setting, at least 1.

    Raises:
      ValueError: if an argument breaks these rules.
    """
    pairs = np.asarray(list(sizes), np.int64).reshape(-1, 2)
    if len(np.unique(pairs, axis=0)) < 2 or (pairs < (1, 2)).any():
        raise ValueError(f"sizes must be two or more different pairs of W >= 1 and N >= 2, got {list(sizes)}")
    gains = _check("compressions", compressions, len(pairs)) - 1
    if (gains < 0).any():
        raise ValueError(f"compressions must be at least 1, as every step accepts a token, got {list(compressions)}")

    def fit(alphas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the best 1/f for each alpha, and the sum of its squared residuals."""
        regressor = expected_tokens(alphas[:, None], *pairs.T) - 1
        square = (regressor**2).sum(axis=1)
        slope = np.divide(regressor @ gains, square, out=np.ones_like(alphas), where=square > 0).clip(0, 1)
        return slope, ((gains - slope[:, None] * regressor) ** 2).sum(axis=1)

    low, high = 0.0, 1.0
    for _ in range(6):
        alphas = np.linspace(low, high, 1001)
        slopes, errors = fit(alphas)
        best = int(errors.argmin())
        low, high = alphas[max(best - 2, 0)], alphas[min(best + 2, 1000)]
    total = ((gains - gains.mean()) ** 2).sum()
    r2 = float(1 - errors[best] / total) if np.ptp(gains) else math.nan
    return ScalingFit(float(alphas[best]), float(1 / slopes[best]), r2)


def fit_log(windows: Sequence[int], compressions: Sequence[float]) -> LogFit:
    """Returns the least-squares line of tokens per step against log2 of the window size W.

    Raises:
      ValueError: if there are not two different windows, one is less than 1, or a compression is missing or not finite.
    """
    array = np.asarray(windows)
    if len(np.unique(array)) < 2 or (array < 1).any():
        raise ValueError(f"windows must have two or more different values, each at least 1, got {list(windows)}")
    values = _check("compressions", compressions, len(array))
    from scipy import stats

    line = stats.linregress(np.log2(array), values)
    return LogFit(float(line.slope), float(line.intercept), float(line.rvalue**2) if np.ptp(values) else math.nan)


def _check(name: str, values: Sequence[float], length: int | None = None) -> np.ndarray:
    """Returns finite values as an array [length], or of any length but 0."""
    array = np.asarray(values, np.float64)
    if array.shape != (length or max(array.size, 1),) or not np.isfinite(array).all():
        raise ValueError(f"{name} must be {length or 'one or more'} finite numbers, got {list(values)}")
    return array
