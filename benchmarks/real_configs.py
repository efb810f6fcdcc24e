"""The compiled programs of published models, on devices that need not be there: memory, copies and estimated steps.

    python benchmarks/real_configs.py --json FILE
    python benchmarks/real_configs.py --models phi-4 --places h100
    python benchmarks/real_configs.py --table FILE      # the rows in a file, in Markdown

benchmarks/configs holds the config.json of each model, with the keys that matter; there are no weights. The compilers
of TPUs and GPUs are in the extras tpu-compiler and gpu-compiler. Of the devices as many as possible divide the model,
and the others the lookahead. Models of families that are not supported are named and left out.
"""

import json
import os
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

sys.path[0] = str(pathlib.Path(__file__).parent.parent)  # import from the repository, not from this folder
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the plugin for GPUs otherwise looks for a driver

import jlade
from benchmarks import report
from benchmarks.tables import markdown
from jlade.conversion.hf_config import read_config
from jlade.lookahead.names import label, parse
from jlade.models.sharding import can_divide

CONFIGS = pathlib.Path(__file__).parent / "configs"
MODELS = sorted(directory.name for directory in CONFIGS.iterdir())
PLACES = {"v6e-8": ("v6e", 8), "h100": ("h100", 1), "h100-8": ("h100", 8)}  # a kind of device, and their number
COLUMNS: dict[str, Callable[[dict[str, Any]], Any]] = {  # of the table, by their heading
    "model, devices": lambda row: f"{row['model']}, {row['place']}",
    "mesh": lambda row: "lookahead {1}, model {2}".format(*row["mesh"]),
    "fits": lambda row: "yes" if row["fits"] else "no",
    "GB of each device": lambda row: "-" if row["needed_bytes"] is None else f"{row['needed_bytes'] / 1e9:.1f}",
    "largest capacity": lambda row: row["largest_capacity"],
    "copies": lambda row: row["copies_in_loop"],
    "host loops": lambda row: row["host_loops_in_step"],
    "plain step, ms": lambda row: _milliseconds(row["plain_step_estimate_ms"]),
    "step, ms": lambda row: _milliseconds(row["step_estimate_ms"]),
    "setting": lambda row: label(parse(row["lookahead"])),
    "attention": lambda row: row["attention"],
    "compiled in, s": lambda row: f"{row['compile_seconds']:.0f}",
}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS, metavar="NAME", help="(default: all)")
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=list(PLACES), help="(default: all)")
    parser.add_argument("--capacity", type=int, default=1024, metavar="C", help="cache entries (default: %(default)s)")
    parser.add_argument("--table", metavar="FILE", help="print the table of earlier results")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(pathlib.Path(options.table).read_text(encoding="utf-8"))["rows"]))
        return
    warnings.filterwarnings("ignore", "(?s).*only the text part of the model is read")
    rows: list[dict[str, Any]] = []
    for model in options.models:
        try:
            config = read_config(CONFIGS / model)
        except ValueError as error:
            print(f"{model}: left out: {error}", file=sys.stderr)
            continue
        for place in options.places:
            device, number = PLACES[place]
            shards = max(size for size in range(1, number + 1) if number % size == 0 and can_divide(config, size))
            mesh = {"lookahead": number // shards, "model": shards}
            found = jlade.inspect(CONFIGS / model, device, capacity=options.capacity, mesh=mesh if number > 1 else None)
            rows.append({"model": model, "place": place} | found.facts())
            outcome = "compiled" if found.failure is None else f"refused: {found.failure.splitlines()[0]}"
            print(f"{model} on {place}: {outcome}, {found.compile_seconds:.0f} s", file=sys.stderr, flush=True)
            report.write(options.json, {"rows": rows})  # after each row, as all of them take long
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows in Markdown."""
    return markdown(list(COLUMNS), ([str(column(row)) for column in COLUMNS.values()] for row in rows))


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    main()
