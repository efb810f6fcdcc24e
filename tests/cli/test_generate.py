import functools
import io
import itertools
import json
import os
import pathlib
import shutil
import sys
import types

import jax
import numpy as np
import pytest

import jlade
from jlade import cli, storage
from jlade.cli import arguments
from jlade.generation.results import NOT_FINITE
from tests.cli.own_terminal import Terminal
from tests.tiny import PAPER, tiny_llama, tiny_tokenizer

PROMPTS = ("import os\n", "def read_config(path):")
LIMIT = ["--max-new-tokens", "12"]


@pytest.fixture(scope="module")
def expected(demo):
    """What `jlade.generate` makes of each prompt alone, in lists."""
    params, tokenizer = demo
    options = {"tokenizer": tokenizer, "lookahead": PAPER, "max_new_tokens": 12, "logprobs": True}
    made = [jlade.generate(params, prompt, **options) for prompt in PROMPTS]
    names = ("text", "tokens", "steps", "logprobs", "compression")
    return types.SimpleNamespace(**{name: [getattr(each, name)[0] for each in made] for name in names})


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Names of files with the prompts, in the current directory."""
    monkeypatch.chdir(tmp_path)
    for name, prompt in zip(("a.py", "b.py"), PROMPTS, strict=True):
        (tmp_path / name).write_text(prompt, encoding="utf-8")
    return ["a.py", "b.py"]


def type_in(monkeypatch, data: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.fixture
def run(printed):
    return functools.partial(printed, "generate")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--batch-size", "2"]], ids=["one by one", "batch"])
def test_every_file_is_a_prompt_and_the_texts_come_in_order(more, files, expected, run):
    assert run(*files, *LIMIT, *more) == f"{expected.text[0]}\n{expected.text[1]}\n"


@pytest.mark.slow
def test_text_is_written_as_it_is_made(files, monkeypatch):
    written = []
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "flush", lambda: written.append(sys.stdout.getvalue()))
    assert cli.main(["generate", files[0], *LIMIT]) == 0
    assert len(set(written)) > 3, "12 tokens take 3 steps at least, and a newline follows"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(written))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_standard_input_is_one_prompt(arguments, expected, monkeypatch, run):
    type_in(monkeypatch, PROMPTS[0].encode())
    assert run(*arguments, *LIMIT) == f"{expected.text[0]}\n"


@pytest.mark.slow
def test_json_has_the_figures_of_each_prompt(files, expected, run):
    arguments = [*files, *LIMIT, "--json", "--logprobs"]
    records = [json.loads(line) for line in run(*arguments).splitlines()]
    assert [record.pop("source") for record in records] == files
    for i, record in enumerate(records):
        np.testing.assert_allclose(record.pop("logprobs"), expected.logprobs[i], rtol=1e-4)
        assert record == {
            "prompt": PROMPTS[i],
            "text": expected.text[i],
            "token_ids": expected.tokens[i].tolist(),
            "finish_reason": "length",
            "tokens": 12,
            "steps": expected.steps[i],
            "compression": expected.compression[i],
        }


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--json"], ["--batch-size", "2"]], ids=["text", "json", "rows"])
def test_logits_that_are_not_finite_are_an_error_at_the_end(more, demo, files, monkeypatch, capsys):
    params, tokenizer = demo
    broken = params.replace(norm=params.norm.at[3].set(float("nan")))
    monkeypatch.setattr(storage, "read", lambda *arguments, **options: (broken, tokenizer))
    (pathlib.Path.cwd() / "c.jsonl").write_text(
        json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": PROMPTS[0]}})
    )
    names = ["c.jsonl"] if more == ["--json"] else files
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["generate", *names, *LIMIT, *more])
    assert exit_info.value.code == 1
    printed = capsys.readouterr()
    assert printed.err == f"jlade generate: error: {len(names)} of {len(names)} texts ended early: {NOT_FINITE}\n"
    if more == ["--json"]:
        response = json.loads(printed.out)["response"]
        assert (response["status_code"], response["body"]["error"]["message"]) == (500, NOT_FINITE)
    else:
        assert printed.out == "\n\n"


def test_each_non_blank_line_is_a_prompt(files, expected, monkeypatch, run):
    type_in(monkeypatch, f"\ufeff\n{PROMPTS[1]}\r\n  \nimport os".encode())
    arguments = ["-", *files, "--lines", *LIMIT, "--json", "--batch-size", "2"]
    records = [json.loads(line) for line in run(*arguments).splitlines()]
    assert [(record["source"], record["prompt"]) for record in records] == [
        ("-:2", PROMPTS[1]),
        ("-:4", "import os"),
        ("a.py:1", "import os"),
        ("b.py:1", PROMPTS[1]),
    ]
    assert records[0]["text"] == records[3]["text"] == expected.text[1]
    assert records[1]["text"] == records[2]["text"]
    assert "logprobs" not in records[0]


@pytest.mark.slow
def test_the_first_sampled_text_is_that_of_jlade_prompt_and_each_prompt_has_a_key(files, demo, run):
    params, tokenizer = demo
    key = jax.random.key(7)
    controls = {"lookahead": PAPER, "max_new_tokens": 12, "sampling": jlade.SamplingConfig(temperature=1.0)}
    controls["stop"] = ["  1, 1", "never"]
    expected = [
        jlade.generate(params, prompt, tokenizer=tokenizer, key=each, **controls)
        for prompt, each in zip(PROMPTS, (key, jax.random.fold_in(key, 1)), strict=True)
    ]
    assert [each.finish_reason for each in expected] == [("stop",), ("length",)]
    printed = run(*files, *LIMIT, "--temperature", "1", "--seed", "7", "--stop", "  1, 1", "--stop", "never")
    assert printed == "".join(f"{each.text[0]}\n" for each in expected)
    shutil.copytree(arguments.DEMO, "stops")
    settings = {"stop_strings": controls["stop"], "eos_token_id": params.config.eos_ids}
    pathlib.Path("stops", "generation_config.json").write_text(json.dumps(settings))
    assert run(*files, *LIMIT, "--temperature", "1", "--seed", "7", "--model", "stops") == printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.py", "nowhere.py"], "nowhere.py cannot be read: No such file"),
        (["a.py", "."], ". cannot be read: Is a directory"),
        (["a.py", "latin"], "latin is not UTF-8"),
        (["a.py", "blank"], "blank is empty"),
        (["a.py", "blank", "--lines"], "blank is empty"),
        (["a.py", "long"], "long has 3001 tokens; with a new one they exceed the model's 2048 positions"),
        (["a.py", "--logprobs"], "--logprobs needs --json"),
        (["a.py", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["a.py", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_errors_are_reported_before_anything_is_decoded(arguments, message, files, tmp_path, refused):
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    (tmp_path / "blank").write_text(" \n\n")
    (tmp_path / "long").write_text("1 " * 1500)
    error = refused(["generate", *arguments])
    assert message in error


def test_a_closed_pipe_ends_the_command_quietly(files, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert cli.main(["generate", *files, *LIMIT]) == 1
    assert capsys.readouterr().err == ""


def lines_of(file):
    return file.read_bytes().splitlines(keepends=True)


@pytest.mark.slow
def test_an_interrupted_job_goes_on_where_its_output_ends(files, monkeypatch, tmp_path, capsys):
    sampled = ["--temperature", "1", "--lookahead", "4,4,3"]
    arguments = ["generate", *files, "a.py", *LIMIT, *sampled, "--output", "out.jsonl"]
    assert cli.main(arguments) == 0
    whole = lines_of(tmp_path / "out.jsonl")
    assert [json.loads(line)["prompt"] for line in whole] == [*PROMPTS, PROMPTS[0]]
    assert json.loads(whole[0])["text"] != json.loads(whole[2])["text"], "each prompt has a key of its own"
    assert json.loads(whole[0])["options"] == {"max_new_tokens": 12, "temperature": 1.0, "lookahead": "4,4,3"}

    calls = []
    generate = jlade.generate

    def interrupted(params, prompts, **request):
        calls.append(prompts)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(params, prompts, **request)

    (tmp_path / "out.jsonl").write_bytes(whole[0] + whole[1][:20])
    monkeypatch.setattr(jlade, "generate", interrupted)
    assert cli.main(arguments) == 130
    assert lines_of(tmp_path / "out.jsonl") == whole[:2]
    assert "2 of 3 prompts are completed" in capsys.readouterr().err
    assert cli.main(arguments) == 0
    assert lines_of(tmp_path / "out.jsonl") == whole
    assert cli.main(arguments) == 0
    assert len(calls) == 3
    assert lines_of(tmp_path / "out.jsonl") == whole


@pytest.mark.slow
def test_an_interrupted_job_in_rows_goes_on_too(files, monkeypatch, tmp_path, capsys):
    (tmp_path / "long").write_text("x" * 9000, encoding="utf-8")
    names = [*files, "long", "b.py", "a.py", "a.py"]
    arguments = ["generate", *names, *LIMIT, "--output", "out.jsonl", "--skip-invalid"]
    assert cli.main(arguments) == 0
    whole = lines_of(tmp_path / "out.jsonl")
    (tmp_path / "out.jsonl").unlink()
    arguments += ["--batch-size", "2"]

    def interrupted(self, prompts, **options):
        yield from itertools.islice(complete(self, prompts, **options), 3)
        raise KeyboardInterrupt

    complete = jlade.Engine.map
    with monkeypatch.context() as patch:
        patch.setattr(jlade.Engine, "map", interrupted)
        assert cli.main(arguments) == 130
    assert "4 of 6 prompts are completed" in capsys.readouterr().err
    assert cli.main(arguments) == 0
    texts = [json.loads(line).get("text") for line in lines_of(tmp_path / "out.jsonl")]
    assert texts == [json.loads(line).get("text") for line in whole]
    assert [text is None for text in texts] == [name == "long" for name in names]


@pytest.mark.parametrize(
    ("content", "number"),
    [
        ("notes\n", 1),
        ("[]\n", 1),
        ('{"source": "a.py", "prompt": "import os\\n", "options": {"max_new_tokens": 11}}\n', 1),
        ('{"source": "b.py", "prompt": "import os\\n", "options": {"max_new_tokens": 12}}\n', 1),
        (2 * '{"source": "a.py", "prompt": "import os\\n", "options": {"max_new_tokens": 12}}\n', 2),
    ],
)
def test_the_output_of_another_job_is_left_as_it_is(content, number, files, tmp_path, refused):
    (tmp_path / "out.jsonl").write_text(content)
    error = refused(["generate", "a.py", *LIMIT, "--output", "out.jsonl"])
    assert f"out.jsonl:{number} is not the record of this job's prompt {number}" in error
    assert (tmp_path / "out.jsonl").read_text() == content


def test_the_output_must_be_a_file(files, tmp_path, refused):
    (tmp_path / "folder").mkdir()
    for name in ("folder", os.devnull):
        assert f"--output must be a file, got {name}" in refused(["generate", "a.py", *LIMIT, "--output", name])


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", ["1", "2"])
def test_a_prompt_that_does_not_fit_is_reported_and_skipped(batch_size, files, expected, tmp_path, capsys):
    (tmp_path / "long").write_text("x " * 3000)
    arguments = ["a.py", "long", "b.py", *LIMIT, "--skip-invalid", "--batch-size", batch_size]
    assert cli.main(["generate", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("skipped: long has 3002 tokens; ")
    first, skipped, second = map(json.loads, captured.out.splitlines())
    assert skipped == {"source": "long", "prompt": "x " * 3000, "error": captured.err.removeprefix("skipped: ").strip()}
    assert [first["text"], second["text"]] == expected.text
    assert cli.main(["generate", *arguments]) == 0
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected.text)


@pytest.mark.slow
def test_work_over_many_prompts_shows_its_progress(files, small_demo):
    to_file = "sys.stdout = open('out', 'w'); from jlade.cli import main; sys.exit(main())"
    arguments = ["generate", "a.py", "b.py", "--model", str(small_demo), "--max-new-tokens", "4"]
    terminal = Terminal(*arguments, code=to_file)
    try:
        terminal.wait_for(r"0/2.*prompts")
        terminal.wait_for(r"2/2.*prompts")
        assert terminal.process.wait(timeout=120) == 0
    finally:
        terminal.close()


@pytest.mark.parametrize("arguments", [["--batch-size", "2"], []])
def test_texts_are_those_of_a_grammar(arguments, files, monkeypatch, run, tmp_path):
    params = tiny_llama(2, eos_ids=(12,))
    monkeypatch.setattr(storage, "read", lambda *arguments, **options: (params, tiny_tokenizer()))
    command = ["--json", "--regex", "(ab){2}c?", "--lookahead", "4,4,3", "--max-new-tokens", "24", *arguments]
    records = [{"prompt": "a"}, {"prompt": "b", "guided_choice": ["abc", "cab"]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    lines = [json.loads(line) for line in run("a.jsonl", *command).splitlines()]
    assert lines[0]["text"] in ("abab", "ababc")
    assert lines[1]["text"] in ("abc", "cab")
    assert [line["finish_reason"] for line in lines] == ["eos", "eos"]
