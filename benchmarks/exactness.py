"""Comparison of greedy texts with and without lookahead, on this device and in each precision.

    python benchmarks/exactness.py

The demo model continues prompts in one batch, with plain decoding and with several settings. The texts of plain
decoding are also compared with those that transformers generated on a CPU (`tests/golden`). In float32 with exact
products all texts must be equal; otherwise the status is 1. By default GPUs and TPUs round the factors of float32
products, and bfloat16 rounds every result: there the order of nearly equal logits may change.
"""

import argparse
import dataclasses
import functools
import json
import sys
from pathlib import Path

# Import from the repository, not from this folder: see compression.py.
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
    LookaheadConfig(),
    LookaheadConfig.tree(63),
    LookaheadConfig.paper(15, 5, 15),
    LookaheadConfig.paper(7, 3, 7),
    LookaheadConfig.paper(10, 2, 10),
    LookaheadConfig.paper(0, 5, 10),
    LookaheadConfig.paper(
        15, 5, 15, relative_step_time=3.0
    ),  # more than the tokens per step of these texts, so that steps become narrower
]
EXACT = "float32, exact products"
PRECISIONS = {EXACT: ("float32", "highest"), "float32": ("float32", "default"), "bfloat16": ("bfloat16", "default")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=26, metavar="P", help="number of prompts (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="M", help="at most 256")
    parser.add_argument("--attention", metavar="NAME", help="argument of `Llama` (default: Llama's own)")
    add_arguments(parser)
    options = parser.parse_args()

    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    step = max(1, len(lines) // options.prompts)  # prompts of both kinds
    lines = lines[::step][: options.prompts]
    greedy = json.loads(GOLDEN.read_text(encoding="utf-8"))
    expected = np.array([greedy[line["id"]][: options.max_new_tokens] for line in lines])
    names = ("prompts", "max_new_tokens", "attention")
    parts = Parts(options, {name: getattr(options, name) for name in names})
    prompts = [line["ids"] for line in lines]
    for precision in PRECISIONS:
        compare = _Comparison(prompts, expected, precision, options.attention)
        parts.run(precision, compare.with_plain)
        for lookahead in SETTINGS if precision == EXACT else SETTINGS[:1]:
            name = f"{lookahead.window_size}, {lookahead.ngram_size}, {lookahead.guess_set_size}"
            name += "" if lookahead.relative_step_time is None else " adaptive"
            parts.run(f"{precision}: {name}", functools.partial(compare.with_lookahead, lookahead))
    parts.print()
    all_equal = f"{len(lines)}/{len(lines)}"
    different = [
        name
        for name, part in parts.results.items()
        if EXACT in name and part.get("equal texts", all_equal) != all_equal
    ]
    if different:
        print(f"texts differ: {different}")
    sys.exit(parts.failed() or bool(different))


@dataclasses.dataclass
class _Comparison:
    prompts: list[list[int]]
    expected: np.ndarray
    precision: str
    attention: str | None
    plain: np.ndarray | None = None

    def with_plain(self) -> Figures:
        """Compares plain decoding with the expected texts."""
        self.plain = self._generate(None).tokens
        return _equal(self.plain, self.expected)

    def with_lookahead(self, lookahead: LookaheadConfig) -> Figures:
        """Compares lookahead with plain decoding."""
        if self.plain is None:
            self.plain = self._generate(None).tokens
        out = self._generate(lookahead)
        return _equal(out.tokens, self.plain) | {"tokens/step": float(out.lengths.sum() / out.steps.sum())}

    def _generate(self, lookahead: LookaheadConfig | None) -> jlade.Generation:
        dtype, precision = PRECISIONS[self.precision]
        params, _ = jlade.demo(dtype)
        with jax.default_matmul_precision(precision):
            return jlade.generate(
                params,
                self.prompts,
                max_new_tokens=self.expected.shape[1],
                lookahead=lookahead,
                eos_ids=(),
                decoder=make_decoder(params, self.attention),
            )


def _equal(texts: np.ndarray, expected: np.ndarray) -> Figures:
    return {
        "equal texts": f"{np.sum((texts == expected).all(axis=1))}/{len(expected)}",
        "first difference, token": first_difference(texts, expected),
    }


if __name__ == "__main__":
    main()
