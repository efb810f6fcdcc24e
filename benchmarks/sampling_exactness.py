"""Comparison of sampled texts with those of plain sampling, for several settings and every control, on all prompts.

    python benchmarks/sampling_exactness.py

A batch has a sequence for each control alone and one for all controls together. Temperatures rotate from prompt to
prompt.
"""

import argparse
import dataclasses
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

SETTINGS = [(7, 3, 3), (5, 4, 5), (4, 3, 2), (10, 2, 10), (0, 5, 4), (2, 5, 4)]
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
ALONE: dict[str, Any] = {
    "temperature alone": {},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.3},
    "logit_bias": {"logit_bias": {100: 2.0, 200: float("-inf")}},
}
CONTROLS = ALONE | {"all together": {name: value for control in ALONE.values() for name, value in control.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-new-tokens", type=int, default=40, metavar="M")
    parser.add_argument("--json", metavar="FILE", help="write the figures, with machine and versions, to FILE")
    options = parser.parse_args()

    params, _ = jlade.demo(dtype="float32")
    prompts = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    settings = {str(setting): LookaheadConfig.paper(*setting) for setting in SETTINGS}
    equal = {name: np.zeros(len(CONTROLS), int) for name in settings}
    steps = dict.fromkeys(settings, 0)
    tokens = 0
    with Progress() as progress:
        task = progress.add_task("", total=len(prompts) * (1 + len(settings)))
        for i, prompt in enumerate(prompts):
            temperatures = np.roll(TEMPERATURES, i)
            sampling = [
                SamplingConfig(temperature=float(temperatures[j % len(temperatures)]), **control)
                for j, control in enumerate(CONTROLS.values())
            ]
            arguments = {"max_new_tokens": options.max_new_tokens, "sampling": sampling, "key": jax.random.key(i)}
            plain = jlade.generate(params, [prompt["ids"]] * len(sampling), lookahead=None, **arguments)
            progress.advance(task)
            tokens += int(plain.lengths.sum())
            for name, lookahead in settings.items():
                out = jlade.generate(params, [prompt["ids"]] * len(sampling), lookahead=lookahead, **arguments)
                equal[name] += np.all(out.tokens == plain.tokens, axis=1)
                steps[name] += int(out.steps.sum())
                progress.advance(task)

    table = Table(
        "W, N, G", "tokens/step", *CONTROLS, title=f"texts equal to those of plain sampling, out of {len(prompts)}"
    )
    for name in settings:
        table.add_row(name, f"{tokens / steps[name]:.2f}", *map(str, equal[name]))
    Console(width=200).print(table)
    if options.json:
        figures = [
            {
                "setting": dataclasses.asdict(settings[name]),
                "tokens_per_step": tokens / steps[name],
                "equal": dict(zip(CONTROLS, equal[name].tolist(), strict=True)),
            }
            for name in settings
        ]
        result = {"model": "demo", "max_new_tokens": options.max_new_tokens, "temperatures": TEMPERATURES}
        report.write(options.json, result | {"prompts": len(prompts), "settings": figures})


if __name__ == "__main__":
    main()
