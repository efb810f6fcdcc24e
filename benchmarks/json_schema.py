"""Automata of JSON schemas: how many schemas have one, which instances they accept, and the time to build them.

    python benchmarks/json_schema.py maskbench DIR --every 60    # DIR/maskbench/data of guidance-ai/jsonschemabench
    python benchmarks/json_schema.py suite DIR                   # DIR/draft7 of JSON-Schema-Test-Suite's tests

A schema passes if its automaton accepts its valid instances and refuses the invalid ones. Others are refused with the
keyword that is not supported, are too large, or take longer than the limit; none of these is accepted in silence. An
instance is written with its properties in the order of the file, where a grammar has the order of the declaration.
"""

import collections
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import numpy as np
from rich.progress import track

from benchmarks import measure, report
from jlade.constraints import automaton
from jlade.constraints.automaton import Automaton
from jlade.constraints.grammar import Grammar
from jlade.constraints.json_document import UnsupportedError

FILES = {"maskbench": "maskbench/data/*.json", "suite": "draft7/*.json"}


class Schema(NamedTuple):
    """A schema, with instances and whether each is valid."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("source", choices=FILES)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every N-th file, sorted by name")
    parser.add_argument("--limit", type=int, default=20, metavar="S", help="seconds for a schema (default: 20)")
    options = parser.parse_args(argv)
    files = sorted(options.directory.glob(FILES[options.source]))[:: options.every]
    if not files:
        raise SystemExit(f"{options.directory} has no files of {options.source}")
    kinds, wrong = collections.Counter[str](), list[str]()
    built: dict[str, list[float]] = {"seconds": [], "states": []}
    for schema in track([schema for file in files for schema in read(options.source, file)], "schemas"):
        begin = time.perf_counter()
        found = build(schema, options.limit)
        seconds = time.perf_counter() - begin
        kind = found if isinstance(found, str) else verdict(found, schema)
        kinds[kind] += 1
        if kind == "accepts an invalid instance":
            wrong.append(schema.name)
        if isinstance(found, Automaton):
            built["seconds"].append(seconds)
            built["states"].append(len(found.next_state))

    outcomes = collections.Counter[str]()
    for kind, number in kinds.items():
        outcomes[kind.partition(":")[0]] += number
    facts: dict[str, Any] = {"source": options.source, "every": options.every, "limit": options.limit}
    facts |= {"schemas": kinds.total(), "outcomes": dict(outcomes.most_common())}
    facts |= {"refused": {kind: number for kind, number in kinds.most_common() if ":" in kind}}
    facts |= {name: quantiles(values) for name, values in built.items()} | {"wrong": wrong}
    rows = ([kind, str(number), f"{number / kinds.total():.1%}"] for kind, number in outcomes.most_common())
    report.print_table(["outcome", "schemas", "share"], rows)
    print(json.dumps({name: facts[name] for name in ("seconds", "states", "wrong")}, indent=1))
    report.write(options.json, facts)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Returns the median, other quantiles and the maximum of some values."""
    found = np.quantile(values, [0.5, 0.9, 0.99, 1])
    return dict(zip(("p50", "p90", "p99", "max"), map(float, found), strict=True))


def read(source: str, file: Path) -> Iterator[Schema]:
    """Yields the schemas of a file."""
    content = json.loads(file.read_text(encoding="utf-8"))
    for case in [content] if source == "maskbench" else content:
        name = file.stem if source == "maskbench" else f"{file.stem}: {case['description']}"
        yield Schema(name, case["schema"], [(test["data"], test["valid"]) for test in case["tests"]])


def build(schema: Schema, limit: int) -> Automaton | str:
    """Returns the automaton of a schema, or what is against it."""
    try:
        with measure.at_most(limit):
            return Grammar.json_schema(schema.schema).automaton
    except UnsupportedError as error:
        path, _, _ = str(error).partition(": ")
        return f"refused: {path.rsplit('/', 1)[-1]}"
    except automaton.TooLargeError:
        return "too large"
    except measure.TimeLimit:
        return "too slow"
    except ValueError as error:
        return f"wrong schema: {error}"


def verdict(found: Automaton, schema: Schema) -> str:
    """Returns whether an automaton agrees with the instances of a schema; a wrong acceptance counts first."""
    wrong = {
        is_valid
        for data, is_valid in schema.instances
        if found.accepts(json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogatepass")) != is_valid
    }
    if False in wrong:
        return "accepts an invalid instance"
    return "refuses a valid instance" if wrong else "passes"


if __name__ == "__main__":
    main()
