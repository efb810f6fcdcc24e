"""Data sets: every format gives the recorded questions, and broken files are refused with their place."""

import dataclasses
import gzip
import json
import pathlib
import sys

import hypothesis
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import strategies as st

from jlade.evaluation import datasets
from jlade.evaluation.datasets import Question

DATA = pathlib.Path(__file__).parent / "data"
EXPECTED = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
PROMPT = b'{"prompt": "a"}\n'


def as_json(dataset):
    """Returns the data set as in expected.json, where fields with their default are left out."""
    defaults = {field.name: field.default for field in dataclasses.fields(Question)}
    questions = [
        {name: value for name, value in dataclasses.asdict(question).items() if value != defaults[name]}
        for question in dataset.questions
    ]
    return json.loads(json.dumps({"name": dataset.name, "format": dataset.format, "questions": questions}))


@pytest.mark.parametrize("name", EXPECTED)
def test_recorded_questions(name):
    assert as_json(datasets.read(DATA / name)) == EXPECTED[name]


def test_every_format_is_recorded():
    assert {dataset["format"] for dataset in EXPECTED.values()} == set(datasets.FORMATS)


@pytest.mark.parametrize("name", ["cnn_dailymail", "xsum"])
def test_parquet(name, tmp_path):
    lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    file = tmp_path / "test.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(line) for line in lines]), file)
    assert as_json(datasets.read(file)) == EXPECTED[f"{name}.jsonl"]


def test_gzip(tmp_path):
    file = tmp_path / "HumanEval.jsonl.gz"
    file.write_bytes(gzip.compress((DATA / "humaneval.jsonl").read_bytes()))
    assert as_json(datasets.read(file)) == EXPECTED["humaneval.jsonl"]


def test_an_array_and_lines_are_the_same(tmp_path):
    lines = (DATA / "gsm8k.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "array.json").write_text(f"\n [{', '.join(lines)}]", encoding="utf-8")
    (tmp_path / "lines.json").write_text("\n\n".join(lines), encoding="utf-8")
    for name in ("array.json", "lines.json"):
        assert as_json(datasets.read(tmp_path / name)) == EXPECTED["gsm8k.jsonl"]


def refuse(tmp_path, content, message, name="file.jsonl"):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        datasets.read(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"file\.jsonl is empty"),
        (b"\n \n", r"file\.jsonl is empty"),
        (PROMPT + b'{"prompt"', r"file\.jsonl, line 2: not readable as JSON: Expecting ':'"),
        (b"[" * 100_000, "not readable as JSON"),
        (PROMPT + b"\n7\n", "line 3: must be a JSON object, got int"),
        (PROMPT + b'{"prompt": "\xff"}', "line 2: not UTF-8"),
        ('{"prompt": 3}', "line 1: prompt must be Unicode text that is not blank, got 3"),
        ('{"prompt": " "}', "prompt must be Unicode text that is not blank, got ' '"),
        (r'{"prompt": "\ud800"}', "prompt must be Unicode text"),
        ('{"prompt": "a", "id": 1.5}', "id must be an integer or text that is not blank, got 1.5"),
        ('{"prompt": "a", "id": true}', "id must be an integer or text"),
        ('{"prompt": "a", "kind": []}', r"kind must be Unicode text that is not blank, got \[\]"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}', "line 2: the id must be unique, got '1' again"),
        (PROMPT + b'{"ids": [1]}', "line 2: the first question is in the format prompts.*got the fields ids"),
        (PROMPT + b"{}", r"line 2: .* must have the fields prompt .*got the fields \(none\)"),
        ('{"ids": []}', r"ids must be a list of one or more token ids, got \[\]"),
        ('{"ids": [1, -1]}', "ids must be a list of one or more token ids"),
        ('{"ids": [true]}', "ids must be a list of one or more token ids"),
        ('{"ids": "12"}', "ids must be a list of one or more token ids"),
        (
            '{"text": "a", "n": 1}',
            r"line 1: no known format has the fields text, n\. Accepted: mt_bench \(question_id,",
        ),
        ('{"question_id": 1, "category": "qa", "turns": []}', r"line 1: turns must be a list of one or more texts"),
        ('{"question_id": 1, "category": "qa", "turns": ["a", ""]}', "turns must be a list of one or more texts"),
        ('{"question_id": 1, "category": null, "turns": ["a"]}', "category must be Unicode text .* got None"),
        ('{"task_id": "a", "prompt": "b", "entry_point": "c(", "test": "d"}', r"entry_point .* function, got 'c\('"),
        ('{"question": "a", "answer": 4}', "answer must be Unicode text that is not blank, got 4"),
        ('{"question": "a", "answer": "It is 4."}', "answer must be a text that ends with #### and a number, got"),
        ('{"question": "a", "choices": ["b", "c"], "answer": 2}', "answer must be one of A, B, or its place .*got 2"),
        ('{"question": "a", "choices": "b", "answer": 0}', "choices must be a list of one or more texts"),
    ],
)
def test_a_broken_line_is_refused_with_its_number(content, message, tmp_path):
    refuse(tmp_path, content, message)


def test_other_broken_files_are_refused(tmp_path):
    refuse(tmp_path, '[{"prompt": "a"}, {"prompt": null}]', r"array\.json, item 2: prompt must be", "array.json")
    refuse(tmp_path, '[{"prompt": "a"}', r"array\.json: not readable as JSON", "array.json")
    refuse(tmp_path, "[]", r"array\.json is empty", "array.json")
    refuse(tmp_path, PROMPT, r"path must end in one of \.jsonl, .*got '.*file\.txt'", "file.txt")
    refuse(tmp_path, PROMPT, r"file\.jsonl\.gz, line 1: not readable as gzip: Not a gzipped file", "file.jsonl.gz")
    packed = gzip.compress(b"".join(b'{"prompt": "%d"}\n' % i for i in range(10_000)))
    refuse(tmp_path, packed[: len(packed) // 2], r"gz, line [1-9]\d{3}: not readable as gzip", "file.jsonl.gz")
    refuse(tmp_path, packed[:2000] + b"\xff" * 99, r"gz, line \d+: not readable as gzip", "file.jsonl.gz")
    refuse(tmp_path, b"PAR1", r"file\.parquet is not readable as Parquet", "file.parquet")
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"id": "1", "document": "a", "summary": "b"}, {"id": "2", "document": "c"}]),
        tmp_path / "rows.parquet",
    )
    with pytest.raises(ValueError, match=r"rows\.parquet, row 2: summary must be Unicode text .*, got None"):
        datasets.read(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"none\.jsonl cannot be read: No such file"):
        datasets.read(tmp_path / "none.jsonl")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match=r"folder\.json cannot be read: Is a directory"):
        datasets.read(tmp_path / "folder.json")


def test_a_prompt_for_summaries_of_the_user(tmp_path):
    file, summaries = tmp_path / "prompt.txt", DATA / "xsum.jsonl"
    file.write_text("In five words:\n{text}\n", encoding="utf-8")
    question = datasets.read(summaries, datasets.SummaryPrompt.read(file)).questions[1]
    assert question.turns == ("In five words:\nA school has planted fifty trees along its fence.",)
    assert question.system is None
    file.write_text("Text: {text}\n---\nSummarize it.", encoding="utf-8")
    question = datasets.read(summaries, datasets.SummaryPrompt.read(file)).questions[1]
    assert question.system == "Text: A school has planted fifty trees along its fence."
    assert question.turns == ("Summarize it.",)
    gsm8k = datasets.read(DATA / "gsm8k.jsonl", datasets.SummaryPrompt.read(file))
    assert as_json(gsm8k) == EXPECTED["gsm8k.jsonl"], "other questions stay as they are"
    assert question.beginning == ""
    file.write_text("Text: {text}\n---\nSummarize it.\n---\nIn short:\n", encoding="utf-8")
    question = datasets.read(summaries, datasets.SummaryPrompt.read(file)).questions[1]
    assert (question.turns, question.beginning) == (("Summarize it.",), "In short:")
    file.write_text("a\n---\n{text}\n---\nb\n---\nc", encoding="utf-8")
    with pytest.raises(ValueError, match=r"prompt\.txt: a prompt for summaries must have at most 3 parts, got 4"):
        datasets.SummaryPrompt.read(file)
    for content in ("Summarize.", "{text} {text}"):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=r"prompt\.txt: a prompt for summaries must have \{text\} once, got"):
            datasets.SummaryPrompt.read(file)
    with pytest.raises(ValueError, match=r"none cannot be read as text"):
        datasets.SummaryPrompt.read(tmp_path / "none")


def test_parquet_needs_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refuse(tmp_path, b"", r'pip install "jlade\[evaluation\]"', "file.parquet")


def questions_of(tasks):
    return [Question(str(i), task, category) for i, (task, category) in enumerate(tasks)]


tasks = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), min_size=1, max_size=40)


@hypothesis.given(tasks=tasks, limit=st.integers(1, 45), seed=st.none() | st.integers(0, 9))
def test_select_spreads(tasks, limit, seed):
    questions = questions_of(tasks)
    chosen = datasets.select(questions, limit, seed)
    assert len(chosen) == min(limit, len(questions))
    assert list(chosen) == [question for question in questions if question in chosen], "the order, without duplicates"
    assert chosen == datasets.select(questions, limit, seed)
    require_even(questions, chosen, lambda question: question.task)
    for task in {question.task for question in questions}:
        of_task = [[question for question in part if question.task == task] for part in (questions, chosen)]
        require_even(*of_task, lambda question: question.category)


def require_even(questions, chosen, group):
    """Checks that a group has fewer than another by at most one, unless it has no more."""
    counts = {
        group(q): [sum(group(one) == group(q) for one in part) for part in (questions, chosen)] for q in questions
    }
    most = max(count for _, count in counts.values())
    assert all(count >= min(most - 1, size) for size, count in counts.values()), counts


def test_select_chooses_at_random_or_the_first():
    questions = questions_of([("a", ""), ("a", ""), ("b", ""), ("b", "")] * 10)
    assert [question.id for question in datasets.select(questions, 4)] == ["0", "1", "2", "3"]
    chosen = {datasets.select(questions, 4, seed) for seed in range(20)}
    assert len(chosen) == 20
    assert {question for part in chosen for question in part} > set(questions[-4:])
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        datasets.select(questions, 0)
