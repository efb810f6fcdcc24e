"""Comparison of texts with and without lookahead, on this device: greedy in each precision, and sampled.

    python benchmarks/exactness.py

The demo model continues prompts in one batch, with plain decoding and with several settings. The texts of plain
decoding are also compared with those that transformers generated on a CPU (`tests/golden`). In float32 with exact
products all texts must be equal; otherwise the status is 1. By default GPUs and TPUs round the factors of float32
products, and bfloat16 rounds every result: there the order of nearly equal logits may change.

Sampled texts are compared with those of plain sampling with the same keys. A batch has a sequence for each control
alone and one for all of them together; temperatures rotate from prompt to prompt.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import numpy as np

import jlade
from benchmarks import report
from benchmarks.accelerator import WINDOW_AND_TREE, first_difference, make_decoder
from benchmarks.parts import Figures, Parts, make_parser
from jlade import LookaheadConfig, SamplingConfig
from jlade.lookahead.names import label

GOLDEN = report.DEMO_PROMPTS.with_name("greedy.json")
SETTINGS = [
    WINDOW_AND_TREE,
    LookaheadConfig.tree(63),
    LookaheadConfig.paper(15, 5, 15),
    LookaheadConfig.paper(7, 3, 7),
    LookaheadConfig.paper(10, 2, 10),
    LookaheadConfig.paper(0, 5, 10),
    # More than the tokens per step of these texts, so that steps become narrower.
    LookaheadConfig.tree(63, relative_step_time=3.0),
]
EXACT = "float32, exact products"
PRECISIONS = {EXACT: ("float32", "highest"), "float32": ("float32", "default"), "bfloat16": ("bfloat16", "default")}

SAMPLED = [WINDOW_AND_TREE, LookaheadConfig.tree(7), LookaheadConfig.paper(7, 3, 3), LookaheadConfig.paper(0, 5, 4)]
SAMPLED_TOKENS = 40
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
CONTROLS: list[dict[str, Any]] = [
    {},
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.3},
    {"logit_bias": {100: 2.0, 200: float("-inf")}},
]
CONTROLS.append(functools.reduce(lambda one, other: one | other, CONTROLS))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=26, metavar="P", help="number of prompts (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="M", help="of greedy texts, at most 256")
    parser.add_argument("--attention", metavar="NAME", help="argument of `Llama` (default: Llama's own)")
    options = parser.parse_args()

    lines = report.read_lines(report.DEMO_PROMPTS)
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
            parts.run(greedy_part(precision, lookahead), functools.partial(compare.with_lookahead, lookahead))
    compare = _Comparison(prompts, expected, EXACT, options.attention)
    for lookahead in SAMPLED:
        parts.run(sampled_part(lookahead), functools.partial(compare.sampled, lookahead))
    parts.print()
    different = [name for name, part in parts.results.items() if EXACT in name and not _is_all(part)]
    if different:
        print(f"texts differ: {different}")
    sys.exit(parts.failed() or bool(different))


def greedy_part(precision: str, lookahead: LookaheadConfig) -> str:
    """Returns the name of the part that compares greedy texts with a setting."""
    adaptive = ", adaptive" if lookahead.relative_step_time else ""
    return f"{precision}: {label(lookahead)}{adaptive}"


def sampled_part(lookahead: LookaheadConfig) -> str:
    """Returns the name of the part that compares sampled texts with a setting."""
    return f"{EXACT}, sampled: {label(lookahead)}"


@dataclasses.dataclass
class _Comparison:
    prompts: list[list[int]]
    expected: np.ndarray
    precision: str
    attention: str | None
    plain: np.ndarray | None = None
    plain_sampled: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # by prompt

    def with_plain(self) -> Figures:
        """Compares plain decoding with the expected texts."""
        self.plain = self._greedy(None).tokens
        return _equal(self.plain, self.expected)

    def with_lookahead(self, lookahead: LookaheadConfig) -> Figures:
        """Compares lookahead with plain decoding."""
        if self.plain is None:
            self.plain = self._greedy(None).tokens
        out = self._greedy(lookahead)
        return _equal(out.tokens, self.plain) | {"tokens/step": float(out.lengths.sum() / out.steps.sum())}

    def sampled(self, lookahead: LookaheadConfig) -> Figures:
        """Compares sampled texts, with each control and all of them, with plain sampling."""
        texts, tokens, steps = [], 0, 0
        for i in range(len(self.prompts)):
            if i not in self.plain_sampled:
                self.plain_sampled[i] = self._sampled(i, None).tokens
            out = self._sampled(i, lookahead)
            texts.append(out.tokens)
            tokens, steps = tokens + out.lengths.sum(), steps + out.steps.sum()
        plain = np.concatenate([self.plain_sampled[i] for i in range(len(texts))])
        return _equal(np.concatenate(texts), plain) | {"tokens/step": float(tokens / steps)}

    def _greedy(self, lookahead: LookaheadConfig | None) -> jlade.Generation:
        return self._generate(self.prompts, lookahead, max_new_tokens=self.expected.shape[1])

    def _sampled(self, i: int, lookahead: LookaheadConfig | None) -> jlade.Generation:
        temperatures = [TEMPERATURES[(i + j) % len(TEMPERATURES)] for j in range(len(CONTROLS))]
        sampling = [
            SamplingConfig(temperature=temperature, **control)
            for temperature, control in zip(temperatures, CONTROLS, strict=True)
        ]
        prompts = [self.prompts[i]] * len(sampling)
        return self._generate(
            prompts, lookahead, max_new_tokens=SAMPLED_TOKENS, sampling=sampling, key=jax.random.key(i)
        )

    def _generate(
        self, prompts: list[list[int]], lookahead: LookaheadConfig | None, **options: Any
    ) -> jlade.Generation:
        dtype, precision = PRECISIONS[self.precision]
        params, _ = jlade.demo(dtype)
        decoder = make_decoder(params, self.attention)
        with jax.default_matmul_precision(precision):
            return jlade.generate(params, prompts, lookahead=lookahead, eos_ids=(), decoder=decoder, **options)


def _equal(texts: np.ndarray, expected: np.ndarray) -> Figures:
    return {
        "equal texts": f"{np.sum((texts == expected).all(axis=1))}/{len(expected)}",
        "first difference, token": first_difference(texts, expected),
    }


def _is_all(part: Figures) -> bool:
    equal, _, number = part.get("equal texts", "").partition("/")
    return bool(equal == number)


if __name__ == "__main__":
    main()
