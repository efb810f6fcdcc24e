"""Figures 5 and 8 of results made by hand, on a device that they name."""

import pytest

from jlade.evaluation import devices, scaling
from tests.evaluation.made import answer, of, result, rows, run

GPU = {"device": "NVIDIA H100", "model": "large"}


def test_figure_5_has_the_speed_of_each_data_set_and_names_the_device():
    steps = {"plain": [1] * 12, "15,5,15": [3] * 4, "transformers": [1] * 12}
    results = {
        name: [
            result(name, answer(accepted, seconds=seconds), dataset=dataset)
            for dataset, seconds in (("code", len(accepted) / 10), ("chat", 12 / 10))
        ]
        for name, accepted in steps.items()
    }
    table, figure = devices.figure_5(run(**GPU), results)
    assert table.title == figure.title == "Speed by data set on NVIDIA H100 (Figure 5 of the paper): large"
    heads = ["plain, tokens/s", "15, 5, 15, tokens/s", "transformers, tokens/s", "tokens/step", "speedup"]
    assert [column.name for column in table.columns] == ["data set", *heads, "95% interval"]
    assert rows(table) == {
        "code": ["10.0", "30.0", "10.0", "3.00", "3.00x", "3.00 to 3.00"],
        "chat": ["10.0", "10.0", "10.0", "3.00", "1.00x", "1.00 to 1.00"],
    }
    assert figure.name == "figure5"
    assert figure.png().startswith(b"\x89PNG")


def test_the_device_of_a_cpu_is_its_processor_and_a_mesh_is_named():
    assert devices.name_of(run()) == "a processor"
    assert devices.name_of(run(**GPU, mesh="data=2")) == "NVIDIA H100, divided as data=2"


def test_figure_8_has_the_measured_speed_by_window_beside_the_estimates():
    """A step of W = 16 takes three times that of a plain one, and the others the same."""
    results = {"plain": of("plain", 1.0), "4,7,4": of("4,7,4", 9.0)}
    for w, compression, seconds in ((16, 2.0, 30), (2, 1.5, 10)):
        name = f"{w},5,{w}"
        results[name] = of(name, compression, seconds=seconds)
    table, figure = devices.figure_8(run(**GPU), results)
    assert table.title == "Tokens per step and speed by W on NVIDIA H100 (Figure 8 of the paper)"
    measured = {w: row[:3] for w, row in rows(table).items()}
    assert measured == {"2": ["1.50", "15.0", "1.50x"], "16": ["2.00", "6.7", "0.67x"]}
    for column, device in zip((4, 5), scaling.FIGURE_8_DEVICES, strict=True):
        assert [row[column] for row in table.rows] == pytest.approx(scaling.figure_8_speedups(results, device))
    assert "whose plain decoding gives 10.0 tokens/s" in table.note
    assert figure.name == "figure8"
    assert devices.figure_8(run(), {"plain": of("plain", 1.0), "4,7,4": of("4,7,4", 9.0)}) == []
