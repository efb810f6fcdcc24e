"""`jlade inspect --device`."""

import json

import pytest

from jlade import cli
from jlade.conversion import save_hf
from jlade.inspection import targets
from tests.tiny import tiny_llama

KEYS = (
    *("fits", "argument_bytes", "temporary_bytes", "compile_seconds", "copies_in_loop", "host_loops_in_step"),
    *("kernels_per_step", "collectives_per_step", "plain_step_estimate_ms", "step_estimate_ms", "largest_capacity"),
)


@pytest.fixture
def directory(tmp_path):
    """A directory with nothing but a config.json."""
    save_hf(tiny_llama(), tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    (tmp_path / "whole" / "config.json").rename(tmp_path / "bare" / "config.json")
    return str(tmp_path / "bare")


@pytest.mark.slow
def test_facts_and_table(directory, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["inspect", directory, "--device", "cpu", "--lookahead", "2,3,1", "--length", "32"]
    assert cli.main([*arguments, "--json", "--engine"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["engine"]["temporary_bytes"] > 0
    assert set(KEYS) <= facts.keys()
    assert facts["lookahead"] == "2,3,1"
    assert (facts["device"], facts["capacity"], facts["batch_size"]) == ("cpu", 32, 1)
    assert cli.main(arguments) == 0
    table = capsys.readouterr().out
    for row in ("step at 2, 3, 1", "measured", "estimated", "arithmetic", "largest capacity", "fits: ", "at most "):
        assert row in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lookahead", "2,3,1"], "--lookahead has no effect without --device"),
        (["--attention", "plain"], "--attention has no effect without --device"),
        (["--int8"], "--bits has no effect without --device"),
        (["--engine"], "--engine has no effect without --device"),
        (
            ["--device", "cpu", "--lookahead", "2,3"],
            "--lookahead: a setting is W,N,G, tree=M, W,N,G:tree=M, jacobi=M, code, prose or creative; got '2,3'",
        ),
        (["--device", "cpu", "--length", "65"], "capacity must be at most 64, the model's positions, got 65"),
        (["--device", "h300"], "invalid choice: 'h300'"),
    ],
)
def test_refusals(arguments, message, directory, refused):
    assert message in refused(["inspect", directory, *arguments])


def test_a_missing_compiler_is_named(directory, refused, monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    for device, extra in (("v6e", "tpu"), ("L40S", "gpu")):
        assert f'"jlade[{extra}-compiler]"' in refused(["inspect", directory, "--device", device, "--length", "32"])


def test_a_directory_that_is_none(refused):
    error = refused(["inspect", "nowhere", "--device", "cpu"])
    assert "--model must be a directory, a GGUF file, smollm2 or an id of the Hugging Face Hub" in error
    assert error.endswith("got 'nowhere'\n")
