"""Tokens per step and speed of plain, Jacobi, prompt lookup and lookahead decoding.

    python benchmarks/compression.py                                      # the usual methods
    python benchmarks/compression.py --settings 15,5,15 7,7,7 --seeds 3   # these W,N,G, with and without prompt pool

Every method decodes every prompt and ignores end tokens. Programs are compiled before they are timed. Times include
prefill; steps do not. The column `equal` counts the texts that are equal to those of plain decoding.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

# Import from the repository, not from this folder: here this file would hide Python's `compression`, which JAX imports.
sys.path[0] = str(pathlib.Path(__file__).parent.parent)

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jlade
from benchmarks import report
from jlade.config import SMALL_BLOCK, LookaheadConfig

PROMPTS = pathlib.Path(__file__).parent.parent / "tests" / "golden" / "prompts.jsonl"
USUAL = {
    "plain": None,
    "Jacobi": LookaheadConfig.paper(window_size=10, ngram_size=2, guess_set_size=10, pool_from_prompt=False),
    "prompt lookup": LookaheadConfig.paper(window_size=0, ngram_size=5, guess_set_size=10),
    "lookahead": LookaheadConfig.paper(15, 5, 15, pool_from_prompt=False),
    "lookahead + prompt": LookaheadConfig.paper(15, 5, 15),
    "small block": SMALL_BLOCK,
}


@dataclasses.dataclass
class Method:
    """A way to decode, and its results."""

    name: str
    setting: LookaheadConfig | None
    tokens_per_step: list[float] = dataclasses.field(default_factory=list)  # per seed, over all prompts
    seconds: list[float] = dataclasses.field(default_factory=list)  # per seed
    num_equal: int = 0  # texts equal to those of plain decoding, over all prompts and seeds

    def figures(self, num_texts: int, num_tokens: int, plain_seconds: float) -> dict[str, Any]:
        seconds = float(np.mean(self.seconds))
        return {
            "method": self.name,
            "setting": None if self.setting is None else dataclasses.asdict(self.setting),
            "equal": f"{self.num_equal}/{num_texts}",
            "tokens_per_step": float(np.mean(self.tokens_per_step)),
            "tokens_per_step_by_seed": self.tokens_per_step,
            "tokens_per_second": num_tokens / seconds,
            "speedup": plain_seconds / seconds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default=PROMPTS, metavar="FILE", help="JSON lines with the token ids in `ids`")
    parser.add_argument("--model", metavar="DIR", help="Hugging Face LLaMA directory (default: the demo model)")
    parser.add_argument(
        "--settings",
        nargs="+",
        metavar="W,N,G",
        help="settings to compare with plain decoding (default: the usual methods)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="M")
    parser.add_argument("--seeds", type=int, default=1, metavar="S", help="draws of the first window to average over")
    parser.add_argument("--json", metavar="FILE", help="write the figures, with machine and versions, to FILE")
    options = parser.parse_args()

    params, _ = jlade.demo() if options.model is None else jlade.load(options.model)
    lines = pathlib.Path(options.prompts).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["ids"] for line in lines]
    methods = [Method(name, setting) for name, setting in USUAL.items()]
    if options.settings:
        methods = [methods[0], *(m for text in options.settings for m in _both_pools(text))]

    _measure(params, prompts, methods, options.max_new_tokens, options.seeds)
    num_tokens = len(prompts) * options.max_new_tokens
    plain_seconds = float(np.mean(methods[0].seconds))
    figures = [method.figures(len(prompts) * options.seeds, num_tokens, plain_seconds) for method in methods]
    Console().print(_table(figures))
    if options.json:
        result = {"model": options.model or "demo", "prompts": len(prompts), "max_new_tokens": options.max_new_tokens}
        report.write(options.json, result | {"methods": figures})


def _both_pools(text: str) -> list[Method]:
    window, ngram, guesses = (int(part) for part in text.split(","))
    with_prompt = LookaheadConfig.paper(window_size=window, ngram_size=ngram, guess_set_size=guesses)
    without = dataclasses.replace(with_prompt, pool_from_prompt=False)
    return [Method("lookahead", without), Method("lookahead + prompt", with_prompt)]


def _measure(
    params: Any, prompts: Sequence[Sequence[int]], methods: Sequence[Method], max_new_tokens: int, num_seeds: int
) -> None:
    """Adds the measurements to the methods, of which the first is plain decoding."""
    longest = max(prompts, key=len)
    expected: list[np.ndarray] = []
    with Progress() as progress:
        task = progress.add_task("", total=len(methods) * num_seeds * len(prompts))
        for method in methods:
            progress.update(task, description=method.name)
            jlade.generate(params, longest, max_new_tokens=max_new_tokens, lookahead=method.setting)  # compiles
            for seed in range(num_seeds):
                steps, seconds = 0, 0.0
                for i, prompt in enumerate(prompts):
                    begin = time.perf_counter()
                    out = jlade.generate(
                        params,
                        prompt,
                        max_new_tokens=max_new_tokens,
                        lookahead=method.setting,
                        eos_ids=(),
                        key=jax.random.key(seed),
                    )
                    seconds += time.perf_counter() - begin
                    steps += int(out.steps[0])
                    if i == len(expected):
                        expected.append(out.tokens)
                    method.num_equal += np.array_equal(out.tokens, expected[i])
                    progress.advance(task)
                method.tokens_per_step.append(len(prompts) * max_new_tokens / steps)
                method.seconds.append(seconds)


def _table(figures: Sequence[dict[str, Any]]) -> Table:
    table = Table("method", "W", "N", "G", "equal", "tokens/step", "tokens/s", "speedup")
    for column in table.columns[1:]:
        column.justify = "right"
    for method in figures:
        setting = method["setting"] or {}
        size = [str(setting.get(name, "")) for name in ("window_size", "ngram_size", "guess_set_size")]
        rates = [f"{method['tokens_per_step']:.2f}", f"{method['tokens_per_second']:.0f}", f"{method['speedup']:.2f}x"]
        table.add_row(method["method"], *size, method["equal"], *rates)
    return table


if __name__ == "__main__":
    main()
