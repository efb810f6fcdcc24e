"""The step of a mixture of experts by its tokens: experts that it reads, estimated time, and on a CPU measured time.

    python benchmarks/experts.py --device h100 --json FILE
    python benchmarks/experts.py --device v6e --mesh 4
    python benchmarks/experts.py --device cpu --layers 1     # measured too, with random weights, in float32

The models are those of benchmarks/configs with experts. The compilers of TPUs and GPUs are in the extras tpu-compiler
and gpu-compiler, and need no device. "By the sheet" is the estimate that `lookahead="auto"` makes without a compiler.
"""

import argparse
import dataclasses
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp

sys.path[0] = str(pathlib.Path(__file__).parent.parent)  # import from the repository, not from this folder
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the plugin for GPUs otherwise looks for a driver

import jlade
from benchmarks import report
from benchmarks.real_configs import CONFIGS
from jlade import LookaheadConfig, NGramConfig
from jlade.conversion.hf_config import read_config
from jlade.conversion.tensors import param_shapes
from jlade.costs import estimate
from jlade.costs.devices import DEVICES

WINDOW_AND_TREE = LookaheadConfig.tree(80, ngrams=NGramConfig(10, 5, 10))
SETTINGS = (LookaheadConfig.tree(7), LookaheadConfig.tree(31), WINDOW_AND_TREE)  # 8, 32 and 120 tokens
BATCHES = (1, 4, 8, 16, 32, 64)
VOCABULARY = 4096  # with fewer layers than the model has, whose output matrix would take most of the time


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b"], metavar="NAME")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--mesh", type=int, default=1, metavar="N", help="devices that share the model")
    parser.add_argument("--layers", type=int, help="of the model (default: all)")
    parser.add_argument("--capacity", type=int, default=1024, metavar="C")
    options = parser.parse_args()
    results = []
    for model in options.models:
        config = read_config(CONFIGS / model)
        if options.layers:
            changed = {"num_layers": options.layers, "vocab_size": VOCABULARY, "eos_ids": ()}
            changed |= {"sliding_windows": config.sliding_windows[: options.layers]}
            config = dataclasses.replace(config, **changed)
        params = param_shapes(config, jnp.float32 if options.device == "cpu" else jnp.bfloat16)
        results.append({"model": model, "layers": config.num_layers} | measure(params, options))
        print_result(results[-1])
        report.write(options.json, {"device": options.device, "mesh": options.mesh, "results": results})


def measure(params: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the widths that "auto" takes by batch size, and a row for each block size."""
    device = DEVICES.get(options.device)
    platform, kind = (device.platform, device.kind) if device else ("cpu", "cpu")
    weights = estimate.weights_of(params)
    widths = {batch: estimate.estimate(platform, kind, batch, weights).block_size for batch in BATCHES}
    by_sheet = estimate.rates(platform, kind)
    size = sum(leaf.size for leaf in jax.tree.leaves(params)) / options.mesh
    rows: list[dict[str, Any]] = []
    for setting in SETTINGS:
        found = jlade.inspect(
            params,
            options.device,
            lookahead=setting,
            capacity=options.capacity,
            mesh={"model": options.mesh} if options.mesh > 1 else None,
        ).facts()
        for name, tokens in (("plain_step", 1), ("step", setting.block_size)):
            row = {"tokens": tokens, "experts": params.config.num_experts * params.config.share_of_experts(tokens)}
            row["by_sheet_ms"] = 1e3 * size * estimate.step_time(by_sheet, tokens, 1, weights).total
            row |= {key: found[f"{name}_{key}"] for key in ("estimate_ms", "bytes_ms", "measured_ms")}
            row |= {"kernels": found[f"kernels_per_{name}"], "copies": found["copies_in_loop"], "fits": found["fits"]}
            if tokens > 1 or not rows:
                rows.append(row)
    return {"auto": widths, "rows": rows}


def print_result(result: dict[str, Any]) -> None:
    print(f"{result['model']}, {result['layers']} layers; tokens of a step of auto by batch size: {result['auto']}")
    for row in result["rows"]:
        cells = (f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  " + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
