import contextlib
import io
import itertools
import json
import re
import shutil
from typing import NamedTuple

import pytest

from jlade import cli
from jlade.cli import bench
from jlade.cli.arguments import load
from jlade.evaluation import datasets, experiments, runs, scaling
from jlade.evaluation.answers import EvaluatedModel
from jlade.evaluation.experiments import EXPERIMENTS
from tests.evaluation.made import ABOUT, answer

SHORT = ["--limit", "1", "--max-new-tokens", "6"]
TABLES = {"methods", "tasks", "throughput", "accepted", "table2", "table3", "figure4", "figure4-trees", "table4"}
TABLES |= {"paper", "growth", "exactness", "hits-by-kind", "figure6-7", "jacobi", "convergence"}
TABLES |= {"costs", "figure5", "figure8"}
FIGURES = {"figure5", "throughput", "figure4a", "figure4b", "figure4c", "figure6", "figure7", "figure8", "hits"}
FEW = ["--windows", "1", "3", "--ngrams", "3", "5"]


class Call(NamedTuple):
    """The arguments of a call of `EvaluatedModel.answer`."""

    model: EvaluatedModel
    prompt: list[int]
    max_length: int | None


def make_answers(monkeypatch, check=lambda call: None):
    """Replaces a model's answers by one that is made up, after a check of each call, and returns the list of calls."""
    calls = []

    def answered(self, prompt, method, key, pool=None, choices=(), max_length=None):
        calls.append(Call(self, prompt, max_length))
        check(calls[-1])
        return answer([1, 2], text="made"), None

    monkeypatch.setattr(EvaluatedModel, "answer", answered)
    return calls


@pytest.fixture
def made(monkeypatch):
    return make_answers(monkeypatch)


@pytest.fixture(scope="module")
def everything(small_demo, tmp_path_factory):
    """The directory of all experiments, each on one question, those of Figure 4 with fewer settings; and the output."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("rouge_score")
    directory = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        patch.setattr("jlade.cli.arguments.DEMO", small_demo)
        patch.setattr(scaling, "TREES", (1, 3))
        trees = tuple(map(str, scaling.tree_methods()))
        patch.setitem(EXPERIMENTS, "figure4", EXPERIMENTS["figure4"]._replace(methods=("windows", *trees)))
        patch.setitem(EXPERIMENTS, "table4", EXPERIMENTS["table4"]._replace(methods=("plain", "windows")))
        patch.setitem(EXPERIMENTS, "jacobi", EXPERIMENTS["jacobi"]._replace(methods=("plain", "jacobi=4")))
        assert cli.main(["bench", "all", *SHORT, *FEW, "--output", str(directory / "new")]) == 0
    return directory / "new", output.getvalue()


@pytest.mark.slow
def test_every_experiment_has_its_files(everything):
    directory, output = everything
    files = {f"{name}.{kind}" for name, kind in itertools.product(TABLES, ("md", "json"))}
    files |= {f"{name}.png" for name in FIGURES} | {"run.jsonl", "run.pools", "experiments.json", "report.html"}
    extra = {"divergences.md", "divergences.json"}
    assert {path.name for path in directory.iterdir()} - extra == files
    for name in FIGURES:
        assert (directory / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert output.endswith(f"{directory / 'report.html'}: tables and figures\n")
    assert "Window, candidates and prompt (Table 3 of the paper)" in output


@pytest.mark.slow
def test_its_tables_are_markdown_and_json_of_the_same_numbers(everything):
    directory, _ = everything

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    for name in TABLES:
        facts = json.loads((directory / f"{name}.json").read_text(), parse_constant=refuse)
        (about,) = facts["runs"]
        assert (about["model"], about["dtype"], about["max_new_tokens"]) == ("demo", "float32", 6)
        lines = (directory / f"{name}.md").read_text().splitlines()
        assert lines[0] == f"**{facts['title']}**"
        assert len([line for line in lines if line.startswith("|")]) == len(facts["rows"]) + 2
        assert facts["rows"]


@pytest.mark.slow
def test_greedy_answers_are_identical_in_float32(everything):
    run = runs.read(everything[0] / "run.jsonl")
    assert len(run.results) == len({result.key for result in run.results}) > 20
    assert {result.error for result in run.results} == {None}
    rows = json.loads((everything[0] / "exactness.json").read_text())["rows"]
    assert [row["share"] for row in rows if row["dtype"] == "float32"] == [1, 1]
    plain = next(row for row in json.loads((everything[0] / "methods.json").read_text())["rows"])
    assert (plain["method"], plain["tokens/step"], plain["speedup"]) == ("plain", 1, 1)


@pytest.mark.slow
def test_the_report_needs_nothing_else(everything):
    page = (everything[0] / "report.html").read_text()
    assert re.findall('(?:src|href)=(?!"data:|"#)', page) == []
    assert not re.search("url\\(|@import|<script", page)
    assert page.count("<img ") == len(FIGURES)
    for name in ("paper", *EXPERIMENTS):
        assert f'<section id="{name}">' in page
        assert f'<a href="#{name}">' in page


@pytest.mark.slow
def test_the_report_can_be_read(everything, open_page):
    for width, scheme in ((390, "light"), (1200, "dark")):
        opened = open_page(everything[0] / "report.html", width, color_scheme=scheme)
        assert opened.errors == []
        assert len(opened.requests) == 1
        assert not opened.overflows()
        headings = opened.page.get_by_role("heading", level=2)
        assert headings.all_inner_texts() == ["Beside the paper", *(each.title for each in EXPERIMENTS.values())]
        assert all(heading.is_visible() for heading in headings.all())
        tables = opened.page.locator("table")
        assert tables.count() >= len(TABLES)
        assert all(table.is_visible() for table in tables.all())
        loaded = "images => images.every(image => image.complete && image.naturalWidth > 0)"
        assert opened.page.locator("img").evaluate_all(loaded)
        assert not opened.page.get_by_text("processor", exact=True).is_visible()
        opened.page.get_by_text("Machine, versions and command").click()
        assert opened.page.get_by_text("processor", exact=True).is_visible()
        opened.page.close()


@pytest.mark.slow
def test_the_first_column_stays_when_a_table_scrolls(everything, open_page):
    opened = open_page(everything[0] / "report.html", 390)
    cell = opened.page.locator("#methods tbody td").first
    before = cell.bounding_box()["x"]
    opened.page.locator("#methods .wide").first.evaluate("box => box.scrollLeft = 100")
    assert opened.page.locator("#methods .wide").first.evaluate("box => box.scrollLeft") == 100
    assert cell.bounding_box()["x"] == before


@pytest.mark.slow
def test_running_again_decodes_nothing_and_writes_the_same_tables(everything, tmp_path, monkeypatch, capsys):
    directory = tmp_path / "again"
    shutil.copytree(everything[0], directory)
    monkeypatch.setattr(EvaluatedModel, "answer", None)
    assert cli.main(["bench", "methods", "table3", *SHORT, "--output", str(directory)]) == 0
    for name in ("methods", "tasks", "table3"):
        written, expected = (json.loads((d / f"{name}.json").read_text()) for d in (directory, everything[0]))
        assert written["rows"] == expected["rows"]
    assert set(experiments.load(directory)) == set(EXPERIMENTS), "those of before are known too"


@pytest.mark.slow
def test_a_report_of_two_runs_names_the_run_of_each_table(everything, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other"
    shutil.copytree(everything[0], other)
    (other / "run.jsonl").write_text(
        (other / "run.jsonl").read_text().replace('"model": "demo"', '"model": "large"', 1)
    )
    monkeypatch.setattr(EvaluatedModel, "answer", None)
    arguments = ["methods", "table4", "pool", "--report", str(everything[0]), str(other)]
    assert cli.main(["bench", *arguments, "--output", str(tmp_path / "both")]) == 0
    names = {path.name for path in (tmp_path / "both").iterdir()}
    assert {"methods-1.md", "methods-2.md", "table4.md", "growth-1.json", "hits-2.png", "report.html"} <= names
    assert "methods.md" not in names
    page = (tmp_path / "both" / "report.html").read_text()
    titles = re.findall("<h3>(.*?)</h3>", page)
    assert len(titles) == len(set(titles))
    assert any("large" in title for title in titles)
    assert "<p>Run 1: demo, " in page
    assert "<p>Run 2: large, " in page
    rows = json.loads((tmp_path / "both" / "table4.json").read_text())["rows"]
    assert [row["model"].split(",")[0] for row in rows] == ["demo", "large", *["7B", "13B", "34B"] * 4]
    assert "large" in capsys.readouterr().out


def test_methods_are_compared_with_their_baselines(made, tmp_path, capsys):
    arguments = ["--methods", "4,4,3", "4,4,3:t=1", "4,4,3", *SHORT]
    assert cli.main(["bench", *arguments, "--output", str(tmp_path)]) == 0
    labels = [row["method"] for row in json.loads((tmp_path / "methods.json").read_text())["rows"]]
    assert labels == ["plain", "plain, temperature 1", "4, 4, 3", "4, 4, 3, temperature 1"]
    output = capsys.readouterr().out
    assert "2.00" not in output
    assert "1.50" in output


def test_data_and_seed_choose_the_questions(made, tmp_path, capsys):
    lines = [{"id": i, "prompt": "x " * 10 * i, "task": "task [b]|</b>"} for i in range(1, 9)]
    (tmp_path / "mine.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    arguments = ["--methods", "plain", "--data", str(tmp_path / "mine.jsonl"), "--max-new-tokens", "6", "--limit", "3"]
    assert cli.main(["bench", *arguments, "--output", str(tmp_path / "a")]) == 0
    assert [result.question for result in runs.read(tmp_path / "a" / "run.jsonl").results] == ["1", "2", "3"]
    assert cli.main(["bench", *arguments, "--seed", "1", "--output", str(tmp_path / "b")]) == 0
    chosen = datasets.select(datasets.read(tmp_path / "mine.jsonl").questions, 3, 1)
    results = runs.read(tmp_path / "b" / "run.jsonl").results
    assert [result.question for result in results] == [question.id for question in chosen] != ["1", "2", "3"]
    assert "task [b]|</b>" in re.sub(r"\s*│\n│\s*", " ", capsys.readouterr().out), "names are no markup"


def test_lengths_of_the_paper_are_those_of_each_data_set(made, tmp_path, capsys):
    """Section 5: sequences of 512 tokens for HumanEval and 2048 for ClassEval."""
    code = {"task_id": "1", "prompt": "def f():", "entry_point": "f", "test": "def check(f): pass"}
    whole_class = {"task_id": "2", "skeleton": "class A:", "class_name": "A"}
    files = {"code": code, "class": whole_class, "mine": {"prompt": "Hello"}}
    for name, line in files.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    arguments = ["--methods", "plain", "--data", *(str(tmp_path / f"{name}.jsonl") for name in files)]
    assert cli.main(["bench", *arguments, "--max-new-tokens", "paper", "--output", str(tmp_path / "out")]) == 0
    lengths = [(call.model.max_new_tokens, call.max_length) for call in made]
    assert lengths == [(None, 512), (None, 2048), (None, None)]
    assert runs.read(tmp_path / "out" / "run.jsonl").about["max_new_tokens"] == "paper"
    assert "answers of as many new tokens as the paper allows" in (tmp_path / "out" / "report.html").read_text()
    assert "as many new tokens as the paper allows" in (tmp_path / "out" / "methods.md").read_text()


def test_figures_5_and_8_are_of_the_device_by_one_command(made, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench.provenance, "provenance", lambda: ABOUT | {"device": "TPU v6 lite"})
    arguments = ["figure5", "figure8", *SHORT, *FEW, "--output", str(tmp_path)]
    assert cli.main(["bench", *arguments]) == 0
    for name in ("figure5", "figure8"):
        assert "on TPU v6 lite (Figure" in json.loads((tmp_path / f"{name}.json").read_text())["title"]
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "Figure 5" in (tmp_path / "paper.md").read_text()
    methods = {result.method for result in runs.read(tmp_path / "run.jsonl").results}
    assert methods >= {"plain", "15,5,15", "1,5,1", "3,5,3"}


def test_ctrl_c_says_how_many_answers_there_are_and_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    count = itertools.count(1)

    def interrupt(call):
        if next(count) == 3:
            raise KeyboardInterrupt

    make_answers(monkeypatch, interrupt)
    arguments = ["bench", "--methods", "plain", "4,4,3", "--limit", "2", "--output", str(tmp_path)]
    assert cli.main(arguments) == 130
    captured = capsys.readouterr()
    assert captured.err == f"2 of 4 answers are in {tmp_path / 'run.jsonl'}; the same command goes on\n"
    assert captured.out == ""
    assert cli.main(arguments) == 0
    assert next(count) == 6, "three more than the two before the interruption"
    assert len(runs.read(tmp_path / "run.jsonl").results) == 4


def test_questions_without_an_answer_are_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "short"}\n' + json.dumps({"prompt": "x " * 3000}) + "\n")

    def refuse(call):
        if len(call.prompt) > 1000:
            raise ValueError("too long")

    make_answers(monkeypatch, refuse)
    arguments = ["--methods", "plain", "4,4,3", "--data", str(tmp_path / "mine.jsonl"), "--output", str(tmp_path)]
    assert cli.main(["bench", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == "2 of 4 answers are missing, such as that of plain to mine/1 of mine: too long\n"
    assert "1 question" in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table5"], "there is no experiment 'table5'; there are methods, figure5, table2, .* and all"),
        (["--methods", "plain", "medusa"], "a method is .* got 'medusa'"),
        (["--methods", "transformers:t=1"], "transformers decodes greedily"),
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--max-new-tokens", "book"], "--max-new-tokens: must be an integer of at least 1, or paper, got 'book'"),
        (["--windows", "0", "3"], "--windows must be at least 1, got 0"),
        (["--ngrams", "5"], "--ngrams must have two or more different values, got 5"),
        (["--windows", "8", "4000"], "at most 4096 are accepted"),
        (["--summary-prompt", "one/a.jsonl"], "one/a.jsonl: a prompt for summaries must have {text} once, got 0"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--output", "file"], "--output must be a directory, got file"),
        (["--data", "one/a.jsonl", "two/a.jsonl"], "--data names two data sets called 'a': join the files, or rename"),
        (["--data", "none.jsonl"], "none.jsonl cannot be read"),
        (["table2", "--data", "one/a.jsonl"], "no question of the data is of use for table2"),
        (["--report", "none"], "none/run.jsonl is not a file with the results"),
        (["--report", "one"], "one/run.jsonl is not a file with the results"),
    ],
)
def test_bad_arguments_are_refused_before_a_model_is_loaded(arguments, message, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jlade.cli.arguments.load", None)
    (tmp_path / "file").touch()
    for directory in ("one", "two"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "a.jsonl").write_text('{"prompt": "x"}\n')
    assert re.search(message, refused(["bench", *arguments]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "one", "two"]


def test_methods_that_need_torch_are_refused_by_name_and_else_left_out(refused, monkeypatch):
    monkeypatch.setattr(experiments.importlib.util, "find_spec", lambda name: None)
    message = refused(["bench", "--methods", "plain", "transformers"])
    assert message == "jlade bench: error: the method transformers needs torch: pip install torch transformers\n"
    selected = experiments.select(["methods", "table3"], datasets.samples(), "float32", limit=1)
    assert selected["methods"].methods == ("plain", "prompt-lookup", "15,5,15")
    assert "transformers-lookup" not in selected["table3"].methods


def test_a_run_of_another_model_is_refused(made, refused, tmp_path, capsys):
    arguments = ["bench", "--methods", "plain", "--limit", "1", "--output", str(tmp_path)]
    assert cli.main(arguments) == 0
    capsys.readouterr()
    error = refused([*arguments, "--max-new-tokens", "7"])
    assert re.search("holds a run with max_new_tokens=128, and this one has 7: name another --output", error)


def test_a_report_of_experiments_that_were_not_made(made, refused, tmp_path, capsys):
    assert cli.main(["bench", "--methods", "plain", "--limit", "1", "--output", str(tmp_path)]) == 0
    capsys.readouterr()
    error = refused(["bench", "table3", "figure4", "--report", str(tmp_path), "--output", str(tmp_path / "new")])
    assert error == "jlade bench: error: the results have nothing for table3, figure4\n"


def test_a_model_without_a_chat_template_continues_the_messages(made, small_demo, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(small_demo, bare)
    (bare / "chat_template.jinja").unlink()
    one = {"question_id": 1, "category": "talk", "turns": ["Hello </s> you", "And then?"]}
    (tmp_path / "mt.jsonl").write_text(json.dumps(one) + "\n")
    arguments = ["--methods", "plain", "--data", str(tmp_path / "mt.jsonl"), "--output", str(tmp_path / "out")]
    assert cli.main(["bench", "--model", str(bare), *arguments]) == 0
    _, tokenizer = load(bench.parser().parse_args(["--model", str(bare)]))
    texts = ["Hello </s> you", "Hello </s> you\n\nmade\n\nAnd then?"]
    tokenizer.encode_special_tokens = True
    assert [len(call.prompt) for call in made] == [len(tokenizer.encode(text).ids) for text in texts]


# Of LLaMA-2-Chat, whose roles must alternate.
LLAMA_2 = (
    "{% set system = messages[0]['content'] %}{% for message in messages[1:] %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "[INST] <<SYS>>\n{{ system }}\n<</SYS>>\n\n{{ message['content'] | trim }} [/INST]"
    "{% else %} {{ message['content'] | trim }} </s>{% endif %}{% endfor %}"
)


def test_summaries_are_asked_for_in_the_form_of_appendix_d(made, small_demo, tmp_path):
    """There the system message has the text and rules, a sentence asks, and "Summary:" begins the answer."""
    llama = tmp_path / "llama"
    shutil.copytree(small_demo, llama)
    (llama / "chat_template.jinja").write_text(LLAMA_2)
    (tmp_path / "one.jsonl").write_text(json.dumps({"id": 1, "document": "It rains.", "summary": "Rain."}) + "\n")
    arguments = ["--methods", "plain", "--data", str(tmp_path / "one.jsonl"), "--output", str(tmp_path / "out")]
    assert cli.main(["bench", "--model", str(llama), *arguments]) == 0
    system = r".*:\n\nIt rains\.\n\n(- .*\n)+"
    prompt = made[0].model.tokenizer.decode(made[0].prompt)
    assert re.fullmatch(rf"\[INST\] <<SYS>>\n{system}<</SYS>>\n\n.* \[/INST\] Summary:", prompt)
