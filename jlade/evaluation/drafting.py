"""Drafts and guesses: hits and growth of the pool, the convergence of Jacobi decoding, and a guide's formulas."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from jlade.config import LookaheadConfig
from jlade.evaluation import measures, report
from jlade.evaluation.answers import Answer
from jlade.evaluation.comparison import Results, by_method
from jlade.evaluation.methods import Method, parse
from jlade.evaluation.report import Figure, Row, Table
from jlade.evaluation.runs import Result, Run

HIT_STEPS = 8  # steps of a point in the figure of hit rates
CHAINS = (4, 8, 16)  # guesses of Jacobi decoding
ITERATIONS = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # columns of the table of convergence


def growth_table(run: Run, results: Results) -> Table:
    """Returns the n-grams in the pool while texts grow, and how often a step had a draft."""
    (name,) = [name for name in results if parse(name).shows_growth]
    all_answers = measures.answers(results[name])
    longest = max(len(answer.tokens) for answer in all_answers)
    rows: list[Row] = []
    for low, high in itertools.pairwise([0, *(n for n in (1, 16, 32, 64, 128, 256, 512) if n < longest), longest]):
        growths = [[counts for n, *counts in answer.growth if low < n <= high] for answer in all_answers]
        last = [growth[-1] for growth in growths if growth]
        if last:
            steps = [number for answer in all_answers for number in _num_drafted(answer, low, high)]
            share = sum(number > 0 for number in steps) / max(1, len(steps))
            rows.append((f"{low} to {high}", *np.mean(last, axis=0).tolist(), share, len(last)))
    columns = {"tokens of the text": "", "n-grams": ".0f", "keys": ".0f", "steps with a draft": ".0%", "answers": "d"}
    setting = dataclasses.replace(parse(name), shows_growth=False).label
    note = f"At {setting}. The pool begins with the n-grams of the prompt."
    return Table("growth", "Growth of the pool", columns, rows, note)


def _num_drafted(answer: Answer, low: int, high: int) -> Iterable[int]:
    """Returns the drafted tokens of the steps that began with `low` to `high` tokens."""
    begins = itertools.accumulate(answer.accepted, initial=0)
    return [number for begin, number in zip(begins, answer.num_drafted, strict=False) if low <= begin < high]


def hits_figure(run: Run, results: Results) -> Figure:
    """Returns the share of steps with a draft over time, with cold and warm pools."""
    series = {
        method.label: [(step, 100 * rate) for step, rate in measures.hit_rates(own, HIT_STEPS)]
        for method, own, _ in by_method(results)
        if not method.shows_growth and isinstance(method.setting, LookaheadConfig) and "pool" in method.setting.reach
    }
    series = {name: points for name, points in series.items() if points}
    draw = report.lines(series, "step of the text", "steps with a draft, %")
    note = (
        f"Means over {HIT_STEPS} steps. A cold pool starts empty for each prompt, a warm one with the n-grams of the "
        "prompts before."
    )
    return Figure("hits", "Hits of the pool over time", draw, note)


def hits_table(run: Run, results: Results) -> Table | None:
    """Returns how often a step finds a match, by kind of text, and how much of it is accepted; None without matches.

    The terms are those of a guide to lookahead decoding. The hit rate h is the share of lookups, one for each step,
    that find n-grams of the current token in the pool, whether the model accepts them or not; a tree also looks up its
    other sources. The match length L is the mean number of tokens of a step that accepts a match. The guide estimates
    1 + h (L - 1) tokens per step, as if every match were accepted.
    """
    rows: list[Row] = []
    for method, own, _ in by_method(results):
        for task, category in dict.fromkeys((one.task, one.category) for one in own):
            found = measures.answers(one for one in own if (one.task, one.category) == (task, category))
            steps = [number for answer in found for number in answer.accepted]
            matches = [number > 0 for answer in found for number in answer.num_drafted]
            if any(matches):
                accepted = [number for number in steps if number > 1]
                rate, length = sum(matches) / len(matches), sum(accepted) / len(accepted) if accepted else math.nan
                formula = length, 1 + rate * (length - 1)
                kind = f"{task}: {category}" if category else task
                rows.append((method.label, kind, rate, len(accepted) / len(steps), *formula, sum(steps) / len(steps)))
    columns = {"method": "", "kind of text": "", "hits h": ".0%", "accepted": ".0%"}
    columns |= {"match length L": ".2f", "1 + h(L-1)": ".2f", "tokens/step": ".2f"}
    note = (
        "A hit is a step whose lookup finds a draft, in the pool or in another source of a tree. Accepted is the share "
        "of steps that accept tokens of a draft, and L the mean number of tokens that these give, with the model's "
        "own. 1 + h(L-1) is a guide's estimate of tokens per step, as if every hit were accepted. The guide names "
        "hit rates of 60 to 70% for code, 70 to 80% for templates and forms, 50 to 60% for technical documentation and "
        "30 to 40% for creative writing."
    )
    return Table("hits-by-kind", "Hits by kind of text", columns, rows, note) if rows else None


def jacobi_methods() -> list[Method]:
    """Returns Jacobi decoding with chains of several lengths."""
    return [Method(LookaheadConfig.jacobi(size)) for size in CHAINS]


def jacobi_table(run: Run, results: Results) -> Table:
    """Returns the steps and the speed of Jacobi decoding, beside the speedup that its convergence would allow.

    The latter is a guide's formula W/(K(1 + beta)). K and beta are missing where all answers are too short for them.
    """
    rows: list[Row] = []
    for method, size, own in _chains(results):
        converged = [len(each) for each in _converged(own, size)]
        iterations = sum(converged) / len(converged) if converged else math.nan
        compression = measures.compression(own)
        speedup = measures.speed(own) / measures.speed(results[str(Method())])
        overhead = compression / speedup  # 1 + beta, the time of a step in plain ones
        rows.append((method.label, compression, iterations, overhead - 1, size / iterations / overhead, speedup))
    columns = {"method": "", "tokens/step": ".2f", "iterations K": ".1f", "overhead beta": ".0%"}
    columns |= {"W/(K(1 + beta))": ".2f x", "speedup": ".2f x"}
    note = (
        "K is the mean number of iterations until the first W guesses of a text have converged; beta is the time of a "
        "step beyond that of a plain one. The paper reports that Jacobi decoding hardly reduces the number of steps."
    )
    return Table("jacobi", "Jacobi decoding (Algorithm 1 of the paper)", columns, rows, note)


def convergence_table(run: Run, results: Results) -> Table | None:
    """Returns the share of a chain's guesses that have converged after each number of iterations.

    A chain has a row if all its guesses converged in an answer; None without rows.
    """
    rows: list[Row] = []
    for method, size, own in _chains(results):
        if converged := _converged(own, size):
            means = [float(np.mean([each[min(i, len(each)) - 1] for each in converged])) for i in ITERATIONS]
            shares = [mean / size if i <= size else None for i, mean in zip(ITERATIONS, means, strict=True)]
            rows.append((method.label, *shares, float(np.median(list(map(len, converged))))))
    columns = {"converged after iteration": ""} | {str(i): ".0%" for i in ITERATIONS}
    columns |= {"median iterations to all": ".0f"}
    note = "The first guesses of each answer, from a random start. Without any gain, iteration i converges guess i."
    return Table("convergence", "Guesses that have converged", columns, rows, note) if rows else None


def _chains(results: Results) -> Iterator[tuple[Method, int, list[Result]]]:
    """Yields the methods of Jacobi decoding, the lengths of their chains and their results."""
    for method, own, _ in by_method(results):
        if isinstance(method.setting, LookaheadConfig) and method.setting.sources == ("chain",):
            yield method, method.setting.num_drafted, own


def _converged(results: Iterable[Result], size: int) -> list[np.ndarray]:
    """Returns the tokens of the first `size` that have converged after each iteration, for each answer long enough."""
    found = []
    for answer in measures.answers(results):
        converged = np.minimum(np.cumsum(answer.accepted), size)
        if converged[-1] == size:
            found.append(converged[: int(np.argmax(converged == size)) + 1])
    return found
