"""Models, prompts, timings in turns and servers: what the scripts measure with."""

import argparse
import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

import jlade
from benchmarks import inflate, report
from jlade.mesh import num_bytes
from jlade.models.llama import Llama, LlamaParams

PROMPT_TOKENS = 200  # longer prompts are cut


def add_model_arguments(parser: argparse.ArgumentParser, shape: str = "7b", dtype: str = "bfloat16") -> None:
    """Adds the arguments of `load` and `make_decoder`, with these defaults."""
    parser.add_argument("--shape", choices=["demo", *inflate.SHAPES], default=shape, help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=dtype, help="(default: %(default)s)")
    parser.add_argument("--attention", metavar="NAME", help="argument of `Llama` (default: Llama's own)")


def load(shape: str, dtype: str | None) -> LlamaParams:
    """Returns the demo model in a shape, "demo" or one of `inflate.SHAPES`, and a dtype."""
    params, _ = jlade.demo(dtype)
    if shape != "demo":
        params = inflate.inflate(params, inflate.SHAPES[shape], jax.random.key(0))
    return jax.block_until_ready(params)


def make_decoder(params: LlamaParams, attention: str | None) -> Llama:
    """Returns the decoder of `params` for their device, with the implementation `attention` unless it is None."""
    chosen: dict[str, Any] = {} if attention is None else {"attention": attention}
    return dataclasses.replace(params.decoder, **chosen).on(params)


def prompts_of(kind: str, number: int, least: int = 0) -> list[list[int]]:
    """Returns the token ids of the first prompts of a kind, "code" or "prose", that have at least `least` tokens."""
    lines = report.read_lines(report.DEMO_PROMPTS)
    ids = [line["ids"][:PROMPT_TOKENS] for line in lines if line["kind"] == kind and len(line["ids"]) >= least]
    if len(ids) < number:
        raise ValueError(f"there are {len(ids)} {kind} prompts of at least {least} tokens, not {number}")
    return ids[:number]


def read_bytes(params: LlamaParams) -> int:
    """Returns the bytes of weights that a step reads: all but an untied embedding, of which it reads one row."""
    looked_up = 0 if params.output is None else params.embedding.nbytes
    return num_bytes(params) - looked_up


def seconds(run: Callable[..., jax.Array], *arguments: Any, repeat: int, calls: int) -> float:
    """Returns the time of a call: the median of `repeat` measurements of `calls` consecutive calls."""
    jax.block_until_ready(run(*arguments))

    def several() -> jax.Array:
        for _ in range(calls):
            result = run(*arguments)
        return result

    return statistics.median(in_turns({"run": several}, repeat)["run"]) / calls


def in_turns(runs: Mapping[Any, Callable[[], Any]], repeat: int) -> dict[Any, list[float]]:
    """Returns the seconds of every run, timed `repeat` times. The caller has compiled the runs by running them once."""
    taken: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            taken[name].append(time.perf_counter() - begin)
    return taken


def step_seconds(runs: Mapping[Any, Callable[[int], int]], repeat: int, few: int, many: int) -> dict[Any, float]:
    """Returns the seconds of a step of each run, by the difference of two texts, timed in turns.

    Args:
      runs: decode a text of some new tokens and return its steps. The caller has compiled them.
      repeat: timings of each text.
      few, many: new tokens of the two texts.
    """
    texts = {(name, number): functools.partial(run, number) for name, run in runs.items() for number in (few, many)}
    num_steps = {key: text() for key, text in texts.items()}
    taken = in_turns(texts, repeat)
    result = {}
    for name in runs:
        longer = [b - a for a, b in zip(taken[name, few], taken[name, many], strict=True)]
        result[name] = statistics.median(longer) / (num_steps[name, many] - num_steps[name, few])
    return result


def compare_texts(texts: np.ndarray, expected: np.ndarray) -> report.Figures:
    """Returns how many of the texts [B, M] are the expected ones, and the index of the first token that differs."""
    indices = np.nonzero((texts != expected).any(axis=0))[0]
    return {
        "equal texts": f"{np.sum((texts == expected).all(axis=1))}/{len(expected)}",
        "first difference, token": int(indices[0]) if len(indices) else None,
    }


class TimeLimit(BaseException):
    """A block takes longer than `at_most` allows. No code takes it for an error of its own."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises `TimeLimit` in the block after some seconds of this process's own time."""

    def stop(*_: Any) -> None:
        raise TimeLimit

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1)  # again, as Python drops errors raised in its collector
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


@contextlib.contextmanager
def served(
    model: str, *arguments: str, log: Any = None, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yields the process of `jlade serve` on a free port and its URL, and then ends it by SIGTERM.

    The file `log` gets its errors, the last of which are printed if the block or the server fails.
    """
    command = [sys.executable, "-m", "jlade", "serve", *([] if model == "demo" else [model]), "--port", "0", *arguments]
    inherited = os.environ | (environment or {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=inherited) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line, "the server has not started"
            yield server, line.split()[-1]
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        except BaseException:
            if log is not None:
                log.seek(0)
                print(f"status {server.poll()}", log.read()[-5000:], file=sys.stderr)
            raise
        finally:
            server.kill()


def wait_until_idle(url: str, headers: Mapping[str, str] | None = None) -> None:
    """Waits until no request of a server runs or waits, at most 30 seconds."""
    end = time.monotonic() + 30
    while True:
        request = urllib.request.Request(f"{url}/metrics", headers=dict(headers or {}))
        with urllib.request.urlopen(request, timeout=30) as response:
            metrics = response.read().decode()
        numbers = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} ([\d.]+)$", metrics, re.MULTILINE)
        if [float(number) for number in numbers] == [0, 0]:
            return
        assert time.monotonic() < end, metrics
        time.sleep(0.1)


def status_bytes(name: str, pid: int | str = "self") -> int:
    """Returns the bytes that Linux gives a process under a name of its status, such as VmRSS, its resident memory."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return 1024 * int(status.partition(f"\n{name}:")[2].split()[0])
