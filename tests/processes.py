"""Several processes on this machine that form one JAX program."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys

import jax

ROOT = pathlib.Path(__file__).parents[1]
PLUGINS = ROOT / "tests" / "plugins"
PYTHONPATH = f"{PLUGINS}{os.pathsep}{ROOT}"
# Programs compile in half the time, as with the options in conftest.py.
XLA_FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"


def free_address() -> str:
    """Returns an address for process 0 on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@contextlib.contextmanager
def started(commands: list[list[str]], num_devices: int):
    """Yields Python commands as processes with `num_devices` virtual devices each, and ends those that still run."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(num_devices), "PYTHONPATH": PYTHONPATH}
    environment["XLA_FLAGS"] = XLA_FLAGS
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, *words], env=environment, **pipes) for words in commands]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def finish(running: list[subprocess.Popen], timeout: float = 300) -> list[tuple[int, str, str]]:
    """Returns the status, the output and the errors of each process."""
    ended = [process.communicate(timeout=timeout) for process in running]
    return [(process.returncode, *texts) for process, texts in zip(running, ended, strict=True)]
