"""How long a first call takes: a fresh process with the demo model, and what tracing and compiling take of it.

    python benchmarks/compilation.py

Cold start: the command and the library, each in a process of its own, without JAX's persistent compilation cache, and
with one that an earlier process has filled. The command also compiles and runs plain decoding, to compare with.
Compilation: `jlade.decode` for one prompt in a capacity of 1024 tokens, at the shapes of `inflate.py`; no weights are
needed. Adaptive decoding is one program with steps of three widths.
"""

import argparse
import functools
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The script's own folder is no place for imports: see compression.py.
sys.path[0] = str(Path(__file__).parent.parent)

import jax
import jax.numpy as jnp

import jlade
from benchmarks import inflate
from benchmarks.parts import Figures, Parts, add_arguments
from jlade.config import PLAIN, LookaheadConfig
from jlade.models.llama import init_params

CAPACITY = 1024
SETTINGS = {
    "plain": PLAIN,
    "0,8,1": LookaheadConfig(0, 8, 1),
    "15,5,15": LookaheadConfig(15, 5, 15),
    "15,5,15 adaptive": LookaheadConfig(15, 5, 15, step_cost=1.4),
}
PROMPT = "def read_config(path):\n"
NEW_TOKENS = 32
LIBRARY = f"""
import jlade
params, tokenizer = jlade.demo()
print(jlade.generate(params, {PROMPT!r}, tokenizer=tokenizer, max_new_tokens={NEW_TOKENS}, lookahead="auto").text[0])
"""
PROCESSES = {
    "jlade PROMPT": [sys.executable, "-m", "jlade.cli", PROMPT, "--max-new-tokens", str(NEW_TOKENS)],
    "jlade.generate": [sys.executable, "-c", LIBRARY],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["134m", "7b"], choices=[*inflate.SHAPES], help="to compile")
    parser.add_argument("--repeat", type=int, default=3, metavar="R", help="starts of each process")
    add_arguments(parser)
    options = parser.parse_args()

    parts = Parts(options, {"repeat": options.repeat, "capacity": CAPACITY})
    for name, command in PROCESSES.items():
        parts.run(name, functools.partial(_start, command, options.repeat))
    for shape in options.shapes:
        for setting in SETTINGS:
            parts.run(f"{shape} {setting}", functools.partial(_compile, shape, SETTINGS[setting]))
    parts.print()
    sys.exit(parts.failed())


def _start(command: list[str], repeat: int) -> Figures:
    """Times whole processes, from their start to their end."""

    def seconds(**environment: str) -> float:
        begin = time.perf_counter()
        subprocess.run(command, env=os.environ | environment, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begin

    with tempfile.TemporaryDirectory() as scratch:
        cold = [seconds(JAX_ENABLE_COMPILATION_CACHE="false") for _ in range(repeat)]
        first, *warm = [seconds(JAX_COMPILATION_CACHE_DIR=scratch) for _ in range(1 + repeat)]
    return {
        "without a cache, s": statistics.median(cold),
        "filling the cache, s": first,
        "with the cache filled, s": statistics.median(warm),
    }


def _compile(shape: str, lookahead: LookaheadConfig) -> Figures:
    """Times the three stages of what a first call of `jlade.decode` does before it runs."""
    config = inflate.SHAPES[shape]
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    params = jax.eval_shape(lambda key: init_params(key, config, dtype), jax.random.key(0))
    prompts, lengths, eos_ids = (jnp.zeros(shape, jnp.int32) for shape in ((1, CAPACITY), 1, (1, 8)))
    arrays = (prompts, lengths, jlade.Stopping(lengths, eos_ids), jax.random.key(0))
    times = [time.perf_counter()]
    traced = jlade.decode.trace(params, *arrays, decoder=params.decoder, lookahead=lookahead)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    stages = zip(("tracing", "lowering", "compiling"), itertools.pairwise(times), strict=True)
    figures = {f"{stage}, s": end - begin for stage, (begin, end) in stages}
    return {"layers": config.num_layers} | figures | {"together, s": times[-1] - times[0]}


if __name__ == "__main__":
    main()
