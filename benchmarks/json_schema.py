"""Automata of JSON schemas: how many schemas have one, which instances they accept, and the time to build them.

    python benchmarks/json_schema.py maskbench DIR --every 60    # DIR/maskbench/data of guidance-ai/jsonschemabench
    python benchmarks/json_schema.py suite DIR                   # DIR/draft7 of JSON-Schema-Test-Suite's tests

With `--tokenizer PATH`, for each of several, every automaton is made a table over the tokens of a vocabulary, and the
record has the sizes of the tables and the seconds from schema to table.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import numpy as np
from rich.progress import track

from benchmarks import report
from jlade.constraints import automaton
from jlade.constraints.automaton import Automaton
from jlade.constraints.grammar import Grammar
from jlade.constraints.json_document import UnsupportedError
from jlade.constraints.tokens import Table, Trie
from jlade.conversion import formats, location
from jlade.generation import text


class Schema(NamedTuple):
    """A schema, with instances and whether each is valid."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


class Vocabulary(NamedTuple):
    """The tokens of a tokenizer, and the seconds that their trie takes."""

    size: int
    trie: Trie
    end: int
    seconds: float


class Size(NamedTuple):
    """The table of a schema over a vocabulary, and the seconds that it takes with its automaton."""

    seconds: float
    states: int
    classes: int
    megabytes: float  # of the transitions in int32


class Outcome(NamedTuple):
    """What became of a schema: "passes", "refuses a valid instance", or the reason against it."""

    name: str
    kind: str
    seconds: float
    states: int
    tables: list[Size | None]  # for each vocabulary, None for one that took longer than the limit


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("source", choices=["maskbench", "suite"])
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every N-th file, sorted by name")
    parser.add_argument(
        "--limit", type=int, default=20, metavar="S", help="seconds for a schema (default: %(default)s)"
    )
    parser.add_argument(
        "--tokenizer",
        action="append",
        default=[],
        metavar="PATH",
        help="make tables over its tokens: a directory with tokenizer.json, a GGUF file or smollm2; may be repeated",
    )
    options = parser.parse_args()
    read = maskbench if options.source == "maskbench" else suite
    schemas = [each for file in files(options.directory, options.source)[:: options.every] for each in read(file)]
    vocabularies = [read_vocabulary(path) for path in options.tokenizer]
    outcomes = [judge(each, vocabularies, options.limit) for each in track(schemas, "schemas")]

    numbers = collections.Counter(outcome.kind.partition(":")[0] for outcome in outcomes)
    built = [outcome for outcome in outcomes if outcome.states]
    facts: dict[str, Any] = {"source": options.source, "every": options.every, "limit": options.limit}
    facts |= {"schemas": len(outcomes), "outcomes": dict(numbers.most_common())}
    facts |= {"refused": dict(collections.Counter(each.kind for each in outcomes if ":" in each.kind).most_common())}
    for name in ("seconds", "states"):
        facts[name] = quantiles([getattr(each, name) for each in built])
    facts["wrong"] = [each.name for each in outcomes if each.kind == "accepts an invalid instance"]
    if vocabularies:
        facts["tables"] = {
            str(each.size): of_tables(each, tables)
            for each, *tables in zip(vocabularies, *(outcome.tables for outcome in built), strict=True)
        }
    rows = ([kind, str(number), f"{number / len(outcomes):.1%}"] for kind, number in numbers.most_common())
    report.print_table(["outcome", "schemas", "share"], rows)
    print(f"seconds {facts['seconds']}, states {facts['states']}; wrong: {facts['wrong']}")
    for size, of_size in facts.get("tables", {}).items():
        print(f"{size} tokens: {of_size}")
    report.write(options.json, facts)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Returns the median, other quantiles and the maximum of some values."""
    found = np.quantile(values, [0.5, 0.9, 0.99, 1])
    return dict(zip(("p50", "p90", "p99", "max"), map(float, found), strict=True))


def of_tables(vocabulary: Vocabulary, tables: Sequence[Size | None]) -> dict[str, Any]:
    """Returns the facts of the tables over a vocabulary."""
    sizes = [each for each in tables if each is not None]
    facts: dict[str, Any] = {"trie_seconds": vocabulary.seconds, "tables": len(sizes)}
    facts["too slow"] = len(tables) - len(sizes)
    return facts | {name: quantiles([getattr(each, name) for each in sizes]) for name in Size._fields}


def read_vocabulary(path: str) -> Vocabulary:
    """Returns the tokens of a tokenizer, the first one without bytes as that which ends a text."""
    tokenizer: Any = formats.find(location.find(path)).tokenizer()
    if tokenizer is None:
        raise SystemExit(f"{path} has no tokenizer")
    spelled, size = text.token_bytes(tokenizer), tokenizer.get_vocab_size()
    begin = time.perf_counter()
    all_bytes = [spelled[token] for token in range(size)]
    trie = Trie(all_bytes)
    return Vocabulary(size, trie, all_bytes.index(b""), time.perf_counter() - begin)


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


def judge(each: Schema, vocabularies: Sequence[Vocabulary], limit: int) -> Outcome:
    """Builds the automaton of a schema and its tables, and tries its instances."""
    begin, found = time.perf_counter(), None
    try:
        with at_most(limit):
            found = Grammar.json_schema(each.schema).automaton
    except UnsupportedError as error:
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
        return Outcome(each.name, kind, seconds, 0, [])
    tables = [measure(found, vocabulary, seconds, limit) for vocabulary in vocabularies]
    return Outcome(each.name, verdict(found, each), seconds, len(found.next_state), tables)


def measure(found: Automaton, vocabulary: Vocabulary, seconds: float, limit: int) -> Size | None:
    """Makes the table of an automaton that took some seconds; returns None if the table takes longer than the limit."""
    begin = time.perf_counter()
    try:
        with at_most(limit):
            table = Table.of(found, vocabulary.trie, [vocabulary.end], vocabulary.size)
    except TimeoutError:
        return None
    states, classes = table.moves.shape
    return Size(seconds + time.perf_counter() - begin, states, classes, table.moves.nbytes / 1e6)


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
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again, as Python drops errors that are raised in its collector
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
