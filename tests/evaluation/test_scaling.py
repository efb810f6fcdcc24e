"""Figures 4 and 6 to 8 and Table 4 of results made by hand."""

import itertools
import re

import pytest

from jlade import LookaheadConfig
from jlade.evaluation import datasets, experiments, scaling, statistics
from tests.evaluation.made import lines_of, of, rows, run


def of_windows(compression):
    return {str(method): of(method, compression(method.setting)) for method in scaling.window_methods()}


def test_figure_4_finds_the_line_and_the_law_that_made_the_numbers():
    def law(setting):
        w, n = setting.window_size, setting.ngram_size
        return (1.5 - 1 + n - sum((1 - 0.6**i) ** w for i in range(1, n))) / 1.5

    results = of_windows(law)
    table, one, other = scaling.windows(run(), results)
    assert list(table.columns)[:3] == ["N", "W = 1", "W = 2"]
    measured = {str(n): [law(LookaheadConfig.paper(w, n, w)) for w in scaling.WINDOWS] for n in (3, 5, 7)}
    for name, *compressions, slope, r2 in table.rows:
        assert compressions == pytest.approx(measured[name], abs=0.006)
        fit = statistics.fit_log(scaling.WINDOWS, measured[name])
        assert (slope, r2) == pytest.approx((fit.slope, fit.r2), abs=0.01)
    assert table.note.startswith("Equations 5 and 7 fit with alpha = 0.60")
    assert float(re.search(r"f = ([\d.]+)", table.note)[1]) == pytest.approx(1.5, abs=0.02)
    assert (one.name, other.name, other.note) == ("figure4a", "figure4b", table.note)
    assert all(figure.png().startswith(b"\x89PNG") for figure in (one, other))


def test_trees_beside_figure_4_find_the_line_that_made_the_numbers():
    results = {str(method): of(method, 1 + 0.3 * i) for i, method in enumerate(scaling.tree_methods())}
    del results["tree=119"]  # of another number of drafts than twice the one before
    table = scaling.trees_table(run(), results)
    assert table.texts() == [["7", "8", "1.00"], ["15", "16", "1.30"], ["31", "32", "1.60"], ["63", "64", "1.90"]]
    assert table.note == "Each doubling of the tokens of a step adds 0.300 tokens per step; R² of the fit 1.000."
    results |= of_windows(lambda setting: 1.5)
    assert scaling.blocks_figure(run(), results).png().startswith(b"\x89PNG")


def test_figure_4_of_equal_numbers_has_no_share_of_variance():
    assert {row[-1] for row in scaling.windows(run(), of_windows(lambda setting: 1.2))[0].texts()} == {"-"}


def test_the_settings_of_table_4_are_those_of_the_paper():
    assert scaling.GOOD == {"7B": (15, 5), "13B": (10, 5), "34B": (7, 5)}
    assert list(map(str, scaling.good_methods())) == ["15,5,15", "10,5,10", "7,5,7"]
    (selection,) = experiments.select(["table4"], datasets.samples(), "float32").values()
    assert {"15,5,15", "10,5,10", "7,5,7"} < set(selection.methods)


@pytest.mark.slow
def test_table_4_names_the_fastest_measured_setting_and_estimates_those_of_gpus():
    def speed(setting):
        return 1 + setting.window_size / 60 + (setting.ngram_size == 5)

    results = of_windows(speed) | {"plain": of("plain", 1.0), "15,5,15": of("15,5,15", 2.2, seconds=150)}
    for method in scaling.window_methods():  # steps take time by their blocks here
        results[str(method)] = of(method, speed(method.setting), seconds=method.setting.block_size)
    other = {name: of(name, 1.0, seconds=1.0 if name == "8,7,8" else 10) for name in results}
    table = scaling.configurations_table([(run(), results), (run(model="other", parameters=2e6), other)])
    found = {row[0]: row[1:] for row in table.texts()[:2]}
    assert found["tiny, 1.5 M, measured"] == ["a processor", "-", "1", "3", "2.55x", "-"], "1.02 tokens in 0.04 s"
    assert found["other, 2.0 M, measured"] == ["a processor", "-", "8", "7", "10.00x", "-"]
    estimated = {(row[0], row[1]): row[2:] for row in table.texts()[2:]}
    assert len(estimated) == 3 * len(scaling.TABLE_4_DEVICES)
    rate, _, ngram_size, best, of_paper = estimated["7B, estimated", "NVIDIA A100-SXM4-80GB"]
    assert (rate, ngram_size) == ("312", "5"), "the estimates take the first run's tokens per step"
    assert 1 < float(of_paper[:-1]) <= float(best[:-1]) <= 2.27
    assert estimated["13B, estimated", "NVIDIA A100-SXM4-80GB"][-1] == "-", "10, 5, 10 was not measured"
    assert estimated["34B, estimated", "NVIDIA GeForce RTX 3090"][1:] == ["-"] * 4, "it does not fit"
    slow = float(estimated["7B, estimated", "NVIDIA GeForce RTX 3090"][-1][:-1])
    assert slow < float(of_paper[:-1]), "with less arithmetic to spare"
    assert "tokens per step of tiny" in table.note


def test_figure_8_has_lines_of_this_device_and_of_two_others():
    results = of_windows(lambda setting: 1.5) | {"plain": of("plain", 1.0)}
    _, figure = scaling.figure_8(run(), results)
    drawn = lines_of(figure)
    assert drawn["tokens per step"] == drawn["speedup, measured on cpu"] == [[w, 1.5] for w in scaling.WINDOWS]
    fast, slow = (drawn[f"speedup of 7B, NVIDIA {name}, estimated"] for name in ("A100-SXM4-80GB", "GeForce RTX 3090"))
    assert all(1.5 > one[1] >= other[1] for one, other in zip(fast, slow, strict=True))
    assert fast[-1][1] > slow[-1][1]
    of_other = {name: each for name, each in results.items() if ",5," not in name}
    assert scaling.figure_8(run(), of_other) == []


def test_figure_8_has_the_measured_speed_by_window_beside_the_estimates():
    """A step of W = 16 takes three times that of a plain one, and the others the same."""
    results = {"plain": of("plain", 1.0), "4,7,4": of("4,7,4", 9.0)}
    for w, compression, seconds in ((16, 2.0, 30), (2, 1.5, 10)):
        name = f"{w},5,{w}"
        results[name] = of(name, compression, seconds=seconds)
    table, figure = scaling.figure_8(run(device="NVIDIA H100"), results)
    assert table.title == "Tokens per step and speed by W on NVIDIA H100 (Figure 8 of the paper)"
    measured = {w: row[:3] for w, row in rows(table).items()}
    assert measured == {"2": ["1.50", "15.0", "1.50x"], "16": ["2.00", "6.7", "0.67x"]}
    for column, device in zip((4, 5), scaling.FIGURE_8_DEVICES, strict=True):
        assert [row[column] for row in table.rows] == pytest.approx(scaling.figure_8_speedups(results, device))
    assert "whose plain decoding gives 10.0 tokens/s" in table.note
    assert figure.name == "figure8"


@pytest.fixture(scope="module")
def divided():
    """The table and the pictures of Figures 6 and 7."""
    return scaling.parallelism(run(), {"plain": of("plain", 1.0), "15,5,15": of("15,5,15", 2.0)})


def test_figures_6_and_7_compare_the_ways_to_divide_a_step(divided):
    table, *pictures = divided
    speeds = {(row[0], row[1]): row[2:6] for row in table.rows}
    assert len(speeds) == 2 * 9
    plain, found, of_plain, speedup = speeds["7B", "one device"]
    assert of_plain == 1
    assert speedup == pytest.approx(found / plain)
    assert 1.5 < speedup < 2
    for way in ("data parallelism, 8 devices, 8 sequences", "lookahead parallelism, 8 devices"):
        assert speeds["7B", way][2] == pytest.approx(1, abs=0.03), "plain decoding gains nothing"
    assert speeds["7B", "tensor parallelism, 8 devices"][2] > 1.5
    assert speeds["7B", "lookahead parallelism, 8 devices"][3] == pytest.approx(speedup, rel=0.05), "it was free"
    for devices in (4, 8):  # hidden states of 4096 numbers in 16 bits, for 1 token or for 120, at 0.8 of 300 GB/s
        of_pipeline = speeds["7B", f"pipeline parallelism, {devices} devices"]
        for alone, piped, tokens, accepted in ((plain, of_pipeline[0], 1, 1), (found, of_pipeline[1], 120, 2)):
            messages = (devices - 1) * (2e-6 + tokens * 4096 * 2 / (0.8 * 300e9))
            assert piped == pytest.approx(accepted / (accepted / alone + messages))
    assert [picture.name for picture in pictures] == ["figure6", "figure7"]
    assert "jlade has no pipeline parallelism" in table.note


def test_numbers_of_the_paper_stand_beside_figures_6_and_7(divided):
    of_paper = {(row[0], row[1]): row[6:] for row in divided[0].rows if any(row[6:])}
    assert of_paper.pop(("7B", "one device")) == ("1.07x", "1.9x")
    slow = itertools.product(("7B", "13B"), ("tensor", "pipeline"), (4, 8))
    assert of_paper == {
        **{(size, f"{way} parallelism, {number} devices"): ("0.75x to 0.82x", None) for size, way, number in slow},
        **{(size, "lookahead parallelism, 8 devices"): (None, "up to 4x") for size in ("7B", "13B")},
    }
