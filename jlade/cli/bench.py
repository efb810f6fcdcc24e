"""`jlade bench`: compares ways to decode on a model and data, and makes the paper's tables and figures of them."""

import argparse
import pathlib
import sys
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from jlade.cli import arguments, terminal
from jlade.errors import check_int
from jlade.evaluation import answers, datasets, experiments, methods, provenance, report, runs, scaling
from jlade.evaluation.answers import EvaluatedModel
from jlade.evaluation.datasets import Dataset
from jlade.evaluation.report import Table
from jlade.generation import chat_template, text
from jlade.generation.chat_template import Message
from jlade.generation.text import Tokenizer
from jlade.mesh import default_device
from jlade.models.llama import LlamaParams

RUN = "run.jsonl"
PAPER = "paper"  # in the place of a number of tokens


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    every = "\n".join(f"{name:<10} {each.summary}" for name, each in experiments.EXPERIMENTS.items())
    result = arguments.Parser(
        prog="jlade bench",
        description="Decode the questions of data sets by several methods, in turns, and write tables, figures and a\n"
        "report of the results. A run that was interrupted goes on where it stopped.",
        epilog=f"experiments:\n{every}\nall        all of these\n\nA method is {methods.SYNTAX}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        examples=[
            "jlade bench methods --model path/to/model --methods plain 15,5,15 tree=63 --limit 20",
            "jlade bench figure4 table3 --model path/to/model --output results",
        ],
    )
    listed = "one or more of the list below (default: methods)"
    result.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=listed)
    arguments.add_model(result)
    arguments.add(result, "--kv-dtype")
    result.add_argument(
        "--data",
        nargs="+",
        metavar="FILE",
        help="questions: Spec-Bench, MT-Bench, HumanEval, MBPP, GSM8K, MMLU, ClassEval, CNN/DailyMail, XSum, or JSON "
        "lines with a field prompt or ids (default: 90 samples)",
    )
    result.add_argument(
        "--summary-prompt",
        metavar="FILE",
        help="the messages that ask for a summary: the user's with {text}, or the system's, a line ---, and the "
        "user's; another line --- and the beginning of the answer may follow these two",
    )
    result.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help=f"methods that the experiment methods compares (default: {' '.join(experiments.USUAL)}; "
        "lookahead stands for --lookahead)",
    )
    setting = "setting of the experiments that do not vary it (default: %(default)s)"
    result.add_argument("--lookahead", default="15,5,15", metavar="SETTING", help=setting)
    windows = "W = G of the experiments that vary it, up to 64 in the paper (default: 1 2 4 8 16)"
    result.add_argument("--windows", type=int, nargs="+", default=scaling.WINDOWS, metavar="W", help=windows)
    ngrams = "N of the same experiments, up to 11 in the paper (default: 3 5 7)"
    result.add_argument("--ngrams", type=int, nargs="+", default=scaling.NGRAMS, metavar="N", help=ngrams)
    arguments.add_integer(result, "--limit", "Q", "most questions of each experiment, spread over tasks")
    arguments.add_integer(result, "--seed", "S", "choose the questions at random, and draw sampled texts, by this seed")
    result.add_argument(
        "--max-new-tokens",
        type=_max_new_tokens,
        default=128,
        metavar="M",
        help=f"most tokens of an answer, or {PAPER} for the limits of the paper to prompt and answer together: 512 for "
        "HumanEval, 2048 for ClassEval, and for others, where it names none, the model's (default: %(default)s)",
    )
    result.add_argument("--output", default="bench", metavar="DIR", help="directory of the results (default: bench)")
    several = "decode nothing; make the report of the results in one or more directories, such as of several models"
    result.add_argument("--report", nargs="+", metavar="DIR", help=several)
    code = (
        "run the code that the model writes for questions with tests, in a subprocess with limits, which is no sandbox"
    )
    result.add_argument("--run-code", action="store_true", help=code)
    return result


def _max_new_tokens(value: str) -> int | str:
    try:
        return value if value == PAPER else int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, or {PAPER}, got {value!r}") from None


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    names = _experiments(options.experiments)
    output = pathlib.Path(options.output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output must be a directory, got {output}")
    if options.report:
        directories = [pathlib.Path(directory) for directory in options.report]
        results = [(runs.read(directory / RUN), experiments.load(directory)) for directory in directories]
    else:
        _check(options)
        results = [_run(names, options, output)]
    for each, _ in results:
        _show_missing(each)
    sections = experiments.present(names, results)
    if not sections:
        raise ValueError(f"the results have nothing for {', '.join(names)}")
    beside_paper = experiments.beside_paper(*results[0]) if len(results) == 1 else {}
    console = Console(highlight=False)
    for section in (sections | beside_paper).values():
        for item in section.items:
            if isinstance(item, Table):
                console.print(_table(item))
    with terminal.Status("drawing"):
        page = report.write(output, beside_paper | sections, [run for run, _ in results])
    print(f"{page}: tables and figures")


def _experiments(given: Sequence[str]) -> list[str]:
    names = list(experiments.EXPERIMENTS)
    for name in given:
        if name not in names and name != "all":
            raise ValueError(f"there is no experiment {name!r}; there are {', '.join(names)} and all")
    return names if "all" in given else [name for name in names if name in (given or ["methods"])]


def _check(options: argparse.Namespace) -> None:
    """Raises a ValueError that names an option with a wrong value, before anything is loaded."""
    if options.max_new_tokens != PAPER:
        check_int("--max-new-tokens", options.max_new_tokens, 1)
    if options.limit is not None:
        check_int("--limit", options.limit, 1)
    if options.seed is not None:
        check_int("--seed", options.seed, 0)
    arguments.setting("--lookahead", options.lookahead)
    for name, values, least in (("--windows", options.windows, 1), ("--ngrams", options.ngrams, 2)):
        if len({check_int(name, value, least) for value in values}) < 2:
            raise ValueError(f"{name} must have two or more different values, got {' '.join(map(str, values))}")
    scaling.window_methods(options.windows, options.ngrams)
    for name in options.methods or ():
        methods.parse(name)


def _run(
    names: Sequence[str], options: argparse.Namespace, directory: pathlib.Path
) -> tuple[runs.Run, dict[str, experiments.Selection]]:
    """Decodes what the directory does not have, and returns the run with the selections of its experiments."""
    sets = _read(options.data, options.summary_prompt)
    dtype = options.dtype or ("float32" if default_device().platform == "cpu" else "bfloat16")
    chosen = options.methods, options.limit, options.seed, options.lookahead, options.windows, options.ngrams
    selections = experiments.select(names, sets, dtype, *chosen)
    cells = experiments.cells(selections.values(), sets, dtype)
    with terminal.Status("loading"):
        params, tokenizer = arguments.load(options)
        encode = _chat(arguments.find(options), tokenizer)

    def load(other: str) -> LlamaParams:
        if other == dtype:
            return params
        return arguments.load(argparse.Namespace(**{**vars(options), "dtype": other}))[0]

    limit = None if options.max_new_tokens == PAPER else options.max_new_tokens
    model = EvaluatedModel(load, dtype, tokenizer, limit, options.kv_dtype)
    about = provenance.provenance() | {
        "model": options.model or "demo",
        "revision": options.revision,
        "adapter": options.adapter,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "dtype": dtype,
        "mesh": options.mesh,
        "bits": options.bits,
        "kv_dtype": options.kv_dtype,
        "transformers_device": answers.torch_device() if any(cell.method.setting is None for cell in cells) else None,
        "data": [dataset.name for dataset in sets],
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "run_code": options.run_code,
    }
    file = directory / RUN
    num_done = runs.done_cells(file, cells)
    with terminal.bar(len(cells), num_done, "answers") as advance:
        try:
            for _ in runs.execute(cells, model, encode, file, about, options.seed or 0, options.run_code):
                advance(1)
                num_done += 1
        except KeyboardInterrupt:
            print(f"{num_done} of {len(cells)} answers are in {file}; the same command goes on", file=sys.stderr)
            raise
    return runs.read(file), experiments.store(directory, selections)


def _show_missing(run: runs.Run) -> None:
    """Prints the number of answers that are missing, with the first reason."""
    missing = [result for result in run.results if result.error is not None]
    if missing:
        first = missing[0]
        answer = f"that of {first.method} to {first.question} of {first.dataset}: {first.error}"
        print(f"{len(missing)} of {len(run.results)} answers are missing, such as {answer}", file=sys.stderr)


def _read(data: Sequence[str] | None, summary_prompt: str | None) -> Sequence[Dataset]:
    summary = datasets.SUMMARY if summary_prompt is None else datasets.SummaryPrompt.read(summary_prompt)
    if data is None:
        return datasets.samples(summary)
    sets = [datasets.read(file, summary) for file in data]
    names = [dataset.name for dataset in sets]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--data names two data sets called {min(twice)!r}: join the files, or rename one")
    return sets


def _chat(directory: pathlib.Path, tokenizer: Tokenizer) -> runs.Encode:
    """Returns a function that applies the model's chat template; a model without one continues the plain messages.

    A last message of the assistant is the beginning of the answer.
    """
    of_transformers = chat_template.load_tokenizer(directory)

    def encode(messages: Sequence[Message]) -> list[int]:
        if of_transformers.chat_template is None:
            return text.encode(tokenizer, "\n\n".join(each["content"] for each in messages), parse_special=False)
        begins_answer = messages[-1]["role"] == "assistant"
        return chat_template.encode(of_transformers, messages, continue_final_message=begins_answer)

    return encode


def _table(table: Table) -> RichTable:
    shown = RichTable(title=Text(table.title), caption=Text(table.note), title_justify="left", caption_justify="left")
    for name, form in table.columns.items():
        shown.add_column(Text(name), justify="right" if form else "left", overflow="fold")
    for row in table.texts():
        shown.add_row(*map(Text, row))
    return shown
