"""Speed of decoding on an accelerator, compared with its memory bandwidth, at the shape of a large model.

    python benchmarks/accelerator.py                                                    # a 7 B shape in bfloat16
    python benchmarks/accelerator.py --shape demo --new-tokens 32 --repeat 1            # a trial on a CPU

The model is the demo model inflated to that shape (`inflate.py`), so text and compression are real. Each program is
`jlade.decode` under one `jax.jit`, prefill included. The time of a step is the time of 256 more tokens divided by the
number of their steps; it excludes prefill. Rates are in GB/s of bytes read and written. Every figure is a median.
Compared runs are timed in turns. The programs of a part are compiled at once, each in a thread.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import jax.numpy as jnp
import numpy as np

import jlade
from benchmarks import inflate, report
from benchmarks.parts import Figures, Parts, make_parser
from jlade.config import PLAIN, LookaheadConfig, NGramConfig
from jlade.lookahead.names import label
from jlade.mesh import default_device, device_of, num_bytes
from jlade.models.llama import Llama, LlamaParams

CACHE_HIT = "/jax/compilation_cache/cache_hits"  # the event of a program from the persistent cache
CAPACITY = 1024  # tokens, the capacity that `jlade.prepare` chooses for texts of these lengths
PROMPT_TOKENS = 200  # longer prompts are cut
FEW, MANY = 16, 272  # new tokens of two texts; their difference in time is that of steps alone
WINDOW_AND_TREE = LookaheadConfig.tree(80, ngrams=NGramConfig(10, 5, 10))
LOOKAHEAD = {
    "15, 5, 15": LookaheadConfig.paper(15, 5, 15),
    "window and tree": WINDOW_AND_TREE,
    "tree of 63": LookaheadConfig.tree(63),
}
BLOCKS = {8: LookaheadConfig.paper(1, 5, 1), 32: LookaheadConfig.paper(4, 5, 4), 64: LookaheadConfig.paper(8, 5, 8)}
BLOCKS |= {120: LOOKAHEAD["15, 5, 15"], 256: LookaheadConfig.paper(32, 5, 32)}


def main() -> None:
    parser = make_parser(__doc__)
    add_model_arguments(parser)
    parser.add_argument(
        "--prompts", type=int, default=3, metavar="P", help="prompts of each kind, decoded one at a time"
    )
    parser.add_argument("--new-tokens", type=int, default=256, metavar="M", help="tokens of each text")
    parser.add_argument(
        "--batches", type=int, nargs="*", default=[8, 4], metavar="B", help="batch sizes to measure besides 1"
    )
    parser.add_argument(
        "--blocks", type=int, nargs="*", default=list(BLOCKS), choices=list(BLOCKS), help="block sizes of steps"
    )
    parser.add_argument("--repeat", type=int, default=5, metavar="R", help="timings of each program")
    options = parser.parse_args()

    names = ("shape", "dtype", "new_tokens", "prompts", "repeat")
    params = load(options)
    decoder = make_decoder(params, options.attention)
    settings = {name: getattr(options, name) for name in names} | {"attention": decoder.attention}
    parts = Parts(options, settings)
    model = Model(params, decoder, options.repeat)
    measure = _Measurement(model, options.prompts, options.new_tokens, options.blocks)
    parts.run("batch 1", lambda: measure.texts(1))
    parts.run("memory", measure.memory)  # before anything else raises the peak
    device = parts.run("device", lambda: measure_device(options.repeat))
    parts.run("steps", lambda: measure.steps(device))
    for batch_size in options.batches:
        parts.run(f"batch {batch_size}", functools.partial(measure.texts, batch_size), like="batch 1")
    parts.print()
    sys.exit(parts.failed())


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `load` and `make_decoder`."""
    parser.add_argument("--shape", choices=["demo", *inflate.SHAPES], default="7b", help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--attention", metavar="NAME", help="argument of `Llama` (default: Llama's own)")


def load(options: argparse.Namespace) -> LlamaParams:
    """Returns the demo model in the shape and dtype of the options."""
    params, _ = jlade.demo(options.dtype)
    if options.shape != "demo":
        params = inflate.inflate(params, inflate.SHAPES[options.shape], jax.random.key(0))
    return jax.block_until_ready(params)


def make_decoder(params: LlamaParams, attention: str | None) -> Llama:
    """Returns the decoder of `params` for their device, with the implementation `attention` unless it is None."""
    chosen: dict[str, Any] = {} if attention is None else {"attention": attention}
    return dataclasses.replace(params.decoder, **chosen).on(params)


def prompts_of(kind: str, number: int, least: int = 0) -> list[list[int]]:
    """Returns the token ids of the first prompts of a kind, "code" or "prose", that have at least `least` tokens."""
    lines = report.read_lines(report.DEMO_PROMPTS)
    ids = [line["ids"][:PROMPT_TOKENS] for line in lines if line["kind"] == kind and len(line["ids"]) >= least]
    if len(ids) < number:
        raise ValueError(f"there are {len(ids)} {kind} prompts of at least {least} tokens, not {number}")
    return ids[:number]


def read_bytes(params: LlamaParams) -> int:
    """Returns the bytes of weights that a step reads: all but an untied embedding, of which it reads one row."""
    looked_up = 0 if params.output is None else params.embedding.nbytes
    return num_bytes(params) - looked_up


def peak_bytes(params: LlamaParams) -> int | None:
    """Returns the peak of this process's memory on the device of `params`, None on CPUs."""
    device = device_of(params)
    stats = device.memory_stats()
    return None if stats is None else stats["peak_bytes_in_use"]


def in_turns(runs: Mapping[Any, Callable[[], Any]], repeat: int) -> dict[Any, list[float]]:
    """Returns the seconds of every run, timed `repeat` times. The caller has compiled the runs by running them once."""
    seconds: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def step_seconds(runs: Mapping[Any, Callable[[int], int]], repeat: int, few: int, many: int) -> dict[Any, float]:
    """Returns the seconds of a step of each run, by the difference of two texts, timed in turns.

    Args:
      runs: decode a text of some new tokens and return its steps. The caller has compiled them.
      repeat: timings of each text.
      few, many: new tokens of the two texts.
    """
    texts = {(name, number): functools.partial(run, number) for name, run in runs.items() for number in (few, many)}
    num_steps = {key: text() for key, text in texts.items()}
    seconds = in_turns(texts, repeat)
    result = {}
    for name in runs:
        longer = [b - a for a, b in zip(seconds[name, few], seconds[name, many], strict=True)]
        result[name] = statistics.median(longer) / (num_steps[name, many] - num_steps[name, few])
    return result


def first_difference(texts: np.ndarray, expected: np.ndarray) -> int | None:
    """Returns the first place where the texts [..., M] differ, None when all are equal."""
    places = np.nonzero((texts != expected).any(axis=tuple(range(texts.ndim - 1))))[0]
    return int(places[0]) if len(places) else None


@dataclasses.dataclass
class Model:
    """Parameters and the programs compiled for them."""

    params: LlamaParams
    decoder: Llama
    repeat: int
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
                self.compilation[f"tracing and lowering {_name(key)}, s"] = time.perf_counter() - begin

        def finish(key: Any) -> tuple[Any, float]:
            begin = time.perf_counter()
            return lowered[key].compile(), time.perf_counter() - begin

        events = collections.Counter[str]()
        jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for key, (program, seconds) in zip(lowered, pool.map(finish, lowered), strict=True):
                self.programs[key] = program
                self.compilation[f"compiling {_name(key)}, s"] = seconds
        if lowered:
            self.compilation["programs compiled, from the cache"] = f"{len(lowered)}, {events[CACHE_HIT]}"

    def _prepare(
        self, lookahead: LookaheadConfig, prompts: Sequence[list[int]], new_tokens: int
    ) -> tuple[jlade.Inputs, jlade.DecodeConfig]:
        return jlade.prepare(
            self.params, prompts, max_new_tokens=new_tokens, lookahead=lookahead, eos_ids=(), decoder=self.decoder
        )

    def take_compilation(self) -> Figures:
        """Returns the times of compilation since the previous call."""
        figures, self.compilation = self.compilation, {}
        return figures

    def step_seconds(self, lookaheads: Sequence[LookaheadConfig]) -> list[float]:
        """Returns the seconds of a step of each setting, at batch size 1, timed in turns."""
        (prompt,) = prompts_of("code", 1, PROMPT_TOKENS)
        self.compile(lookaheads, [prompt])

        def num_steps(lookahead: LookaheadConfig, new_tokens: int) -> int:
            return int(self.decode(lookahead, [prompt], new_tokens)[1][0])

        runs = {lookahead: functools.partial(num_steps, lookahead) for lookahead in lookaheads}
        return list(step_seconds(runs, self.repeat, FEW, MANY).values())


def _key(inputs: jlade.Inputs, config: jlade.DecodeConfig) -> tuple[LookaheadConfig, int]:
    return config.lookahead, inputs.prompts.shape[0]


def _name(key: tuple[LookaheadConfig, int]) -> str:
    return f"{label(key[0])}, batch {key[1]}"


@dataclasses.dataclass
class _Measurement:
    model: Model
    num_prompts: int
    new_tokens: int
    blocks: Sequence[int]

    def __post_init__(self) -> None:
        self.peak_of_loading = peak_bytes(self.model.params)

    def texts(self, batch_size: int) -> Figures:
        """Measures whole texts, prefill included, of plain decoding and of settings with lookahead."""
        figures: Figures = {}
        settings = [PLAIN, *LOOKAHEAD.values()]
        for kind in ("code", "prose"):
            prompts = prompts_of(kind, self.num_prompts if batch_size == 1 else batch_size)
            batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
            self.model.compile(settings, batches[0])

            def run(lookahead: LookaheadConfig, batches: list[list[list[int]]] = batches) -> list[Any]:
                return [self.model.decode(lookahead, batch, self.new_tokens) for batch in batches]

            runs = {lookahead: functools.partial(run, lookahead) for lookahead in settings}
            texts, steps = {}, {}
            for lookahead, decode in runs.items():
                results = decode()
                texts[lookahead] = np.concatenate([tokens for tokens, _ in results])
                steps[lookahead] = np.stack([steps for _, steps in results])
            seconds = {name: statistics.median(times) for name, times in in_turns(runs, self.model.repeat).items()}
            tokens = texts[PLAIN].size
            figures[f"{kind}: plain, tokens/s"] = tokens / seconds[PLAIN]
            for name, wide in LOOKAHEAD.items():
                compression = tokens / steps[wide].sum()
                speedup = seconds[PLAIN] / seconds[wide]
                part: Figures = {
                    "tokens/s": tokens / seconds[wide],
                    "speedup": speedup,
                    "compression": float(compression),
                    "speedup / compression": float(speedup / compression),
                    # A batch makes as many steps as its slowest sequence.
                    "steps of plain / steps": float(steps[PLAIN].max(axis=1).sum() / steps[wide].max(axis=1).sum()),
                    "equal texts": f"{(texts[PLAIN] == texts[wide]).all(axis=1).sum()}/{len(prompts)}",
                    "first difference, token": first_difference(texts[wide], texts[PLAIN]),
                }
                figures |= {f"{kind}: {name}, {figure}": value for figure, value in part.items()}
        return figures | self.model.take_compilation()

    def memory(self) -> Figures:
        """Returns the peak of memory since the start of the process, with the sizes of weights and cache."""
        cache = jax.eval_shape(lambda params: self.model.decoder.init_cache(params, 1, CAPACITY), self.model.params)
        cache_bytes, weights = num_bytes(cache), num_bytes(self.model.params)
        figures: Figures = {"weights, GB": weights / 1e9, "cache, GB": cache_bytes / 1e9}
        for key, program in self.model.programs.items():
            figures[f"temporary of {_name(key)}, GB"] = program.memory_analysis().temp_size_in_bytes / 1e9
        peak = peak_bytes(self.model.params)
        if peak is not None and self.peak_of_loading is not None:
            figures |= {
                "peak of making the weights, GB": self.peak_of_loading / 1e9,
                "peak, GB": peak / 1e9,
                "peak above weights and cache, GB": (peak - weights - cache_bytes) / 1e9,
            }
        return figures

    def steps(self, device: Figures | None) -> Figures:
        """Measures steps by block size, and compares the rate of reading of plain decoding with that of copying."""
        wide: dict[Any, LookaheadConfig] = {size: BLOCKS[size] for size in self.blocks}
        wide |= {name: lookahead for name, lookahead in LOOKAHEAD.items() if lookahead not in wide.values()}
        one, *others = self.model.step_seconds([PLAIN, *wide.values()])
        config, weights = self.model.params.config, read_bytes(self.model.params)
        token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.model.params.norm.dtype.itemsize
        cached = (PROMPT_TOKENS + (FEW + MANY) // 2) * token
        figures: Figures = {"step of 1, ms": 1e3 * one}
        for name, seconds in zip(wide, others, strict=True):
            figures |= {f"step of {name}, ms": 1e3 * seconds, f"step of {name}, x step of 1": seconds / one}
        figures |= {
            "weights read, GB/s": weights / one / 1e9,
            "weights and cache read, GB/s": (weights + cached) / one / 1e9,
        }
        if device is not None:
            copied = device["copy, GB/s"]
            figures |= {
                f"{name} read, x rate of the copy": figures[f"{name} read, GB/s"] / copied
                for name in ("weights", "weights and cache")
            }
        return figures | self.model.take_compilation()


def measure_device(repeat: int) -> Figures:
    """Returns the rates of copying, reading and multiplying bfloat16 arrays far larger than the device's caches."""
    on_cpu = default_device().platform == "cpu"
    size, calls = (2**28, 3) if on_cpu else (2**32, 10)  # bytes; consecutive calls, which hide the time of launches
    width = 1024 if on_cpu else 8192
    data = jax.random.normal(jax.random.key(0), (size // 2,), jnp.bfloat16)
    left, right = jax.random.normal(jax.random.key(1), (2, width, width), jnp.bfloat16)
    copy = jax.jit(lambda x: jnp.copy(x))
    in_place = jax.jit(lambda x, times: jax.lax.fori_loop(0, times, lambda _, x: x + 1, x))
    read = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    product = jax.jit(lambda x, y: x @ y)

    def several(work: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        for _ in range(calls):
            result = work(*arrays)
        return result

    runs = {
        "copy": functools.partial(several, copy, data),
        "in place": functools.partial(in_place, data, calls),
        "read": functools.partial(several, read, data),
        "product": functools.partial(several, product, left, right),
    }
    for run in runs.values():
        jax.block_until_ready(run())
    seconds = {name: statistics.median(times) / calls for name, times in in_turns(runs, repeat).items()}
    return {
        "copy, GB/s": 2 * size / min(seconds["copy"], seconds["in place"]) / 1e9,  # CPUs are slow at fresh memory
        "read, GB/s": size / seconds["read"] / 1e9,
        "bfloat16 product, TFLOP/s": 2 * width**3 / seconds["product"] / 1e12,
    }


if __name__ == "__main__":
    main()
