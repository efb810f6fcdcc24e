"""Measures of results that are made by hand."""

import math

import pytest

from jlade.evaluation import measures
from tests.evaluation.made import answer, result

# 6 tokens in 3 steps and 4 tokens in 4 steps; a step takes 0.1 s.
FAST, SLOW = answer([3, 2, 1]), answer([1, 1, 1, 1])


def test_compression_and_speed_are_of_all_answers_together():
    results = [result("15,5,15", FAST, SLOW), result("15,5,15", SLOW, question="2")]
    assert measures.answers(results) == [FAST, SLOW, SLOW]
    assert measures.compression(results) == pytest.approx(14 / 11)
    assert measures.speed(results) == pytest.approx(14 / 1.1)


def test_speed_counts_the_tokens_of_the_timed_steps():
    of_transformers = answer([1] * 5, timed_tokens=4, seconds=0.4)
    assert measures.speed([result("transformers", of_transformers)]) == pytest.approx(10)
    assert measures.compression([result("transformers", of_transformers)]) == 1


def test_speedups_are_of_each_question():
    results = [result("15,5,15", FAST), result("15,5,15", SLOW, question="2")]
    baselines = [result("plain", SLOW), result("plain", answer([1] * 4, seconds=0.2), question="2")]
    found = measures.speedup(results, baselines)
    assert (found.mean, found.low, found.high) == pytest.approx((1.25, 0.5, 2.0))
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        measures.speedup(results, baselines[:1])


def test_an_answer_of_one_token_has_no_speed():
    letter, of_transformers = answer([1]), answer([1], timed_tokens=0, seconds=0.0)
    assert measures.speed([result("plain", SLOW, letter)]) == measures.speed([result("plain", SLOW)])
    results = [result("transformers", of_transformers), result("transformers", SLOW, question="2")]
    baselines = [result("plain", letter), result("plain", SLOW, question="2")]
    assert measures.speedup(results, baselines) == (1.0, 1.0, 1.0, 1.0)
    assert math.isnan(measures.speed(results[:1]))
    none = measures.speedup(results[:1], baselines[:1])
    assert all(map(math.isnan, none))
    assert none.interval is None


def test_first_token_is_the_median():
    times = [0.5, 9.0, 1.0]
    results = [result("plain", *(answer([1], first_seconds=seconds) for seconds in times))]
    assert measures.first_token(results) == 1.0


def test_identical_is_a_share_of_the_answers():
    different = (None, (3, 0.01), None)
    results = [result("15,5,15", FAST, FAST, FAST, differences=different), result("15,5,15", FAST)]
    assert measures.identical(results) == 0.75


def test_accepted_shares_are_of_the_steps():
    assert measures.accepted_shares([result("15,5,15", FAST, SLOW)]) == pytest.approx([5 / 7, 1 / 7, 1 / 7])
    assert measures.accepted_shares([result("15,5,15", answer([3, 3]))]) == [0, 0, 1]


def test_hit_rates_are_means_over_time_until_half_of_the_answers_have_ended():
    def candidates(*numbers):
        return answer([1] * len(numbers), numbers)

    results = [result("15,5,15", candidates(0, 2, 3, 0, 1, 1), candidates(0, 0, 1), candidates(4))]
    assert measures.hit_rates(results, 1) == [(1, pytest.approx(1 / 3)), (2, 0.5), (3, 1.0)]
    assert measures.hit_rates(results, 2) == [(2, pytest.approx(2 / 5)), (4, pytest.approx(2 / 3))]
    assert measures.hit_rates([], 2) == measures.hit_rates([result("transformers", answer([]))], 2) == []


def test_methods_are_compared_on_the_questions_that_all_of_them_answered():
    def of(method, question, dataset="code", **changes):
        return result(method, FAST, question=question, dataset=dataset, **changes)

    results = [
        of("plain", "1"),
        of("15,5,15", "1"),
        of("auto", "1"),
        of("plain", "2"),
        of("plain", "1", dataset="chat"),
        of("15,5,15", "1", dataset="chat"),
        of("15,5,15", "3"),
        of("plain", "4"),
        of("15,5,15", "4", error="the prompt is too long"),
    ]
    found = measures.by_method(results, ["15,5,15", "plain"])
    assert list(found) == ["15,5,15", "plain"]
    keys = [("code", "1"), ("chat", "1")]
    assert [[each.key[:2] for each in of_method] for of_method in found.values()] == [keys, keys]
    assert {each.method for each in found["plain"]} == {"plain"}
    assert measures.by_method(results, ["plain", "jacobi"]) == {"plain": [], "jacobi": []}
