import json
import os
import subprocess
import sys


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
