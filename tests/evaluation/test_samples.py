"""The samples: their number, and that their answers are right."""

import json
import re

import pytest

from jlade.evaluation import datasets, drafting
from tests.evaluation import made


def lines(name):
    text = (datasets.SAMPLES / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_there_are_90_questions_of_nine_tasks():
    samples = datasets.samples()
    questions = [question for dataset in samples for question in dataset.questions]
    assert len(questions) == 90
    assert {question.task for question in questions} == {
        f"{name} sample"
        for name in (
            *("CNN/DailyMail", "GSM8K", "HumanEval", "MBPP", "MMLU", "MT-Bench", "XSum"),
            *("technical documentation", "templates and forms"),
        )
    }
    assert len({(question.task, question.id) for question in questions}) == 90
    assert len({(question.turns, question.system) for question in questions}) == 90
    categories = [question.category for question in questions if question.task == "MT-Bench sample"]
    assert len(categories) == 12
    assert set(categories) == datasets.MT_BENCH
    assert {len(question.turns) for question in questions} == {1, 2}


@pytest.mark.parametrize("line", lines("humaneval"), ids=lambda line: line["entry_point"])
def test_canonical_solutions_pass(line):
    space = {}
    exec(line["prompt"] + line["canonical_solution"] + line["test"], space)
    space["check"](space[line["entry_point"]])
    with pytest.raises((AssertionError, TypeError)):
        space["check"](lambda *arguments: None)


def test_mbpp_code_passes():
    for line in lines("mbpp"):
        space = {}
        exec("\n".join((line["code"], *line["test_list"])), space)


def test_gsm8k_calculations_hold():
    for line in lines("gsm8k"):
        steps = re.findall(r"<<([-+*/.\d]+)=([\d.]+)>>([\d.]+)", line["answer"])
        assert steps
        assert line["answer"].count("=") == 2 * len(steps), "every calculation is annotated"
        for calculation, result, written in steps:
            assert eval(calculation) == float(result) == float(written.rstrip(".")), calculation
        assert line["answer"].endswith(f"\n#### {steps[-1][1]}")


def test_articles_are_short_and_highlights_shorter():
    for line in lines("cnn_dailymail"):
        assert 120 <= len(line["article"].split()) <= 250
        assert 3 <= len(line["highlights"].split("\n")) <= 4
        assert len(line["highlights"].split()) <= 40


@pytest.mark.parametrize("name", ["technical", "templates"])
def test_texts_to_continue_have_several_entries_and_end_within_one(name):
    found = lines(name)
    assert len(found) == 6
    for line in found:
        prompt = line["prompt"]
        assert 70 <= len(prompt.split()) <= 160
        assert prompt == prompt.strip(), "a model has few tokens for blanks at the end"
        assert len(re.split(r"\n\n|\n *<div", prompt)) >= 4, "entries, of which the last one is not complete"


def test_hits_by_kind_have_rows_of_all_kinds_of_a_guide():
    """Code, templates and forms, technical documentation, and creative writing."""
    results = [
        made.result("15,5,15", made.answer([2, 1], [4, 0]), question=q.id, task=q.task, category=q.category)
        for dataset in datasets.samples()
        for q in dataset.questions
    ]
    kinds = {row[1] for row in drafting.hits_table(made.run(), {"15,5,15": results}).texts()}
    of_guide = {"HumanEval sample", "templates and forms sample", "technical documentation sample"}
    assert kinds > of_guide | {"MT-Bench sample: writing"}
