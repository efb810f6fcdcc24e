"""The commands of `jlade`: the choice among them, their help, and their errors."""

import argparse
import contextlib
import difflib
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

import jax
from rich.console import Console
from rich.text import Text

import jlade
from jlade.cli import (
    arguments,
    bench,
    chat,
    compile,
    complete,
    convert,
    generate,
    inspection,
    plan,
    prior,
    program_cache,
    serve,
    trace,
    tune,
)

# Modules with two functions: `parser` returns that of the arguments, `run` takes what it parsed.
COMMANDS: dict[str, ModuleType] = {
    "complete": complete,
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "tune": tune,
    "bench": bench,
    "inspect": inspection,
    "compile": compile,
    "plan": plan,
    "trace": trace,
    "prior": prior,
    "convert": convert,
}
OVERVIEW = """\
usage: jlade PROMPT         complete a prompt, and compare with plain decoding
       jlade COMMAND ...    run a command
       jlade help COMMAND   show the options of a command, and examples
       jlade --version      show the versions of jlade and JAX

complete   complete a prompt, and compare with plain decoding
generate   complete files, or the lines of files
chat       chat with a model
serve      serve a model over HTTP with OpenAI's interface
tune       find the fastest setting for a model on this device
bench      compare ways to decode; make the paper's tables and figures
inspect    describe a checkpoint and the memory it needs
compile    compile a model's programs ahead, for this device or another
plan       estimate decoding on many devices
trace      write a page that shows a generation step by step
prior      learn what a model predicts after pairs of tokens, for better drafts
convert    write a checkpoint in another format or dtype
help       show this text, or the options of a command

--model names the model of every command but convert: a directory, a GGUF file,
smollm2 or an id of the Hugging Face Hub. chat, serve, inspect, compile and plan
also take it as a word: `jlade chat path/to/model`."""


def parse(words: Sequence[str]) -> tuple[ModuleType, argparse.Namespace]:
    """Returns the command that the words name, `complete` if they name none, and its options.

    Options that the commands share may stand before the command's name.

    Raises:
      SystemExit: after the help, and for words that are refused.
    """
    match list(words):
        case [] | ["help"] | ["help", "help"] | ["--help"] | ["-h"]:
            Console(highlight=False).print(Text(OVERVIEW))
            sys.exit(0)
        case ["--version"]:
            print(f"jlade {jlade.__version__}, JAX {jax.__version__}")
            sys.exit(0)
        case ["help", name]:
            words = [name, "--help"]
            if name not in COMMANDS:
                _refuse(f"there is no command {name!r}; there are {', '.join(COMMANDS)}")
        case [word]:
            close = difflib.get_close_matches(word, [*COMMANDS, "help"], n=1, cutoff=0.75)
            if close and word not in COMMANDS:
                _refuse(f"did you mean `jlade {close[0]}`? To complete the text {word!r}: jlade complete {word}")
    name, rest = _split(words)
    command = COMMANDS[name]
    options = command.parser().parse_args(rest)
    program_cache.enable()
    return command, options


def report(error: Exception, options: argparse.Namespace) -> NoReturn:
    """Prints an error in one line.

    Raises:
      SystemExit: with status 2 for a wrong request, 1 for any other error.
    """
    message = " ".join(str(error).split())
    if isinstance(error, OSError | ValueError | MemoryError | FloatingPointError):
        print(f"{options.prog}: error: {message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, OSError | ValueError) else 1)
    print(f"{options.prog}: {type(error).__name__}: {message} (--debug shows the traceback)", file=sys.stderr)
    sys.exit(1)


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Shows the warnings of the block without the line of code that gives them."""

    def show(message: Warning | str, *where: Any, **others: Any) -> None:
        print(f"jlade: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _refuse(message: str) -> NoReturn:
    print(f"jlade: error: {message}", file=sys.stderr)
    sys.exit(2)


def _split(words: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the command's name and the other words."""
    for i, word in enumerate(words):
        if word == "--":
            break
        if word in COMMANDS and _are_options(words[:i]):
            return word, [*words[:i], *words[i + 1 :]]
    return "complete", list(words)


def _are_options(words: Sequence[str]) -> bool:
    """Returns whether all words are options that the commands share, with their values."""
    parser = arguments.Parser(add_help=False, exit_on_error=False)
    arguments.add_shared(parser)
    try:
        return not parser.parse_known_args(words)[1]
    except argparse.ArgumentError:
        return False
