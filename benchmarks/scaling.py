"""Estimated speed on many devices: which mesh for which model, and lookahead parallelism against tensor parallelism.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json
    python benchmarks/scaling.py --plot docs/scaling.svg

All figures are estimates of `jlade.plan`, with bfloat16 weights and 4096 cache entries.
"""

import dataclasses
import functools
import itertools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

sys.path[0] = str(pathlib.Path(__file__).parent.parent)  # import from the repository, not from this folder

import jlade
from benchmarks import report
from benchmarks.inflate import LLAMA_3_8B, SHAPES
from jlade import Plan, pictures
from jlade.costs.work import MeshShape
from jlade.lookahead.names import label
from jlade.models.llama import LlamaConfig

MODELS = {
    "134m": SHAPES["134m"],
    "1b": SHAPES["1b"],
    "7b": SHAPES["7b"],
    "8b": LLAMA_3_8B,
    "70b": dataclasses.replace(LLAMA_3_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64),
    "405b": dataclasses.replace(LLAMA_3_8B, hidden_size=16384, intermediate_size=53248, num_layers=126, num_heads=128),
}  # LLaMA 2 and 3
DEVICES = ["v5e", "v5p", "v6e", "h100", "h200"]
COUNTS = [1, 2, 4, 8, 16, 32, 64]
BATCHES = [1, 8, 32, 128]
CAPACITY = 4096
SOURCES = {"smollm2": "tokens per step of SmolLM2", "paper": "the paper's settings and formula"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--plot", metavar="IMAGE")
    options = parser.parse_args(argv)
    if options.json:
        of_axes = [row for source in SOURCES for row in axes(source)]
        report.write(options.json, {"capacity": CAPACITY, "streams": streams(), "batches": batches(), "axes": of_axes})
    if options.plot:
        plot(options.plot)


@functools.cache
def plan(model: str, device: str, count: int, batch_size: int = 1, source: str | None = "smollm2") -> Plan:
    """Returns a plan with the tokens per step of `source`, or with plain decoding for None."""
    config: LlamaConfig = dataclasses.replace(MODELS[model], max_positions=CAPACITY)
    options: Any = {"lookahead": None} if source is None else {"compression": source}
    return jlade.plan(config, device, count, batch_size=batch_size, capacity=CAPACITY, **options)


def streams() -> list[dict[str, Any]]:
    """Returns the recommended meshes for one stream, by the number of devices."""
    return [case(model, device, count) for model in MODELS for device in DEVICES for count in COUNTS]


def batches() -> list[dict[str, Any]]:
    """Returns the recommended meshes of eight devices, by the number of texts."""
    return [case(model, device, 8, size) for model in ("1b", "8b", "70b") for device in DEVICES for size in BATCHES]


def case(model: str, device: str, count: int, batch_size: int = 1) -> dict[str, Any]:
    """Returns the recommended mesh with its setting and speed, and the speed of plain decoding."""
    best = plan(model, device, count, batch_size).recommended
    plain = plan(model, device, count, batch_size, source=None).recommended
    return {
        "model": model,
        "device": device,
        "count": count,
        "batch_size": batch_size,
        "plain": plain and plain.tokens_per_second,
        "mesh": best and best.layout,
        "lookahead": best and label(best.lookahead),
        "block_size": best and best.lookahead.block_size,
        "compression": best and best.compression,
        "step_ms": best and 1e3 * best.step.total,
        "tokens_per_second": best and best.tokens_per_second,
    }


def axes(source: str) -> list[dict[str, Any]]:
    """Returns tokens per second of one stream of the 7B model, by the axis that the devices are on.

    Args:
      source: of the tokens per step; see `jlade.plan`.
    """
    found = []
    for device in ("v5e", "h100"):
        for count in (1, 2, 4, 8):
            options = {x.layout: x for x in plan("7b", device, count, source=source).options if x.fits}
            slow = {x.layout: x for x in plan("7b", device, count, source=None).options if x.fits}
            both = [x for layout, x in options.items() if min(layout[1:]) > 1 and layout.num_devices == count]
            model, lookahead = options[MeshShape(1, 1, count)], options[MeshShape(1, count, 1)]
            found.append(
                {
                    "compression": source,
                    "device": device,
                    "count": count,
                    "model, plain decoding": slow[MeshShape(1, 1, count)].tokens_per_second,
                    "model": model.tokens_per_second,
                    "lookahead": lookahead.tokens_per_second,
                    "both": max((option.tokens_per_second for option in both), default=None),
                    "settings": {"model": label(model.lookahead), "lookahead": label(lookahead.lookahead)},
                    "microseconds_of_equal_speed": equal_speed(model, lookahead) if count > 1 else None,
                }
            )
    return found


def equal_speed(model: Any, lookahead: Any) -> float:
    """Returns the microseconds of a collective with which `model` would be as slow as `lookahead`."""
    slower = model.compression / lookahead.tokens_per_second - model.step.total
    collectives = sum(each.times for each in model.collectives)
    return 1e6 * (model.step.collective + slower) / collectives


def plot(file: str) -> None:
    """Draws tokens per second of one stream of the 7B model against the number of devices."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "jlade"})
    lines = {
        "model": "tensor parallelism, lookahead decoding",
        "both": "both axes, lookahead decoding",
        "lookahead": "lookahead parallelism, lookahead decoding",
        "model, plain decoding": "tensor parallelism, plain decoding",
    }
    figure = Figure(figsize=(8, 6), layout="constrained")
    panels = itertools.product(SOURCES.items(), ("v5e", "h100"))
    for ((source, text), device), part in zip(panels, figure.subplots(2, 2).flat, strict=True):
        ours = [row for row in axes(source) if row["device"] == device]
        series = {
            line: [(row["count"], row[name]) for row in ours if row[name] is not None] for name, line in lines.items()
        }
        pictures.draw_lines(part, series, dashed=[lines["model, plain decoding"]])
        pictures.use_log2(part, (row["count"] for row in ours))
        part.set_title(f"{device}, {text}", fontsize="medium")
        part.set(xlabel="devices", ylabel="tokens/s, estimated", ylim=(0, None))
        pictures.finish(part)
    pictures.add_legend(figure)
    figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)


if __name__ == "__main__":
    main()
