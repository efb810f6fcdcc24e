"""Time to the first token in a fresh process: with nothing, with JAX's persistent cache, and with programs made ahead.

    python benchmarks/programs.py
    python benchmarks/programs.py --models smollm2 --lookahead tree=7
    python benchmarks/programs.py --engine 2

Each measurement is a new process that loads the model, in float32, and takes the first piece of `jlade.stream`, at
`lookahead="auto"` unless a setting is given. The ways take turns. JAX's cache is filled by an earlier process and keeps
every program, however short it compiles; the programs are those of `jlade.compile`. The times are of the call, and of
the process from its start, which imports JAX and reads the weights too. The seconds of all processors count what the
process itself does, whatever runs beside it. Figures are medians.

With --engine it is the first piece of a request to a new engine of so many rows, and the time of the call is also that
of making the engine. The programs are all of `jlade.compile_engine`.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # import from the repository, not from this folder

from benchmarks import report

WAYS = ("nothing", "cache", "programs")
TIMES = {
    "call": "call, s",
    "call_cpu": "call, s of processors",
    "process": "process, s",
    "process_cpu": "process, s of processors",
}
# Code of other processes, whose arguments are the directory of programs, a setting, rows and a model.
ARGUMENTS = """
import collections, json, pathlib, sys, time
import jax, jlade
from jlade.lookahead import names
programs, setting, rows, model = sys.argv[1:]
lookahead, rows = names.parse(setting) if setting else "auto", int(rows)
of_engine = {"max_sequences": rows, "capacity": 1024} if rows else {}
"""
COMPILE = (
    ARGUMENTS
    + """
source = pathlib.Path(jlade.__file__).parent / "demo" if model == "demo" else model
(jlade.compile_engine if rows else jlade.compile)(source, programs, lookahead=lookahead, **of_engine)
"""
)
FIRST_TOKEN = (
    ARGUMENTS
    + r"""
options, prompt = {"lookahead": lookahead, "programs": programs or None}, "def read_config(path):\n"
params, _ = jlade.demo("float32") if model == "demo" else jlade.load(model, "float32")
events = collections.Counter()
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.update([event.split("/")[-1]]))
begin, cpu = time.perf_counter(), time.process_time()
if rows:
    engine = jlade.Engine(params, **of_engine, **options)
    piece = next(iter(engine.submit(prompt, max_new_tokens=32)))
else:
    piece = next(jlade.stream(params, prompt, max_new_tokens=32, **options))
figures = {"call": time.perf_counter() - begin, "call_cpu": time.process_time() - cpu}
figures |= {"at": time.time(), "process_cpu": time.process_time(), "tokens": piece.tokens.tolist()}
figures |= {"traces": events["jaxpr_trace_duration"], "compilations": events["backend_compile_duration"]}
print(json.dumps(figures))
"""
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["demo"], metavar="MODEL", help="as `jlade.load` takes it")
    parser.add_argument("--repeat", type=int, default=3, metavar="R", help="processes of each way")
    parser.add_argument("--lookahead", default="", metavar="SETTING", help="like tree=7 (default: auto)")
    parser.add_argument("--engine", type=int, default=0, metavar="B", help="first token of an engine of B rows")
    options = parser.parse_args(argv)
    figures: dict[str, Any] = {}
    for model in options.models:
        figures[model] = _measure([options.lookahead, str(options.engine), model], options.repeat)
        facts = {"lookahead": options.lookahead or "auto"} | ({"engine": options.engine} if options.engine else {})
        report.write(options.json, facts | {"models": figures})
        forms = dict.fromkeys(TIMES, ".2f") | {"traces": ".0f", "compilations": ".0f"}
        rows = (
            [way, *(f"{found[name]:{form}}" for name, form in forms.items())]
            for way, found in figures[model]["ways"].items()
        )
        report.print_table(["way", *TIMES.values(), "traces", "compilations"], rows, model)


def _measure(given: list[str], repeat: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        programs, cache = Path(scratch) / "programs", Path(scratch) / "cache"
        begin = time.perf_counter()
        _run(scratch, [COMPILE, str(programs), *given])
        seconds = time.perf_counter() - begin
        _run(scratch, [FIRST_TOKEN, "", *given], cache)  # fills it
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(repeat):
            for way in WAYS:
                arguments = [FIRST_TOKEN, str(programs) if way == "programs" else "", *given]
                began = time.time()
                figures = json.loads(_run(scratch, arguments, cache if way == "cache" else None))
                runs[way].append(figures | {"process": figures.pop("at") - began})
        assert len({tuple(run["tokens"]) for way in WAYS for run in runs[way]}) == 1, "the first tokens differ"
        size = sum(file.stat().st_size for file in programs.iterdir())
    names = (*TIMES, "traces", "compilations")
    ways = {way: {name: statistics.median(run[name] for run in runs[way]) for name in names} for way in WAYS}
    return {"compile_seconds": seconds, "program_bytes": size, "ways": ways, "runs": runs}


def _run(scratch: str, arguments: Sequence[str], cache: Path | None = None) -> str:
    """Runs code in a new process and returns its output. Without `cache` no compiled program is reused.

    The process runs in `scratch`, which has what it would keep in the user's directories.
    """
    own = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": f"{scratch}/home"}
    own |= {
        "JAX_ENABLE_COMPILATION_CACHE": "false" if cache is None else "true",
        "JAX_COMPILATION_CACHE_DIR": str(cache or ""),
    }
    own |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    # Without kept bytecode, Python would compile the sources of JAX in every process, which takes over a second.
    own |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{scratch}/bytecode"}
    command = [sys.executable, "-c", *arguments]
    return subprocess.run(
        command, cwd=scratch, env=os.environ | own, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    main()
