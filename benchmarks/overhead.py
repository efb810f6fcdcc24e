"""What a call of `generate` costs beside the compiled program: checking, padding, launching, fetching, detokenizing.

    python benchmarks/overhead.py

Times whole calls and the program alone, on the same prompt in turn, and prints the medians and their difference.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The script's own folder is no place for imports: see compression.py.
sys.path[0] = str(Path(__file__).parent.parent)

import jax
import numpy as np
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
    ids = tokenizer.encode(PROMPT).ids
    prompts = np.zeros((1, 1024), np.int32)
    prompts[0, : len(ids)] = ids
    lengths, limits = np.array([len(ids)], np.int32), np.array([options.max_new_tokens], np.int32)
    inputs = (prompts, lengths, limits, np.full((1, 8), 2, np.int32), jax.random.key(0))
    on_device = jax.device_put(inputs)

    def call() -> Any:
        return jlade.generate(params, PROMPT, **arguments)

    def program() -> Any:
        return jlade.decode(params, *on_device, decoder=params.decoder, lookahead=SMALL_BLOCK)

    def milliseconds(work: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(work())
        return 1e3 * (time.perf_counter() - begin)

    call(), program()  # compiles
    rounds = [(milliseconds(call), milliseconds(program)) for _ in track(range(options.repeats), "calls")]
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
