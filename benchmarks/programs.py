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
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # import from the repository, not from this folder


from benchmarks import report
from benchmarks.compilation import Installation

WAYS = ("nothing", "cache", "programs")
TIMES = {
    "call": "call, s",
    "call_cpu": "call, s of processors",
    "process": "process, s",
    "process_cpu": "process, s of processors",
}
LOAD = {"demo": "jlade.demo('float32')", "smollm2": "jlade.load('smollm2', 'float32')"}
MODEL = {"demo": "pathlib.Path(jlade.__file__).parent / 'demo'", "smollm2": "'smollm2'"}
SETTING = """
from jlade.lookahead import names
lookahead = names.parse(sys.argv[2]) if sys.argv[2] else "auto"
"""
COMPILE = f"""
import pathlib, sys, jlade
{SETTING}
make, options = jlade.compile, {{{{}}}}
if rows := int(sys.argv[3]):
    make, options = jlade.compile_engine, {{{{"max_sequences": rows, "capacity": 1024}}}}
make({{model}}, sys.argv[1], lookahead=lookahead, **options)
"""
FIRST_TOKEN = f"""
import collections, json, sys, time
import jax, jlade
{SETTING}
options, prompt = {{{{"lookahead": lookahead, "programs": sys.argv[1] or None}}}}, "def read_config(path):\\n"
params, _ = {{load}}
events = collections.Counter()
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.update([event.split("/")[-1]]))
begin, cpu = time.perf_counter(), time.process_time()
if rows := int(sys.argv[3]):
    engine = jlade.Engine(params, max_sequences=rows, capacity=1024, **options)
    piece = next(iter(engine.submit(prompt, max_new_tokens=32)))
else:
    piece = next(jlade.stream(params, prompt, max_new_tokens=32, **options))
figures = {{{{"call": time.perf_counter() - begin, "call_cpu": time.process_time() - cpu}}}}
figures |= {{{{"at": time.time(), "process_cpu": time.process_time(), "tokens": piece.tokens.tolist()}}}}
figures |= {{{{"traces": events["jaxpr_trace_duration"], "compilations": events["backend_compile_duration"]}}}}
print(json.dumps(figures))
"""


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=LOAD, default=["demo"])
    parser.add_argument("--repeat", type=int, default=3, metavar="R", help="processes of each way")
    parser.add_argument("--lookahead", default="", metavar="SETTING", help="like tree=7 (default: auto)")
    parser.add_argument("--engine", type=int, default=0, metavar="B", help="first token of an engine of B rows")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for model in options.models:
        figures[model] = _measure(model, [options.lookahead, str(options.engine)], options.repeat)
        facts = {"lookahead": options.lookahead or "auto"} | ({"engine": options.engine} if options.engine else {})
        report.write(options.json, facts | {"models": figures})
        forms = dict.fromkeys(TIMES, ".2f") | {"traces": ".0f", "compilations": ".0f"}
        rows = (
            [way, *(f"{found[name]:{form}}" for name, form in forms.items())]
            for way, found in figures[model]["ways"].items()
        )
        report.print_table(["way", *TIMES.values(), "traces", "compilations"], rows, model)


def _measure(model: str, given: list[str], repeat: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        programs, cache = Path(scratch) / "programs", Path(scratch) / "cache"
        environment = {"PYTHONPATH": str(ROOT), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        # Without kept bytecode, Python would compile the sources of JAX in every process, which takes over a second.
        environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(scratch) / "bytecode")}
        process = Installation(sys.executable, Path(scratch), environment)
        seconds, _ = process.run(["-c", COMPILE.format(model=MODEL[model]), str(programs), *given])
        first = ["-c", FIRST_TOKEN.format(load=LOAD[model])]
        process.run([*first, "", *given], cache=cache)  # fills it
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(repeat):
            for way in WAYS:
                arguments = [*first, str(programs) if way == "programs" else "", *given]
                began = time.time()
                figures = json.loads(process.run(arguments, cache=cache if way == "cache" else None)[1])
                runs[way].append(figures | {"process": figures.pop("at") - began})
        assert len({tuple(run["tokens"]) for way in WAYS for run in runs[way]}) == 1, "the first tokens differ"
        size = sum(file.stat().st_size for file in programs.iterdir())
    names = (*TIMES, "traces", "compilations")
    ways = {way: {name: statistics.median(run[name] for run in runs[way]) for name in names} for way in WAYS}
    return {"compile_seconds": seconds, "program_bytes": size, "ways": ways, "runs": runs}


if __name__ == "__main__":
    main()
