"""Tokens per step of sampled texts, for each temperature and each way to draw the window and to verify.

    python benchmarks/sampling.py

Each text is compared with the text of plain sampling with the same key. With coupled verification all must be equal.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# Import from the repository, not from this folder: see compression.py.
sys.path[0] = str(Path(__file__).parent.parent)

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jlade
from benchmarks import report
from benchmarks.compression import PROMPTS
from jlade import LookaheadConfig, SamplingConfig

SETTINGS = {
    "coupled": LookaheadConfig.paper(15, 5, 15),
    "coupled, greedy window": LookaheadConfig.paper(15, 5, 15, window_draw="greedy"),
    "rejection": LookaheadConfig.paper(15, 5, 15, verification="rejection"),
    "rejection, greedy window": LookaheadConfig.paper(15, 5, 15, verification="rejection", window_draw="greedy"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="M")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0], metavar="T")
    parser.add_argument("--json", metavar="FILE", help="write the figures, with machine and versions, to FILE")
    options = parser.parse_args()

    params, _ = jlade.demo()
    prompts = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    figures: list[dict[str, Any]] = []
    with Progress() as progress:
        task = progress.add_task("", total=len(options.temperatures) * (1 + len(SETTINGS)) * len(prompts))
        for temperature in options.temperatures:
            plain: list[np.ndarray] = []
            for name, lookahead in {"plain": None, **SETTINGS}.items():
                progress.update(task, description=f"{name} at {temperature}")
                steps: dict[str, list[int]] = {"code": [], "prose": []}
                num_equal = 0
                for i, prompt in enumerate(prompts):
                    out = jlade.generate(
                        params,
                        prompt["ids"],
                        max_new_tokens=options.max_new_tokens,
                        lookahead=lookahead,
                        sampling=SamplingConfig(temperature=temperature),
                        eos_ids=(),
                        key=jax.random.key(i),
                    )
                    if lookahead is None:
                        plain.append(out.tokens)
                    num_equal += np.array_equal(out.tokens, plain[i])
                    steps[prompt["kind"]].append(int(out.steps[0]))
                    progress.advance(task)
                rates = {kind: options.max_new_tokens * len(counts) / sum(counts) for kind, counts in steps.items()}
                figures.append(
                    {"temperature": temperature, "method": name, "equal": num_equal, "tokens_per_step": rates}
                )

    table = Table("temperature", "method", "same text as plain", "tokens/step, code", "tokens/step, prose")
    for method in figures:
        columns = [f"{method['tokens_per_step'][kind]:.2f}" for kind in ("code", "prose")]
        table.add_row(str(method["temperature"]), method["method"], f"{method['equal']}/{len(prompts)}", *columns)
    Console().print(table)
    if options.json:
        report.write(options.json, {"model": "demo", "max_new_tokens": options.max_new_tokens, "methods": figures})


if __name__ == "__main__":
    main()
