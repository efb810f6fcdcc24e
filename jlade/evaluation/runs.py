"""Runs: the answers of several methods to the same questions, in a file that an interrupted run goes on with."""

import collections
import dataclasses
import json
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jlade import storage
from jlade.drafts.pool import NGramPool
from jlade.evaluation import infilling, quality
from jlade.evaluation.answers import Answer, EvaluatedModel
from jlade.evaluation.datasets import Question
from jlade.evaluation.methods import Method, parse
from jlade.files import append_line, written_whole
from jlade.generation import difference, text
from jlade.generation.chat_template import Message
from jlade.generation.difference import Difference

# Token ids of the messages of a conversation. A last message of the assistant is the beginning of the answer.
Encode = Callable[[Sequence[Message]], list[int]]
Key = tuple[str, str, str]  # of a result: data set, id of the question, method
VARYING = {"date", "command"}  # facts about a run that may differ when it goes on


class Cell(NamedTuple):
    """A question to be answered by a method."""

    dataset: str
    question: Question
    method: Method

    @property
    def key(self) -> Key:
        return self.dataset, self.question.id, str(self.method)


@dataclasses.dataclass(frozen=True)
class Result:
    """The answers of a method to the turns of a question."""

    dataset: str
    question: str  # the id
    task: str
    category: str
    method: str  # see `jlade.evaluation.methods.parse`
    answers: tuple[Answer, ...]  # one for each turn; none after an error
    # From plain decoding in float32; None for equal answers, and for answers at a temperature above 0.
    differences: tuple[Difference | None, ...]
    reference: str | None = None  # the summary to compare with by ROUGE
    passed: bool | None = None  # whether it passes the question's tests, or equals its answer; None if not judged
    error: str | None = None  # why the question could not be answered, such as a prompt that is too long

    @property
    def key(self) -> Key:
        return self.dataset, self.question, self.method


@dataclasses.dataclass(frozen=True)
class Run:
    """Results, and facts about their model, machine and settings."""

    about: dict[str, Any]
    results: tuple[Result, ...]


def limit(about: Mapping[str, Any]) -> str:
    """Returns the most new tokens of an answer of a run, in words."""
    most = about["max_new_tokens"]
    return "as many new tokens as the paper allows" if most == "paper" else f"up to {most} new tokens"


def reference(dtype: str) -> Method:
    """Returns plain decoding in float32, of a run in `dtype`."""
    return parse("plain:float32", dtype)


def plan(dataset: str, question: Question, methods: Sequence[Method], dtype: str) -> list[Cell]:
    """Returns the cells of a question and methods, in a run in `dtype`.

    First comes plain decoding in float32, with which all texts are compared, and whose answers the later turns of all
    methods contain; then the baselines of the methods' speed, and the methods.
    """
    baselines = [method.baseline for method in methods if method.setting is not None]
    order = dict.fromkeys([reference(dtype), *baselines, *methods]) if methods else {}
    return [Cell(dataset, question, method) for method in order]


def read(file: str | os.PathLike[str]) -> Run:
    """Returns the run in a file.

    Raises:
      ValueError: names the file and the line that is not one of a run.
    """
    path = pathlib.Path(file)
    if not path.is_file():
        raise ValueError(f"{path} is not a file with the results of `jlade bench`")
    read_lines: list[Any] = []  # the facts about the run, then the results
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            content = json.loads(line)
            read_lines.append(_result(content) if read_lines else dict(content["run"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}:{number} is not a line of a run: {error!r}") from error
    if not read_lines:
        raise ValueError(f"{path} is empty; accepted is a file written by `jlade bench`")
    return Run(read_lines[0], tuple(read_lines[1:]))


def execute(
    cells: Sequence[Cell],
    model: EvaluatedModel,
    encode: Encode,
    file: str | os.PathLike[str],
    about: Mapping[str, Any],
    seed: int = 0,
    run_code: bool = False,
) -> Iterator[Result]:
    """Answers the cells that the file does not have, writes each result when it is there, and yields it.

    A run that was interrupted goes on: its file becomes that of an uninterrupted one, times aside. The pools of methods
    with a warm pool lie in a directory next to the file.

    Args:
      cells: the questions and methods, in the order of `plan`.
      model, encode: answer them, with the chat template.
      file: JSON lines; the first one is `about`, the others are results.
      about: facts about the run. Those of an existing file must be the same, except for date and command.
      seed: of sampled texts.
      run_code: whether to run the tests of answers in code; see `jlade.evaluation.quality.passed`.

    Raises:
      ValueError: the file is of another run.
    """
    path = pathlib.Path(file)
    done = _prepare(path, about)
    pools = _Pools(path.with_suffix(".pools"), collections.Counter(method for *_, method in done))
    runner = _Runner(model, encode, pools, jax.random.key(seed), run_code, done)
    for cell in cells:
        if cell.key not in done:
            result = runner.answer(cell)
            append_line(path, json.dumps(dataclasses.asdict(result)))
            done[cell.key] = result
            pools.written(cell.method)
            yield result


def done_cells(file: str | os.PathLike[str], cells: Sequence[Cell]) -> int:
    """Returns the number of the cells that the file has."""
    path = pathlib.Path(file)
    done = {result.key for result in read(path).results} if path.exists() and _whole_lines(path) else set()
    return sum(cell.key in done for cell in cells)


def _prepare(path: pathlib.Path, about: Mapping[str, Any]) -> dict[Key, Result]:
    """Returns the results in the file after cutting off a line that an interruption left; writes a new file's head."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = _whole_lines(path) if path.exists() else []
    if not lines:
        with written_whole(path, replace=True) as file:
            file.write_text(json.dumps({"run": dict(about)}) + "\n", encoding="utf-8")
        return {}
    run = read(path)
    for name in sorted((about.keys() | run.about.keys()) - VARYING):
        if run.about.get(name) != json.loads(json.dumps(about.get(name))):
            raise ValueError(
                f"{path} holds a run with {name}={run.about.get(name)!r}, and this one has {about.get(name)!r}: name "
                "another --output, or remove the file"
            )
    os.truncate(path, sum(map(len, lines)))
    return {result.key: result for result in run.results}


def _whole_lines(path: pathlib.Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _result(content: dict[str, Any]) -> Result:
    answers = tuple(Answer(**_tuples(answer)) for answer in content.pop("answers"))
    differences = tuple(each and Difference(*each) for each in content.pop("differences"))
    return Result(**content, answers=answers, differences=differences)


def _tuples(value: Any) -> Any:
    """Returns a value of JSON with tuples in the place of lists."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class _Runner(NamedTuple):
    model: EvaluatedModel
    encode: Encode
    pools: "_Pools"
    key: jax.Array
    run_code: bool
    done: Mapping[Key, Result]

    def answer(self, cell: Cell) -> Result:
        """Returns the answers to a question, whose random key is the same for all methods."""
        dataset, question, method = cell
        plain = reference(self.model.dtype)
        baseline = None if method == plain else self.done.get((dataset, question.id, str(plain)))
        told = () if baseline is None else baseline.answers
        key = jax.random.fold_in(self.key, zlib.crc32(f"{dataset}/{question.id}".encode()))
        pool = self.pools.before(method)
        answers: list[Answer] = []
        differences: list[Difference | None] = []
        passed = error = None
        try:
            for turn in range(max(1, len(question.turns))):
                prompt = self._prompt(question, [answer.text for answer in (told or answers)[:turn]])
                known = pool if method.is_warm else None
                answer, pool = self.model.answer(prompt, method, key, known, question.choices, question.max_length)
                answers.append(answer)
                is_compared = told and not method.temperature
                differences.append(self._difference(prompt, told[turn], answer) if is_compared else None)
            passed = self._judge(question, answers[-1])
        except ValueError as refused:
            answers, differences, error = [], [], str(refused)
        self.pools.after(method, pool)
        facts = dataset, question.id, question.task, question.category, str(method)
        return Result(*facts, tuple(answers), tuple(differences), question.reference, passed, error)

    def _judge(self, question: Question, answer: Answer) -> bool | None:
        """Returns whether an answer is right, None if the question does not say it."""
        if question.choices:
            return answer.text.strip() == question.answer
        if question.answer is not None:
            return quality.last_number(answer.text) == question.answer
        if not self.run_code or question.tests is None:
            return None
        completion = answer.text
        if question.suffix is not None:
            completion = question.turns[0] + infilling.filled(self.model.tokenizer, answer.tokens) + question.suffix
        return quality.passed([completion], [question.tests])[0]

    def _prompt(self, question: Question, answers: Sequence[str]) -> Sequence[int]:
        """Returns the token ids of the turn after these answers."""
        if question.ids is not None:
            return question.ids
        if question.suffix is not None:
            return infilling.prompt(self.model.tokenizer, question.turns[0], question.suffix)
        if not question.is_chat:
            return text.encode(self.model.tokenizer, question.turns[0], parse_special=False)
        return self.encode(question.messages(answers))

    def _difference(self, prompt: Sequence[int], expected: Answer, answer: Answer) -> Difference | None:
        params, kv_dtype = self.model.params("float32"), self.model.kv_dtype
        return difference.find(params, list(prompt), expected.tokens, answer.tokens, kv_dtype)


class _Pools(NamedTuple):
    """The warm pool of each method, in a file that is replaced after each question.

    A pool is written before the result and has its number in the name; the one before it is removed after the result.
    So the number of results in the file always finds its pool.
    """

    directory: pathlib.Path
    num_results: collections.Counter[str]  # of each method, in the file of results

    def before(self, method: Method) -> NGramPool | None:
        """Returns the pool after the last question, None for a cold one."""
        file = self._files(method).get(self.num_results[str(method)])
        return None if file is None else storage.load_pool(file)

    def after(self, method: Method, pool: NGramPool | None) -> None:
        """Writes the pool after a question."""
        if method.is_warm and pool is not None:
            number = self.num_results[str(method)] + 1
            storage.save_pool(pool, self.directory / f"{_slug(method)}.{number}.safetensors")

    def written(self, method: Method) -> None:
        """Counts a result that is in the file, and removes the pools before the newest one."""
        self.num_results[str(method)] += 1
        for number, file in self._files(method).items():
            if number < self.num_results[str(method)]:
                file.unlink()

    def _files(self, method: Method) -> dict[int, pathlib.Path]:
        files = self.directory.glob(f"{_slug(method)}.*.safetensors") if method.is_warm else ()
        return {int(file.name.split(".")[-2]): file for file in files}


def _slug(method: Method) -> str:
    return re.sub(r"[^a-z0-9]+", "-", str(method))
