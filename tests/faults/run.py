"""Puts each fault of the catalogue into a copy of the tree, and names those that no test found.

    python -m tests.faults.run                     # all of them
    python -m tests.faults.run -k engine -k mask   # those with one of these in their description or file
    python -m tests.faults.run --list

The tests named for the faults first run on an unchanged copy, where they must pass. Then each fault is applied, its
tests run, and the file is restored. A fault is found if a test fails or takes longer than the limit. The exit status is
1 if a fault was not found, or if pytest could not run its tests.
"""

import argparse
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tests.faults.catalogue import FAULTS, Fault

ROOT = pathlib.Path(__file__).parents[2]
FOUND, NOT_FOUND, BROKEN = "found", "NOT FOUND", "BROKEN"


class Outcome(NamedTuple):
    """Whether tests found a fault, and by which of them or why not."""

    kind: str
    detail: str
    output: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", action="append", default=[], metavar="TEXT", help="run faults with TEXT (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="faults at once (default: one for each core)")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="of each fault (default: 300)")
    parser.add_argument("--skip-unchanged", action="store_true", help="do not run the tests on an unchanged copy first")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    options = parser.parse_args()
    faults = [each for each in FAULTS if not options.k or any(k in f"{each.text} {each.file}" for k in options.k)]
    if options.list:
        print(*(f"{each.file}: {each.text}" for each in faults), sep="\n")
        return 0
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="jlade-faults-") as directory:
        copies: queue.Queue[pathlib.Path] = queue.Queue()
        for number in range(options.jobs):
            copies.put(copied(pathlib.Path(directory) / str(number)))
        if not options.skip_unchanged:
            tests = dict.fromkeys(test for each in faults for test in each.tests)
            unchanged = run([*tests], copies.queue[0], None)
            print(f"unchanged: {len(tests)} tests, {time.perf_counter() - begin:.0f} s", flush=True)
            if unchanged.kind != NOT_FOUND:
                print(unchanged.output)
                return 1

        def trial(fault: Fault) -> Outcome:
            copy, start = copies.get(), time.perf_counter()
            try:
                outcome = run_with(fault, copy, options.limit)
            finally:
                copies.put(copy)
            seconds = f"{time.perf_counter() - start:.0f} s"
            print(f"{outcome.kind}: {fault.text} ({fault.file}): {outcome.detail} {seconds}", flush=True)
            return outcome

        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = dict(zip(faults, pool.map(trial, faults), strict=True))
    left = {fault: outcome for fault, outcome in outcomes.items() if outcome.kind != FOUND}
    for fault, outcome in left.items():
        print(f"\n{outcome.kind}: {fault.text} ({fault.file})\n{outcome.output if outcome.kind == BROKEN else ''}")
    print(f"{len(faults) - len(left)} of {len(faults)} faults found, {time.perf_counter() - begin:.0f} s")
    return 1 if left else 0


def copied(copy: pathlib.Path) -> pathlib.Path:
    """Copies the tree's files, but for those that git ignores, and returns the copy."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():  # not one that is deleted but still in git's index
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    # Python compares these programs with the text of a file, not with its time: two faults may come in one second.
    compiling = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "jlade"]
    subprocess.run(compiling, cwd=copy, check=True)
    return copy


def run_with(fault: Fault, copy: pathlib.Path, limit: float) -> Outcome:
    """Runs the tests of a fault in a copy of the tree that has it."""
    file = copy / fault.file
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        return run(fault.tests, copy, limit)
    finally:
        file.write_text(text, encoding="utf-8")


def run(tests: Sequence[str], copy: pathlib.Path, limit: float | None) -> Outcome:
    """Runs those of the tests that `make test` has in a copy of the tree, up to the first that fails."""
    programs = os.environ.get("JLADE_TEST_PROGRAMS", str(ROOT / ".pytest_cache" / "programs"))
    changed = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "JLADE_TEST_PROGRAMS": programs}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=os.environ | changed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # with the processes that tests start, for the end
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return Outcome(FOUND, f"by the limit of {limit:.0f} s,", "")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode == 0:
        return Outcome(NOT_FOUND, f"by {', '.join(tests)},", output)
    if process.returncode != 1:
        return Outcome(BROKEN, f"pytest's exit status {process.returncode},", output)
    failed = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return Outcome(FOUND, f"by {', '.join(failed)},", output)


if __name__ == "__main__":
    sys.exit(main())
