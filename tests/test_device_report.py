"""docs/device_numbers.md is the page of the results, and results of another device fill a column of it."""

import json
import re
import shutil

import pytest

from benchmarks import device_report, expert_kernel
from benchmarks.device_report import PAGE, RESULTS, SECTIONS, Results


def tables(page):
    """Returns the cells of each table by its section's title, question and device."""
    found = {}
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL):
        rows = [[cell.strip() for cell in line[2:-1].split("|")] for line in text.splitlines() if line.startswith("| ")]
        for row in rows[1:]:
            found[title, row[0]] = dict(zip(rows[0][1:], row[1:], strict=True))
    return found


def copy_as(kind, directory, **stems):
    """Copies files of `RESULTS` to a directory as those of another device, under these stems."""
    for stem, source in stems.items():
        result = json.loads((RESULTS / f"{source}.json").read_text(encoding="utf-8")) | {"device": kind}
        name = f"{stem}_{device_report.file_name(kind)}.json"
        (directory / name).write_text(json.dumps(result), encoding="utf-8")


def test_the_page_is_that_of_the_results():
    assert PAGE.read_text(encoding="utf-8") == device_report.page(RESULTS)


@pytest.mark.parametrize(
    ("kind", "column"), [("TPU v6 lite", "TPU v6e"), ("NVIDIA B200", "B200"), ("TPU v9", "TPU v9")]
)
def test_results_of_a_device_fill_its_column(kind, column, tmp_path, monkeypatch):
    monkeypatch.setattr(device_report, "RESULTS", shutil.copytree(RESULTS, tmp_path / "results"))
    monkeypatch.setattr(device_report, "PAGE", tmp_path / "page.md")
    new = tmp_path / "new"
    new.mkdir()
    stems = ("exactness", "attention", "accelerator_7b", "versus_transformers_7b")
    copy_as(kind, new, **{stem: f"{stem}_nvidia_h200" for stem in stems})
    copy_as("cpu", new, overhead_1b="overhead")
    monkeypatch.setattr("sys.argv", ["device_report.py", "page", str(new)])
    device_report.main()
    before, after = tables(PAGE.read_text(encoding="utf-8")), tables((tmp_path / "page.md").read_text(encoding="utf-8"))
    assert before.keys() == after.keys()
    for question, cells in after.items():
        rest = {name: cell for name, cell in cells.items() if name != column}
        assert rest == {name: cell for name, cell in before[question].items() if name != column}
        assert cells.get(column, cells["H200"]) == cells["H200"]
    assert any(cells.get(column) for cells in after.values())


def test_a_directory_without_results_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(device_report, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr("sys.argv", ["device_report.py", "page", str(tmp_path)])
    with pytest.raises(SystemExit, match="has no results of an accelerator"):
        device_report.main()
    assert not (tmp_path / "page.md").exists()


def test_every_figure_of_a_result_has_its_cell(tmp_path):
    """No question is about a figure that no script writes."""
    h200 = Results(RESULTS, "7b", "1b", "nvidia_h200")
    left_out = (
        r"batch [48]:|batch [48],|block of 8,| 512 cached|8192|block of (32|64|256),|10, 2, 10|0, 5, 10|adaptive"
        r"|sampled: tree of 7|static"
    )
    for section in SECTIONS[:4] + SECTIONS[5:6] + SECTIONS[7:8]:
        empty = [row.question for row in section.rows(h200) if row.value is None]
        assert [question for question in empty if not re.search(left_out, question)] == [], section.title
    copy_as("cpu", tmp_path, overhead_1b="overhead", quantization_7b="quantization_134m", meshes="meshes")
    copy_as("cpu", tmp_path, estimate_7b="estimate_134m_cpu")
    cpu = Results(tmp_path, "7b", "1b", "cpu")
    for title in ("Outside the model", "Weights in few bits", "Meshes"):
        (section,) = (each for each in SECTIONS if each.title == title)
        assert all(row.value for row in section.rows(cpu)), title
    assert any(row.value for row in device_report.estimated(cpu))


def test_kernels_are_compared_with_plain_jax_and_the_floor(tmp_path):
    cases = [
        {"shape": shape, "tokens": tokens, "implementation": way, "seconds": seconds, "floor_seconds": 0.5} | error
        for shape in expert_kernel.FULL
        for tokens in expert_kernel.BLOCKS
        for way, seconds, error in (("plain", 2, {"relative_error": 0.1}), ("gpu", 1, {"relative_error": 0.2}))
    ]
    (tmp_path / "experts_new.json").write_text(json.dumps({"cases": cases}), encoding="utf-8")
    *rows, error = device_report.expert_kernels(Results(tmp_path, "7b", "1b", "new"))
    assert {row.value for row in rows} == {"0.50, 2.00"}
    assert error.value == "0.2000, 0.1000"
