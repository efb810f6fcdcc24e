"""Options, tables, parts that fail alone, and the file of `--json` with provenance: what all scripts report with."""

import argparse
import json
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

import jlade
from jlade.evaluation.provenance import provenance
from jlade.models.llama import LlamaParams

DEMO_PROMPTS = pathlib.Path(__file__).parents[1] / "tests" / "golden" / "prompts.jsonl"  # with their token ids
SECONDS = "seconds of this part"
Figures = dict[str, Any]


def make_parser(description: str | None, parts: bool = False) -> argparse.ArgumentParser:
    """Returns a parser that shows a docstring as it is, with `--json` and, if `parts`, the options of `Parts`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures, with machine and versions, to FILE")
    if parts:
        parser.add_argument("--only", nargs="+", metavar="PART", help="run only these parts, in the usual order")
        parser.add_argument("--minutes", type=float, default=60, metavar="M", help="start no part that would end later")
    return parser


def read_lines(path: pathlib.Path) -> list[Any]:
    """Returns the values of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def load(model: str, dtype: str | None = None) -> tuple[LlamaParams, Any]:
    """Returns the parameters and the tokenizer of a model, of the demo model for "demo"."""
    params, tokenizer = jlade.demo(dtype) if model == "demo" else jlade.load(model, dtype)
    assert tokenizer is not None
    return params, tokenizer


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]], title: str | None = None) -> None:
    """Prints rows of cells below the names of their columns."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


def write(path: str | None, result: dict[str, Any]) -> None:
    """Writes a result with its provenance as JSON, if there is a path."""
    if path:
        content = json.dumps(provenance() | result, indent=1)
        pathlib.Path(path).write_text(content + "\n", encoding="utf-8")


def file_name(kind: str) -> str:
    """Returns JAX's `device_kind` in the form that the names of result files contain."""
    return "_".join(kind.lower().split())


class Parts:
    """Runs the parts of a benchmark: if one fails or takes too long, the figures of the others are kept.

    With `--json` the file is written after every part. If it has the figures of an earlier run, on the same machine
    with the same settings, those of other parts are kept. Date and command are those of the latest run.
    """

    def __init__(self, options: argparse.Namespace, names: Iterable[str], **settings: Any):
        self.options, self.begin = options, time.monotonic()
        self.settings = json.loads(json.dumps({name: getattr(options, name) for name in names} | settings))
        self.results: dict[str, Figures] = self._earlier()
        self._write()  # before anything is measured, to find out if the file can be written

    def run(self, name: str, measure: Callable[[], Figures], like: str | None = None) -> Figures | None:
        """Runs a part and returns its figures; None if it was not selected, failed or did not fit into the time.

        The time of the part `like`, if given, is the estimate for this part.
        """
        if self.options.only and name not in self.options.only:
            return None
        begin = time.monotonic()
        left = 60 * self.options.minutes - (begin - self.begin)
        is_late = left < self.results.get(like or "", {}).get(SECONDS, 0)
        print(f"[{begin - self.begin:6.1f} s] {name}{f': left out, {left:.0f} s are left' * is_late}", flush=True)
        figures: Figures | None = None
        result: Figures = {"left out": f"{left:.0f} s were left"}
        if not is_late:
            try:
                figures = measure()
                result = figures | {SECONDS: time.monotonic() - begin}
            except Exception as error:  # of any kind: the other parts still run
                traceback.print_exc()
                result = {"error": f"{type(error).__name__}: {error}"}
        self.results[name] = result
        self._write()
        return figures

    def finish(self, failed: bool = False) -> None:
        """Prints the figures of all parts and ends the process, with status 1 if a part failed or `failed` is True."""
        table = Table("part", "figure", "value")
        for part, figures in self.results.items():
            for name, value in figures.items():
                table.add_row(part, name, f"{value:.4g}" if isinstance(value, float) else str(value))
                part = ""
        Console(width=120).print(table)
        sys.exit(failed or any("error" in figures for figures in self.results.values()))

    def _write(self) -> None:
        write(self.options.json, self.settings | {"parts": self.results})

    def _earlier(self) -> dict[str, Figures]:
        if not self.options.json or not pathlib.Path(self.options.json).exists():
            return {}
        stored = json.loads(pathlib.Path(self.options.json).read_text(encoding="utf-8"))
        same = {name: value for name, value in provenance().items() if name not in ("date", "command")}
        is_same = all(stored.get(name) == value for name, value in (same | self.settings).items())
        return stored.get("parts", {}) if is_same else {}
