"""Numbers of the paper beside those of results made by hand."""

import pytest

from jlade.evaluation import drafting, paper, paper_comparison, scaling
from jlade.evaluation.experiments import EXPERIMENTS
from tests.evaluation.made import of, rows, run

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
    table = paper_comparison.table(run(), RESULTS)
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
    assert paper_comparison.table(run(), {}) is None
    assert "Table 3, row 9" not in rows(
        paper_comparison.table(run(), RESULTS | {"table3": {"plain": of("plain", 1.0)}})
    )


def test_every_experiment_of_the_paper_has_a_number():
    assert {entry.experiment for entry in paper_comparison.ENTRIES} == EXPERIMENTS.keys() - {"pool"}
