"""Hostile files: thousands of changed files of every format that jlade reads, and what comes of reading them.

    python -m tests.stress.fuzz                                 # 10,000 of each format, an hour
    python -m tests.stress.fuzz --formats gguf pool --inputs 500

`tests/hostile.py` has the formats, the changes and what counts as a fault. Each format is read in a process of its own,
which may end (a crash), take longer than 5 seconds for a file (a hang), or raise anything but an error that names the
file. Its address space is limited to 1 GiB above that at the start, so that a header that promises terabytes shows.
The results are added to those in `--output`: give each part of a long run a `--seed` of its own. An input that caused a
fault is kept in `--faults`.
"""

import argparse
import collections
import faulthandler
import importlib
import importlib.metadata
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.measure import status_bytes
from jlade.evaluation.provenance import provenance

SECONDS = 5
MEMORY = 2**30
VERSIONS = ("jax", "safetensors", "tokenizers", "transformers", "gguf", "hypothesis")


def main() -> None:
    """Reads the options, and runs a process for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--inputs", type=int, default=10_000, metavar="N", help="of each format")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("benchmarks/results/fuzz.json"))
    parser.add_argument("--faults", type=pathlib.Path, default=pathlib.Path("build/faults"))
    parser.add_argument("--in-process", action="store_true", help="read one format here, and print JSON lines")
    options = parser.parse_args()
    if options.in_process:
        run(options.formats[0], options.inputs, options.seed, options.faults)
        return
    for name in options.formats or importlib.import_module("tests.hostile").FORMATS:
        record = supervise(name, options)
        known = json.loads(options.output.read_text()) if options.output.exists() else {"formats": {}}
        known |= provenance() | {"versions": {package: importlib.metadata.version(package) for package in VERSIONS}}
        known["formats"][name] = _added(known["formats"].get(name), record)
        options.output.write_text(json.dumps(known, indent=1) + "\n")
        print(name, json.dumps(record))


def supervise(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns what came of the inputs of a format, over as many processes as crashes made necessary."""
    counts: collections.Counter[str] = collections.Counter()
    slowest, memory, seconds, seed = 0.0, 0.0, 0.0, options.seed
    while (done := counts.total()) < options.inputs:
        command = [sys.executable, "-m", "tests.stress.fuzz", "--in-process", "--formats", name, "--seed", str(seed)]
        command += ["--inputs", str(options.inputs - done), "--faults", str(options.faults)]
        begin = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                kind, took, grown = json.loads(line)
                counts[kind] += 1
                slowest, memory = max(slowest, took), max(memory, grown)
        seconds += time.monotonic() - begin
        seed += 1
        if counts.total() == done:
            raise RuntimeError(f"no input was read: {' '.join(command)}")
        if process.returncode:  # the input at which it ended is in `--faults`
            counts[f"fault: ended the process: {process.returncode}"] += 1
    return {
        "inputs": counts.total(),
        "outcomes": dict(counts.most_common()),
        "slowest_seconds": round(slowest, 3),
        "largest_growth_mib": round(memory, 1),
        "seconds": round(seconds),
    }


def run(name: str, inputs: int, seed: int, faults: pathlib.Path) -> None:
    """Reads inputs, and prints for each its outcome, its seconds, and the MiB by which the process grew at its peak."""
    import hypothesis
    import jax

    hostile = importlib.import_module("tests.hostile")
    jax.config.update("jax_platforms", "cpu")
    form = hostile.FORMATS[name]
    faults.mkdir(parents=True, exist_ok=True)
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch) / "files"
        directory.mkdir()
        os.environ["XDG_CACHE_HOME"] = scratch
        form.write(directory)
        expected = form.read(directory)
        resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + MEMORY, resource.RLIM_INFINITY))
        number = 0

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=inputs,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(form.inputs(directory))
        def read(change: tuple[str, bytes]) -> None:
            nonlocal number
            number += 1
            file, content = change
            kept = faults / f"{name.replace(' ', '_')}-{seed}-{number}{pathlib.Path(file).suffix}"
            kept.write_bytes(content)  # in case the process ends
            before = _reset_peak()
            signal.alarm(SECONDS)
            faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
            begin = time.perf_counter()
            try:
                kind = hostile.outcome(form, directory, expected, file, content)
                kept.unlink()
            except hostile.FaultError as fault:
                kind = f"fault: {' '.join(str(fault).replace(scratch, '').split())[:160]}"
            except KeyboardInterrupt:
                kind = f"fault: more than {SECONDS} seconds"
            took = time.perf_counter() - begin
            signal.alarm(0)
            faulthandler.cancel_dump_traceback_later()
            results.write(json.dumps([kind, took, (status_bytes("VmHWM") - before) / 2**20]) + "\n")

        signal.signal(signal.SIGALRM, signal.default_int_handler)  # which no code takes for an error
        read()


def _added(earlier: dict[str, Any] | None, record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record of two runs."""
    if earlier is None:
        return record
    counts = collections.Counter(earlier["outcomes"])
    counts.update(record["outcomes"])
    largest = {name: max(earlier[name], record[name]) for name in ("slowest_seconds", "largest_growth_mib")}
    sums = {name: earlier[name] + record[name] for name in ("inputs", "seconds")}
    return {"inputs": sums.pop("inputs"), "outcomes": dict(counts.most_common())} | largest | sums


def _reset_peak() -> int:
    """Makes the peak of the resident memory the current size, which it returns in bytes."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


if __name__ == "__main__":
    main()
