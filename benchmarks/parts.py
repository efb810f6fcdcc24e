"""Benchmarks in parts: if one part fails or takes too long, the results of the others are kept."""

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import report
from jlade.evaluation.provenance import provenance

Figures = dict[str, Any]
SECONDS = "seconds of this part"


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the arguments that `Parts` takes."""
    parser = report.make_parser(description)
    parser.add_argument("--only", nargs="+", metavar="PART", help="run only these parts, in the usual order")
    parser.add_argument("--minutes", type=float, default=60, metavar="M", help="start no part that would end later")
    return parser


class Parts:
    """Runs parts and collects their figures. With `--json` the file is written after every part.

    If the file has the figures of an earlier run, on the same machine with the same settings, those of other parts are
    kept. Date and command are those of the latest run.
    """

    def __init__(self, options: argparse.Namespace, settings: dict[str, Any]):
        self.options, self.settings = options, json.loads(json.dumps(settings))
        self.begin = time.monotonic()
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
        if left < self.results.get(like or "", {}).get(SECONDS, 0):
            self._note(f"{name}: left out, {left:.0f} s are left of {self.options.minutes:g} minutes")
            self._keep(name, {"left out": f"{left:.0f} s were left"})
            return None
        self._note(name)
        figures: Figures | None = None
        try:
            figures = measure()
            result = figures | {SECONDS: time.monotonic() - begin}
        except Exception as error:  # of any kind: the other parts still run
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        self._keep(name, result)
        return figures

    def failed(self) -> bool:
        """Returns whether a part failed; the exit status is then 1."""
        return any("error" in figures for figures in self.results.values())

    def print(self) -> None:
        """Prints the figures of all parts as a table."""
        table = Table("part", "figure", "value")
        for part, figures in self.results.items():
            for name, value in figures.items():
                table.add_row(part, name, f"{value:.4g}" if isinstance(value, float) else str(value))
                part = ""
        Console(width=120).print(table)

    def _note(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:6.1f} s] {text}", flush=True)

    def _keep(self, name: str, figures: Figures) -> None:
        self.results[name] = figures
        self._write()

    def _write(self) -> None:
        report.write(self.options.json, self.settings | {"parts": self.results})

    def _earlier(self) -> dict[str, Figures]:
        if not self.options.json or not Path(self.options.json).exists():
            return {}
        stored = json.loads(Path(self.options.json).read_text(encoding="utf-8"))
        same = {name: value for name, value in provenance().items() if name not in ("date", "command")}
        is_same = all(stored.get(name) == value for name, value in (same | self.settings).items())
        return stored.get("parts", {}) if is_same else {}
