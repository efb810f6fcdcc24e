"""Commands that are killed at random moments; `kills.py` does it more often, with more commands."""

import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]


def test_commands_that_are_killed_leave_whole_files_and_the_next_run_finishes(tmp_path):
    """The script itself compares files with those of an undisturbed run, and fails if they differ."""
    jobs = ("convert-hf", "pool")
    command = [sys.executable, "-m", "tests.stress.kills", *jobs, "--moments", "3", "--json", tmp_path / "kills.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "kills.json").read_text(encoding="utf-8"))["jobs"]
    assert tuple(figures) == jobs
    assert {each["killed"] + each["had_finished"] for each in figures.values()} == {3}
    assert any(each["killed"] for each in figures.values())
