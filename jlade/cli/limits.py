"""The arguments that decide the programs of the server's engine, besides the model and its setting."""

import argparse
import dataclasses
from typing import Any

import jlade
from jlade.server.served_model import MAX_PREDICTION, MAX_TOP_OF_CHAT, MAX_TOP_OF_COMPLETION, REMEMBER, Limits

DEFAULT = Limits()
# By their names in `Limits`: placeholders of the values, and explanations.
SIZES = {
    "max_sequences": ("B", "requests decoded at once (default: %(default)s)"),
    "capacity": ("C", "most tokens of a prompt and its text (default: up to 4096)"),
    "cache_tokens": (
        "N",
        "tokens whose keys and values are held at once, of all requests and of what is kept for later ones; with "
        "fewer, requests wait while there are too few (default: --capacity for each of --max-sequences)",
    ),
    "max_prediction": (
        "N",
        f"most tokens of a prediction, 0 to ignore predictions (default: {MAX_PREDICTION} with a tree of drafts)",
    ),
    "remember": (
        "BYTES",
        "host memory for answers that may be drafts of later requests with the same prompt_cache_key, 0 for none "
        f"(default: {REMEMBER} with a tree of drafts)",
    ),
    "max_grammar": (
        "N",
        "most entries of the table of a grammar, each of 4 bytes in every row, 0 to refuse grammars and tools "
        "(default: %(default)s)",
    ),
    "max_top_logprobs": (
        "K",
        "most alternatives of a token that a request may ask for (default: OpenAI's limits, "
        f"{MAX_TOP_OF_CHAT} in a chat and {MAX_TOP_OF_COMPLETION} in a completion)",
    ),
}
NAMES = (*SIZES, "corpus")


def add(parser: argparse._ActionsContainer) -> None:
    """Adds the arguments."""
    for name, (metavar, text) in SIZES.items():
        default = getattr(DEFAULT, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar=metavar, help=text)
    parser.add_argument(
        "--corpus", metavar="DIR", help="texts in which drafts are searched too, a directory of jlade.save_corpus"
    )


def read(options: argparse.Namespace) -> Limits:
    """Returns the limits of requests; what a command has no argument for is as by default."""
    given = {
        field.name: getattr(options, field.name, getattr(DEFAULT, field.name)) for field in dataclasses.fields(Limits)
    }
    return Limits(**given)


def corpus(options: argparse.Namespace) -> Any:
    """Returns the texts of `--corpus`, None for none."""
    return None if options.corpus is None else jlade.load_corpus(options.corpus)
