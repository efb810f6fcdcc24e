"""Whether greedy texts with lookahead are those of plain decoding, on this device and in each precision.

    python benchmarks/exactness.py

The demo model continues prompts, all in one batch, by plain decoding and by several settings; plain decoding is held
against the texts that transformers generated on a CPU (`tests/golden`). In float32 with exact products all must be
equal. By default GPUs and TPUs round the factors of float32 products, and in bfloat16 everything is rounded more: there
near-ties may fall the other way. Exits with status 1 unless all are equal in exact float32.
"""

import argparse
import functools
import json
import sys
from pathlib import Path

# The script's own folder is no place for imports: see compression.py.
sys.path[0] = str(Path(__file__).parent.parent)

import jax
import numpy as np

import jlade
from benchmarks.accelerator import first_difference, make_decoder
from benchmarks.compression import PROMPTS
from benchmarks.parts import Figures, Parts, add_arguments
from jlade import LookaheadConfig

GOLDEN = PROMPTS.with_name("greedy.json")
SETTINGS = [
    LookaheadConfig(15, 5, 15),
    LookaheadConfig(7, 3, 7),
    LookaheadConfig(10, 2, 10),
    LookaheadConfig(0, 5, 10),
    LookaheadConfig(15, 5, 15, step_cost=3.0),  # above what these texts repay, so that steps become narrower
]
EXACT = "float32, exact products"
PRECISIONS = {EXACT: ("float32", "highest"), "float32": ("float32", "default"), "bfloat16": ("bfloat16", "default")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=26, metavar="P", help="how many (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="M", help="at most 256")
    parser.add_argument("--attention", metavar="NAME", help="argument of `Llama`; its own default unless given")
    add_arguments(parser)
    options = parser.parse_args()

    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    step = max(1, len(lines) // options.prompts)  # some of each kind
    lines = lines[::step][: options.prompts]
    greedy = json.loads(GOLDEN.read_text(encoding="utf-8"))
    expected = np.array([greedy[line["id"]][: options.max_new_tokens] for line in lines])
    names = ("prompts", "max_new_tokens", "attention")
    parts = Parts(options, {name: getattr(options, name) for name in names})
    prompts = [line["ids"] for line in lines]
    for name, (dtype, precision) in PRECISIONS.items():
        settings = SETTINGS if name == EXACT else SETTINGS[:1]
        parts.run(name, functools.partial(_compare, prompts, expected, settings, dtype, precision, options.attention))
    parts.print()
    exact = parts.results.get(EXACT, {})
    different = [key for key, text in exact.items() if "equal" in key and text != f"{len(lines)}/{len(lines)}"]
    if different:
        print(f"{EXACT}: texts differ: {different}")
    sys.exit(parts.failed() or bool(different))


def _compare(
    prompts: list[list[int]],
    expected: np.ndarray,
    settings: list[LookaheadConfig],
    dtype: str,
    precision: str,
    attention: str | None,
) -> Figures:
    params, _ = jlade.demo(dtype)
    generate = functools.partial(
        jlade.generate,
        params,
        prompts,
        max_new_tokens=expected.shape[1],
        eos_ids=(),
        decoder=make_decoder(params, attention),
    )
    with jax.default_matmul_precision(precision):
        plain = generate(lookahead=None).tokens
        figures: Figures = {"plain, equal to transformers": _equal(plain, expected)}
        for lookahead in settings:
            out = generate(lookahead=lookahead)
            name = f"{lookahead.window_size}, {lookahead.ngram_size}, {lookahead.guess_set_size}"
            name += "" if lookahead.step_cost is None else " adaptive"
            figures |= {
                f"{name}: equal to plain": _equal(out.tokens, plain),
                f"{name}: first difference, token": first_difference(out.tokens, plain),
                f"{name}: tokens/step": float(out.lengths.sum() / out.steps.sum()),
            }
    return figures


def _equal(texts: np.ndarray, expected: np.ndarray) -> str:
    return f"{np.sum((texts == expected).all(axis=1))}/{len(expected)}"


if __name__ == "__main__":
    main()
