"""The Makefile installs JAX for the accelerator of the machine."""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
HEADERS = {
    "driver of 2023": "| NVIDIA-SMI 535.54.03    Driver Version: 535.54.03    CUDA Version: 12.2     |",
    "driver of 2025": "| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0     |",
    "driver of 2026": "| NVIDIA-SMI 610.1    KMD Version: 610.1    CUDA UMD Version: 13.2     |",
}


def dry_run(tmp_path, *arguments, header=None, device=None):
    """Returns the commands that `make demo` would run on a machine with this GPU or this device file."""
    commands = tmp_path / "bin"
    commands.mkdir()
    smi = commands / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{header}'\n" if header else "#!/bin/sh\nexit 9\n", encoding="utf-8")
    smi.chmod(0o755)
    if device:
        (tmp_path / "dev" / device).parent.mkdir(parents=True)
        (tmp_path / "dev" / device).touch()
    environment = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}", "DEV": str(tmp_path / "dev")}
    environment.pop("MAKEFLAGS", None)
    command = ["make", "--dry-run", "demo", f"VENV={tmp_path}/venv", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("machine", "extra"),
    [
        ({}, "cpu"),
        ({"header": HEADERS["driver of 2023"]}, "cuda12"),
        ({"header": HEADERS["driver of 2025"]}, "cuda13"),
        ({"header": HEADERS["driver of 2026"]}, "cuda13"),
        ({"device": "accel0"}, "tpu"),
        ({"device": "vfio/0"}, "tpu"),
        ({"device": "vfio/vfio"}, "cpu"),
    ],
    ids=str,
)
def test_it_finds_the_accelerator(machine, extra, tmp_path):
    run = dry_run(tmp_path, **machine)
    assert run.returncode == 0, run.stderr
    assert f"if [ {extra} != cpu ]" in run.stdout


def test_it_takes_the_accelerator_that_it_is_told(tmp_path):
    run = dry_run(tmp_path, "ACCELERATOR=tpu", header=HEADERS["driver of 2025"])
    assert '".[tpu]"' in run.stdout


def test_an_unknown_accelerator_is_refused(tmp_path):
    run = dry_run(tmp_path, "ACCELERATOR=rocm")
    assert run.returncode != 0
    assert 'ACCELERATOR must be cpu, cuda12, cuda13 or tpu, got "rocm"' in run.stderr
