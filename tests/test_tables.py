"""The tables of README.md and docs/ are those that `python -m benchmarks.tables` makes of the results."""

import json
import re
import shutil

import pytest

from benchmarks import expert_kernel
from benchmarks.report import file_name
from benchmarks.tables import PAGES, ROOT, Results, devices, fill

RESULTS = Results()
PUBLISHED = {"HumanEval.jsonl.gz", "spec_bench.jsonl"}  # data by their authors
MARKED = "<!-- made by benchmarks.tables: speed.corpus -->\n{}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_made_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert fill(text, RESULTS) == text


def test_a_table_without_an_end_is_an_error():
    with pytest.raises(ValueError, match="of 2 tables 1 have"):
        fill(MARKED.format("") + MARKED.format("| old |\n<!-- end -->\n"), RESULTS)


def test_a_row_has_a_cell_for_each_title(monkeypatch):
    monkeypatch.setattr("benchmarks.tables.speed.corpus", lambda results: iter([("a", "b"), ("c",)]))
    with pytest.raises(ValueError, match=r"speed\.corpus has 2 titles"):
        fill(MARKED.format("<!-- end -->\n"), RESULTS)


@pytest.mark.parametrize("file", sorted(RESULTS.directory.glob("*.json")), ids=lambda file: file.stem)
def test_results_name_their_command_and_machine(file):
    content = RESULTS[file.stem]
    for run in content if isinstance(content, list) else [content]:
        about = run.get("run", run)
        assert {"date", "command", "processor"} <= about.keys()
        assert not re.search(r"/tmp|/bench[A-Z]", about["command"])
        data = re.search(r"--data (\S+)", about["command"])
        assert data is None or (ROOT / data[1]).exists() or data[1] in PUBLISHED


def copy_as(kind, directory, **stems):
    """Copies result files to a directory as those of another device, under these stems."""
    for stem, source in stems.items():
        path = directory / f"{stem}_{file_name(kind)}.json"
        path.write_text(json.dumps(RESULTS[source] | {"device": kind}), encoding="utf-8")


def columns(table):
    """Returns the cells of a table by the titles of its columns."""
    titles, *rows = table
    return dict(zip(titles, zip(*rows, strict=True), strict=True))


@pytest.mark.parametrize(
    ("kind", "column"), [("TPU v6 lite", "TPU v6e"), ("NVIDIA B200", "B200"), ("TPU v9", "TPU v9")]
)
def test_results_of_a_device_fill_its_column(kind, column, tmp_path):
    directory = shutil.copytree(RESULTS.directory, tmp_path / "results")
    stems = ("exactness", "attention", "accelerator_7b", "versus_transformers_7b")
    copy_as(kind, directory, **{stem: f"{stem}_nvidia_h200" for stem in stems})
    before, after = (columns(devices.measured(results)) for results in (RESULTS, Results(directory)))
    assert after.pop(column) == after["H200"]
    assert after == before


def test_questions_without_an_answer_have_no_row():
    h200 = devices.Device(RESULTS, "nvidia_h200")
    answered = [row.question for part in devices.PARTS for row in part(h200) if row.value]
    assert [row[0] for row in devices.measured(RESULTS)][1:] == answered


def test_every_figure_of_a_result_has_its_cell(tmp_path):
    """No question is about a figure that no script writes."""
    h200 = devices.Device(RESULTS, "nvidia_h200")
    left_out = (
        r"batch [48]:|batch [48],|block of 8,| 512 cached|8192|block of (32|64|256),|10, 2, 10|0, 5, 10|adaptive"
        r"|sampled: tree of 7|static"
    )
    for part in (devices.texts, devices.rates, devices.steps, devices.speed, devices.versus, devices.attention_kernel):
        empty = [row.question for row in part(h200) if row.value is None]
        assert [question for question in empty if not re.search(left_out, question)] == [], part
    copy_as("cpu", tmp_path, overhead_1b="overhead", quantization_7b="quantization_134m", meshes="meshes")
    copy_as("cpu", tmp_path, estimate_7b="estimate_134m_cpu")
    cpu = devices.Device(Results(tmp_path), "cpu")
    for part in (devices.outside, devices.few_bits, devices.on_meshes):
        assert all(row.value for row in part(cpu)), part
    assert any(row.value for row in devices.estimated(cpu))


def test_kernels_are_compared_with_plain_jax_and_the_floor(tmp_path):
    cases = [
        {"shape": shape, "tokens": tokens, "implementation": way, "seconds": seconds, "floor_seconds": 0.5} | error
        for shape in expert_kernel.FULL
        for tokens in expert_kernel.BLOCKS
        for way, seconds, error in (("plain", 2, {"relative_error": 0.1}), ("gpu", 1, {"relative_error": 0.2}))
    ]
    (tmp_path / "experts_new.json").write_text(json.dumps({"cases": cases}), encoding="utf-8")
    *rows, error = devices.expert_kernels(devices.Device(Results(tmp_path), "new"))
    assert {row.value for row in rows} == {"0.50, 2.00"}
    assert error.value == "0.2000, 0.1000"
