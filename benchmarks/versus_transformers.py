"""jlade compared with transformers on a CPU: plain decoding, blocks, lookahead, capacity and prefill.

    python benchmarks/versus_transformers.py

Both run in float32, on the demo model and on the same model inflated to 134 M parameters (`inflate.py`). Compared runs
are timed in turns; every figure is a median.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Import from the repository, not from this folder: see compression.py.
sys.path[0] = str(Path(__file__).parent.parent)

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jlade
from benchmarks import inflate, report
from benchmarks.compression import PROMPTS
from jlade import LookaheadConfig
from jlade.config import PLAIN
from jlade.conversion import load_hf, save_hf
from jlade.models.llama import LlamaParams

CANDIDATES = [LookaheadConfig.paper(0, n, g) for n, g in [(3, 1), (4, 1), (5, 1), (6, 1), (8, 1), (4, 2)]]
NEW_TOKENS = 128
BLOCKS = (1, 8, 32)
PREFIX = 200  # tokens in the cache at the beginning of timed steps
PROMPT = 400  # tokens that prefill reads
SHORT = 0.5  # seconds; a shorter run is preceded by an untimed one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, metavar="R")
    parser.add_argument("--prompts", type=int, default=4, metavar="P", help="prompts of each kind, for lookahead")
    parser.add_argument("--models", nargs="+", default=["demo", "134m"], choices=["demo", "134m"])
    parser.add_argument("--json", metavar="FILE", help="write the figures, with machine and versions, to FILE")
    options = parser.parse_args()

    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    prompts = {kind: [p["ids"] for p in lines if p["kind"] == kind][: options.prompts] for kind in ("code", "prose")}
    figures: dict[str, Any] = {}
    with Progress() as progress:
        for name in options.models:
            task = progress.add_task(name, total=None)
            params, model = _load(name)
            compare = _Comparison(params, model, options.repeat)
            figures[name] = {}
            for measure in (compare.plain, compare.blocks, compare.capacity, compare.prefill):
                progress.update(task, description=f"{name}: {measure.__name__}")
                figures[name] |= measure(prompts["code"][0])
            progress.update(task, description=f"{name}: lookahead")
            figures[name] |= compare.lookahead(prompts)
            progress.remove_task(task)

    table = Table("", *figures)
    for figure in dict.fromkeys(key for column in figures.values() for key in column):
        table.add_row(figure, *(_text(figures[name].get(figure, "")) for name in figures))
    Console().print(table)
    if options.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        report.write(options.json, versions | {"repeat": options.repeat, "new_tokens": NEW_TOKENS, "models": figures})


def _load(name: str) -> tuple[LlamaParams, Any]:
    """Returns the model's parameters, and transformers' model loaded from the same files."""
    params, _ = jlade.demo(dtype="float32")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / name
        if name != "demo":
            params = inflate.inflate(params, inflate.SHAPES[name], jax.random.key(0))
        save_hf(params, directory)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        return load_hf(directory, "float32"), model


@dataclasses.dataclass
class _Comparison:
    params: LlamaParams
    model: Any
    repeat: int

    def median_seconds(self, runs: dict[Any, Callable[[], Any]], repeat: int | None = None) -> dict[Any, float]:
        """Returns the median seconds of runs that are made once to compile them, then timed in turns.

        A short run is preceded by an untimed one of its own. Otherwise the previous run would affect it: torch's
        threads spin for another 0.2 s, and memory not used recently is slow.
        """

        def time_once(run: Callable[[], Any]) -> float:
            begin = time.perf_counter()
            jax.block_until_ready(jax.tree.leaves(run()))
            return time.perf_counter() - begin

        seconds: dict[Any, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            time_once(run)
        for _ in range(repeat or self.repeat):
            for name, run in runs.items():
                if min(seconds[name], default=0.0) < SHORT:
                    time_once(run)
                seconds[name].append(time_once(run))
        return {name: statistics.median(values) for name, values in seconds.items()}

    def generate(self, prompt: list[int], lookahead: LookaheadConfig | None) -> np.ndarray:
        """Returns the tokens that jlade generates."""
        out = jlade.generate(self.params, prompt, max_new_tokens=NEW_TOKENS, lookahead=lookahead, eos_ids=())
        return out.tokens[0]

    def transformers_generate(self, prompt: list[int], **settings: Any) -> np.ndarray:
        """Returns the tokens that transformers generates."""
        ids = torch.tensor([prompt])
        limits = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 3}
        with torch.no_grad():
            return self.model.generate(ids, attention_mask=torch.ones_like(ids), **limits, **settings)[
                0, ids.shape[1] :
            ].numpy()

    def plain(self, prompt: list[int]) -> dict[str, Any]:
        """Measures plain decoding, and compares its rate of reading weights with that of a sum over the weights."""
        leaves = jax.tree.leaves(self.params)
        total = jax.jit(lambda leaves: [jnp.sum(leaf) for leaf in leaves])
        seconds = self.median_seconds(
            {
                "jlade": lambda: self.generate(prompt, None),
                "transformers": lambda: self.transformers_generate(prompt),
                "sum": lambda: total(leaves),
            }
        )
        read = sum(leaf.nbytes for leaf in leaves)
        return {
            "same greedy text": np.array_equal(self.generate(prompt, None), self.transformers_generate(prompt)),
            "plain, tokens/s": NEW_TOKENS / seconds["jlade"],
            "transformers, tokens/s": NEW_TOKENS / seconds["transformers"],
            "plain, x transformers": seconds["transformers"] / seconds["jlade"],
            "sum of the weights, GB/s": read / seconds["sum"] / 1e9,
            "weights read in a step of 1, x rate of the sum": seconds["sum"] / self.step_seconds((1, 1024))[0],
        }

    def step_seconds(self, *sizes_and_capacities: tuple[int, int]) -> list[float]:
        """Returns the seconds of a step, for pairs of a block size and a capacity, after `PREFIX` tokens.

        It is the time of `NEW_TOKENS` more tokens divided by the number of their steps. It excludes prefill.
        """
        prompt = np.random.default_rng(0).integers(4, 4096, PREFIX)
        runs = {
            (pair, extra): functools.partial(jlade.decode, self.params, *self._prepare(prompt, *pair, 16 + extra))
            for pair in sizes_and_capacities
            for extra in (0, NEW_TOKENS)
        }
        steps = {name: int(run().num_steps[0]) for name, run in runs.items()}
        seconds = self.median_seconds(dict(runs))
        return [
            (seconds[pair, NEW_TOKENS] - seconds[pair, 0]) / (steps[pair, NEW_TOKENS] - steps[pair, 0])
            for pair in sizes_and_capacities
        ]

    def _prepare(
        self, prompt: np.ndarray, size: int, capacity: int, new_tokens: int
    ) -> tuple[jlade.Inputs, jlade.DecodeConfig]:
        """Returns the arguments of `jlade.decode` for blocks of `size` tokens; the inputs are on the device."""
        inputs, config = jlade.prepare(
            self.params,
            prompt,
            max_new_tokens=new_tokens,
            lookahead=PLAIN if size == 1 else LookaheadConfig.paper(0, size, 1),
            eos_ids=(),
        )
        padded = np.zeros((1, capacity), np.int32)
        padded[0, : len(prompt)] = prompt
        inputs = dataclasses.replace(inputs, prompts=jnp.asarray(padded))
        return jax.device_put(inputs), config

    def blocks(self, prompt: list[int]) -> dict[str, Any]:
        """Measures steps of several block sizes, and compares them with a step of one token."""
        seconds = self.step_seconds(*((size, 1024) for size in BLOCKS))
        step = {f"step of {size}, ms": 1000 * s for size, s in zip(BLOCKS, seconds, strict=True)}
        rest = zip(BLOCKS[1:], seconds[1:], strict=True)
        return step | {f"step of {size}, x step of 1": s / seconds[0] for size, s in rest}

    def capacity(self, prompt: list[int]) -> dict[str, Any]:
        """Compares steps in caches of two capacities that hold the same text."""
        small, large = self.step_seconds((1, 512), (1, 4096))
        return {"step at capacity 4096, x step at 512": large / small}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Measures prefill with `jlade.start`, which makes pool and window, and prefill with one generated token."""
        ids = (prompt * PROMPT)[: PROMPT + 1]
        tensor = torch.tensor([ids[:PROMPT]])
        inputs, config = self._prepare(np.array(ids), 1, 1024, 1)

        def prefill() -> jlade.DecodeState:
            return jlade.start(jlade.prefill(self.params, inputs, config), inputs, config)

        with torch.no_grad():
            seconds = self.median_seconds(
                {
                    "prefill": prefill,
                    "first": lambda: jlade.generate(self.params, ids[:PROMPT], max_new_tokens=1, lookahead=None).tokens,
                    "transformers": lambda: self.model(tensor, logits_to_keep=1).logits.numpy(),
                }
            )
        return {
            f"prefill of {PROMPT}, tokens/s": PROMPT / seconds["prefill"],
            "prefill, x transformers": seconds["transformers"] / seconds["prefill"],
            "prefill and one token, x transformers": seconds["transformers"] / seconds["first"],
        }

    def lookahead(self, prompts: dict[str, list[list[int]]]) -> dict[str, Any]:
        """Compares the candidate that is fastest on code with plain decoding and with transformers' prompt lookup."""
        runs = {
            str(config): _over(prompts["code"], functools.partial(self.generate, lookahead=config))
            for config in CANDIDATES
        }
        tried = self.median_seconds(runs, repeat=1)
        best = min(CANDIDATES, key=lambda config: tried[str(config)])
        result: dict[str, Any] = {"fastest W, N, G": f"{best.window_size}, {best.ngram_size}, {best.guess_set_size}"}
        for kind, ids in prompts.items():
            guesses = best.ngram_size - 1
            runs = {
                "plain": _over(ids, functools.partial(self.generate, lookahead=None)),
                "lookahead": _over(ids, functools.partial(self.generate, lookahead=best)),
                "prompt lookup": _over(
                    ids, functools.partial(self.transformers_generate, prompt_lookup_num_tokens=guesses)
                ),
            }
            seconds = self.median_seconds(runs)
            same = all(np.array_equal(*pair) for pair in zip(runs["plain"](), runs["lookahead"](), strict=True))
            result |= {
                f"{kind}: same text": same,
                f"{kind}: lookahead, tokens/s": len(ids) * NEW_TOKENS / seconds["lookahead"],
                f"{kind}: lookahead, x plain": seconds["plain"] / seconds["lookahead"],
                f"{kind}: lookahead, x prompt lookup of transformers": seconds["prompt lookup"] / seconds["lookahead"],
            }
        return result


def _over(prompts: list[list[int]], run: Callable[[list[int]], Any]) -> Callable[[], list[Any]]:
    return lambda: [run(prompt) for prompt in prompts]


def _text(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
