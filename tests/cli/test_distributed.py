"""`jlade generate --distributed`: processes that decode one job together."""

import json
import signal
import time

import pytest

from jlade import cli
from tests.processes import finish, free_address, started

JOB = ["--lines", "--temperature", "1", "--max-new-tokens", "8", "--lookahead", "3,3,2"]
MESH = ["--mesh", "data=2,model=2"]


@pytest.fixture
def workplace(tiny_model, tmp_path, monkeypatch):
    """A directory with a small model and its prompts, which is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts").write_text("a\nab\nc\nb\nab\n")
    return tmp_path


def commands(*arguments, number=2):
    address = free_address()
    words = ["-m", "jlade", "generate", "--model", "model", *JOB, *MESH, *arguments, "--distributed"]
    return [[*words, f"{address},{number},{index}"] for index in range(number)]


@pytest.mark.slow
def test_results_are_those_of_one_process_written_once(workplace, capsys):
    arguments = ["--model", "model", *JOB, "--batch-size", "2", "--output", "out"]
    assert cli.main(["generate", "prompts", *arguments]) == 0
    expected = (workplace / "out").read_text()
    (workplace / "out").write_text(expected.partition("\n")[0] + "\n")  # as an interrupted job leaves it
    with started(commands("prompts", "--batch-size", "2", "--output", "out"), 2) as running:
        (first, output, errors), (second, nothing, others) = finish(running)
    assert (first, second) == (0, 0), errors + others
    assert (workplace / "out").read_text() == expected
    assert (output, nothing) == ("out: 5 prompts\n", "")


@pytest.mark.slow
def test_an_error_of_one_process_ends_all(workplace):
    one, other = commands("prompts", "--batch-size", "2")
    other[other.index("prompts")] = "nowhere"
    with started([one, other], 2) as running:
        (first, _, errors), (second, _, others) = finish(running, timeout=120)
    assert (first, second) == (2, 2)
    assert "jlade generate: error: process 1 has ended: nowhere cannot be read" in errors
    assert "jlade generate: error: nowhere cannot be read" in others


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_process_ends_the_others(victim, workplace):
    (workplace / "prompts").write_text("a\nab\nc\nb\n" * 5000)
    with started(commands("prompts", "--batch-size", "2", "--output", "out"), 2) as running:
        end = time.monotonic() + 300
        while not (workplace / "out").exists() or not (workplace / "out").read_text():
            assert time.monotonic() < end
            time.sleep(0.1)
        running[victim].send_signal(signal.SIGKILL)
        _, errors = running[1 - victim].communicate(timeout=120)
        assert running[1 - victim].returncode != 0
    assert "another process has ended or cannot be reached" in errors or "another task died" in errors
    *lines, _ = (workplace / "out").read_text().split("\n")
    assert all("text" in json.loads(line) for line in lines)
