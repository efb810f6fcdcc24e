"""Puts each fault of the catalogue into a process of its tests, and names those that no test found.

    python -m tests.faults.run                     # all of them
    python -m tests.faults.run -k engine -k mask   # those with one of these in their description or target
    python -m tests.faults.run --list

The tests named for the faults first run without any, and must pass. Then each fault has a process of pytest, and is
found if an assertion fails there. An error of another kind shows nothing, nor does a test that does not end. The exit
status is 1 if a fault was not found.
"""

import argparse
import itertools
import operator
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.faults.catalogue import FAULTS
from tests.faults.fault import Fault
from tests.faults.plugin import VARIABLE

ROOT = pathlib.Path(__file__).parents[2]
PASSED, FOUND = 0, 1  # exit statuses of pytest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", action="append", default=[], metavar="TEXT", help="run faults with TEXT (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="faults at once (default: one for each core)")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="of each fault (default: 300)")
    parser.add_argument("--skip-right", action="store_true", help="do not run the tests without any first")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if not options.k or any(k in f"{fault.text} {fault.target}" for k in options.k)]
    if options.list:
        print(*(f"{fault.text} ({fault.target})" for fault in faults), sep="\n")
        return 0
    begin = time.perf_counter()
    if not options.skip_right:
        tests = dict.fromkeys(test for fault in faults for test in fault.tests)
        status, output = run([*tests])
        print(f"without a fault: {len(tests)} tests, {time.perf_counter() - begin:.0f} s", flush=True)
        if status != PASSED:
            print(output)
            return 1

    def is_found(fault: Fault) -> bool:
        start = time.perf_counter()
        status, output = run(fault.tests, fault, options.limit)
        seconds = f"{time.perf_counter() - start:.0f} s"
        print(f"{'found' if status == FOUND else 'NOT FOUND'}: {fault.text} ({fault.target}), {seconds}", flush=True)
        if status != FOUND:
            print(output, flush=True)
        return status == FOUND

    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(is_found, faults))
    for fault in itertools.compress(faults, map(operator.not_, found)):
        print(f"NOT FOUND: {fault.text}")
    print(f"{sum(found)} of {len(faults)} faults found, {time.perf_counter() - begin:.0f} s")
    return 0 if all(found) else 1


def run(tests: Sequence[str], fault: Fault | None = None, limit: float | None = None) -> tuple[int | None, str]:
    """Runs those of the tests that `make test` has, with or without a fault, up to the first that fails.

    Returns:
      Pytest's exit status, None past the limit, and its output.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    process = subprocess.Popen(
        command if fault is None else [*command, "-p", "tests.faults.plugin"],
        cwd=ROOT,
        env=os.environ if fault is None else os.environ | {VARIABLE: fault.text},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # with the processes that tests start, for the end
    )
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, f"no end after {limit:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


if __name__ == "__main__":
    sys.exit(main())
