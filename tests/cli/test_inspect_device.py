"""`jlade inspect --device`."""

import json

import pytest

from jlade import cli
from jlade.inspection import targets

KEYS = (
    *("fits", "argument_bytes", "temporary_bytes", "compile_seconds", "copies_in_loop", "host_loops_in_step"),
    *("kernels_per_step", "collectives_per_step", "plain_step_estimate_ms", "step_estimate_ms", "largest_capacity"),
)


@pytest.mark.slow
def test_facts_and_table(bare, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["inspect", str(bare), "--device", "cpu", "--lookahead", "2,3,1", "--length", "32"]
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


def test_a_missing_compiler_is_named(bare, refused, monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    for device, extra in (("v6e", "tpu"), ("L40S", "gpu")):
        assert f'"jlade[{extra}-compiler]"' in refused(["inspect", bare, "--device", device, "--length", "32"])
