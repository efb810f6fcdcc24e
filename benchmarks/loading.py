"""Peak memory and time of loading a checkpoint, compared with safetensors' own reader.

    python benchmarks/loading.py

The checkpoint is random, with the shape of TinyLlama (1.1 B parameters, bfloat16), in a temporary directory. Each
measurement runs in a new process, with the files in the page cache, after another process has touched more memory than
any measurement needs: on virtual machines, memory not used recently is many times slower at first.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import numpy as np
from rich.progress import track
from safetensors import safe_open

from benchmarks import inflate, report
from benchmarks.measure import status_bytes
from jlade.conversion import load_hf, save_hf
from jlade.conversion.tensors import build_params

TOUCH = "import numpy; numpy.ones(10**9)"
WAYS = ("safetensors", "bfloat16", "float32")


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--shape", choices=inflate.SHAPES, default="1b", help="of the weights (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, metavar="R")
    parser.add_argument("--directory", default=tempfile.gettempdir(), metavar="DIR", help="with room for the weights")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        print(json.dumps(_measure(*options.measure)))
        return
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        _write(Path(scratch) / "model", options.shape)
        for _ in track(range(options.repeat), "reading"):
            for way in WAYS:
                subprocess.run([sys.executable, "-c", TOUCH], check=True)
                command = [sys.executable, __file__, "--measure", way, f"{scratch}/model"]
                runs[way].append(json.loads(subprocess.check_output(command)))
    own = statistics.median(run["seconds"] for run in runs["safetensors"])
    figures, rows = [], []
    for way in WAYS:
        seconds, peak = (statistics.median(run[key] for run in runs[way]) for key in ("seconds", "peak_bytes"))
        weights = runs[way][0]["weight_bytes"]
        figures.append({"way": way, "seconds": seconds, "of_safetensors": seconds / own, "weight_bytes": weights})
        figures[-1] |= {"peak_bytes": peak, "of_weights": peak / weights, "runs": runs[way]}
        numbers = (weights / 1e9, seconds, seconds / own, peak / 1e9, peak / weights)
        rows.append([way, *(f"{number:.2f}" for number in numbers)])
    report.print_table(["way", "weights, GB", "seconds", "x safetensors", "peak memory, GB", "x weights"], rows)
    report.write(options.json, {"shape": options.shape, "ways": figures})


def _write(directory: Path, shape: str) -> None:
    """Writes random weights. Tensors of one shape share their values, which does not change the time of reading."""
    rng = np.random.default_rng(0)
    drawn: dict[tuple[int, ...], jax.Array] = {}

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        if shape not in drawn:
            drawn[shape] = jax.numpy.asarray(rng.standard_normal(shape, np.float32) * 0.02, jax.numpy.bfloat16)
        return drawn[shape]

    save_hf(build_params(inflate.SHAPES[shape], draw), directory)


def _measure(way: str, path: str) -> dict[str, Any]:
    """Reads the checkpoint once and returns time and memory, less the memory in use before.

    Args:
      way: "safetensors", or the dtype in which `load_hf` reads.
      path: the directory.
    """
    jax.block_until_ready(jax.numpy.zeros(1) + 1)
    before, begin = status_bytes("VmRSS"), time.perf_counter()
    arrays: list[Any] = []
    if way == "safetensors":
        for file in Path(path).glob("*.safetensors"):
            with safe_open(file, framework="numpy") as reader:
                arrays += [reader.get_tensor(name) for name in reader.keys()]  # noqa: SIM118, not a dict
    else:
        arrays = jax.block_until_ready(jax.tree.leaves(load_hf(path, way)))
    seconds, peak = time.perf_counter() - begin, status_bytes("VmHWM")
    weights = sum(array.nbytes for array in arrays)
    return {"seconds": seconds, "peak_bytes": peak - before, "weight_bytes": weights}


if __name__ == "__main__":
    main()
