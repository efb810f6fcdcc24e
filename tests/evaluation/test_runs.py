"""Runs that are interrupted at any moment and go on, on a tiny model."""

import dataclasses
import itertools
import json
import pathlib
import re
import shutil
import zlib

import jax
import pytest

import jlade
from jlade.evaluation import runs
from jlade.evaluation.answers import EvaluatedModel
from jlade.evaluation.datasets import Question
from jlade.evaluation.methods import parse
from jlade.generation.difference import Difference
from tests.tiny import PAPER, tiny_llama, tiny_tokenizer

PARAMS = tiny_llama(2, max_positions=128)
MODEL = EvaluatedModel(lambda dtype: PARAMS, "float32", tiny_tokenizer(), 12)  # shared by all tests, with its programs
ABOUT = {"model": "tiny", "seed": 0, "max_new_tokens": 12, "data": ["some"], "date": "today", "command": "jlade bench"}
QUESTIONS = (
    Question("chat", "talk", "short", turns=("abc", "cab")),
    Question("text", "talk", turns=("ab",), is_chat=False),
    Question("ids", "numbers", ids=(3, 1, 4, 1, 5)),
)
METHODS = [parse(name) for name in ("4,4,3:warm", "plain:t=1", "2,3,1:warm")]


def encode(messages):
    """Returns ids that depend on all roles and texts."""
    written = "".join(f"{message['role']}:{message['content']}\n" for message in messages)
    return [ord(character) % 13 for character in written][-80:]


def cells(questions=QUESTIONS, methods=METHODS):
    return [cell for question in questions for cell in runs.plan("some", question, methods, "float32")]


def execute(file, planned=None, about=ABOUT, **options):
    return runs.execute(cells() if planned is None else planned, MODEL, encode, file, about, **options)


def lines(file):
    """Returns the lines of a run's file, without times."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    for answer in itertools.chain.from_iterable(line.get("answers", ()) for line in found):
        for name in [name for name in answer if name.endswith("seconds")]:
            assert answer.pop(name) > 0
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The file of an uninterrupted run, beside the pools that it wrote and removed."""
    file = tmp_path_factory.mktemp("whole") / "run.jsonl"
    pools = file.parent / "every pool"
    pools.mkdir()
    for _ in execute(file):
        for pool in (file.parent / "run.pools").glob("*"):
            shutil.copy(pool, pools)
    return file


@pytest.mark.slow
def test_a_run_has_every_cell_in_order(whole):
    run = runs.read(whole)
    assert run.about == ABOUT
    assert [result.key for result in run.results] == [cell.key for cell in cells()]
    methods = ["plain", "plain:t=1", "4,4,3:warm", "2,3,1:warm"]
    assert [result.method for result in run.results] == methods * 3, "what is compared with comes first"
    chat = run.results[0]
    assert (chat.dataset, chat.question, chat.task, chat.category) == ("some", "chat", "talk", "short")
    assert [len(result.answers) for result in run.results] == [2] * 4 + [1] * 8
    assert {difference for result in run.results for difference in result.differences} == {None}
    assert runs.done_cells(whole, cells()) == 12
    assert runs.done_cells(whole, cells(QUESTIONS[:1])) == 4
    assert runs.done_cells(whole.parent / "none", cells()) == 0
    assert sorted(file.name for file in (whole.parent / "run.pools").iterdir()) == [
        "2-3-1-warm.3.safetensors",
        "4-4-3-warm.3.safetensors",
    ]


@pytest.mark.slow
def test_warm_pools_go_from_turn_to_turn_and_question_to_question(whole):
    results = {result.key: result for result in runs.read(whole).results}
    pool, candidates = None, []
    for question in QUESTIONS:
        said = [answer.text for answer in results["some", question.id, "plain"].answers]
        key = jax.random.fold_in(jax.random.key(0), zlib.crc32(f"some/{question.id}".encode()))  # of the first window
        for turn in range(max(1, len(question.turns))):
            out = jlade.generate(
                PARAMS,
                prompt_of(question, turn, said),
                max_new_tokens=12,
                lookahead=PAPER,
                pool=pool,
                key=key,
                with_statistics=True,
                keep_state=True,
            )
            pool = out.state.sources["pool"]
            candidates.append(tuple(out.statistics.num_drafted[0].tolist()))
    found = [results["some", question.id, "4,4,3:warm"] for question in QUESTIONS]
    assert [answer.num_drafted for result in found for answer in result.answers] == candidates


def prompt_of(question, turn, said):
    if question.ids is not None:
        return list(question.ids)
    if not question.is_chat:
        return tiny_tokenizer().encode(question.turns[0]).ids
    messages = [{"role": "user", "content": question.turns[0]}]
    for answer, asked in zip(said[:turn], question.turns[1:], strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": asked}]
    return encode(messages)


def interrupted(whole, directory, num_results, ending, kept):
    """Returns the file as it is after `num_results` lines, `ending`, and the pools `kept` around the last ones."""
    file = directory / "run.jsonl"
    written = whole.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(written[: 1 + num_results]) + written[1 + num_results][:ending])
    results = runs.read(whole).results[:num_results]
    for pool in (whole.parent / "every pool").iterdir():
        name, number, _ = pool.name.rsplit(".", 2)
        last = sum(result.method.replace(",", "-").replace(":", "-") == name for result in results)
        if int(number) - last in kept:
            (directory / "run.pools").mkdir(exist_ok=True)
            shutil.copy(pool, directory / "run.pools")
    return file


# A pool is written, then its result, then the pool before it is removed.
@pytest.mark.slow
@pytest.mark.parametrize(("ending", "kept"), [(0, (0,)), (40, (0, 1)), (-1, (0, 1)), (0, (-1, 0))])
@pytest.mark.parametrize("num_results", range(12))
def test_a_run_interrupted_anywhere_becomes_that_of_an_uninterrupted_one(num_results, ending, kept, whole, tmp_path):
    file = interrupted(whole, tmp_path, num_results, ending, kept)
    assert runs.done_cells(file, cells()) == num_results
    assert len(list(execute(file))) == 12 - num_results
    assert lines(file) == lines(whole)
    assert file.read_bytes().splitlines()[: 1 + num_results] == whole.read_bytes().splitlines()[: 1 + num_results]


@pytest.mark.slow
@pytest.mark.parametrize("written", [b"", b'{"run": {"mod'])
def test_a_run_interrupted_in_its_first_line_begins_anew(written, whole, tmp_path):
    file = tmp_path / "run.jsonl"
    file.write_bytes(written)
    assert runs.done_cells(file, cells()) == 0
    list(execute(file))
    assert lines(file) == lines(whole)


def test_ctrl_c_loses_one_answer_at_most(whole, tmp_path, monkeypatch):
    answer, calls = EvaluatedModel.answer, itertools.count(1)

    def interrupt(*arguments):
        if next(calls) == 8:
            raise KeyboardInterrupt
        return answer(*arguments)

    monkeypatch.setattr(EvaluatedModel, "answer", interrupt)
    file = tmp_path / "run.jsonl"
    with pytest.raises(KeyboardInterrupt):
        list(execute(file))
    assert runs.done_cells(file, cells()) == 3, "the fourth has two turns"
    running = execute(file)
    next(running)
    with pytest.raises(KeyboardInterrupt):
        running.throw(KeyboardInterrupt)
    assert runs.done_cells(file, cells()) == 4
    list(execute(file))
    assert lines(file) == lines(whole)


def test_a_run_takes_more_questions_and_methods(whole, tmp_path):
    file = tmp_path / "run.jsonl"
    list(execute(file, cells(QUESTIONS[:1], METHODS[:1])))
    list(execute(file, cells(QUESTIONS[:2], METHODS)))
    list(execute(file))
    written, expected = ({(line["question"], line["method"]): line for line in lines(f)[1:]} for f in (file, whole))
    assert written == expected


@pytest.mark.parametrize(
    ("fact", "value", "stored"),
    [("model", "other", "'tiny'"), ("seed", 1, "0"), ("max_new_tokens", 24, "12"), ("data", [], r"\['some'\]")],
)
def test_a_file_of_another_run_is_refused_and_left_alone(fact, value, stored, whole):
    before = whole.read_bytes()
    with pytest.raises(
        ValueError, match=f"holds a run with {fact}={stored}, and this one has {re.escape(repr(value))}"
    ):
        next(execute(whole, about=ABOUT | {fact: value}))
    with pytest.raises(ValueError, match=f"holds a run with {fact}={stored}, and this one has None"):
        next(execute(whole, about={name: each for name, each in ABOUT.items() if name != fact}))
    assert whole.read_bytes() == before


def test_another_day_goes_on(whole):
    assert list(execute(whole, about=ABOUT | {"date": "tomorrow", "command": "jlade bench methods"})) == []


def test_another_seed_draws_other_texts_and_changes_no_greedy_one(whole, tmp_path):
    file = tmp_path / "run.jsonl"
    results = list(execute(file, seed=1))
    for one, other in zip(results, runs.read(whole).results, strict=True):
        is_sampled = one.method == "plain:t=1"
        assert ([a.tokens for a in one.answers] != [a.tokens for a in other.answers]) == is_sampled


@pytest.fixture
def asked(monkeypatch):
    """The prompts of answers, which are empty here but for the method's name."""
    prompts = []
    empty = runs.Answer(1, (1,), "", 1, (1,), (0,), (0, 0), (), 1.0, 1.0, 1.0, 1)

    def answer(self, prompt, method, key, pool=None, choices=(), max_length=None):
        prompts.append((str(method), prompt, jax.random.key_data(key).tolist()))
        return dataclasses.replace(empty, text=f"by {method}"), None

    monkeypatch.setattr(EvaluatedModel, "answer", answer)
    return prompts


def test_later_turns_contain_the_answers_of_plain_decoding_in_float32(asked, tmp_path):
    question = Question("chat", "talk", turns=("one", "two", "three"), system="Be brief.")
    methods = [parse("plain:bfloat16"), parse("4,4,3:bfloat16:t=1")]
    planned = cells([question], methods)
    list(runs.execute(planned, MODEL, tuple, tmp_path / "run.jsonl", ABOUT))
    system, one, two = (
        {"role": "system", "content": "Be brief."},
        *({"role": "user", "content": t} for t in ("one", "two")),
    )
    for method in ("plain", "plain:bfloat16", "4,4,3:bfloat16:t=1"):
        first, second, third = (prompt for name, prompt, _ in asked if name == method)
        said = {"role": "assistant", "content": "by plain"}
        assert first == (system, one)
        assert second == (system, one, said, two)
        assert third == (system, one, said, two, said, {"role": "user", "content": "three"})
    assert len({str(key) for *_, key in asked}) == 1, "all methods have the question's key"


def test_the_beginning_of_an_answer_is_a_message_of_the_assistant(asked, tmp_path):
    question = Question("summary", "talk", turns=("Summarize.",), system="The text.", beginning="Summary:")
    list(runs.execute(cells([question], [parse("plain")]), MODEL, tuple, tmp_path / "run.jsonl", ABOUT))
    (_, messages, _), *_ = asked
    said = [("system", "The text."), ("user", "Summarize."), ("assistant", "Summary:")]
    assert [tuple(message.values()) for message in messages] == said


def test_texts_to_continue_have_no_special_tokens_and_no_template(asked, tmp_path):
    question = Question("text", "talk", turns=("</s>",), is_chat=False)
    list(execute(tmp_path / "run.jsonl", cells([question], [parse("plain")])))
    assert asked[0][1] == tiny_tokenizer().encode("a").ids, "the unknown token"


def test_differences_name_the_first_token_and_the_gap_of_the_logits(monkeypatch, tmp_path):
    answer = EvaluatedModel.answer

    def other(self, prompt, method, key, pool=None, choices=(), max_length=None):
        found, pool = answer(self, prompt, method, key, pool)
        if method.setting == parse("2,3,1").setting:
            found = dataclasses.replace(found, tokens=(*found.tokens[:5], 12, *found.tokens[6:]))
        return found, pool

    monkeypatch.setattr(EvaluatedModel, "answer", other)
    list(execute(tmp_path / "run.jsonl", cells(QUESTIONS[2:], [parse("4,4,3"), parse("2,3,1")])))
    plain, same, differs = runs.read(tmp_path / "run.jsonl").results
    assert plain.differences == same.differences == (None,)
    (difference,) = differs.differences
    assert isinstance(difference, Difference)
    assert difference.position == 5
    assert difference.logit_gap > 0


def test_a_question_that_cannot_be_answered_is_recorded_and_the_run_goes_on(tmp_path):
    long = Question("long", "talk", ids=tuple([1] * 127))
    file = tmp_path / "run.jsonl"
    results = list(execute(file, cells([long, QUESTIONS[2]], [parse("4,4,3")])))
    assert [bool(result.error) for result in results] == [True, True, False, False]
    assert re.search("127 tokens.* 128 positions", results[0].error)
    assert results[0].answers == results[0].differences == ()
    assert runs.read(file).results == tuple(results)


def test_answers_are_judged_by_number_and_letter(asked, tmp_path):
    """The answer to each is "by plain" here."""
    questions = [
        Question("number", "maths", ids=(1,), answer="4"),
        Question("letter", "choice", ids=(1,), answer="by plain", choices="AB"),
        Question("none", "talk", ids=(1,)),
    ]
    planned = cells(questions, [parse("plain")])
    assert [result.passed for result in execute(tmp_path / "a", planned)] == [False, True, None]


def test_a_filled_gap_runs_between_the_texts_around_it(asked, monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(runs.quality, "passed", lambda texts, tests: ran.append((texts, tests)) or (True,))
    monkeypatch.setattr(runs.infilling, "prompt", lambda tokenizer, before, after: [1, 2])
    monkeypatch.setattr(runs.infilling, "filled", lambda tokenizer, tokens: f"<{tokens}>")
    code = runs.quality.CodeTests("", "assert f() == 1")
    question = Question("gap", "code", turns=("before ",), is_chat=False, suffix=" after", tests=code)
    (result,) = execute(tmp_path / "run.jsonl", cells([question], [parse("plain")]), run_code=True)
    assert result.passed
    assert (asked[0][1], ran) == ([1, 2], [(["before <(1,)> after"], [code])])


def test_a_gap_without_tokens_for_it_is_recorded_as_an_error(tmp_path):
    question = Question("gap", "code", turns=("a",), is_chat=False, suffix="b")
    (result,) = execute(tmp_path / "run.jsonl", cells([question], [parse("plain")]))
    assert "models that fill gaps" in result.error


def test_tests_of_code_run_only_if_asked(asked, monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(runs.quality, "passed", lambda texts, tests: ran.append((texts, tests)) or (True,))
    question = Question("code", "code", ids=(1,), tests=runs.quality.CodeTests("", "assert f() == 1"))
    planned = cells([question], [parse("plain")])
    assert [result.passed for result in execute(tmp_path / "a", planned)] == [None]
    assert ran == []
    assert [result.passed for result in execute(tmp_path / "b", planned, run_code=True)] == [True]
    assert ran == [(["by plain"], [question.tests])]


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (1, "[]"),
        (1, '{"model": 1}'),
        (3, "{"),
        (3, "[1]"),
        (3, '{"dataset": "some"}'),
        (4, '{"answers": [{"steps": 1}]}'),
    ],
)
def test_a_corrupt_line_is_named(number, line, whole, tmp_path):
    file = tmp_path / "run.jsonl"
    written = whole.read_text().splitlines()
    file.write_text("\n".join([*written[: number - 1], line, *written[number:]]) + "\n")
    with pytest.raises(ValueError, match=rf"run\.jsonl:{number} is not a line of a run"):
        runs.read(file)
    before = file.read_text()
    with pytest.raises(ValueError, match=rf"run\.jsonl:{number} is not a line of a run"):
        next(execute(file))
    assert file.read_text() == before


@pytest.mark.slow
def test_files_that_hold_no_run(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty is empty; accepted is a file written by `jlade bench`"):
        runs.read(tmp_path / "empty")
    for path in (pathlib.Path(tmp_path), tmp_path / "none"):
        with pytest.raises(ValueError, match=f"{path} is not a file with the results"):
            runs.read(path)
