"""Decoding on meshes of the attached devices against one of them: texts, steps, and the time of a call per step.

    python benchmarks/meshes.py --json benchmarks/results/meshes.json      # on GPUs or TPUs
    python benchmarks/meshes.py --cpu-devices 8                            # virtual devices: texts and steps count

All prompts are decoded as one batch, filled up to a multiple of the largest `data`, greedily and sampled, in float32.
On GPUs and TPUs a second call is timed.
"""

import functools
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path[0] = str(pathlib.Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import numpy as np

import jlade
from benchmarks import report
from jlade import Generation, LookaheadConfig, SamplingConfig

EIGHT = [(1, 8, 1), (1, 3, 1), (1, 1, 8), (2, 2, 2), (8, 1, 1), (1, 2, 4)]
GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(temperature=0.8)


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="M")
    parser.add_argument("--prompts", type=int, metavar="P", help="decode the first P prompts only")
    parser.add_argument("--cpu-devices", type=int, metavar="D", help="make D virtual devices of the CPU")
    options = parser.parse_args(argv)
    if options.cpu_devices:
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)

    count = len(jax.devices())
    meshes = EIGHT if count >= 8 else list(dict.fromkeys([(1, count, 1), (1, 1, count)]))
    prompts = [line["ids"] for line in report.read_lines(report.DEMO_PROMPTS)[: options.prompts]]
    prompts += prompts[: -len(prompts) % max(data for data, _, _ in meshes)]
    common: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "eos_ids": ()}
    common["lookahead"] = LookaheadConfig.paper(15, 5, 15)
    source = pathlib.Path(jlade.__file__).parent / "demo"
    params, _ = jlade.load(source, "float32")
    found = []
    for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
        decode = functools.partial(_decode, prompts, common | {"sampling": sampling}, not options.cpu_devices)
        expected, seconds = decode(params)
        found.append(_row(name, (1, 1, 1), expected, expected, seconds))
        for sizes in meshes:
            divided, _ = jlade.load(source, "float32", mesh=jlade.make_mesh(*sizes))
            found.append(_row(name, sizes, expected, *decode(divided)))
    rows = []
    for row in found:
        equal = [f"{row[key]} of {len(prompts)}" for key in ("equal_texts", "equal_steps")]
        time_of_step = f"{row['step_ms']:.1f}" if row["step_ms"] else "-"
        rows.append([row["name"], str(row["mesh"])[1:-1], *equal, str(row["steps"]), time_of_step])
    columns = "", "data, lookahead, model", "equal texts", "equal steps", "steps", "ms a step, with prefill"
    report.print_table(columns, rows)
    report.write(options.json, {"prompts": len(prompts), "max_new_tokens": options.max_new_tokens, "rows": found})


def _decode(
    prompts: list[list[int]], request: dict[str, Any], timed: bool, params: Any
) -> tuple[Generation, float | None]:
    """Returns the result and, if `timed`, the seconds of a second call, prefill included."""
    out = jlade.generate(params, prompts, **request)
    if not timed:  # virtual devices share the cores
        return out, None
    begin = time.perf_counter()
    jlade.generate(params, prompts, **request)
    return out, time.perf_counter() - begin


def _row(
    name: str, sizes: tuple[int, int, int], expected: Generation, out: Generation, seconds: float | None
) -> dict[str, Any]:
    steps = int(out.steps.max())
    return {
        "name": name,
        "mesh": sizes,
        "equal_texts": int(np.sum(np.all(out.tokens == expected.tokens, axis=1))),
        "equal_steps": int(np.sum(out.steps == expected.steps)),
        "steps": steps,
        "step_ms": seconds and 1e3 * seconds / steps,
    }


if __name__ == "__main__":
    main()
