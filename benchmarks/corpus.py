"""The time of a step, and of making the index, by the size of a corpus: the sources of Python's standard library.

    python benchmarks/corpus.py
    python benchmarks/corpus.py --model smollm2 --lookahead tree=31

The sizes take turns, and the least time counts.
"""

import itertools
import sys
import sysconfig
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import numpy as np

import jlade
from benchmarks import report
from jlade.decoding import loop, prefill
from jlade.generation import text
from jlade.lookahead import names


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--lookahead", default="tree=7", metavar="SETTING")
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 10_000, 100_000, 1_000_000], metavar="TOKENS")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="M")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()

    params, tokenizer = report.load(options.model, "float32")
    tokens = library(tokenizer, max(options.sizes))
    requests, index_seconds = {}, {}
    for size in options.sizes:
        begin = time.perf_counter()
        corpus = jlade.Corpus([tokens[:size]]) if size else None
        index_seconds[size] = time.perf_counter() - begin
        requests[size] = jlade.prepare(
            params,
            tokens[-100:],
            max_new_tokens=options.max_new_tokens,
            eos_ids=(),
            lookahead=names.parse(options.lookahead),
            corpus=corpus,
        )
    step_seconds = dict.fromkeys(options.sizes, float("inf"))
    for _ in range(options.repeat + 1):  # the first round compiles
        for size, (inputs, config) in requests.items():
            state = jax.block_until_ready(prefill.start(prefill.prefill(params, inputs, config), inputs, config))
            begin = time.perf_counter()
            state = jax.block_until_ready(loop.run_steps(params, state, config))
            seconds = (time.perf_counter() - begin) / int(np.max(state.num_steps))
            step_seconds[size] = min(step_seconds[size], seconds)

    first = step_seconds[options.sizes[0]]
    rows = (
        [f"{size}", f"{index_seconds[size]:.2f}", f"{1000 * seconds:.2f}", f"{seconds / first:.2f}"]
        for size, seconds in step_seconds.items()
    )
    title = names.label(names.parse(options.lookahead))
    report.print_table(["tokens", "index, s", "step, ms", "of the first"], rows, title)
    figures = {"model": options.model or "demo", "lookahead": options.lookahead}
    figures |= {"index_seconds": index_seconds, "step_seconds": step_seconds}
    report.write(options.json, figures)


def library(tokenizer: text.Tokenizer, least: int) -> list[int]:
    """Returns at least so many tokens of the standard library, and 100 more."""
    tokens: list[int] = []
    for file in itertools.cycle(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        tokens += text.encode(tokenizer, file.read_text(encoding="utf-8"), parse_special=False)
        if len(tokens) >= least + 100:
            return tokens
    raise ValueError("no standard library here")


if __name__ == "__main__":
    main()
