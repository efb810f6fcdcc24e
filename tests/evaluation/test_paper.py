"""The paper's tables and figures of results made by hand."""

import re

import pytest

from jlade import LookaheadConfig
from jlade.evaluation import paper, statistics
from jlade.evaluation.paper import ABLATION, PAPER_ABLATION
from jlade.generation.difference import Difference
from tests.evaluation.made import answer, result, run


def rows(table):
    return {row[0]: row[1:] for row in table.texts()}


def steps(compression):
    """Returns the tokens of steps whose mean has two decimals."""
    tokens = round(100 * compression)
    return [tokens // 100 + (i < tokens % 100) for i in range(100)]


def of(method, compression, **changes):
    return [result(str(method), answer(steps(compression), **changes))]


def test_table_2():
    summary = {"reference": "the cat sat", "dataset": "XSum"}
    results = {
        "plain": [result("plain", answer([1] * 4, text="the cat sat"), **summary)],
        "15,5,15": [result("15,5,15", answer([2, 2], text="the dog sat"), **summary)],
        "plain:t=1": [result("plain:t=1", answer([1] * 4, seconds=0.8, text="no"), **summary)],
        "15,5,15:t=1": [result("15,5,15:t=1", answer([1] * 4, text="no"), **summary)],
    }
    pytest.importorskip("rouge_score")
    assert paper.sampling_table(results).texts() == [
        ["XSum", "plain", "100.00", "100.00", "100.00", "1.00x", "1.00"],
        ["XSum", "15, 5, 15", "66.67", "0.00", "66.67", "2.00x", "2.00"],
        ["XSum", "plain, temperature 1", "0.00", "0.00", "0.00", "1.00x", "1.00"],
        ["XSum", "15, 5, 15, temperature 1", "0.00", "0.00", "0.00", "2.00x", "1.00"],
    ]


def ablation(compressions):
    """Returns results of the methods of Table 3."""
    return {str(method): of(method, s) for method, s in zip(paper.ablation_methods(), compressions, strict=True)}


def test_table_3_of_the_papers_own_numbers_is_in_its_order():
    table = paper.ablation_table(ablation(PAPER_ABLATION))
    assert [row[2] for row in table.texts()] == [row[3] for row in table.texts()]
    assert table.texts()[0] == ["1: plain", "1.00x", "1.00", "1.00"]
    assert table.texts()[8] == ["9: 15, 5, 15", "2.05x", "2.05", "2.05"]
    assert table.note == "36 of 36 pairs of rows are in the paper's order by tokens per step."


def test_table_3_names_the_rows_in_another_order():
    """Rows 8 and 9 are swapped, row 2 ties with row 6, and rows 3 and 4 are missing."""
    swapped = [*PAPER_ABLATION[:7], 2.05, 1.96]
    swapped[1] = 1.59
    results = ablation(swapped)
    for i in (2, 3):
        del results[str(paper.ablation_methods()[i])]
    note = paper.ablation_table(results).note
    count, swapped = note.split("; ")
    assert count == "19 of 21 pairs of rows are in the paper's order by tokens per step"
    assert swapped == "these are not: 2 above 6, 8 above 9."


def test_the_rows_of_table_3_are_those_of_the_paper():
    assert len(ABLATION) + 2 == len(PAPER_ABLATION)
    names = [str(method) for method in paper.ablation_methods()]
    assert names == [
        *("plain", "transformers-lookup", "1,10,3", "1,5,10", "1,5,30:no-prompt", "1,5,30", "30,5,1:no-prompt"),
        *("15,5,15:no-prompt", "15,5,15"),
    ]


def scaling(compression):
    return {str(method): of(method, compression(method.setting)) for method in paper.scaling_methods()}


def test_figure_4_finds_the_line_and_the_law_that_made_the_numbers():
    def law(setting):
        w, n = setting.window_size, setting.ngram_size
        return (1.5 - 1 + n - sum((1 - 0.6**i) ** w for i in range(1, n))) / 1.5

    results = scaling(law)
    table = paper.scaling_table(results)
    assert [column.name for column in table.columns[:3]] == ["N", "W = 1", "W = 2"]
    measured = {str(n): [law(LookaheadConfig.paper(w, n, w)) for w in paper.WINDOWS] for n in (3, 5, 7)}
    for name, *compressions, slope, r2 in table.rows:
        assert compressions == pytest.approx(measured[name], abs=0.006)
        fit = statistics.fit_log(paper.WINDOWS, measured[name])
        assert (slope, r2) == pytest.approx((fit.slope, fit.r2), abs=0.01)
    assert table.note.startswith("Equations 5 and 7 fit with alpha = 0.60")
    assert float(re.search(r"f = ([\d.]+)", table.note)[1]) == pytest.approx(1.5, abs=0.02)
    one, other = paper.scaling_figures(results)
    assert (one.name, other.name, other.note) == ("figure4a", "figure4b", table.note)
    assert all(figure.png().startswith(b"\x89PNG") for figure in (one, other))


def test_trees_beside_figure_4_find_the_line_that_made_the_numbers():
    results = {str(method): of(method, 1 + 0.3 * i) for i, method in enumerate(paper.tree_methods())}
    del results["tree=119"]  # of another number of drafts than twice the one before
    table = paper.trees_table(results)
    assert table.texts() == [["7", "8", "1.00"], ["15", "16", "1.30"], ["31", "32", "1.60"], ["63", "64", "1.90"]]
    assert table.note == "Each doubling of the tokens of a step adds 0.300 tokens per step; R² of the fit 1.000."
    results |= scaling(lambda setting: 1.5)
    assert paper.blocks_figure(results).png().startswith(b"\x89PNG")


def test_figure_4_of_equal_numbers_has_no_share_of_variance():
    assert {row[-1] for row in paper.scaling_table(scaling(lambda setting: 1.2)).texts()} == {"-"}


def test_table_4_names_the_fastest_measured_setting_and_estimates_those_of_gpus():
    def speed(setting):
        return 1 + setting.window_size / 60 + (setting.ngram_size == 5)

    results = scaling(speed) | {"plain": of("plain", 1.0)}
    for method in paper.scaling_methods():  # steps take time by their blocks here
        results[str(method)] = of(method, speed(method.setting), seconds=method.setting.block_size)
    other = {name: of(name, 1.0, seconds=1.0 if name == "8,7,8" else 10) for name in results}
    table = paper.configurations_table([(run(), results), (run(model="other", parameters=2e6), other)])
    found = rows(table)
    assert list(found) == [
        "tiny, 1.5 M, measured on a processor",
        "other, 2.0 M, measured on a processor",
        *(f"{size}, estimated for an A100" for size in ("7B", "13B", "34B")),
    ]
    assert found["tiny, 1.5 M, measured on a processor"] == ["1", "3", "2.55x"], "1.02 tokens a step in 0.04 s"
    assert found["other, 2.0 M, measured on a processor"] == ["8", "7", "10.00x"]
    assert found["7B, estimated for an A100"][1] == "5", "the estimates take the first run's tokens per step"
    assert "tokens per step of tiny" in table.note


def test_growth():
    """Two texts of 20 tokens; the first begins with a step of 2 tokens."""
    one = answer([2, *[3] * 6], [0, 1, 1, 0, 1, 0, 1], growth=((2, 10, 5), (17, 20, 8), (20, 30, 10)))
    other = answer([1] * 20, [0] * 10 + [4] * 10, growth=((1, 20, 7), (9, 30, 8), (17, 40, 10), (20, 50, 12)))
    name = "15,5,15:growth"
    results = {"15,5,15": [result("15,5,15", one)], name: [result(name, one), result(name, other, question="2")]}
    table = paper.growth_table(results)
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
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(layout="constrained")
    paper.hits_figure(results).draw(canvas)
    (axes,) = canvas.axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert drawn == {"15, 5, 15": [[8, 0], [16, 100]], "15, 5, 15, warm pool": [[8, 50], [16, 50]]}


def test_exactness_and_the_answers_that_differ():
    one = answer([1] * 4)
    results = {
        "plain": [result("plain", one, one)],
        "15,5,15:bfloat16": [
            result("15,5,15:bfloat16", one, one, differences=(None, Difference(6, 0.25))),
            result("15,5,15:bfloat16", one, question="2", differences=(Difference(0, 0.5),)),
        ],
    }
    assert rows(paper.exactness_table(run(), results)) == {
        "plain": ["float32", "2", "2", "100%", "-"],
        "15, 5, 15, bfloat16": ["bfloat16", "3", "1", "33%", "0.5"],
    }
    plain = [
        result("plain:bfloat16", one, one, differences=(None, None)),
        result("plain:bfloat16", one, question="2", differences=(None,)),
    ]
    note = paper.exactness_table(run(), results | {"plain:bfloat16": plain}).note
    assert note.endswith("0 the other way round (one-sided sign test: p = 0.25).")
    assert "15, 5, 15, bfloat16: 2 answers differ that plain decoding of this dtype has right" in note
    assert paper.divergences_table(results).texts() == [
        ["15, 5, 15, bfloat16", "code 1", "2", "7", "0.25"],
        ["15, 5, 15, bfloat16", "code 2", "1", "1", "0.5"],
    ]
    assert paper.divergences_table({"plain": results["plain"]}) is None
