"""Times of cold starts, of first calls and of compilation.

    python benchmarks/compilation.py
    python benchmarks/compilation.py --beside OTHER/bin/python    # and of another installation of jlade, in turns

Cold starts: the command, the library and `jlade tune` on three short prompts, each in a new process with the demo
model, without JAX's persistent compilation cache. The command and the library also start with a cache that an earlier
process has filled. The command includes plain decoding, with which it compares.

First calls: a new process calls `jlade.generate` first with one setting, then with another one. The ratio of the two
times shows how much of the first program the second one reuses. The texts have 4 tokens, so that most of the time is
compilation. Figures that begin with "other: " are those of the other installation.

Compilation: `jlade.decode` as one program, for one prompt in a capacity of 1024 tokens, at the shapes of `inflate.py`.
It needs no weights. Adaptive decoding is one program with steps of three widths.
"""

import dataclasses
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # import from the repository, not from this folder

import jax
import jax.numpy as jnp

import jlade
from benchmarks import inflate
from benchmarks.parts import Figures, Parts, make_parser
from jlade.config import PLAIN, LookaheadConfig
from jlade.mesh import default_device
from jlade.models.llama import init_params

SETTINGS = {
    "plain": PLAIN,
    "0,8,1": LookaheadConfig.paper(0, 8, 1),
    "15,5,15": LookaheadConfig.paper(15, 5, 15),
    "tree=7 adaptive": LookaheadConfig.tree(7, relative_step_time=1.4),
}
PROMPT = "def read_config(path):\n"
PROMPTS = ("def read_config(path):", "import argparse", "The library reads files of several formats.")
NEW_TOKENS = 32
PAIRS = (("15,5,15", "10,5,10"), ("0,4,1", "plain"))  # settings of first calls

# The code of other processes runs with older versions of jlade too.
COMMAND = "import sys; from jlade.cli import main; sys.exit(main())"
LIBRARY = f"""
import jlade
params, tokenizer = jlade.demo()
print(jlade.generate(params, {PROMPT!r}, tokenizer=tokenizer, max_new_tokens={NEW_TOKENS}, lookahead="auto").text[0])
"""
FIRST_CALLS = f"""
import json, sys, time
import jlade

params, tokenizer = jlade.demo()

def seconds(sizes):
    lookahead = None if sizes == "plain" else jlade.LookaheadConfig.paper(*map(int, sizes.split(",")))
    begin = time.perf_counter()
    jlade.generate(params, {PROMPT!r}, tokenizer=tokenizer, max_new_tokens=4, lookahead=lookahead)
    return time.perf_counter() - begin

print(json.dumps([seconds(sizes) for sizes in sys.argv[1:]]))
"""
STARTS = {
    "jlade PROMPT": ["-c", COMMAND, PROMPT, "--max-new-tokens", str(NEW_TOKENS)],
    "jlade.generate": ["-c", LIBRARY],
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["134m", "7b"], choices=[*inflate.SHAPES], help="to compile")
    parser.add_argument("--repeat", type=int, default=3, metavar="R", help="processes of each kind")
    parser.add_argument("--beside", metavar="PYTHON", help="measure the jlade of this Python executable too, in turns")
    parser.add_argument(
        "--tune-settings", nargs="+", metavar="W,N,G", help="settings to tune (default: all usual ones)"
    )
    options = parser.parse_args()

    settings = {name: getattr(options, name) for name in ("repeat", "beside", "tune_settings")}
    parts = Parts(options, settings | {"capacity": 1024})
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "prompts").write_text("\n".join(PROMPTS), encoding="utf-8")
        installations = {"": Installation(sys.executable, directory / "this", {"PYTHONPATH": str(ROOT)})}
        if options.beside:
            installations["other: "] = Installation(options.beside, directory / "beside", {"PYTHONPATH": ""})
        compare = functools.partial(_in_turns, installations, options.repeat)
        for name, arguments in STARTS.items():
            parts.run(name, functools.partial(compare, functools.partial(_start, arguments=arguments)))
        parts.run("jlade tune", lambda: compare(functools.partial(_tune, settings=options.tune_settings)))
        for pair in PAIRS:
            first_calls = functools.partial(_first_calls, pair=pair)
            parts.run(f"{pair[0]} then {pair[1]}", functools.partial(compare, first_calls))
    for shape in options.shapes:
        for setting in SETTINGS:
            parts.run(f"{shape} {setting}", functools.partial(_compile, shape, SETTINGS[setting]))
    parts.print()
    sys.exit(parts.failed())


@dataclasses.dataclass(frozen=True)
class Installation:
    """A Python executable with jlade, and a directory in which its processes run.

    The directory keeps the checkout's `jlade` out of the way, and the user's tuned settings and compiled programs.
    """

    python: str
    directory: Path
    environment: Mapping[str, str]

    def run(self, arguments: Sequence[str], *, cache: Path | None = None) -> tuple[float, str]:
        """Runs a process and returns its seconds and its output. Without `cache` no compiled program is reused."""
        self.directory.mkdir(exist_ok=True)
        environment = os.environ | self.environment | {"XDG_CACHE_HOME": str(self.directory / "home")}
        if cache is None:
            environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        else:
            environment |= {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_COMPILATION_CACHE_DIR": str(cache)}
        begin = time.perf_counter()
        done = subprocess.run(
            [self.python, *arguments],
            cwd=self.directory,
            env=environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return time.perf_counter() - begin, done.stdout


def _in_turns(
    installations: Mapping[str, Installation], repeat: int, measure: Callable[[Installation], dict[str, float]]
) -> Figures:
    """Returns the median figures of each installation, and the ratios of this one to the other one."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in installations}
    for _ in range(repeat):
        for name, installation in installations.items():
            runs[name].append(measure(installation))
    figures: Figures = {
        name + figure: statistics.median(run[figure] for run in taken)
        for name, taken in runs.items()
        for figure in taken[0]
    }
    ratios = {
        f"{figure.removesuffix(', s')}, x other": figures[figure] / figures[f"other: {figure}"]
        for figure in runs[""][0]
        if len(installations) > 1 and figure.endswith(", s")
    }
    return figures | ratios


def _start(installation: Installation, arguments: Sequence[str]) -> dict[str, float]:
    """Times whole processes, from their start to their end."""
    with tempfile.TemporaryDirectory() as cache:
        seconds = {
            "without a cache, s": installation.run(arguments)[0],
            "filling the cache, s": installation.run(arguments, cache=Path(cache))[0],
            "with the cache filled, s": installation.run(arguments, cache=Path(cache))[0],
        }
    return seconds


def _tune(installation: Installation, settings: Sequence[str] | None) -> dict[str, float]:
    """Times the whole process of `jlade tune`."""
    chosen = [] if settings is None else ["--settings", *settings]
    arguments = ["-c", COMMAND, "tune", "../prompts", "--lines", "--no-store", *chosen]
    return {"without a cache, s": installation.run(arguments)[0]}


def _first_calls(installation: Installation, pair: Sequence[str]) -> dict[str, float]:
    """Times the first call of `generate` with each of two settings, in one process."""
    _, output = installation.run(["-c", FIRST_CALLS, *pair])
    first, second = json.loads(output)
    return {f"first call with {pair[0]}, s": first, f"then with {pair[1]}, s": second, "second / first": second / first}


def _compile(shape: str, lookahead: LookaheadConfig) -> Figures:
    """Times the three stages of the compilation of `jlade.decode`."""
    model = inflate.SHAPES[shape]
    dtype = jnp.float32 if default_device().platform == "cpu" else jnp.bfloat16
    params = jax.eval_shape(lambda key: init_params(key, model, dtype), jax.random.key(0))
    inputs, config = jlade.prepare(params, [0], lookahead=lookahead, eos_ids=())
    times = [time.perf_counter()]
    traced = jax.jit(jlade.decode, static_argnames="config").trace(params, inputs, config)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    stages = zip(("tracing", "lowering", "compiling"), itertools.pairwise(times), strict=True)
    figures = {f"{stage}, s": end - begin for stage, (begin, end) in stages}
    return {"layers": model.num_layers} | figures | {"together, s": times[-1] - times[0]}


if __name__ == "__main__":
    main()
