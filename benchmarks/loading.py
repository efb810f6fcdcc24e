"""Peak memory and time of loading a checkpoint, compared with safetensors' own reader.

    python benchmarks/loading.py
    python benchmarks/loading.py --onto-devices

The checkpoint is random, with the shape of TinyLlama (1.1 B parameters, bfloat16), in a temporary directory. Each
measurement runs in a new process, with the files in the page cache, after another process has touched more memory than
any measurement needs: on virtual machines, memory not used recently is many times slower at first.

With `--onto-devices` the parameters are divided among 8 virtual devices of the CPU, from each format. The memory of
these devices is the host's, so the host's own share is the peak less the arrays. Parts that several virtual devices
hold may share memory.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jax
import numpy as np
from rich.progress import Progress
from safetensors import safe_open

from benchmarks import report
from benchmarks.inflate import SHAPES
from jlade import make_mesh
from jlade.conversion import load, load_hf, save, save_hf
from jlade.conversion.tensors import build_params, expected_tensors

TOUCH = "import numpy; numpy.ones(10**9)"
SHAPE = SHAPES["1b"]  # TinyLlama's
WAYS = ("safetensors", "bfloat16", "float32", "filling as much as float32")
MESHES = {"model=8": (1, 1, 8), "lookahead=2, model=4": (1, 2, 4)}
FORMATS = {"Hugging Face": (save_hf, load_hf), "jlade": (save, load)}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--repeat", type=int, default=5, metavar="R")
    parser.add_argument(
        "--directory",
        default=tempfile.gettempdir(),
        metavar="DIR",
        help="a directory with room for 2.3 GB of each format",
    )
    parser.add_argument("--onto-devices", action="store_true", help="load onto 8 virtual devices")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps((_measure_devices if options.onto_devices else _measure)(*options.measure)))
        return

    ways = [f"{kind}; {mesh}" for kind in FORMATS for mesh in MESHES] if options.onto_devices else list(WAYS)
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch, Progress() as progress:
        kinds = list(FORMATS) if options.onto_devices else ["Hugging Face"]
        task = progress.add_task("writing the checkpoint", total=len(kinds) + len(ways) * options.repeat)
        for kind in kinds:
            _write(Path(scratch) / kind, kind)
            progress.advance(task)
        for _ in range(options.repeat):
            for way in ways:
                progress.update(task, description=f"reading: {way}")
                kind = way.partition(";")[0] if options.onto_devices else "Hugging Face"
                command = [sys.executable, __file__, "--measure", way, f"{scratch}/{kind}"]
                subprocess.run([sys.executable, "-c", TOUCH], check=True)
                runs[way].append(
                    json.loads(subprocess.check_output(command + ["--onto-devices"] * options.onto_devices))
                )
                progress.advance(task)
    (_report_devices if options.onto_devices else _report)(runs, options.json)


def _report(runs: dict[str, list[dict[str, Any]]], file: str | None) -> None:
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
    report.write(file, {"ways": figures})


def _report_devices(runs: dict[str, list[dict[str, Any]]], file: str | None) -> None:
    figures, rows = [], []
    for way, results in runs.items():
        middle = {key: statistics.median(result[key] for result in results) for key in results[0]}
        of_share = middle["peak_of_a_device"] / middle["share_of_a_device"]
        host = middle["peak_bytes"] - middle["array_bytes"]
        read = middle["read_bytes"] / middle["file_bytes"]
        figures.append({"way": way, "of_share": of_share, "host_bytes": host, "read_of_files": read})
        figures[-1] |= {"seconds": middle["seconds"], "runs": results}
        rows.append([way, f"{middle['seconds']:.2f}", f"{of_share:.3f}", f"{host / 1e6:.0f}", f"{read:.3f}"])
    columns = "format; mesh", "seconds", "peak of a device, x its share", "host beside, MB", "read, x files"
    report.print_table(columns, rows)
    report.write(file, {"ways": figures})


def _write(directory: Path, kind: str) -> None:
    """Writes random weights. Tensors of one shape share their values, which does not change the time of reading."""
    rng = np.random.default_rng(0)
    drawn: dict[tuple[int, ...], jax.Array] = {}

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        if shape not in drawn:
            drawn[shape] = jax.numpy.asarray(rng.standard_normal(shape, np.float32) * 0.02, jax.numpy.bfloat16)
        return drawn[shape]

    FORMATS[kind][0](build_params(SHAPE, draw), directory)


def _measure(way: str, path: str) -> dict[str, Any]:
    """Reads the checkpoint once and returns time and memory, less the memory in use before."""
    jax.block_until_ready(jax.numpy.zeros(1) + 1)
    before = _resident()
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


def _measure_devices(way: str, path: str) -> dict[str, Any]:
    """Loads the checkpoint onto a mesh and returns time, the memory of a device and of the host, and the bytes read."""
    jax.config.update("jax_num_cpu_devices", 8)
    kind, _, name = way.partition("; ")
    mesh = make_mesh(*MESHES[name])
    jax.block_until_ready(jax.numpy.zeros(1) + 1)
    samples: list[int] = []
    before, already_read = _resident(), _read_bytes()
    begin = time.perf_counter()
    params = FORMATS[kind][1](
        path, "bfloat16", mesh=mesh, progress=lambda size: samples.append(_most(jax.live_arrays()))
    )
    seconds = time.perf_counter() - begin
    read = _read_bytes() - already_read
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arrays = jax.tree.leaves(params)
    parts = [part.data for array in arrays for part in array.addressable_shards]
    return {
        "seconds": seconds,
        "share_of_a_device": _most(arrays),
        "peak_of_a_device": max(samples),
        "weight_bytes": sum(array.nbytes for array in arrays),
        "array_bytes": sum({part.unsafe_buffer_pointer(): part.nbytes for part in parts}.values()),
        "peak_bytes": peak - before,
        "read_bytes": read,
        "file_bytes": sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file()),
    }


def _most(arrays: list[jax.Array]) -> int:
    """Returns the bytes of the arrays on the device that holds most of them."""
    held = dict.fromkeys(jax.devices(), 0)
    for array in arrays:
        for device in array.sharding.device_set:
            held[device] += math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return max(held.values())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _read_bytes() -> int:
    """Returns the bytes that this process has read from files, in the page cache or not."""
    return int(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    main()
