"""What sampling leaves of lookahead's gain: tokens per step by temperature, for each way to draw and to verify.

    python benchmarks/sampling.py

Every text under the coupled verification is compared with that of plain sampling with the same key.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# The script's own folder is no place for imports: see compression.py.
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
    "coupled": LookaheadConfig(),
    "coupled, greedy window": LookaheadConfig(window_draw="greedy"),
    "rejection": LookaheadConfig(verification="rejection"),
    "rejection, greedy window": LookaheadConfig(verification="rejection", window_draw="greedy"),
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
    for row in figures:
        columns = [f"{row['tokens_per_step'][kind]:.2f}" for kind in ("code", "prose")]
        table.add_row(str(row["temperature"]), row["method"], f"{row['equal']}/{len(prompts)}", *columns)
    Console().print(table)
    if options.json:
        report.write(options.json, {"model": "demo", "max_new_tokens": options.max_new_tokens, "methods": figures})


if __name__ == "__main__":
    main()
