"""The paper's tables, and its numbers beside those of results made by hand."""

import pytest

from jlade.config import PLAIN, LookaheadConfig
from jlade.evaluation import datasets, drafting, experiments, paper, scaling
from jlade.evaluation.experiments import EXPERIMENTS
from jlade.evaluation.methods import Method, parse
from jlade.evaluation.paper import PAPER_ABLATION
from jlade.generation.difference import Difference
from tests.evaluation.made import answer, of, result, rows, run


def test_table_2():
    summary = {"reference": "the cat sat", "dataset": "XSum"}
    results = {
        "plain": [result("plain", answer([1] * 4, text="the cat sat"), **summary)],
        "15,5,15": [result("15,5,15", answer([2, 2], text="the dog sat"), **summary)],
        "plain:t=1": [result("plain:t=1", answer([1] * 4, seconds=0.8, text="no"), **summary)],
        "15,5,15:t=1": [result("15,5,15:t=1", answer([1] * 4, text="no"), **summary)],
    }
    pytest.importorskip("rouge_score")
    assert paper.sampling_table(run(), results).texts() == [
        ["XSum", "plain", *["100.00 (100.0 to 100.0)"] * 3, "1.00x", "1.00"],
        [
            "XSum",
            "15, 5, 15",
            *(f"{x} ({float(x):.1f} to {float(x):.1f})" for x in ("66.67", "0.00", "66.67")),
            "2.00x",
            "2.00",
        ],
        ["XSum", "plain, temperature 1", *["0.00 (0.0 to 0.0)"] * 3, "1.00x", "1.00"],
        ["XSum", "15, 5, 15, temperature 1", *["0.00 (0.0 to 0.0)"] * 3, "2.00x", "1.00"],
    ]


def test_table_2_samples_in_the_papers_way_and_coupled():
    """Section 3.2 and Algorithm 4: sampled drafts are verified by rejection, and the window is drawn greedily."""
    (selection,) = experiments.select(["table2"], datasets.samples(), "float32").values()
    coupled = LookaheadConfig.paper(15, 5, 15)
    of_paper = LookaheadConfig.paper(
        15, 5, 15, verification="rejection", window_draw="greedy", window_advance="step", pool_from_prompt=True
    )
    sampled = [Method(each, temperature=t) for t in (0.5, 1.0) for each in (PLAIN, coupled, of_paper)]
    assert list(map(parse, selection.methods)) == [Method(PLAIN), Method(coupled), *sampled]


def test_the_paper_is_compared_with_the_row_that_samples_in_its_way():
    names = ["plain:t=1", "15,5,15:t=1", "15,5,15:rejection:t=1", "15,5,15:rejection:greedy-window:t=1"]
    results = {name: of(name, 1 + i / 10) for i, name in enumerate(names)}
    table = paper.numbers_table(run(), {"table2": results})
    assert [row[-1] for row in table.rows if "Algorithm 4" in row[0]] == ["1.30"]


def ablation(compressions):
    """Returns results of the methods of Table 3."""
    return {str(method): of(method, s) for method, s in zip(paper.ablation_methods(), compressions, strict=True)}


def test_table_3_of_the_papers_own_numbers_is_in_its_order():
    table = paper.ablation_table(run(), ablation(PAPER_ABLATION))
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
    note = paper.ablation_table(run(), results).note
    count, swapped = note.split("; ")
    assert count == "19 of 21 pairs of rows are in the paper's order by tokens per step"
    assert swapped == "these are not: 2 above 6, 8 above 9."


def test_the_rows_of_table_3_are_those_of_the_paper():
    assert PAPER_ABLATION == (1.00, 1.55, 1.45, 1.51, 1.12, 1.59, 1.79, 1.96, 2.05)
    names = [str(method) for method in paper.ablation_methods()]
    assert names == [
        *("plain", "transformers-lookup", "1,10,3", "1,5,10", "1,5,30:no-prompt", "1,5,30", "30,5,1:no-prompt"),
        *("15,5,15:no-prompt", "15,5,15"),
    ]


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
    assert paper.divergences_table(run(), results).texts() == [
        ["15, 5, 15, bfloat16", "code 1", "2", "7", "0.25"],
        ["15, 5, 15, bfloat16", "code 2", "1", "1", "0.5"],
    ]
    assert paper.divergences_table(run(), {"plain": results["plain"]}) is None


RESULTS = {
    "methods": {"plain": of("plain", 1.0), "15,5,15": of("15,5,15", 2.0)},
    "figure5": {"plain": of("plain", 1.0), "15,5,15": of("15,5,15", 2.0)},
    "figure6-7": {"plain": of("plain", 1.0), "15,5,15": of("15,5,15", 2.0)},
    "figure8": {"plain": of("plain", 1.0)}
    | {str(each): of(each, 1 + each.setting.window_size / 20) for each in scaling.window_methods()},
    "table2": {
        name: of(name, s) for name, s in (("plain", 1), ("15,5,15", 1.7), ("15,5,15:rejection:greedy-window:t=1", 1.6))
    },
    "table3": {str(method): of(method, 1 + i / 10) for i, method in enumerate(paper.ablation_methods())},
    "jacobi": {"plain": of("plain", 1.0)} | {str(each): of(each, 1.1) for each in drafting.jacobi_methods()},
    "exactness": {"plain": of("plain", 1.0), "15,5,15": of("15,5,15", 2.0)},
}


@pytest.mark.slow
def test_the_numbers_of_a_run_stand_beside_those_of_the_paper():
    table = paper.numbers_table(run(), RESULTS)
    found = {(row[0], row[1]): row[3:] for row in table.texts()}
    assert found["Figure 5", "speedup of lookahead decoding"] == ["1.5x to 2.3x", "2.00x"]
    assert found["Table 2", "tokens per step, greedy"] == ["1.72", "1.70"]
    assert found["Table 2, Algorithm 4", "tokens per step at temperature 1, by rejection"] == ["1.64", "1.60"]
    assert found["Table 3, row 9", "tokens per step"] == ["2.05", "1.80"]
    assert found["Section 2, Algorithm 1", "tokens per step of Jacobi decoding"][1] == "1.10"
    assert found["Appendix E", "answers of plain decoding in float32"][1] == "100% identical"
    pipeline = found["Figures 6, 7", "speedup of pipeline parallelism without lookahead"]
    assert pipeline == ["0.75x to 0.82x", "1.00x (estimated)"]
    a100, rtx3090 = (found["Figure 8", f"speedup on an {name}"][1] for name in ("A100", "RTX 3090"))
    assert a100.endswith("x (estimated)")
    assert float(a100.split("x")[0]) > float(rtx3090.split("x")[0]) > 1
    assert ("Table 4", "good W and N of a 7B model") not in found, "it was not measured"
    assert "the model is tiny" in table.note
    assert paper.numbers_table(run(), {}) is None
    assert "Table 3, row 9" not in rows(paper.numbers_table(run(), RESULTS | {"table3": {"plain": of("plain", 1.0)}}))


def test_every_experiment_of_the_paper_has_a_number():
    assert {entry.experiment for entry in paper.ENTRIES} == EXPERIMENTS.keys() - {"pool"}
