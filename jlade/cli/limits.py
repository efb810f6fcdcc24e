"""The arguments that decide the programs of the server's engine, besides the model and its setting."""

import argparse
import dataclasses
from typing import Any

import jlade
from jlade.server.model import MAX_PREDICTION, MAX_TOP_OF_CHAT, MAX_TOP_OF_COMPLETION, REMEMBER, Limits

DEFAULT = Limits()
NAMES = (
    "max_sequences",
    "capacity",
    "cache_tokens",
    "max_prediction",
    "corpus",
    "remember",
    "max_grammar",
    "max_top_logprobs",
)


def add(parser: argparse._ActionsContainer) -> None:
    """Adds the arguments."""
    parser.add_argument(
        "--max-sequences",
        type=int,
        default=DEFAULT.max_sequences,
        metavar="B",
        help="requests decoded at once (default: %(default)s)",
    )
    parser.add_argument(
        "--capacity", type=int, metavar="C", help="most tokens of a prompt and its text (default: up to 4096)"
    )
    parser.add_argument(
        "--cache-tokens",
        type=int,
        metavar="N",
        help="tokens whose keys and values are held at once, of all requests and of what is kept for later ones; with "
        "fewer, requests wait while there are too few (default: --capacity for each of --max-sequences)",
    )
    parser.add_argument(
        "--max-prediction",
        type=int,
        metavar="N",
        help=f"most tokens of a prediction, 0 to ignore predictions (default: {MAX_PREDICTION} with a tree of drafts)",
    )
    parser.add_argument(
        "--corpus", metavar="DIR", help="texts in which drafts are searched too, a directory of jlade.save_corpus"
    )
    parser.add_argument(
        "--remember",
        type=int,
        metavar="BYTES",
        help="host memory for answers that may be drafts of later requests with the same prompt_cache_key, 0 for none "
        f"(default: {REMEMBER} with a tree of drafts)",
    )
    parser.add_argument(
        "--max-grammar",
        type=int,
        default=DEFAULT.max_grammar,
        metavar="N",
        help="most entries of the table of a grammar, each of 4 bytes in every row, 0 to refuse grammars and tools "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--max-top-logprobs",
        type=int,
        metavar="K",
        help="most alternatives of a token that a request may ask for (default: OpenAI's limits, "
        f"{MAX_TOP_OF_CHAT} in a chat and {MAX_TOP_OF_COMPLETION} in a completion)",
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
