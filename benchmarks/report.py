"""What the scripts have in common: a parser with `--json`, and the file that it names, with provenance."""

import argparse
import json
import pathlib
from typing import Any

from jlade.evaluation.provenance import provenance


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser that shows a script's docstring as it is, with `--json`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures, with machine and versions, to FILE")
    return parser


def write(path: str | None, result: dict[str, Any]) -> None:
    """Writes a result with its provenance as JSON, if there is a path."""
    if path:
        text = json.dumps(provenance() | result, indent=1)
        pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


def file_name(kind: str) -> str:
    """Returns JAX's `device_kind` in the form that the names of result files contain."""
    return "_".join(kind.lower().split())
