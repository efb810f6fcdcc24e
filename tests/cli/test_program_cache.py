import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")


def run_command(**environment):
    arguments = ["import os\n", "--max-new-tokens", "4", "--no-lookahead", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "jlade", *arguments],
        # The time to compile decides which programs are kept: without optimizations some are at the limit.
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return json.loads(done.stdout)["text"]


def files_below(directory):
    return {path.name for path in directory.rglob("*-cache")}


def test_programs_are_kept_from_one_run_to_the_next(cache_directory):
    text = run_command()
    kept = files_below(cache_directory / "jlade" / "compiled")
    assert kept
    assert run_command() == text
    assert files_below(cache_directory / "jlade" / "compiled") == kept


def test_programs_that_a_killed_process_has_half_written_are_compiled_anew(cache_directory):
    """JAX writes the time of the last use after the program, and warns of torn programs; `run_command` forbids that."""
    text = run_command()
    compiled = cache_directory / "jlade" / "compiled"
    program = min(compiled.rglob("*-cache"))
    content = program.read_bytes()
    program.write_bytes(content[:1000])
    program.with_name(program.name.removesuffix("cache") + "atime").unlink()
    assert run_command() == text
    assert program.stat().st_size > 1000


def test_the_users_own_directory_is_used(cache_directory, tmp_path):
    run_command(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "elsewhere"))
    assert files_below(tmp_path / "elsewhere")
    assert not (cache_directory / "jlade" / "compiled").exists()


def test_the_command_runs_without_a_cache_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    run_command(XDG_CACHE_HOME=str(tmp_path / "file"))


def test_the_library_sets_nothing():
    code = "import jax, jlade; assert jax.config.jax_compilation_cache_dir is None"
    subprocess.run([sys.executable, "-c", code], check=True)
