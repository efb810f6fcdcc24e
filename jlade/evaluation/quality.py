"""The quality of texts: ROUGE of summaries, right numbers, and the share of programs that pass their tests."""

import contextlib
import json
import math
import os
import pathlib
import re
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, NamedTuple, cast

from jlade.evaluation.datasets import CodeTests

# A continued function ends where one of these begins a line: mostly the stop sequences of HumanEval (arXiv 2107.03374).
_END = re.compile(r"\n(?=def |async def |class |@|if |print\(|assert |#|```)")
_BLOCK = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_START_SECONDS = 60.0  # for the interpreter, on a busy machine


class Rouge(NamedTuple):
    """F1 scores in percent."""

    rouge1: float  # of words
    rouge2: float  # of pairs of words
    rougeL: float  # of the longest common subsequence of words  # noqa: N815, the measure's name


def rouge(texts: Sequence[str], references: Sequence[str]) -> Rouge:
    """Returns the mean ROUGE of texts against their references; see `rouge_of_each`."""
    scores = rouge_of_each(texts, references)
    return Rouge(*(sum(column) / len(scores) for column in zip(*scores, strict=True)))


def rouge_of_each(texts: Sequence[str], references: Sequence[str]) -> list[Rouge]:
    """Returns the ROUGE of each text against its reference, by the package `rouge-score` with its Porter stemmer.

    Raises:
      ValueError: if there are no texts, or not one reference for each; or says how to install `rouge-score`.
    """
    _check_pairs("texts", texts, "references", references)
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ValueError('ROUGE needs rouge-score: pip install "jlade[evaluation]"') from error
    scorer = RougeScorer(Rouge._fields, use_stemmer=True)
    scores = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    return [Rouge(*(100 * score[name].fmeasure for name in Rouge._fields)) for score in scores]


def last_number(text: str) -> str | None:
    """Returns the last number of a text, without thousands' commas and zeros after the point; None if it has none."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    number = found[-1].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def pass_rate(completions: Sequence[str], tests: Sequence[CodeTests], seconds: float = 5.0) -> float:
    """Returns the percentage of completions that pass their tests (pass@1). It runs them: see `passed`."""
    results = passed(completions, tests, seconds)
    return 100 * sum(results) / len(results)


def passed(completions: Sequence[str], tests: Sequence[CodeTests], seconds: float = 5.0) -> tuple[bool, ...]:
    """Returns whether each completion passes its tests, given `seconds` without the start of the interpreter.

    **This runs generated code on this machine and is no sandbox: ask the user first.** The code can read and delete the
    user's files and use the network. Each completion runs in a process of its own, an isolated Python with an empty
    environment, in an empty temporary directory, with limits to time, memory, the size of a file and open files. Its
    input is empty and its output is dropped. It can start no processes by Python's usual means. At the end, or after
    `seconds`, its process group is killed.

    A completion passes only if its tests return. The process proves that by a random line, which it reads from a pipe
    after that. An early exit with any status, a crash, a timeout and any output count as failures. Code written to
    deceive is not detected: it shares the process with its tests, so it can read the line itself, or return objects
    that equal everything.

    Raises:
      ValueError: if there are no completions, or not one entry of `tests` for each; if `seconds` is not positive and
        finite; or if the system is not Linux.
      RuntimeError: if no process could be started.
    """
    _check_pairs("completions", completions, "tests", tests)
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be positive and finite, got {seconds}")
    if not sys.platform.startswith("linux"):
        raise ValueError(f"generated code runs on Linux only, for its limits to resources; got {sys.platform}")
    return tuple(_run(program(text, test), test.code, seconds) for text, test in zip(completions, tests, strict=True))


def program(completion: str, tests: CodeTests) -> str:
    """Returns the program that a completion makes.

    A completion whose first line is indented continues the prompt, up to the next statement at the top level. Any other
    one is an answer: its first Markdown code block counts, or all of it if there is none, after the prompt.
    """
    first = next((line for line in completion.splitlines() if line.strip()), "")
    if tests.prompt and first.startswith(("  ", "\t")):
        return tests.prompt + _END.split(completion, maxsplit=1)[0] + "\n"
    block = _BLOCK.search(completion)
    return f"{tests.prompt}\n{completion if block is None else block[1]}\n"


def _run(source: str, tests: str, seconds: float) -> bool:
    message = json.dumps({"parts": [source, tests], "cpu_seconds": math.ceil(seconds) + 1})
    token = secrets.token_hex().encode() + b"\n"
    command = [sys.executable, "-I", str(pathlib.Path(__file__).with_name("candidate.py"))]
    with (
        tempfile.TemporaryDirectory(prefix="jlade-", ignore_cleanup_errors=True) as directory,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=directory, env={}, start_new_session=True
        ) as process,
    ):
        pipe_in, pipe_out = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        try:
            with contextlib.suppress(BrokenPipeError), pipe_in:
                pipe_in.write(message.encode() + b"\n" + token)
            if _receive(pipe_out, 1, _START_SECONDS) != b"+":
                raise RuntimeError(f"the process that runs generated code did not start: {' '.join(command)}")
            return _receive(pipe_out, len(token) + 1, seconds) == token
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # nobody has waited for the process yet, so the id is still its own


def _receive(pipe: IO[bytes], size: int, seconds: float) -> bytes:
    """Returns at most `size` bytes of a pipe; none at its end, or if there are none for `seconds`."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return os.read(pipe.fileno(), size) if selector.select(seconds) else b""


def _check_pairs(name: str, values: Sequence[object], other: str, others: Sequence[object]) -> None:
    if not values or len(values) != len(others):
        raise ValueError(
            f"{name} and {other} must have the same length, at least 1, got {len(values)} and {len(others)}"
        )
