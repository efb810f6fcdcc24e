"""jlade beside llama.cpp on a GGUF file: load, first token, tokens a second and a step, and the texts.

    python benchmarks/llama_cpp.py model.gguf --binaries llama.cpp/build/bin
    python benchmarks/llama_cpp.py model.gguf --binaries llama.cpp/build/bin --bits file --max-new-tokens 64

The binaries are `llama-completion`, `llama-lookahead` (its own windows of 15, 5, 15) and `llama-lookup` of llama.cpp's
source, which the source package llama-cpp-python brings. Each measurement is a new process, greedy, with as many
threads; the ways take turns, and figures are medians. jlade keeps compiled programs in JAX's cache, which a first
process fills, and computes in float32. The first token counts from the start of the process; tokens a second are
those of a second text in the process for jlade, and llama.cpp's own of its only text. A text is compared by its
beginning in common with llama.cpp's plain one, in characters.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # import from the repository, not from this folder

from benchmarks import report

PROMPTS = (
    "The days of the week as a Python list: [{'day': 'Monday', 'number': 1},",
    "def read_config(path):\n    '''Reads a file of settings.'''\n",
    "The capital of France is Paris. The capital of Italy is",
    "Once upon a time there was a small fox who",
)
OURS, THEIRS = ("plain", "auto"), ("completion", "lookahead", "lookup")
CODE = """
import json, sys, time
import jlade
path, prompt, way, number, bits = sys.argv[1:]
options = {"max_new_tokens": int(number), "lookahead": None if way == "plain" else "auto", "eos_ids": ()}
params, _ = jlade.load(path, "float32", bits=int(bits) if bits.isdecimal() else bits or None)
loaded = time.time()
next(jlade.stream(params, prompt, **options))
first = time.time()
jlade.generate(params, prompt, **options)
begin = time.perf_counter()
out = jlade.generate(params, prompt, **options)
seconds = time.perf_counter() - begin
steps = int(out.steps[0])
print(json.dumps({"loaded": loaded, "first": first, "rate": int(number) / seconds, "steps": int(number) / steps,
                  "text": out.text[0]}))
"""
COLUMNS = {
    "load": "load, s",
    "first": "first token, s",
    "rate": "tokens/s",
    "steps": "tokens a step",
    "same": "characters in common",
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--binaries", type=Path, required=True, metavar="DIR")
    parser.add_argument("--bits", default="", choices=("4", "8", "file"), help="of jlade's matrices (default: float32)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="L")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), metavar="P")
    options = parser.parse_args(argv)
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in (*OURS, *THEIRS)}
    with tempfile.TemporaryDirectory() as cache:
        for way in OURS:  # fill the cache
            _ours(options, PROMPTS[0], way, cache)
        for prompt in PROMPTS[: options.prompts]:
            of_prompt = {way: _ours(options, prompt, way, cache) for way in OURS}
            of_prompt |= {way: _theirs(options, prompt, way) for way in THEIRS}
            expected = of_prompt["completion"]["text"]
            for way, run in of_prompt.items():
                runs[way].append(run | {"same": _in_common(run["text"], expected)})
    figures = {
        way: {name: statistics.median(run[name] for run in own) for name in COLUMNS} for way, own in runs.items()
    }
    facts = {"model": options.model.name, "bits": options.bits, "threads": options.threads}
    report.write(options.json, facts | {"ways": figures, "runs": runs})
    names = [*(f"jlade, {way}" for way in OURS), *(f"llama.cpp, {way}" for way in THEIRS)]
    cells = ([f"{own[column]:.2f}" for column in COLUMNS] for own in figures.values())
    rows = ([name, *row] for name, row in zip(names, cells, strict=True))
    report.print_table(["way", *COLUMNS.values()], rows, options.model.name)


def _in_common(text: str, other: str) -> int:
    """Returns the number of characters until two texts part."""
    pairs = zip(text, other, strict=False)
    return next((i for i, (one, another) in enumerate(pairs) if one != another), min(len(text), len(other)))


def _ours(options: Any, prompt: str, way: str, cache: str) -> dict[str, Any]:
    keep = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    arguments = [str(options.model), prompt, way, str(options.max_new_tokens), options.bits]
    began = time.time()
    command = [sys.executable, "-c", CODE, *arguments]
    process = subprocess.run(command, cwd=ROOT, env=os.environ | keep, capture_output=True, text=True, check=True)
    figures = json.loads(process.stdout)
    return figures | {"load": figures.pop("loaded") - began, "first": figures["first"] - began}


def _theirs(options: Any, prompt: str, way: str) -> dict[str, Any]:
    of_text = ["-no-cnv", "--no-display-prompt", "--ignore-eos"] if way == "completion" else []
    command = [options.binaries / f"llama-{way}", "-m", options.model, "-p", prompt, "-n", str(options.max_new_tokens)]
    command += ["-t", str(options.threads), "--temp", "0", "--perf", *of_text]
    process = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)

    def number(pattern: str) -> float:
        """Returns the last number that a pattern finds in the output."""
        return float(re.findall(pattern, process.stderr + process.stdout)[-1])

    load = number(r"load time = +([\d.]+) ms") / 1000
    if way == "completion":
        first = load + number(r"prompt eval time = +([\d.]+) ms") / 1000
        text, steps, rate = process.stdout, 1.0, number(r" eval time = .*?([\d.]+) tokens per second")
    else:
        first = load + number(r"encoded .* in +([\d.]+) seconds")
        tokens, accepted = number(r"n_predict += (\d+)"), number(r"n_accept += (\d+)")
        rate, steps = number(r"decoded .* speed: +([\d.]+) t/s"), tokens / max(tokens - accepted, 1)
        text = process.stdout.partition(prompt)[2]
    return {"load": load, "first": first, "rate": rate, "steps": steps, "text": text}


if __name__ == "__main__":
    main()
