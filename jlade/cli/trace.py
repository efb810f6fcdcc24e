"""`jlade trace`: completes a prompt and writes a page that shows the generation step by step."""

import argparse
import pathlib

from jlade.cli import arguments, terminal
from jlade.evaluation import trace
from jlade.files import written_whole
from jlade.lookahead import names


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = arguments.Parser(
        prog="jlade trace",
        description="Complete a prompt, and write a page that shows each step: the window, the drafts, the tokens "
        "that were accepted and the n-grams that entered the pool. A browser opens it without a network.",
        examples=[
            'jlade trace "def read_config(path):" --max-new-tokens 64',
            'jlade trace "def read_config(path):" --lookahead 15,5,15 --output paper.html',
        ],
    )
    result.add_argument("prompt", metavar="PROMPT", help="the text to complete")
    result.add_argument(
        "--output", default="trace.html", metavar="FILE", help="the page; it is replaced (default: %(default)s)"
    )
    arguments.add_shared(result, lookahead=f"{names.name(trace.WINDOW_AND_TREE)}, a window and a tree of drafts")
    return result


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    request = arguments.request(options)
    path = pathlib.Path(options.output)
    if path.exists() and not path.is_file():
        raise ValueError(f"--output must be a file, got {options.output}")
    with terminal.Status("loading") as line:
        params, request["tokenizer"] = arguments.load(options)
        line.say("decoding")
        traced = trace.trace(params, options.prompt, **request)
    with written_whole(path, replace=True) as file:
        file.write_text(trace.page(traced), encoding="utf-8")
    tokens, steps = len(traced.tokens) - traced.prompt_length, len(traced.steps)
    print(f"{path}: {tokens} tokens in {steps} steps, {tokens / steps:.2f} per step")
