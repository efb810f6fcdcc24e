"""`lookahead="auto"` beside plain decoding, alone and while another process takes a core: speedup by task.

    python benchmarks/busy_core.py --model smollm2 --data benchmarks/prompts/smollm2.jsonl --limit 12

Each prompt is decoded plainly and by `"auto"` in turns, and the texts have to be the same. The speedup of a task is the
time of its steps by plain decoding, divided by that by `"auto"`; prompts are read beforehand. `"auto"` begins without
what earlier calls have taught it, and goes on learning when the other process begins. So the first rounds beside it
show how soon the costs of its widths follow the machine.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import numpy as np

from benchmarks import report
from jlade.costs import learned
from jlade.decoding import loop, prefill
from jlade.generation import request as request_lib
from jlade.generation.options import Options
from jlade.models.base import Params

BUSY = "while True: pass"


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", help="default: the demo model")
    report.add_prompts(parser)
    parser.add_argument("--rounds", type=int, default=2, metavar="R", help="over all prompts, each way")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="M")
    options = parser.parse_args()
    params, tokenizer = report.load(options.model, "float32")
    prompts = [(each.task, report.prompt_ids(tokenizer, each)) for each in report.questions(options)]
    found: dict[str, dict[str, float]] = {}
    steps: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # where "auto" would find what it learned before
        learned.forget()
        for _, ids in prompts:  # compiles
            decode(params, ids, "auto", options.max_new_tokens)
            decode(params, ids, None, options.max_new_tokens)
        learned.forget()
        for beside in ("alone", "beside a busy process"):
            busy = subprocess.Popen([sys.executable, "-c", BUSY]) if beside != "alone" else None
            try:
                for number in range(options.rounds):
                    name = f"{beside}, round {number + 1}"
                    found[name], steps[name] = one_round(params, prompts, options.max_new_tokens)
                    print(name, f"{found[name]['all']:.2f}x", steps[name], file=sys.stderr)
            finally:
                if busy is not None:
                    busy.kill()
    rows = ([name, *(f"{speedup:.2f}x" for speedup in speedups.values())] for name, speedups in found.items())
    report.print_table(["", *next(iter(found.values()))], rows, 'Speedup of "auto"')
    figures = {"model": options.model or "demo", "data": options.data, "prompts": len(prompts)}
    report.write(options.json, figures | {"max_new_tokens": options.max_new_tokens, "speedup": found, "steps": steps})


def one_round(params: Params, prompts: list[tuple[str, list[int]]], most: int) -> tuple[dict[str, float], list[int]]:
    """Returns the speedup of each task, and the steps at each level, widest first."""
    seconds: dict[str, list[float]] = {}
    steps = np.zeros(0, int)
    for index, (task, ids) in enumerate(prompts):
        ways: list[Literal["auto"] | None] = [None, "auto"] if index % 2 else ["auto", None]
        turns = {way: decode(params, ids, way, most) for way in ways}
        np.testing.assert_array_equal(turns[None][0], turns["auto"][0])
        steps = turns["auto"][2] if index == 0 else steps + turns["auto"][2]
        for name in (task, "all"):
            of_task = seconds.setdefault(name, [0.0, 0.0])
            of_task[0], of_task[1] = of_task[0] + turns[None][1], of_task[1] + turns["auto"][1]
    return {task: plain / auto for task, (plain, auto) in seconds.items()}, steps.tolist()


def decode(
    params: Params, ids: list[int], lookahead: Literal["auto"] | None, most: int
) -> tuple[np.ndarray, float, np.ndarray]:
    """Returns the text, the seconds of its steps, and the number of steps at each level; the call teaches "auto"."""
    request = request_lib.make(params, ids, Options(max_new_tokens=most, lookahead=lookahead))
    inputs, config = request.inputs, request.config
    prefix = jax.block_until_ready(prefill.prefill(params, inputs, config))
    begin = time.perf_counter()
    state = jax.block_until_ready(loop.run_steps(params, prefill.start(prefix, inputs, config), config))
    seconds = time.perf_counter() - begin
    num_steps = np.zeros(0, int) if state.pace is None else np.asarray(state.pace.num_steps)
    if request.learned is not None and state.pace is not None:
        request.learned.learn_steps(inputs, config, num_steps, seconds)
    return np.asarray(state.tokens), seconds, num_steps


if __name__ == "__main__":
    main()
