"""`jlade compile`, and `--programs`."""

import json

import pytest

from jlade import cli
from jlade.generation import programs
from tests.compilations import recorded

OPTIONS = ["--temperature", "0.7"]
PROMPT = ["import os\n", "--max-new-tokens", "8", "--no-compare", "--json"]


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path / "programs")


def completed(capsys, *more):
    assert cli.main([*PROMPT, *OPTIONS, *more]) == 0
    result = json.loads(capsys.readouterr().out)
    return result["text"], result["finish_reason"]


@pytest.mark.slow
def test_a_completion_runs_them(directory, capsys):
    assert cli.main(["compile", "--output", directory, *OPTIONS, "--stop", "never"]) == 0
    assert capsys.readouterr().out == f"{directory}: programs for cpu\n"
    with recorded("jaxpr_to_mlir") as events:
        found = completed(capsys, "--programs", directory, "--stop", "def ")
    assert not {facts["fun_name"] for _, facts in events} & {"jit(_read)", "jit(_start)", "jit(_run)"}
    assert found == completed(capsys, "--stop", "def ")


def test_arguments_that_are_refused(directory, tmp_path, refused):
    assert "are required: --output" in refused(["compile"])
    assert "output must not exist yet" in refused(["compile", "--output", str(tmp_path)])
    assert "batch_size must be" in refused(["compile", "--output", directory, "--batch-size", "0"])
    assert "top_p has no effect at temperature 0" in refused(["compile", "--output", directory, "--top-p", "0.5"])
    assert "programs must be a directory written by jlade compile" in refused([*PROMPT, "--programs", directory])
    assert not (tmp_path / "programs" / programs.MANIFEST).exists()
