"""Time of a step of a model of tunix that is decoded as it is, beside the converted one and the model alone.

    python benchmarks/tunix_steps.py --json benchmarks/results/tunix_steps.json

One text of the demo model in tunix's Qwen2, with a cache of 1024 tokens. "model alone" is the model's own forward pass
of as many tokens with the same cache: decoding it as it is cannot take less. The rounds of all take turns, and the
fastest one counts, in wall-clock time and in that of all cores together, which other programs affect least.
"""

import dataclasses
import importlib.metadata
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import jax.numpy as jnp
import numpy as np

import jlade
from benchmarks import report
from benchmarks.rollouts import PROMPTS, Tokenizer, demo_model
from jlade.integrations.tunix import decoder
from jlade.lookahead import names

CAPACITY = 1024
Run = Callable[[], tuple[int, float, float]]  # steps, and their seconds by the clock and of all cores


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--lookahead", default="tree=7", metavar="SETTING", help="beside plain steps")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="M")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    params, demo = jlade.demo(dtype="float32")
    as_it_is, state = decoder(demo_model(params), max_positions=CAPACITY)
    prompt = Tokenizer(demo).encode(PROMPTS[0])
    result: dict[str, dict[str, dict[str, float]]] = {}
    for setting, lookahead in {options.lookahead: names.parse(options.lookahead), "plain": None}.items():
        given = {"lookahead": lookahead, "max_new_tokens": options.max_new_tokens, "eos_ids": ()}
        runs: dict[str, Run] = {
            "converted": steps(params.decoder, params, prompt, given),
            "as it is": steps(as_it_is, state, prompt, given),
            "model alone": passes(as_it_is, state, 1 if lookahead is None else lookahead.block_size, len(prompt)),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(options.rounds + 1):  # the first compiles
            for name, run in runs.items():
                number, *seconds = run()
                times[name].append((1000 * seconds[0] / number, 1000 * seconds[1] / number))
        result[setting] = {
            name: dict(zip(("wall", "cores"), map(min, zip(*each[1:], strict=True)), strict=True))
            for name, each in times.items()
        }

    rows = (
        [setting, name, f"{times['wall']:.2f}", f"{times['cores']:.2f}"]
        for setting, of_setting in result.items()
        for name, times in of_setting.items()
    )
    report.print_table(["setting", "model", "ms", "ms of all cores"], rows, "A step")
    versions = {name: importlib.metadata.version(name) for name in ("google-tunix", "flax")}
    report.write(options.json, versions | {"settings": vars(options), "milliseconds": result})


def steps(own: Any, params: Any, prompt: list[int], options: dict[str, Any]) -> Run:
    """Returns a function that decodes the prompt."""
    inputs, config = jlade.prepare(params, prompt, decoder=own, **options)

    def run() -> tuple[int, float, float]:
        state = jax.block_until_ready(jlade.start(jlade.prefill(params, inputs, config), inputs, config))
        begin, of_cores = time.perf_counter(), time.process_time()
        state = jax.block_until_ready(jlade.run_steps(params, state, config))
        return int(state.num_steps[0]), time.perf_counter() - begin, time.process_time() - of_cores

    return run


def passes(own: Any, params: Any, size: int, length: int) -> Run:
    """Returns a function that makes 100 forward passes over blocks of `size` tokens, which commit nothing."""
    empty = own.init_cache(params, 1, CAPACITY)
    cache = dataclasses.replace(empty, length=jnp.full(1, length, jnp.int32))

    @jax.jit
    def loop(params: Any, cache: Any, number: jax.Array) -> Any:
        def run(carry: Any) -> Any:
            number, tokens, cache = carry
            logits, layers = own.forward(params, tokens, length + tokens, cache, np.tri(size, dtype=bool))
            return number - 1, jnp.argmax(logits, -1).astype(jnp.int32), dataclasses.replace(cache, layers=layers)

        return jax.lax.while_loop(lambda carry: carry[0] > 0, run, (number, jnp.zeros((1, size), jnp.int32), cache))

    def run() -> tuple[int, float, float]:
        begin, of_cores = time.perf_counter(), time.process_time()
        jax.block_until_ready(loop(params, cache, jnp.int32(100)))
        return 100, time.perf_counter() - begin, time.process_time() - of_cores

    return run


if __name__ == "__main__":
    main()
