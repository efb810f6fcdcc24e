"""Speed of decoding on an accelerator, compared with its memory bandwidth, at the shape of a large model.

    python benchmarks/accelerator.py                                                    # a 7 B shape in bfloat16
    python benchmarks/accelerator.py --shape demo --new-tokens 32 --repeat 1            # a trial on a CPU

The model is the demo model inflated to that shape (`inflate.py`), so text and compression are real. Each program is
`jlade.decode` under one `jax.jit`, prefill included. The time of a step is the time of 256 more tokens divided by the
number of their steps; it excludes prefill. Rates are in GB/s of bytes read and written. Every figure is a median.
Compared runs are timed in turns. The programs of a part are compiled at once, each in a thread.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import jax.numpy as jnp
import numpy as np

import jlade
from benchmarks import measure, report
from benchmarks.measure import PROMPT_TOKENS, in_turns, prompts_of
from benchmarks.report import Figures
from jlade.config import PLAIN, LookaheadConfig, NGramConfig
from jlade.lookahead.names import label
from jlade.mesh import default_device, device_of, num_bytes
from jlade.models.llama import Llama, LlamaParams

CACHE_HIT = "/jax/compilation_cache/cache_hits"  # the event of a program from the persistent cache
CAPACITY = 1024  # tokens, the capacity that `jlade.prepare` chooses for texts of these lengths
FEW, MANY = 16, 272  # new tokens of two texts; their difference in time is that of steps alone
WINDOW_AND_TREE = LookaheadConfig.tree(80, ngrams=NGramConfig(10, 5, 10))
LOOKAHEAD = {
    "15, 5, 15": LookaheadConfig.paper(15, 5, 15),
    "window and tree": WINDOW_AND_TREE,
    "tree of 63": LookaheadConfig.tree(63),
}
BLOCKS = {8: LookaheadConfig.paper(1, 5, 1), 32: LookaheadConfig.paper(4, 5, 4), 64: LookaheadConfig.paper(8, 5, 8)}
BLOCKS |= {120: LOOKAHEAD["15, 5, 15"], 256: LookaheadConfig.paper(32, 5, 32)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__, parts=True)
    measure.add_model_arguments(parser)
    parser.add_argument("--prompts", type=int, default=3, metavar="P", help="of each kind, decoded one at a time")
    parser.add_argument("--new-tokens", type=int, default=256, metavar="M", help="tokens of each text")
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 4], metavar="B", help="batch sizes besides 1")
    parser.add_argument("--blocks", type=int, nargs="*", default=list(BLOCKS), choices=list(BLOCKS), help="of steps")
    parser.add_argument("--repeat", type=int, default=5, metavar="R", help="timings of each program")
    options = parser.parse_args(argv)

    params = measure.load(options.shape, options.dtype)
    model = Model(params, measure.make_decoder(params, options.attention), options.repeat)
    names = "shape", "dtype", "new_tokens", "prompts", "repeat"
    parts = report.Parts(options, names, attention=model.decoder.attention)
    peak_of_loading = peak_bytes(params)
    parts.run("batch 1", lambda: texts(model, 1, options.prompts, options.new_tokens))
    parts.run("memory", lambda: memory(model, peak_of_loading))  # before anything else raises the peak
    device = parts.run("device", lambda: measure_device(options.repeat))
    parts.run("steps", lambda: steps(model, options.blocks, device))
    for size in options.batches:
        parts.run(f"batch {size}", functools.partial(texts, model, size, size, options.new_tokens), like="batch 1")
    parts.finish()


def peak_bytes(params: LlamaParams) -> int | None:
    """Returns the peak of this process's memory on the device of `params`, None on CPUs."""
    stats = device_of(params).memory_stats()
    return None if stats is None else stats["peak_bytes_in_use"]


@dataclasses.dataclass
class Model:
    """Parameters and the programs compiled for them."""

    params: LlamaParams
    decoder: Llama
    repeat: int  # timings of each program
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)
    compilation: Figures = dataclasses.field(default_factory=dict)

    def decode(
        self, lookahead: LookaheadConfig, prompts: Sequence[list[int]], new_tokens: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the new tokens [B, M] and the steps [B]; nothing stays on the device."""
        inputs, config = self._prepare(lookahead, prompts, new_tokens)
        key = _key(inputs, config)
        if key not in self.programs:
            self.compile([lookahead], prompts)
        state = self.programs[key](self.params, inputs)
        tokens, steps = jax.device_get((state.tokens, state.num_steps))
        new = [text[len(ids) : len(ids) + new_tokens] for text, ids in zip(tokens, prompts, strict=True)]
        return np.stack(new), steps

    def compile(self, lookaheads: Iterable[LookaheadConfig], prompts: Sequence[list[int]]) -> None:
        """Compiles the programs of settings for batches like `prompts`, at once: a compiler leaves most cores idle."""
        lowered = {}
        for lookahead in lookaheads:
            inputs, config = self._prepare(lookahead, prompts, FEW)
            if (key := _key(inputs, config)) not in self.programs:
                begin = time.perf_counter()
                lowered[key] = jax.jit(jlade.decode, static_argnames="config").lower(self.params, inputs, config)
                self.compilation[f"tracing and lowering {key}, s"] = time.perf_counter() - begin

        def finish(key: str) -> tuple[Any, float]:
            begin = time.perf_counter()
            return lowered[key].compile(), time.perf_counter() - begin

        events = collections.Counter[str]()
        jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for key, (program, taken) in zip(lowered, pool.map(finish, lowered), strict=True):
                self.programs[key] = program
                self.compilation[f"compiling {key}, s"] = taken
        if lowered:
            self.compilation["programs compiled, from the cache"] = f"{len(lowered)}, {events[CACHE_HIT]}"

    def take_compilation(self) -> Figures:
        """Returns the times of compilation since the previous call."""
        figures, self.compilation = self.compilation, {}
        return figures

    def _prepare(
        self, lookahead: LookaheadConfig, prompts: Sequence[list[int]], new_tokens: int
    ) -> tuple[jlade.Inputs, jlade.DecodeConfig]:
        request: Any = {"lookahead": lookahead, "eos_ids": (), "decoder": self.decoder}
        return jlade.prepare(self.params, prompts, max_new_tokens=new_tokens, **request)


def _key(inputs: jlade.Inputs, config: jlade.DecodeConfig) -> str:
    return f"{label(config.lookahead)}, batch {inputs.prompts.shape[0]}"


def texts(model: Model, batch_size: int, num_prompts: int, new_tokens: int) -> Figures:
    """Measures whole texts, prefill included, of plain decoding and of settings with lookahead."""
    figures: Figures = {}
    settings = [PLAIN, *LOOKAHEAD.values()]
    for kind in ("code", "prose"):
        prompts = prompts_of(kind, num_prompts)
        batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
        model.compile(settings, batches[0])

        def run(lookahead: LookaheadConfig, batches: list[list[list[int]]] = batches) -> list[Any]:
            return [model.decode(lookahead, batch, new_tokens) for batch in batches]

        runs = {lookahead: functools.partial(run, lookahead) for lookahead in settings}
        tokens, steps = {}, {}
        for lookahead, decode in runs.items():
            results = decode()
            tokens[lookahead] = np.concatenate([new for new, _ in results])
            steps[lookahead] = np.stack([num_steps for _, num_steps in results])
        seconds = {name: statistics.median(times) for name, times in in_turns(runs, model.repeat).items()}
        num_tokens = tokens[PLAIN].size
        figures[f"{kind}: plain, tokens/s"] = num_tokens / seconds[PLAIN]
        for name, wide in LOOKAHEAD.items():
            compression, speedup = num_tokens / steps[wide].sum(), seconds[PLAIN] / seconds[wide]
            part: Figures = {
                "tokens/s": num_tokens / seconds[wide],
                "speedup": speedup,
                "compression": float(compression),
                "speedup / compression": float(speedup / compression),
                # A batch makes as many steps as its slowest sequence.
                "steps of plain / steps": float(steps[PLAIN].max(axis=1).sum() / steps[wide].max(axis=1).sum()),
            }
            part |= measure.compare_texts(tokens[wide], tokens[PLAIN])
            figures |= {f"{kind}: {name}, {figure}": value for figure, value in part.items()}
    return figures | model.take_compilation()


def memory(model: Model, peak_of_loading: int | None) -> Figures:
    """Returns the peak of memory since the start of the process, with the sizes of weights and cache."""
    cache = jax.eval_shape(lambda params: model.decoder.init_cache(params, 1, CAPACITY), model.params)
    cache_bytes, weights, peak = num_bytes(cache), num_bytes(model.params), peak_bytes(model.params)
    figures: Figures = {"weights, GB": weights / 1e9, "cache, GB": cache_bytes / 1e9}
    for key, program in model.programs.items():
        figures[f"temporary of {key}, GB"] = program.memory_analysis().temp_size_in_bytes / 1e9
    if peak is not None and peak_of_loading is not None:
        figures |= {"peak of making the weights, GB": peak_of_loading / 1e9, "peak, GB": peak / 1e9}
        figures |= {"peak above weights and cache, GB": (peak - weights - cache_bytes) / 1e9}
    return figures


def steps(model: Model, blocks: Sequence[int], device: Figures | None) -> Figures:
    """Measures steps by block size, and compares the rate of reading of plain decoding with that of copying."""
    wide: dict[Any, LookaheadConfig] = {size: BLOCKS[size] for size in blocks}
    wide |= {name: lookahead for name, lookahead in LOOKAHEAD.items() if lookahead not in wide.values()}
    (prompt,) = prompts_of("code", 1, PROMPT_TOKENS)
    model.compile([PLAIN, *wide.values()], [prompt])

    def num_steps(lookahead: LookaheadConfig, new_tokens: int) -> int:
        return int(model.decode(lookahead, [prompt], new_tokens)[1][0])

    runs = {lookahead: functools.partial(num_steps, lookahead) for lookahead in (PLAIN, *wide.values())}
    one, *others = measure.step_seconds(runs, model.repeat, FEW, MANY).values()
    config, weights = model.params.config, measure.read_bytes(model.params)
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.params.norm.dtype.itemsize
    cached = (PROMPT_TOKENS + (FEW + MANY) // 2) * token
    figures: Figures = {"step of 1, ms": 1e3 * one}
    for name, seconds in zip(wide, others, strict=True):
        figures |= {f"step of {name}, ms": 1e3 * seconds, f"step of {name}, x step of 1": seconds / one}
    for name, read in (("weights", weights), ("weights and cache", weights + cached)):
        figures[f"{name} read, GB/s"] = read / one / 1e9
        if device is not None:
            figures[f"{name} read, x rate of the copy"] = read / one / 1e9 / device["copy, GB/s"]
    return figures | model.take_compilation()


def measure_device(repeat: int) -> Figures:
    """Returns the rates of copying, reading and multiplying bfloat16 arrays far larger than the device's caches."""
    on_cpu = default_device().platform == "cpu"
    size, calls = (2**28, 3) if on_cpu else (2**32, 10)  # bytes; consecutive calls, which hide the time of launches
    width = 1024 if on_cpu else 8192
    data = jax.random.normal(jax.random.key(0), (size // 2,), jnp.bfloat16)
    left, right = jax.random.normal(jax.random.key(1), (2, width, width), jnp.bfloat16)

    def taken(run: Callable[..., jax.Array], *arrays: Any) -> float:
        return measure.seconds(jax.jit(run), *arrays, repeat=repeat, calls=calls)

    copy = taken(lambda x: jnp.copy(x), data)
    # CPUs are slow at fresh memory, so the data are also changed in place.
    in_place = taken(lambda x: jax.lax.fori_loop(0, calls, lambda _, x: x + 1, x), data) / calls
    return {
        "copy, GB/s": 2 * size / min(copy, in_place) / 1e9,
        "read, GB/s": size / taken(lambda x: jnp.sum(x, dtype=jnp.float32), data) / 1e9,
        "bfloat16 product, TFLOP/s": 2 * width**3 / taken(lambda x, y: x @ y, left, right) / 1e12,
    }


if __name__ == "__main__":
    main()
