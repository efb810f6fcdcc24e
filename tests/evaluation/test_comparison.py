"""Tables that compare methods, and Figure 5, of results made by hand."""

import pytest

from jlade.evaluation import comparison
from tests.evaluation.made import answer, axes_of, result, rows, run

GPU = {"device": "NVIDIA H100", "model": "large"}
PLAIN = answer([1] * 6, first_seconds=2.0)
RESULTS = {
    "plain": [result("plain", PLAIN), result("plain", PLAIN, PLAIN, dataset="chat", passed=False)],
    "15,5,15": [
        result("15,5,15", answer([3, 2, 1])),
        result("15,5,15", answer([2, 4]), answer([6]), dataset="chat", differences=(None, (2, 0.1)), passed=True),
    ],
    "plain:t=1": [result("plain:t=1", PLAIN), result("plain:t=1", PLAIN, PLAIN, dataset="chat")],
    "transformers": [
        result("transformers", answer([1] * 6, timed_tokens=5, seconds=2.5)),
        result("transformers", *[answer([1] * 6, timed_tokens=5, seconds=5)] * 2, dataset="chat"),
    ],
}


def test_methods():
    table = comparison.methods_table(run(), RESULTS)
    assert rows(table) == {
        "plain": ["1.00", "10.0", "2.00", "1.00x", "1.00x", "1.00 to 1.00", "100%"],
        "15, 5, 15": ["3.00", "30.0", "1.10", "3.00x", "3.00x", "2.00 to 4.00", "67%"],
        "plain, temperature 1": ["1.00", "10.0", "2.00", "1.00x", "1.00x", "1.00 to 1.00", "-"],
        "transformers": ["1.00", "1.2", "1.10", "0.15x", "0.15x", "0.10 to 0.20", "100%"],
    }
    assert "2 questions, up to 8 new tokens" in table.note


@pytest.mark.filterwarnings("error")
def test_answers_of_one_token_have_no_speed():
    results = {name: [result(name, answer([1]))] for name in ("plain", "15,5,15")}
    assert rows(comparison.methods_table(run(), results))["15, 5, 15"] == ["1.00", "-", "1.10", *["-"] * 3, "100%"]


def test_tasks():
    table = comparison.tasks_table(run(), RESULTS)
    assert list(table.columns) == ["tokens/step", "code", "chat", "all"]
    assert rows(table)["15, 5, 15"] == ["2.00", "4.00", "3.00"]


def test_throughput():
    table = comparison.throughput_table(run(), RESULTS)
    assert list(table.columns) == ["tokens/s", "code", "chat"]
    assert rows(table)["15, 5, 15"] == ["20.0", "40.0"]
    assert rows(table)["transformers"] == ["2.0", "1.0"]
    figure = comparison.throughput_figure(run(), RESULTS)
    assert figure.title == "Throughput by data set: tiny on cpu"
    assert comparison.throughput_figure(run(mesh="model=2"), RESULTS).title.endswith("tiny on model=2")


def test_accepted_tokens_of_the_methods_that_count_them():
    table = comparison.accepted_table(run(), RESULTS)
    assert list(table.columns)[1:] == ["1", "2", "3", "4", "5", "6"]
    assert rows(table) == {
        "plain": ["100%", "-", "-", "-", "-", "-"],
        "15, 5, 15": ["17%", "33%", "17%", "17%", "0%", "17%"],
        "plain, temperature 1": ["100%", "-", "-", "-", "-", "-"],
    }


def test_memory_training_and_determinism():
    def of_method(name, first, state_bytes=None):
        answers = [answer([1, 1], tokens=(token, 5), state_bytes=state_bytes) for token in (first, 7)]
        return name, [result(name, *answers)]

    results = dict(
        [
            of_method("plain", 1, 1000),
            of_method("tree=7", 1, 4000),
            of_method("plain:t=1", 2, 1100),
            of_method("7,5,7:t=1", 2, 2345),
            of_method("7,5,7:rejection:t=1", 3, 2345),
            of_method("0,4,1", 1),
            of_method("transformers", 1),
            of_method("transformers-lookup", 4),
        ]
    )
    assert rows(comparison.costs_table(run(), results)) == {
        "plain": ["1.00x", "0", "none", "text", "100%"],
        "tree of 7": ["1.00x", "3,000", "none", "text", "100%"],
        "plain, temperature 1": ["1.00x", "0", "none", "text, with the same key", "100%"],
        "7, 5, 7, temperature 1": ["1.00x", "1,245", "none", "text, with the same key", "100%"],
        "7, 5, 7, by rejection, temperature 1": ["1.00x", "1,245", "none", "distribution", "50%"],
        "prompt lookup 0, 4, 1": ["1.00x", "-", "none", "text", "100%"],
        "transformers": ["1.00x", "0", "none", "text", "100%"],
        "transformers, prompt lookup": ["1.00x", "120", "none", "text", "50%"],  # 3 + 2 + 10 tokens
    }


def test_right_answers():
    assert comparison.right_table(run(), {"plain": RESULTS["plain:t=1"]}) is None
    results = {
        "plain": [result("plain", PLAIN, dataset=name, passed=right) for name, right in (("a", True), ("b", False))],
        "15,5,15": [result("15,5,15", PLAIN, dataset=name, passed=True) for name in "abb"],
    }
    table = comparison.right_table(run(), results)
    assert list(table.columns) == ["right answers", "a (1)", "b (1)"]
    assert rows(table) == {"plain": ["100.0%", "0.0%"], "15, 5, 15": ["100.0%", "100.0%"]}


def test_tables_say_when_transformers_ran_on_another_device():
    for about, says in (({}, False), ({"transformers_device": "cpu"}, False), ({"transformers_device": "cuda"}, True)):
        table = comparison.methods_table(run(**about), RESULTS)
        assert ("transformers ran on another device" in table.note) == says
    on_gpu = run(device="NVIDIA H200", transformers_device="cpu")
    assert "ran on another device, cpu" in comparison.throughput_table(on_gpu, RESULTS).note
    assert comparison.throughput_table(on_gpu, {"plain": RESULTS["plain"]}).note == ""


def test_the_figure_has_a_bar_and_its_number_for_each_method_and_data_set():
    figure = comparison.throughput_figure(run(), RESULTS)
    axes = axes_of(figure)
    widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
    assert [width for each in widths for width in each] == pytest.approx([10, 10, 20, 40, 10, 10, 2, 1])
    assert [text.get_text() for text in axes.texts] == ["10.0", "10.0", "20.0", "40.0", "10.0", "10.0", "2.0", "1.0"]
    assert figure.png().startswith(b"\x89PNG")


def test_figure_5_has_the_speed_of_each_data_set_and_names_the_device():
    steps = {"plain": [1] * 12, "15,5,15": [3] * 4, "transformers": [1] * 12}
    results = {
        name: [
            result(name, answer(accepted, seconds=seconds), dataset=dataset)
            for dataset, seconds in (("code", len(accepted) / 10), ("chat", 12 / 10))
        ]
        for name, accepted in steps.items()
    }
    table, figure = comparison.figure_5(run(**GPU), results)
    assert table.title == figure.title == "Speed by data set on NVIDIA H100 (Figure 5 of the paper): large"
    heads = ["plain, tokens/s", "15, 5, 15, tokens/s", "transformers, tokens/s", "tokens/step", "speedup"]
    assert list(table.columns) == ["data set", *heads, "95% interval"]
    assert rows(table) == {
        "code": ["10.0", "30.0", "10.0", "3.00", "3.00x", "3.00 to 3.00"],
        "chat": ["10.0", "10.0", "10.0", "3.00", "1.00x", "1.00 to 1.00"],
    }
    assert figure.name == "figure5"
    assert figure.png().startswith(b"\x89PNG")


def test_the_device_of_a_cpu_is_its_processor_and_a_mesh_is_named():
    assert comparison.device_name(run()) == "a processor"
    assert comparison.device_name(run(**GPU, mesh="data=2")) == "NVIDIA H100, divided as data=2"
