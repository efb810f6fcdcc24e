"""The planned times of steps beside those of compiled programs, whose estimates are recorded."""

import json
import pathlib

import jax.numpy as jnp

from benchmarks.estimate import BLOCKS, MODELS
from jlade.conversion.tensors import param_shapes
from jlade.costs import plan, work
from jlade.costs.devices import DEVICES
from jlade.costs.work import MeshShape

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"


def ratios() -> dict[str, list[float]]:
    """Returns the planned times of the model in a step by those of compiled programs, for each device."""
    rows = json.loads((RESULTS / "estimate.json").read_text(encoding="utf-8"))["rows"]
    shards = {name: work.shard(param_shapes(MODELS[name], jnp.bfloat16), 1) for name in ("1b", "7b", "8b")}
    found: dict[str, list[float]] = {}
    for row in rows:
        shard, request = shards[row["shape"]], (BLOCKS[row["block"]], row["batch"], row["capacity"])
        of_step = work.work(shard, MeshShape(1, 1, 1), *request)
        step = plan.step_time(of_step, shard.config.num_layers, DEVICES[row["device"]])
        found.setdefault(row["device"], []).append(1e3 * step.total / row["ms"])
    return found
