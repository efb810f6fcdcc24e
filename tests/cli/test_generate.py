import io
import itertools
import json
import os
import sys

import jax
import numpy as np
import pytest

import jlade
from jlade import cli
from jlade.config import SMALL_BLOCK

PROMPTS = ("import os\n", "def read_config(path):")
LIMIT = ["--max-new-tokens", "12"]


@pytest.fixture(scope="module")
def expected(demo):
    params, tokenizer = demo
    keys = jax.random.split(jax.random.key(0), len(PROMPTS))  # as in the command, so that the programs are the same
    return jlade.generate(
        params, PROMPTS, tokenizer=tokenizer, lookahead=SMALL_BLOCK, max_new_tokens=12, logprobs=True, key=keys
    )


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Names of files with the prompts, in the current directory."""
    monkeypatch.chdir(tmp_path)
    for name, prompt in zip(("a.py", "b.py"), PROMPTS, strict=True):
        (tmp_path / name).write_text(prompt, encoding="utf-8")
    return ["a.py", "b.py"]


def type_in(monkeypatch, data: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def run(capsys, *arguments):
    assert cli.main(["generate", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_every_file_is_a_prompt_and_the_texts_come_in_order(files, expected, capsys):
    assert run(capsys, *files, *LIMIT) == f"{expected.text[0]}\n{expected.text[1]}\n"


def test_a_batch_gives_the_texts_that_one_prompt_at_a_time_gives(files, expected, capsys):
    assert run(capsys, *files, *LIMIT, "--batch-size", "2") == f"{expected.text[0]}\n{expected.text[1]}\n"


def test_text_is_written_as_it_is_made(files, monkeypatch):
    written = []
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "flush", lambda: written.append(sys.stdout.getvalue()))
    assert cli.main(["generate", files[0], *LIMIT]) == 0
    assert len(set(written)) > 3, "12 tokens take 3 steps at least, and a newline follows"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(written))


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_standard_input_is_one_prompt(arguments, expected, monkeypatch, capsys):
    type_in(monkeypatch, PROMPTS[0].encode())
    assert run(capsys, *arguments, *LIMIT) == f"{expected.text[0]}\n"


def test_json_has_the_figures_of_each_prompt(files, expected, capsys):
    arguments = [*files, *LIMIT, "--json", "--logprobs", "--batch-size", "2"]
    records = [json.loads(line) for line in run(capsys, *arguments).splitlines()]
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


def test_each_non_blank_line_is_a_prompt(files, expected, monkeypatch, capsys):
    type_in(monkeypatch, f"\n{PROMPTS[1]}\r\n  \nimport os".encode())
    arguments = ["-", *files, "--lines", *LIMIT, "--json", "--batch-size", "2"]
    records = [json.loads(line) for line in run(capsys, *arguments).splitlines()]
    assert [(record["source"], record["prompt"]) for record in records] == [
        ("-:2", PROMPTS[1]),
        ("-:4", "import os"),
        ("a.py:1", "import os"),
        ("b.py:1", PROMPTS[1]),
    ]
    assert records[0]["text"] == records[3]["text"] == expected.text[1]
    assert records[1]["text"] == records[2]["text"]
    assert "logprobs" not in records[0]


def test_sampled_texts_are_those_of_one_large_batch(files, demo, capsys):
    params, tokenizer = demo
    expected = jlade.generate(
        params,
        PROMPTS,
        tokenizer=tokenizer,
        lookahead=SMALL_BLOCK,
        max_new_tokens=12,
        sampling=jlade.SamplingConfig(temperature=1.0),
        stop=["unittest", "never"],
        key=jax.random.key(7),
    )
    assert expected.finish_reason == ("stop", "length")
    printed = run(capsys, *files, *LIMIT, "--temperature", "1", "--seed", "7", "--stop", "unittest", "--stop", "never")
    assert printed == f"{expected.text[0]}\n{expected.text[1]}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.py", "nowhere.py"], "nowhere.py cannot be read: No such file"),
        (["a.py", "."], ". cannot be read: Is a directory"),
        (["a.py", "latin"], "latin is not UTF-8"),
        (["a.py", "blank"], "blank is empty"),
        (["a.py", "blank", "--lines"], "blank is empty"),
        (["a.py", "long"], "long has 3001 tokens; with max_new_tokens=256 they exceed the model's 2048 positions"),
        (["a.py", "--logprobs"], "--logprobs needs --json"),
        (["a.py", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["a.py", "--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_errors_are_reported_before_anything_is_decoded(arguments, message, files, tmp_path, capsys):
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    (tmp_path / "blank").write_text(" \n\n")
    (tmp_path / "long").write_text("1 " * 1500)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["generate", *arguments])
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_a_closed_pipe_ends_the_command_quietly(files, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert cli.main(["generate", *files, *LIMIT]) == 1
    assert capsys.readouterr().err == ""
