"""What the scripts have in common: options, models and prompts, tables, and the file of `--json` with provenance."""

import argparse
import json
import pathlib
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

import jlade
from jlade.evaluation import datasets
from jlade.evaluation.datasets import Question
from jlade.evaluation.provenance import provenance
from jlade.generation import text
from jlade.generation.text import Tokenizer
from jlade.models.llama import LlamaParams

DEMO_PROMPTS = pathlib.Path(__file__).parents[1] / "tests" / "golden" / "prompts.jsonl"  # with their token ids


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser that shows a script's docstring as it is, with `--json`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures, with machine and versions, to FILE")
    return parser


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `questions`."""
    parser.add_argument("--data", default="tests/golden/prompts.jsonl", help="as `jlade bench --data` reads it")
    parser.add_argument("--limit", type=int, metavar="Q", help="number of prompts, spread over tasks")


def questions(options: argparse.Namespace) -> tuple[Question, ...]:
    """Returns the questions that the options of `add_prompts` choose."""
    found = datasets.read(options.data).questions
    return datasets.select(found, options.limit) if options.limit else found


def prompt_ids(tokenizer: Tokenizer, question: Question) -> list[int]:
    """Returns the token ids of a question, or of its first turn."""
    return list(question.ids or text.encode(tokenizer, question.turns[0]))


def read_lines(path: pathlib.Path) -> list[Any]:
    """Returns the values of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def load(model: str | None, dtype: str | None = None) -> tuple[LlamaParams, Any]:
    """Returns the parameters and the tokenizer of a model, of the demo model for "demo" or None."""
    params, tokenizer = jlade.demo(dtype) if model in (None, "demo") else jlade.load(model, dtype)
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
