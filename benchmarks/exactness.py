"""Comparison of texts with and without lookahead, on this device: greedy in each precision, and sampled.

    python benchmarks/exactness.py

The demo model continues prompts in one batch, with plain decoding and with several settings. The texts of plain
decoding are also compared with those that transformers generated on a CPU (`tests/golden`). In float32 with exact
products all texts must be equal; otherwise the status is 1. By default GPUs and TPUs round the factors of float32
products, and bfloat16 rounds every result: there the order of nearly equal logits may change.

Sampled texts are compared with those of plain sampling with the same keys. A batch has a sequence for each control
alone and one for all of them together; temperatures rotate from prompt to prompt.
"""

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import numpy as np

import jlade
from benchmarks import report
from benchmarks.accelerator import WINDOW_AND_TREE
from benchmarks.measure import compare_texts, make_decoder
from benchmarks.report import Figures
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__, parts=True)
    parser.add_argument("--prompts", type=int, default=26, metavar="P", help="number of prompts (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="M", help="of greedy texts, at most 256")
    parser.add_argument("--attention", metavar="NAME", help="argument of `Llama` (default: Llama's own)")
    options = parser.parse_args(argv)

    lines = report.read_lines(report.DEMO_PROMPTS)
    step = max(1, len(lines) // options.prompts)  # prompts of both kinds
    lines = lines[::step][: options.prompts]
    greedy = json.loads(GOLDEN.read_text(encoding="utf-8"))
    golden = np.array([greedy[line["id"]][: options.max_new_tokens] for line in lines])
    prompts = [line["ids"] for line in lines]
    parts = report.Parts(options, ("prompts", "max_new_tokens", "attention"))

    @functools.cache
    def decoded(precision: str, lookahead: LookaheadConfig | None) -> jlade.Generation:
        return _generate(precision, options.attention, prompts, lookahead, max_new_tokens=golden.shape[1])

    @functools.cache
    def sampled(lookahead: LookaheadConfig | None) -> list[jlade.Generation]:
        return [_sample(options.attention, i, prompt, lookahead) for i, prompt in enumerate(prompts)]

    def with_plain(precision: str) -> Figures:
        return compare_texts(decoded(precision, None).tokens, golden)

    def with_lookahead(precision: str, lookahead: LookaheadConfig) -> Figures:
        return _compare([decoded(precision, lookahead)], [decoded(precision, None)])

    def with_sampled(lookahead: LookaheadConfig) -> Figures:
        return _compare(sampled(lookahead), sampled(None))

    for precision in PRECISIONS:
        parts.run(precision, functools.partial(with_plain, precision))
        for lookahead in SETTINGS if precision == EXACT else SETTINGS[:1]:
            parts.run(greedy_part(precision, lookahead), functools.partial(with_lookahead, precision, lookahead))
    for lookahead in SAMPLED:
        parts.run(sampled_part(lookahead), functools.partial(with_sampled, lookahead))
    different = [name for name, part in parts.results.items() if EXACT in name and not _is_all(part)]
    if different:
        print(f"texts differ: {different}")
    parts.finish(failed=bool(different))


def greedy_part(precision: str, lookahead: LookaheadConfig) -> str:
    """Returns the name of the part that compares greedy texts with a setting."""
    adaptive = ", adaptive" if lookahead.relative_step_time else ""
    return f"{precision}: {label(lookahead)}{adaptive}"


def sampled_part(lookahead: LookaheadConfig) -> str:
    """Returns the name of the part that compares sampled texts with a setting."""
    return f"{EXACT}, sampled: {label(lookahead)}"


def _generate(
    precision: str, attention: str | None, prompts: list[list[int]], lookahead: LookaheadConfig | None, **options: Any
) -> jlade.Generation:
    dtype, of_products = PRECISIONS[precision]
    params, _ = jlade.demo(dtype)
    options |= {"lookahead": lookahead, "decoder": make_decoder(params, attention), "eos_ids": ()}
    with jax.default_matmul_precision(of_products):
        return jlade.generate(params, prompts, **options)


def _sample(attention: str | None, i: int, ids: list[int], lookahead: LookaheadConfig | None) -> jlade.Generation:
    """Returns the texts of prompt number `i` with each of the controls."""
    temperatures = (TEMPERATURES[(i + j) % len(TEMPERATURES)] for j in range(len(CONTROLS)))
    controls = zip(temperatures, CONTROLS, strict=False)
    sampling = [SamplingConfig(temperature=temperature, **control) for temperature, control in controls]
    request: Any = {"max_new_tokens": SAMPLED_TOKENS, "sampling": sampling, "key": jax.random.key(i)}
    return _generate(EXACT, attention, [ids] * len(CONTROLS), lookahead, **request)


def _compare(outs: list[jlade.Generation], plain: list[jlade.Generation]) -> Figures:
    tokens, expected = (np.concatenate([out.tokens for out in each]) for each in (outs, plain))
    num_tokens, num_steps = (sum(getattr(out, name).sum() for out in outs) for name in ("lengths", "steps"))
    return compare_texts(tokens, expected) | {"tokens/step": float(num_tokens / num_steps)}


def _is_all(part: Figures) -> bool:
    equal, _, number = part.get("equal texts", "").partition("/")
    return bool(equal == number)


if __name__ == "__main__":
    main()
