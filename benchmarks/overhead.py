"""Overhead of `generate` outside `jlade.decode`: checks, padding, transfers and detokenization.

    python benchmarks/overhead.py

Calls of `generate` and of `jlade.decode`, with its inputs on the device, are timed in turns on the same prompt. The
figures are their medians, and the median of their difference. Both include the launches of the compiled programs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Import from the repository, not from this folder: see compression.py.
sys.path[0] = str(Path(__file__).parent.parent)

import jax
from rich.console import Console
from rich.progress import track

import jlade
from benchmarks import report
from jlade.config import SMALL_BLOCK

PROMPT = "def read_config(path):\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="M")
    parser.add_argument("--repeats", type=int, default=30, metavar="R")
    parser.add_argument("--json", metavar="FILE", help="write the figures, with machine and versions, to FILE")
    options = parser.parse_args()

    params, tokenizer = jlade.demo()
    arguments = {"max_new_tokens": options.max_new_tokens, "lookahead": SMALL_BLOCK, "tokenizer": tokenizer}
    inputs, config = jlade.prepare(params, PROMPT, **arguments)
    inputs = jax.device_put(inputs)

    def call() -> Any:
        return jlade.generate(params, PROMPT, **arguments)

    def decode() -> Any:
        return jlade.decode(params, inputs, config)

    def milliseconds(work: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(work())
        return 1e3 * (time.perf_counter() - begin)

    call(), decode()  # compiles the programs
    rounds = [(milliseconds(call), milliseconds(decode)) for _ in track(range(options.repeats), "calls")]
    figures = {
        "generate_ms": statistics.median(whole for whole, _ in rounds),
        "program_ms": statistics.median(alone for _, alone in rounds),
        "outside_ms": statistics.median(whole - alone for whole, alone in rounds),
    }
    Console().print(", ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    if options.json:
        report.write(options.json, {"model": "demo", "max_new_tokens": options.max_new_tokens} | figures)


if __name__ == "__main__":
    main()
