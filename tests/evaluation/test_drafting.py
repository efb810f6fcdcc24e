"""Tables and figures of drafts and guesses, of results made by hand."""

import pytest

from jlade.evaluation import drafting
from tests.evaluation.made import answer, lines_of, result, run


def test_growth():
    """Two texts of 20 tokens; the first begins with a step of 2 tokens."""
    one = answer([2, *[3] * 6], [0, 1, 1, 0, 1, 0, 1], growth=((2, 10, 5), (17, 20, 8), (20, 30, 10)))
    other = answer([1] * 20, [0] * 10 + [4] * 10, growth=((1, 20, 7), (9, 30, 8), (17, 40, 10), (20, 50, 12)))
    name = "15,5,15:growth"
    results = {"15,5,15": [result("15,5,15", one)], name: [result(name, one), result(name, other, question="2")]}
    table = drafting.growth_table(run(), results)
    assert table.texts() == [
        ["0 to 1", "20", "7", "0%", "1"],
        ["1 to 16", "20", "6", "45%", "2"],
        ["16 to 20", "40", "11", "100%", "2"],
    ]
    assert table.note == "At 15, 5, 15. The pool begins with the n-grams of the prompt."


def test_hits_of_cold_and_warm_pools():
    results = {
        "15,5,15": [result("15,5,15", answer([1] * 16, [0] * 8 + [1] * 8))],
        "15,5,15:warm": [result("15,5,15:warm", answer([1] * 16, [0, 1] * 8))],
        "15,5,15:growth": [result("15,5,15:growth", answer([1] * 16, [1] * 16))],
        "plain": [result("plain", answer([1] * 16))],
    }
    assert lines_of(drafting.hits_figure(run(), results)) == {
        "15, 5, 15": [[8, 0], [16, 100]],
        "15, 5, 15, warm pool": [[8, 50], [16, 50]],
    }


def test_hits_are_the_steps_with_a_match_and_the_formula_is_an_estimate():
    """On chat, three of four steps find a match, and two of them accept three tokens: 1 + h (L - 1) is 2.5, not 2."""
    results = {
        "plain": [result("plain", answer([1] * 4))],
        "15,5,15": [
            result("15,5,15", answer([3, 1, 3, 1], [4, 4, 4, 0]), task="chat", category="math"),
            result("15,5,15", answer([2, 1, 1, 1], [8, 0, 0, 4]), task="code", question="2"),
            result("15,5,15", answer([4, 1], [4, 0]), task="code", question="4"),
            result("15,5,15", answer([1, 1], [4, 0]), task="rejected", question="5"),
            result("15,5,15", answer([1, 1], [0, 0]), task="none", question="3"),
        ],
    }
    table = drafting.hits_table(run(), results)
    assert table.texts() == [
        ["15, 5, 15", "chat: math", "75%", "50%", "3.00", "2.50", "2.00"],
        ["15, 5, 15", "code", "50%", "33%", "3.00", "2.00", "1.67"],
        ["15, 5, 15", "rejected", "50%", "0%", "-", "-", "1.00"],
    ]
    assert drafting.hits_table(run(), {"plain": results["plain"]}) is None


def test_jacobi_decoding_converges():
    """Two texts: the first four guesses converge in three and in two steps, which take 1.25 plain ones."""
    results = {
        "plain": [result("plain", answer([1] * 8)), result("plain", answer([1] * 8))],
        "jacobi=4": [
            result("jacobi=4", answer([1, 2, 1, 4], seconds=0.5)),
            result("jacobi=4", answer([2, 3, 3], seconds=0.375)),
        ],
    }
    (row,) = drafting.jacobi_table(run(), results).rows
    assert row[0] == "Jacobi, 4 guesses"
    assert row[1:] == pytest.approx((16 / 7, 2.5, 0.25, 4 / 2.5 / 1.25, 1.6 / 0.875))
    (shares,) = drafting.convergence_table(run(), results).texts()
    assert shares == ["Jacobi, 4 guesses", "38%", "88%", "100%", "100%", *["-"] * 5, "2"]


@pytest.mark.filterwarnings("error")
def test_answers_too_short_to_converge_have_no_iterations():
    """The second chain converges in one answer of two."""
    results = {"plain": [result("plain", answer([1] * 3))], "jacobi=8": [result("jacobi=8", answer([1, 2]))]}
    assert drafting.jacobi_table(run(), results).texts() == [["Jacobi, 8 guesses", "1.50", "-", "0%", "-", "1.50x"]]
    assert drafting.convergence_table(run(), results) is None
    results["jacobi=3"] = [result("jacobi=3", answer([1, 2]), answer([1]))]
    assert [row[0] for row in drafting.convergence_table(run(), results).texts()] == ["Jacobi, 3 guesses"]
    (_, row) = drafting.jacobi_table(run(), results).texts()
    assert row[2] == "2.0"


@pytest.mark.filterwarnings("error")
def test_answers_of_one_token_have_neither_overhead_nor_speedup():
    results = {name: [result(name, answer([1]))] for name in ("plain", "jacobi=4")}
    assert drafting.jacobi_table(run(), results).texts() == [["Jacobi, 4 guesses", "1.00", *["-"] * 4]]
