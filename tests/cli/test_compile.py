"""`jlade compile`, and `--programs`."""

import json
import pathlib
import subprocess
import sys

import pytest

from jlade import cli
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


@pytest.mark.slow
def test_a_batch_job_runs_those_of_its_engine(directory, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\ndef main(\nclass A:\n")
    job = ["generate", str(prompts), "--lines", "--batch-size", "2", "--max-new-tokens", "8", "--no-lookahead"]
    assert (
        cli.main(["compile", "--engine", "generate", "--batch-size", "2", "--no-lookahead", "--output", directory]) == 0
    )
    capsys.readouterr()
    with recorded("jaxpr_to_mlir") as events:
        assert cli.main([*job, "--programs", directory]) == 0
    assert not {facts["fun_name"] for _, facts in events} & OF_ENGINE
    found = capsys.readouterr().out
    assert cli.main(job) == 0
    assert capsys.readouterr().out == found


OF_ENGINE = {f"jit({name})" for name in ("empty", "unread", "_read", "_insert", "_run", "_keep", "_end", "_copy_rest")}
SERVE = """
import json, sys, threading
sys.path.insert(0, sys.argv[1])
import jax
jax.config.update("jax_platforms", "cpu")
from starlette.testclient import TestClient
from jlade import cli
from jlade.server import lifecycle
from tests.compilations import recorded

class Server(lifecycle.Server):
    def run(self, sockets):
        (starting,) = [each for each in threading.enumerate() if each.name == "jlade start"]
        starting.join()
        client = TestClient(self.config.app, base_url="http://127.0.0.1")
        before = len(events)
        answer = client.post("/v1/completions", json={"prompt": "import os\\n", "max_tokens": 8, "temperature": 0})
        names = [[facts["fun_name"] for _, facts in part] for part in (events[:before], events[before:])]
        print(json.dumps([answer.json()["choices"][0]["text"], *names]))

lifecycle.Server, lifecycle.leave = Server, lambda status: None
with recorded("jaxpr_to_mlir") as events:
    cli.main(["serve", "--port", "0", *sys.argv[2:]])
"""


@pytest.mark.slow
def test_a_server_answers_its_first_request_without_compiling(directory, small_demo, capsys):
    options = [str(small_demo), "--max-sequences", "1", "--capacity", "128", "--no-lookahead", "--max-grammar", "0"]
    assert cli.main(["compile", "--engine", "serve", *options, "--output", directory]) == 0
    capsys.readouterr()
    command = [sys.executable, "-c", SERVE, str(pathlib.Path(__file__).parents[2]), *options, "--programs", directory]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text, at_start, of_request = json.loads(done.stdout.splitlines()[-1])
    assert not OF_ENGINE.intersection(at_start)
    assert of_request == []
    assert "3 of 3 sets of programs are loaded or compiled" in done.stderr
    assert cli.main(["import os\n", "--max-new-tokens", "8", "--no-lookahead", "--no-compare", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == text
