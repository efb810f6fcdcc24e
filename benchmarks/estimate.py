"""Estimated times of a step, from compiled programs and data sheets; where the device is attached, measured times too.

    python benchmarks/estimate.py --devices v5e v5p v6e h100 h200 --json FILE
    python benchmarks/estimate.py --devices attached --shapes 7b --capacity 1024 --json FILE

The compilers of TPUs and GPUs are in the extras tpu-compiler and gpu-compiler. One variable changes at a time: the
block size with one sequence and 4096 cache entries; then, for blocks of 1 and 120 tokens, the batch size and the length
of the cache. Layers are alike, or each group of some is, so programs have 2 layers and 4, and each further two add the
same time; --layers 4 is for groups of four, --layers 0 compiles all layers.

An attached device runs programs with all layers, random weights and a nearly full cache. The rates of a CPU have no
data sheet: they are measured in the same run.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

sys.path[0] = str(pathlib.Path(__file__).parent.parent)  # import from the repository, not from this folder
if "attached" not in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the plugin for GPUs otherwise looks for a driver

import jax
import jax.numpy as jnp
import numpy as np

import jlade
from benchmarks import report
from benchmarks.inflate import LLAMA_3_8B, SHAPES
from benchmarks.measure import seconds
from jlade import LookaheadConfig
from jlade.config import PLAIN
from jlade.conversion.hf_config import read_config
from jlade.conversion.tensors import param_shapes
from jlade.costs import estimate
from jlade.costs.devices import DEVICES
from jlade.costs.estimate import Rates
from jlade.inspection import targets
from jlade.inspection.hlo import Module
from jlade.inspection.launches import launches
from jlade.inspection.model_programs import ModelPrograms
from jlade.mesh import default_device, num_bytes
from jlade.models.attention import plain
from jlade.models.base import cache_shapes
from jlade.models.llama import Llama, LlamaConfig

MODELS = SHAPES | {"8b": LLAMA_3_8B, "demo": read_config(pathlib.Path(jlade.__file__).parent / "demo")}
BLOCKS = {
    1: PLAIN,
    2: LookaheadConfig.paper(1, 2, 1),
    8: LookaheadConfig.paper(1, 5, 1),
    32: LookaheadConfig.paper(4, 5, 4),
    60: LookaheadConfig.paper(8, 5, 7),
    120: LookaheadConfig.paper(15, 5, 15),
    240: LookaheadConfig.paper(30, 5, 30),
}
SAME_PROGRAM = {"h200": "h100"}  # devices of one architecture


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    usual = ["v5e", "v5p", "v6e", "h100", "h200"]
    parser.add_argument("--devices", nargs="+", default=usual, choices=["attached", *DEVICES])
    parser.add_argument("--shapes", nargs="+", default=["1b", "7b", "8b"], choices=list(MODELS))
    parser.add_argument("--bits", nargs="+", type=int, default=[16], choices=(16, 8, 4), help="of matrices")
    parser.add_argument("--attention", default="auto", help="its implementation (default: %(default)s)")
    parser.add_argument("--blocks", nargs="+", type=int, default=list(BLOCKS), choices=list(BLOCKS))
    parser.add_argument("--capacity", type=int, metavar="C", help="vary the block size alone, with C cache entries")
    parser.add_argument("--layers", type=int, default=2, metavar="L", help="to compile L and 2 L; 0: all (default: 2)")
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {"layers": options.layers}
    for device in options.devices:
        name, rates = (attached() if device == "attached" else device), None
        if device == "attached" and name == "cpu":
            rates = measured_rates()
            print(f"this machine: {rates.flops / 1e9:.0f} GFLOP/s, {rates.bytes / 1e9:.1f} GB/s")
            facts["rates"] = rates._asdict()
        for shape, bits, (block, batch, capacity) in itertools.product(options.shapes, options.bits, cases(options)):
            config = MODELS[shape]
            row = {"device": name, "shape": shape, "block": block, "batch": batch, "capacity": capacity}
            row |= {} if bits == 16 else {"bits": bits}
            request = {"lookahead": BLOCKS[block], "batch_size": batch, "capacity": capacity}
            request |= {"bits": None if bits == 16 else bits, "attention": options.attention}
            if device == "attached":
                row |= compare(name, config, request | {"rates": rates})
            else:
                row |= extrapolate(name, config, request, options.layers)
            rows.append(row)
            values = (f"{value:.3g}" if isinstance(value, float) else value for value in row.values())
            print("  ".join(f"{key} {value}" for key, value in zip(row, values, strict=True)), flush=True)
            report.write(options.json, facts | {"rows": rows})  # after each row, as all of them take an hour


def cases(options: argparse.Namespace) -> Iterator[tuple[int, int, int]]:
    """Yields block size, batch size and cache length."""
    usual = options.capacity or 4096
    yield from ((block, 1, usual) for block in options.blocks)
    if options.capacity is None:
        ends = [block for block in (1, 120) if block in options.blocks]
        yield from ((block, batch, usual) for batch in (4, 8) for block in ends)
        yield from ((block, 1, capacity) for capacity in (512, 16384) for block in ends)


def extrapolate(device: str, config: LlamaConfig, request: dict[str, Any], layers: int) -> dict[str, float]:
    """Returns the estimated milliseconds of a step with all layers, and of its two sides.

    Programs of `layers` and twice as many are compiled; each further `layers` add as much. With 0 all are compiled.
    """
    rates = estimate.rates(DEVICES[device].platform, DEVICES[device].kind)

    def figures_with(num_layers: int) -> np.ndarray:
        module, body = _compiled(SAME_PROGRAM.get(device, device), config, num_layers, **request)
        launched = launches(module, body, -(-request["capacity"] // plain.CHUNK))
        time = estimate.time(rates, (launch.work for launch in launched))
        return 1e3 * np.array([time.total, time.arithmetic, time.memory])

    if layers:
        first, second = figures_with(layers), figures_with(2 * layers)
        whole = first + (config.num_layers / layers - 1) * (second - first)
    else:
        whole = figures_with(config.num_layers)
    figures = dict(zip(("ms", "arithmetic_ms", "memory_ms"), map(float, whole), strict=True))
    params, lookahead = param_shapes(config, jnp.bfloat16, request["bits"]), request["lookahead"]
    cache = cache_shapes(Llama(config), params, request["batch_size"], request["capacity"])
    pool = 4 * config.vocab_size * lookahead.ngrams.guess_set_size * (lookahead.ngram_size - 1)
    num_least = num_bytes((params, cache)) + request["batch_size"] * pool
    return figures | {"fits": num_least <= DEVICES[device].memory}


@functools.cache
def _compiled(
    device: str,
    config: LlamaConfig,
    layers: int,
    lookahead: LookaheadConfig,
    batch_size: int,
    capacity: int,
    bits: int | None,
    attention: str,
) -> tuple[Module, str]:
    """Returns the program that decodes, and the name of a step in it."""
    (target,), _ = targets.find(device)
    first = dataclasses.replace(config, num_layers=layers, max_positions=max(capacity, config.max_positions))
    params = param_shapes(first, jnp.bfloat16, bits)
    decoder = Llama(first, attention).on(params, absent=target)
    programs = ModelPrograms(params, decoder, target, batch_size, capacity)
    module = Module(programs.decoding(lookahead).as_text())
    return module, module.body(module.loops(module.entry)[-1])


def attached() -> str:
    """Returns the name of the device that JAX uses.

    Raises:
      SystemExit: there is none for it.
    """
    device = default_device()
    names = {each.kind: name for name, each in DEVICES.items()}
    name = "cpu" if device.platform == "cpu" else names.get(device.device_kind)
    if name is None:
        raise SystemExit(f"there is no description of {device.device_kind}")
    return name


def compare(device: str, config: LlamaConfig, request: dict[str, Any]) -> dict[str, float]:
    """Returns the estimated and the measured milliseconds of a step on the attached device."""
    params = param_shapes(config, jnp.float32 if device == "cpu" else jnp.bfloat16, request.pop("bits"))
    found = jlade.inspect(params, device, **request)
    if found.step is None or found.step_seconds is None:
        raise SystemExit(f"{device} refuses the program: {found.failure}")
    estimated, measured = 1e3 * found.step.time.total, 1e3 * found.step_seconds
    return {"ms": estimated, "measured_ms": measured, "ratio": estimated / measured}


def measured_rates() -> Rates:
    """Returns the rates of this machine's CPU: of products with 120 tokens, and of a sum over half a gigabyte."""
    rng = np.random.default_rng(0)
    tokens, weight = (jnp.asarray(rng.normal(size=(size, 768)).astype(np.float32)) for size in (120, 2048))
    large = jnp.asarray(rng.normal(size=2**27).astype(np.float32))
    product = seconds(jax.jit(lambda x, weight: weight @ x.T), tokens, weight, repeat=29, calls=1)
    read = seconds(jax.jit(jnp.sum), large, repeat=29, calls=1)
    return estimate.CPU._replace(flops=2 * 120 * 768 * 2048 / product, bytes=large.nbytes / read)


if __name__ == "__main__":
    main()
