"""Measures of results: tokens per step, speed, time to the first token, pool hits."""

import collections
import math
from collections.abc import Iterable, Sequence

import numpy as np

from jlade.evaluation import statistics
from jlade.evaluation.answers import Answer
from jlade.evaluation.runs import Result


def by_method(results: Iterable[Result], methods: Iterable[str]) -> dict[str, list[Result]]:
    """Returns the results of some methods: those to the questions that all of them answered, in the same order."""
    names = list(methods)
    by_question: dict[tuple[str, str], dict[str, Result]] = collections.defaultdict(dict)
    for result in results:
        if result.method in names and result.error is None:
            by_question[result.dataset, result.question][result.method] = result
    complete = [of_question for of_question in by_question.values() if len(of_question) == len(set(names))]
    return {name: [of_question[name] for of_question in complete] for name in names}


def of_dataset(results: Iterable[Result], dataset: str) -> list[Result]:
    """Returns the results of a data set."""
    return [result for result in results if result.dataset == dataset]


def answers(results: Iterable[Result]) -> list[Answer]:
    """Returns the answers to all turns."""
    return [answer for result in results for answer in result.answers]


def compression(results: Iterable[Result]) -> float:
    """Returns the tokens per step, over all answers (S of arXiv 2402.02057, Equation 6)."""
    all_answers = answers(results)
    return sum(len(answer.tokens) for answer in all_answers) / sum(answer.steps for answer in all_answers)


def speed(results: Iterable[Result]) -> float:
    """Returns the tokens per second without prefill, over all answers of more than one token; NaN for none of these.

    The first token of some methods comes with prefill. An answer of one token, such as a choice, has no speed.
    """
    timed = [answer for answer in answers(results) if len(answer.tokens) > 1]
    return sum(each.timed_tokens for each in timed) / sum(each.seconds for each in timed) if timed else math.nan


def speedup(results: Sequence[Result], baselines: Sequence[Result]) -> statistics.Summary:
    """Returns mean, median and interval of each question's speed relative to the baseline; NaN if no answer has one."""
    ratios = [speed([one]) / speed([other]) for one, other in zip(results, baselines, strict=True)]
    ratios = [ratio for ratio in ratios if not math.isnan(ratio)]
    return statistics.summary(ratios) if ratios else statistics.Summary(*[math.nan] * 4)


def first_token(results: Iterable[Result]) -> float:
    """Returns the median of the seconds until the first tokens of an answer."""
    return float(np.median([answer.first_seconds for answer in answers(results)]))


def identical(results: Sequence[Result]) -> float:
    """Returns the share of the answers that equal those of plain decoding in float32."""
    differences = [difference for result in results for difference in result.differences]
    return differences.count(None) / len(differences)


def same(results: Sequence[Result], baselines: Sequence[Result]) -> float:
    """Returns the share of the answers whose tokens are those of the baseline."""
    equal = [one.tokens == other.tokens for one, other in zip(answers(results), answers(baselines), strict=True)]
    return sum(equal) / len(equal)


def memory(results: Sequence[Result], baselines: Sequence[Result]) -> float | None:
    """Returns the mean bytes of a sequence beyond those of plain decoding by jlade; None in runs without them."""
    sizes = zip(*([each.state_bytes for each in answers(part)] for part in (results, baselines)), strict=True)
    differences = [one - other for one, other in sizes if one is not None and other is not None]
    return sum(differences) / len(differences) if differences else None


def accepted_shares(results: Iterable[Result]) -> list[float]:
    """Returns the share of the steps that accepted 1, 2, ... tokens."""
    counts = np.bincount([number for answer in answers(results) for number in answer.accepted])[1:]
    return (counts / counts.sum()).tolist()


def hit_rates(results: Iterable[Result], size: int) -> list[tuple[int, float]]:
    """Returns how often a step had a draft, over time.

    Args:
      results: of one method.
      size: steps that are taken together.

    Returns:
      Pairs of the last step of each group, from 1, and the share of its steps, over all answers, with a draft.
      Groups that fewer than half of the answers reach are left out.
    """
    drafted = [answer.num_drafted for answer in answers(results)]
    rates = []
    for begin in range(0, max(map(len, drafted), default=0), size):
        parts = [hits[begin : begin + size] for hits in drafted if len(hits) > begin]
        if 2 * len(parts) < len(drafted):
            break
        steps = [number > 0 for part in parts for number in part]
        rates.append((begin + size, sum(steps) / len(steps)))
    return rates
