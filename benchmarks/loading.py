"""Peak memory and time of loading a checkpoint, compared with safetensors' own reader.

    python benchmarks/loading.py

The checkpoint is random, with the shape of TinyLlama (1.1 B parameters, bfloat16), in a temporary directory. Each
measurement runs in a new process, with the files in the page cache, after another process has touched more memory than
any measurement needs: on virtual machines, memory not used recently is many times slower at first.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Import from the repository, not from the script's directory: see compression.py.
sys.path[0] = str(Path(__file__).parent.parent)

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors import safe_open

from benchmarks import report
from benchmarks.inflate import SHAPES
from jlade.conversion import load_hf, save_hf
from jlade.conversion.tensors import build_params, expected_tensors

TOUCH = "import numpy; numpy.ones(10**9)"
SHAPE = SHAPES["1b"]  # TinyLlama's
WAYS = ("safetensors", "bfloat16", "float32", "filling as much as float32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, metavar="R")
    parser.add_argument(
        "--directory", default=tempfile.gettempdir(), metavar="DIR", help="a directory with room for 2.3 GB"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures, with machine and versions, to FILE")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(_measure(*options.measure)))
        return

    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch, Progress() as progress:
        task = progress.add_task("writing the checkpoint", total=1 + len(WAYS) * options.repeat)
        _write(Path(scratch) / "checkpoint")
        progress.advance(task)
        for _ in range(options.repeat):
            for way in WAYS:
                progress.update(task, description=f"reading: {way}")
                command = [sys.executable, __file__, "--measure", way, f"{scratch}/checkpoint"]
                subprocess.run([sys.executable, "-c", TOUCH], check=True)
                runs[way].append(json.loads(subprocess.check_output(command)))
                progress.advance(task)

    own = statistics.median(run["seconds"] for run in runs["safetensors"])
    table = Table("way", "weights, GB", "seconds", "x safetensors", "peak memory, GB", "x weights")
    figures = []
    for way in WAYS:
        seconds, peak = (statistics.median(run[key] for run in runs[way]) for key in ("seconds", "peak_bytes"))
        weights = runs[way][0]["weight_bytes"]
        figures.append({"way": way, "seconds": seconds, "of_safetensors": seconds / own, "weight_bytes": weights})
        figures[-1] |= {"peak_bytes": peak, "of_weights": peak / weights, "runs": runs[way]}
        numbers = (weights / 1e9, seconds, seconds / own, peak / 1e9, peak / weights)
        table.add_row(way, *(f"{number:.2f}" for number in numbers))
    Console().print(table)
    if options.json:
        report.write(options.json, {"ways": figures})


def _write(directory: Path) -> None:
    """Writes random weights. Tensors of one shape share their values, which does not change the time of reading."""
    rng = np.random.default_rng(0)
    drawn: dict[tuple[int, ...], jax.Array] = {}

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        if shape not in drawn:
            drawn[shape] = jax.numpy.asarray(rng.standard_normal(shape, np.float32) * 0.02, jax.numpy.bfloat16)
        return drawn[shape]

    save_hf(build_params(SHAPE, draw), directory)


def _measure(way: str, path: str) -> dict[str, Any]:
    """Reads the checkpoint once and returns time and memory, less the memory in use before."""
    jax.block_until_ready(jax.numpy.zeros(1) + 1)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    begin = time.perf_counter()
    if way == "safetensors":
        arrays = []
        for file in Path(path).glob("*.safetensors"):
            with safe_open(file, framework="numpy") as reader:
                arrays += [reader.get_tensor(name) for name in reader.keys()]  # noqa: SIM118, not a dict
    elif way.startswith("filling"):  # the time to fill fresh memory, without reading
        arrays = [np.full(shape, 1, np.float32) for shape in expected_tensors(SHAPE).values()]
    else:
        arrays = jax.block_until_ready(jax.tree.leaves(load_hf(path, way)))
    seconds = time.perf_counter() - begin
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weights = sum(array.nbytes for array in arrays)
    return {"seconds": seconds, "peak_bytes": peak - before, "weight_bytes": weights}


if __name__ == "__main__":
    main()
