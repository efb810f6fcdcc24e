"""Data sets: questions in the formats in which their authors publish them, and samples that ship with the package."""

import collections
import dataclasses
import functools
import os
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jlade.evaluation import records
from jlade.evaluation.records import DataRecord
from jlade.generation.chat_template import Message

SAMPLES = pathlib.Path(__file__).parent / "samples"
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
LETTERS = "ABCDEFGHIJ"  # of choices


class SummaryPrompt(NamedTuple):
    """The messages that ask for a summary, with {text} in the place of the text, and the beginning of the answer."""

    system: str
    user: str
    beginning: str = ""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "SummaryPrompt":
        """Returns the prompt in a file: the user's message, or up to three parts in this order, between lines ---.

        Raises:
          ValueError: the file cannot be read, does not have {text} once, or has more parts.
        """
        file = pathlib.Path(path)
        try:
            content = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} cannot be read as text: {error}") from error
        if content.count("{text}") != 1:
            raise ValueError(f"{file}: a prompt for summaries must have {{text}} once, got {content.count('{text}')}")
        parts = [part.strip() for part in content.split("\n---\n")]
        if len(parts) > len(cls._fields):
            raise ValueError(f"{file}: a prompt for summaries must have at most 3 parts, got {len(parts)}")
        return cls("", *parts) if len(parts) == 1 else cls(*parts)


# The form of Appendix D of arXiv 2402.02057, which also begins the answer.
SUMMARY = SummaryPrompt(
    "You answer with nothing but the facts of this text:\n\n{text}\n\n"
    "- Write clear and complete sentences.\n"
    "- Write what was asked for, without an introduction or a closing remark.\n"
    "- Do not thank the user, and do not speak of yourself.\n"
    "- Keep to the style of a business report, and be polite.",
    "Summarize the text in a few sentences.",
    "Summary:",
)


@dataclasses.dataclass(frozen=True)
class CodeTests:
    """Tests of a completion; see `jlade.evaluation.quality.pass_rate`."""

    prompt: str  # code that the completion continues; "" where the completion is a whole program
    code: str  # runs after prompt and completion, and raises if a test fails


@dataclasses.dataclass(frozen=True)
class Question:
    """A question of a data set: one prompt, or the user's turns of a conversation."""

    id: str  # unique in its data set, such as "HumanEval/0" or "81"
    task: str  # the row in tables by task, such as "translation" or "MT-Bench"; the data set's name without categories
    category: str = ""  # the part of the task: MT-Bench's "writing", "math" and so on
    turns: tuple[str, ...] = ()  # the user's messages, or one text to continue; () with `ids`
    ids: tuple[int, ...] | None = None  # token ids of the prompt, in place of text
    is_chat: bool = True  # whether the turns go through the model's chat template; otherwise the model continues them
    system: str | None = None  # the system message
    beginning: str = ""  # of the answer to a chat, which the model continues
    reference: str | None = None  # the summary that ROUGE compares with
    tests: CodeTests | None = None
    suffix: str | None = None  # the text after the gap that the answer fills; the turn is the text before it
    answer: str | None = None  # the right one: a number, or a letter of `choices`
    choices: str = ""  # letters, of which the model's most probable one is the answer
    max_length: int | None = None  # tokens of prompt and answer in the paper; None where it sets no limit

    def messages(self, answers: Sequence[str] = ()) -> list[Message]:
        """Returns the messages up to the turn that follows these answers, and the beginning of its answer."""
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for turn, answer in zip(self.turns, [*answers, self.beginning or None], strict=False):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return messages


class Dataset(NamedTuple):
    """The questions of a file."""

    name: str  # the published name, or that of the file
    format: str  # a key of FORMATS
    questions: tuple[Question, ...]


def read(path: str | os.PathLike[str], summary: SummaryPrompt = SUMMARY) -> Dataset:
    """Returns the questions of a file, whose first record decides the format, by its fields.

    Args:
      path: a file in one of the FORMATS: JSON lines or a JSON array, both maybe compressed by gzip, or Parquet.
      summary: asks for the summaries of CNN/DailyMail and XSum.

    Raises:
      ValueError: names the file and the line, item or row, the value and what is accepted.
    """
    file = pathlib.Path(path)
    first, *others = records.read(file)
    name = _format_of(first)
    if name is None:
        accepted = "; ".join(f"{key} ({', '.join(value.fields)})" for key, value in FORMATS.items())
        raise ValueError(f"{first.place}: no known format has the fields {_fields(first)}. Accepted: {accepted}")
    file_format = FORMATS[name]
    title = file_format.title or file.name.split(".")[0]
    if name == "mt_bench" and not all(each.values.get("category") in MT_BENCH for each in (first, *others)):
        title = "Spec-Bench"
    questions: dict[str, Question] = {}
    for i, record in enumerate((first, *others)):
        if _format_of(record) != name:
            raise ValueError(
                f"{record.place}: the first question is in the format {name}, so this one must have the fields "
                f"{', '.join(file_format.fields)} and be in the same format, got the fields {_fields(record)}"
            )
        question = _with_summary(file_format.question(record, title, f"{title}/{i}"), summary)
        if question.id in questions:
            raise ValueError(f"{record.place}: the id must be unique, got {question.id!r} again")
        questions[question.id] = dataclasses.replace(question, max_length=file_format.max_length)
    return Dataset(title, name, tuple(questions.values()))


@functools.cache
def samples(summary: SummaryPrompt = SUMMARY) -> tuple[Dataset, ...]:
    """Returns small data sets written for jlade, 90 questions of nine tasks, whose names end in "sample"."""
    found = (read(file, summary) for file in sorted(SAMPLES.glob("*.jsonl")))
    # Their names differ from those of the published data sets, with which their figures do not compare.
    return tuple(
        Dataset(f"{name} sample", kind, tuple(dataclasses.replace(x, task=f"{x.task} sample") for x in questions))
        for name, kind, questions in found
    )


def select(questions: Sequence[Question], limit: int, seed: int | None = None) -> tuple[Question, ...]:
    """Returns at most `limit` questions, in their order, spread evenly over the tasks and over categories in a task.

    Args:
      questions: the questions to choose from.
      limit: the number of questions. A task with too few leaves its share to the others.
      seed: chooses at random; None chooses the first questions of each category.

    Raises:
      ValueError: if `limit` is less than 1.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    order = list(range(len(questions)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    for groups in ([(each.task, each.category) for each in questions], [each.task for each in questions]):
        counts: collections.Counter[object] = collections.Counter()
        rounds = {}  # the first of each group comes before the second of each, and so on
        for i in order:
            rounds[i] = counts[groups[i]]
            counts[groups[i]] += 1
        order.sort(key=rounds.__getitem__)
    return tuple(questions[i] for i in sorted(order[:limit]))


def _format_of(record: DataRecord) -> str | None:
    return next((name for name, known in FORMATS.items() if record.values.keys() >= set(known.fields)), None)


def _fields(record: DataRecord) -> str:
    return ", ".join(map(str, record.values)) or "(none)"


def _with_summary(question: Question, summary: SummaryPrompt) -> Question:
    """Returns a question with a summary as its reference in the words of the prompt."""
    if question.reference is None:
        return question
    (text,) = question.turns
    system, user, beginning = (message.replace("{text}", text) for message in summary)
    return dataclasses.replace(question, turns=(user,), system=system or None, beginning=beginning)


def _mt_bench(record: DataRecord, name: str, default_id: str) -> Question:
    category = record.text("category")
    task = "MT-Bench" if category in MT_BENCH else category
    return Question(record.identifier("question_id"), task, category, record.texts("turns"))


def _humaneval(record: DataRecord, name: str, default_id: str) -> Question:
    prompt, entry_point = record.text("prompt"), record.text("entry_point")
    if not entry_point.isidentifier():
        record.fail("entry_point", "the name of a function")
    suffix = record.text("suffix") if "suffix" in record.values else None
    tests = CodeTests("" if suffix else prompt, f"{record.text('test')}\ncheck({entry_point})\n")
    return Question(record.identifier("task_id"), name, turns=(prompt,), is_chat=False, tests=tests, suffix=suffix)


def _mbpp(record: DataRecord, name: str, default_id: str) -> Question:
    problem = record.text("prompt" if "prompt" in record.values else "text")
    tests = record.texts("test_list")
    setup = [record.text("test_setup_code")] if record.values.get("test_setup_code") else []
    setup.extend(record.texts("test_imports") if record.values.get("test_imports") else ())
    shown, code = "\n".join(tests), CodeTests("", "\n".join((*setup, *tests)))
    turn = f"{problem}\n\nUse Python. The code must pass these tests:\n\n```python\n{shown}\n```"
    return Question(record.identifier("task_id"), name, turns=(turn,), tests=code)


def _gsm8k(record: DataRecord, name: str, default_id: str) -> Question:
    _, mark, answer = record.text("answer").rpartition("####")
    if not mark:
        record.fail("answer", "a text that ends with #### and a number")
    return Question(default_id, name, turns=(record.text("question"),), answer=answer.strip().replace(",", ""))


def _mmlu(record: DataRecord, name: str, default_id: str) -> Question:
    choices, right = record.texts("choices"), record.values["answer"]
    letters = LETTERS[: len(choices)]
    if right not in [*letters, *range(len(choices))]:
        record.fail("answer", f"one of {', '.join(letters)}, or its place from 0")
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=True))
    turn = f"{record.text('question')}\n\n{listed}\n\nAnswer with the letter of the right choice alone."
    subject = record.text("subject") if "subject" in record.values else ""
    answer = right if isinstance(right, str) else letters[right]
    return Question(default_id, name, subject, turns=(turn,), answer=answer, choices=letters)


def _classeval(record: DataRecord, name: str, default_id: str) -> Question:
    skeleton = record.text("skeleton").rstrip()
    turn = f"Complete the methods of the Python class {record.text('class_name')}:\n\n```python\n{skeleton}\n```"
    return Question(record.identifier("task_id"), name, turns=(turn,))


def _summary(text: str, summary: str, record: DataRecord, name: str, default_id: str) -> Question:
    return Question(record.identifier("id"), name, turns=(record.text(text),), reference=record.text(summary))


def _prompt(record: DataRecord, name: str, default_id: str) -> Question:
    has_ids = "ids" in record.values
    return Question(
        record.identifier("id") if "id" in record.values else default_id,
        next((record.text(field) for field in ("task", "kind") if field in record.values), name),
        turns=() if has_ids else (record.text("prompt"),),
        ids=record.token_ids("ids") if has_ids else None,
        is_chat=False,
    )


class Format(NamedTuple):
    """A format, recognised by its fields; others are ignored."""

    title: str  # the data set's name; "" for the file's
    fields: tuple[str, ...]
    question: Callable[[DataRecord, str, str], Question]  # from a record, the data set's name and an id for want of one
    max_length: int | None = None  # of its questions: Section 5 of arXiv 2402.02057 sets that of two data sets


# The first format that fits counts, so that of prompts, whose fields others have too, is last.
FORMATS = {
    "mt_bench": Format("MT-Bench", ("question_id", "category", "turns"), _mt_bench),
    "humaneval_infilling": Format(
        "HumanEval infilling", ("task_id", "prompt", "suffix", "entry_point", "test"), _humaneval, 512
    ),
    "humaneval": Format("HumanEval", ("task_id", "prompt", "entry_point", "test"), _humaneval, 512),
    "mbpp": Format("MBPP", ("task_id", "code", "test_list"), _mbpp),
    "mmlu": Format("MMLU", ("question", "choices", "answer"), _mmlu),
    "gsm8k": Format("GSM8K", ("question", "answer"), _gsm8k),
    "classeval": Format("ClassEval", ("task_id", "skeleton", "class_name"), _classeval, 2048),
    "cnn_dailymail": Format(
        "CNN/DailyMail", ("id", "article", "highlights"), functools.partial(_summary, "article", "highlights")
    ),
    "xsum": Format("XSum", ("id", "document", "summary"), functools.partial(_summary, "document", "summary")),
    "ids": Format("", ("ids",), _prompt),
    "prompts": Format("", ("prompt",), _prompt),
}
