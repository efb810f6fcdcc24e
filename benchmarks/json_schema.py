"""Automata of JSON schemas: how many schemas have one, which instances they accept, and the time to build them.

    python benchmarks/json_schema.py maskbench DIR --every 60    # DIR/maskbench/data of guidance-ai/jsonschemabench
    python benchmarks/json_schema.py suite DIR                   # DIR/draft7 of JSON-Schema-Test-Suite's tests

A schema passes if its automaton accepts its valid instances and refuses the invalid ones. Others are refused with the
keyword that is not supported, are too large, or take longer than the limit; none of these is accepted in silence. An
instance is written with its properties in the order of the file, where a grammar has the order of the declaration.
"""

import collections
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Import from the repository, not from this folder.
sys.path[0] = str(Path(__file__).parent.parent)

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import report
from jlade.constraints import automaton, json_schema
from jlade.constraints.automaton import Automaton


class Schema(NamedTuple):
    """A schema, with instances and whether each is valid."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


class Outcome(NamedTuple):
    """What became of a schema: "passes", "refuses a valid instance", or the reason against it."""

    name: str
    kind: str
    seconds: float
    states: int


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("source", choices=["maskbench", "suite"])
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every N-th file, sorted by name")
    parser.add_argument(
        "--limit", type=int, default=20, metavar="S", help="seconds for a schema (default: %(default)s)"
    )
    options = parser.parse_args()
    read = maskbench if options.source == "maskbench" else suite
    schemas = [each for file in files(options.directory, options.source)[:: options.every] for each in read(file)]
    outcomes = [judge(each, options.limit) for each in track(schemas, "schemas")]

    numbers = collections.Counter(outcome.kind.partition(":")[0] for outcome in outcomes)
    built = [outcome for outcome in outcomes if outcome.states]
    facts: dict[str, Any] = {"source": options.source, "every": options.every, "limit": options.limit}
    facts |= {"schemas": len(outcomes), "outcomes": dict(numbers.most_common())}
    facts |= {"refused": dict(collections.Counter(each.kind for each in outcomes if ":" in each.kind).most_common())}
    for name in ("seconds", "states"):
        values = np.quantile([getattr(each, name) for each in built], [0.5, 0.9, 0.99])
        facts[name] = dict(zip(("p50", "p90", "p99"), map(float, values), strict=True))
    facts["wrong"] = [each.name for each in outcomes if each.kind == "accepts an invalid instance"]
    table = Table("outcome", "schemas", "share")
    for kind, number in numbers.most_common():
        table.add_row(kind, str(number), f"{number / len(outcomes):.1%}")
    Console().print(table)
    print(f"seconds {facts['seconds']}, states {facts['states']}; wrong: {facts['wrong']}")
    report.write(options.json, facts)


def files(directory: Path, source: str) -> list[Path]:
    """Returns the files of schemas, sorted by name."""
    found = sorted(directory.glob("maskbench/data/*.json" if source == "maskbench" else "draft7/*.json"))
    if not found:
        raise SystemExit(f"{directory} has no files of {source}")
    return found


def maskbench(file: Path) -> Iterator[Schema]:
    content = json.loads(file.read_text(encoding="utf-8"))
    yield Schema(file.stem, content["schema"], [(test["data"], test["valid"]) for test in content["tests"]])


def suite(file: Path) -> Iterator[Schema]:
    for case in json.loads(file.read_text(encoding="utf-8")):
        name = f"{file.stem}: {case['description']}"
        yield Schema(name, case["schema"], [(test["data"], test["valid"]) for test in case["tests"]])


def judge(each: Schema, limit: int) -> Outcome:
    """Builds the automaton of a schema, and tries its instances."""
    begin, found = time.perf_counter(), None
    try:
        with at_most(limit):
            found = automaton.build(json_schema.parse(each.schema))
    except json_schema.UnsupportedError as error:
        path, _, _ = str(error).partition(": ")
        kind = f"refused: {path.rsplit('/', 1)[-1]}"
    except automaton.TooLargeError:
        kind = "too large"
    except TimeoutError:
        kind = "too slow"
    except ValueError as error:
        kind = f"wrong schema: {error}"
    seconds = time.perf_counter() - begin
    if found is None:
        return Outcome(each.name, kind, seconds, 0)
    return Outcome(each.name, verdict(found, each), seconds, len(found.next_state))


def verdict(found: Automaton, each: Schema) -> str:
    """Returns whether an automaton agrees with the instances of a schema; a wrong acceptance counts first."""
    wrong = {
        is_valid
        for data, is_valid in each.instances
        if found.accepts(json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogatepass")) != is_valid
    }
    if False in wrong:
        return "accepts an invalid instance"
    return "refuses a valid instance" if wrong else "passes"


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raises a TimeoutError in the block after some seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    main()
