"""Files of records completed by the workers of Ray Data: the lines of `jlade generate --output`, in many files.

    parts = data.parts(["prompts.jsonl"], "answers", size=1024)
    done = parts.map_batches(
        data.Completer,
        batch_size=1,
        fn_constructor_kwargs={"model": "path/to/hf-llama", "rows": 64},
        compute=ray.data.ActorPoolStrategy(size=8, max_concurrent_calls_per_actor=2),
        num_gpus=1,
        max_task_retries=2,
    )
    for row in done.iter_rows():
        print(row)

A part is some consecutive records. It is complete as soon as its file is there, which appears whole, under a name that
says which records it has. So nothing else is remembered: a worker that gets a part, in another run or after another
worker died, finds its file or makes it. The files, sorted by name, have the job's lines in the order of its records.
"""

import asyncio
import dataclasses
import functools
import json
import logging
import os
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

import jlade
from jlade.conversion import location
from jlade.errors import check_int
from jlade.files import written_whole
from jlade.generation import prompts
from jlade.generation.results import Generation
from jlade.integrations.ray import MISSING
from jlade.integrations.ray import model as model_lib
from jlade.server import records
from jlade.server.fields import Body
from jlade.server.protocol import Completion
from jlade.server.records import Record

BYTE_ORDER_MARK = "\ufeff"  # of UTF-8, which is no text
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FilePart:
    """Consecutive records of a file, which one file of results has: a row of `parts`.

    Attributes:
      name: of the file, as the results have it.
      file: the same as a path that holds on all machines.
      begin, end: of the part, in bytes of the file.
      line: the first one, from 1.
      number: of its first record among all of the job, from 0.
      output: the file of results.
    """

    name: str
    file: str
    begin: int
    end: int
    line: int
    number: int
    output: str

    def records(self) -> list[Record]:
        """Returns the records."""
        with open(self.file, "rb") as file:
            file.seek(self.begin)
            text = file.read(self.end - self.begin).decode()
        return records.parse(self.name, text.removeprefix(BYTE_ORDER_MARK), self.line)


class _Span(NamedTuple):
    begin: int
    end: int
    line: int
    num_records: int


def parts(files: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], *, size: int = 1024) -> Any:
    """Returns a `ray.data.Dataset` of the parts of a job, each a block, for `Completer`.

    Every machine must reach the files and the directory under the same paths.

    Args:
      files: of records in JSON lines, see `docs/usage.md`; all in all the job, in this order.
      output: a directory for the results. Files of an earlier run of the same job stay, and their parts are complete.
      size: records of a part, the last one of a file has fewer. Of a worker that dies, the parts in its hands are lost.

    Raises:
      ValueError: a file cannot be read, is not UTF-8 or is empty; `output` has files of another job or another `size`.
      ImportError: Ray is not installed.
    """
    check_int("size", size, 1)
    try:
        import ray
    except ImportError as error:
        raise ImportError(MISSING.format(error)) from error
    scan = ray.remote(_spans).options(num_cpus=1)
    try:
        found = ray.get([scan.remote(os.fspath(file), os.path.abspath(file), size) for file in files])
    except ray.exceptions.RayTaskError as error:
        raise ValueError(str(error.cause)) from None
    rows = [dataclasses.asdict(part) for part in _number(files, found, output)]
    return ray.data.from_items(rows, override_num_blocks=len(rows))


def _number(
    files: Sequence[str | os.PathLike[str]], spans: Sequence[Sequence[_Span]], output: str | os.PathLike[str]
) -> list[FilePart]:
    """Returns the parts of a job, numbered, after a look at what `output` has."""
    if not files:
        raise ValueError("files must be at least one, got none")
    directory, number, found = pathlib.Path(output).absolute(), 0, []
    for file, of_file in zip(files, spans, strict=True):
        for begin, end, line, num_records in of_file:
            name = f"{number:012}-{num_records}.jsonl"
            place = os.path.abspath(file)
            found.append(FilePart(os.fspath(file), place, begin, end, line, number, str(directory / name)))
            number += num_records
    expected = {part.output for part in found}
    for path in sorted(directory.glob("[0-9]*.jsonl")):
        if str(path) not in expected:
            raise ValueError(
                f"output {os.fspath(output)!r} has {path.name}, which is no part of this job: name another directory, "
                "or give the files and the size of the job that wrote it"
            )
    return found


def _spans(name: str, file: str, size: int) -> list[_Span]:
    """Returns the parts of a file, errors call it `name`."""
    spans, begin, first, place, line, count = [], 0, 1, 0, 0, 0
    try:
        with open(file, "rb") as opened:
            for line, content in enumerate(opened, start=1):
                if count == size:
                    spans.append(_Span(begin, place, first, count))
                    begin, first, count = place, line, 0
                place += len(content)
                count += bool(content.decode().removeprefix(BYTE_ORDER_MARK).strip())
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}:{line} is not UTF-8: {error}") from error
    if count:
        spans.append(_Span(begin, place, first, count))
    if not spans:
        raise ValueError(f"{name} is empty; it must hold a record in each line")
    return spans


class Completer:
    """Completes parts of a job in the rows of an engine: a class for `map_batches` of the dataset of `parts`.

    Each text is that of `jlade.generate` alone with the options of its record, and each line that of
    `jlade generate FILES --skip-invalid --output` with these options, but for numbers of steps.

    A call takes a batch of parts and returns a row for each: `output`, the number of its `lines`, how many of them have
    an error (`refused`), and whether they were there before (`kept`). The file is on the disk before Ray has the row.
    Calls overlap with `max_concurrent_calls_per_actor` of 2 or more: the last texts of a part leave engine rows idle,
    which the next part fills.

    Args:
      model: as in `jlade.load`.
      rows: prompts decoded at once, `max_sequences` of `jlade.Engine`.
      capacity: most tokens of a prompt and its text, as in `jlade.Engine`.
      dtype: of the weights, as in `jlade.load`; by default float32 on CPUs and bfloat16 elsewhere.
      revision: as in `jlade.load`.
      mesh: sizes of `jlade.make_mesh` for the devices of a worker, such as `{"model": 4}`.
      lookahead: "auto", a setting as `--lookahead` takes it, such as "tree=119", or None for plain decoding.
      kv_dtype: as in `jlade.Engine`.
      max_new_tokens: of a record without a limit; by default what fits, up to 256.
      seed: of the records without one, each of which draws noise of its own.

    Raises:
      TypeError, ValueError: name the argument, its value and what is accepted.
    """

    def __init__(
        self,
        model: str,
        *,
        rows: int = 8,
        capacity: int | None = None,
        dtype: str | None = None,
        revision: str | None = None,
        mesh: Mapping[str, int] | None = None,
        lookahead: str | None = "auto",
        kv_dtype: Literal["int8", "float8_e4m3fn"] | None = None,
        max_new_tokens: int | None = None,
        seed: int | None = None,
    ):
        if max_new_tokens is not None:
            check_int("max_new_tokens", max_new_tokens, 1)
        if seed is not None:
            check_int("seed", seed, 0, 2**32 - 1)
        setting = model_lib.setting(lookahead)
        if jlade.load_constraints(model, revision=revision):
            raise ValueError(
                f"model {model!r} has constraints in its generation_config.json, which an engine does not follow: "
                "`jlade generate` does"
            )
        params, tokenizer = model_lib.load(model, dtype, revision, mesh)
        self._engine = jlade.Engine(
            params, tokenizer, max_sequences=rows, capacity=capacity, lookahead=setting, kv_dtype=kv_dtype
        )
        # The options that decide the texts, if they are not the defaults, under the command's names.
        named = {"model": model, "revision": revision, "dtype": dtype, "kv_dtype": kv_dtype, "seed": seed}
        named |= {"max_new_tokens": max_new_tokens, "no_lookahead": True if lookahead is None else None}
        named |= {"lookahead": None if lookahead == "auto" else lookahead}
        self._given = {name: value for name, value in named.items() if value is not None}
        self._key = jax.random.key(seed or 0)
        self._request = {
            "tokenizer": tokenizer,
            "sampling": jlade.load_sampling(model, revision=revision),
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": 0,
            "stop": None,
            "grammar": None,
            "logprobs": False,
        }
        directory = functools.partial(location.find, model, revision)
        self._reader = records.RecordReader(params, self._request, directory, self._engine.capacity)
        self._reading = threading.Lock()

    async def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Completes the parts of a batch, columns of `Part`'s attributes; see the class for the columns returned."""
        rows = zip(*(np.asarray(batch[field.name]).tolist() for field in dataclasses.fields(FilePart)), strict=True)
        done = await asyncio.gather(*(asyncio.to_thread(self._complete, FilePart(*row)) for row in rows))
        return {name: [each[name] for each in done] for name in ("output", "lines", "refused", "kept")}

    def _complete(self, part: FilePart) -> dict[str, Any]:
        job = _without_repeated_ids(part.records())
        output = pathlib.Path(part.output)
        kept = output.exists()
        if kept:
            lines = self._check(job, output)
        else:
            lines = self._lines(job, part.number)
            # If a worker that was taken for dead writes the file too, the lines of one of them stay.
            with written_whole(output, replace=True) as file:
                file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        return {"output": part.output, "lines": len(lines), "refused": sum(map(_is_refused, lines)), "kept": kept}

    def _check(self, job: list[tuple[int, Record]], output: pathlib.Path) -> list[Body]:
        """Returns the lines of a file, if they are those of these records with these options."""
        lines = output.read_bytes().splitlines()
        identities = [record.identity(self._given) for _, record in job]
        for number, line in enumerate(lines, start=1):
            if number > len(job) or not records.is_line_of(identities[number - 1], line):
                raise ValueError(
                    f"{output}:{number} is not the result of this job's record with these options; name another "
                    "directory, or remove this file"
                )
        if len(lines) < len(job):
            raise ValueError(f"{output} has {len(lines)} lines for {len(job)} records; remove it")
        return [json.loads(line) for line in lines]

    def _lines(self, job: list[tuple[int, Record]], first: int) -> list[Body]:
        """Returns the results of records; `first` is the number of the part's first one in the job."""
        with self._reading:
            read = [self._read(record, first + index) for index, record in job]
        valid = [each for each in read if not isinstance(each, str)]
        found: list[Generation | Exception] = []
        if valid:
            options: Any = records.together([options for _, options, _ in valid])
            options["logprobs"] = any(completion.options.get("logprobs") for _, _, completion in valid)
            found = self._engine.generate(prompts.whole([ids for ids, _, _ in valid]), **options)
        generations = iter(found)
        lines = []
        for (_, record), each in zip(job, read, strict=True):
            if isinstance(each, str):
                lines.append(records.result(record, self._given, self._request, None, None, each))
                continue
            out = next(generations)
            if isinstance(out, Exception):
                lines.append(records.result(record, self._given, self._request, None, None, str(out)))
            else:
                lines.append(records.result(record, self._given, self._request, each[2], out))
        return lines

    def _read(self, record: Record, number: int) -> tuple[list[int], dict[str, Any], Completion] | str:
        """Returns the token ids of a record, its options and all that it asks for, or why it cannot be completed."""
        try:
            ids, options, completion = self._reader.read(record)
        except ValueError as error:
            return str(error)
        return ids, {"key": records.key(self._key, number)} | options, completion


def _without_repeated_ids(job: list[Record]) -> list[tuple[int, Record]]:
    """Returns the records with their places, but for those with the custom_id of an earlier one."""
    custom_ids, kept = records.CustomIds(), []
    for index, record in enumerate(job):
        try:
            custom_ids.add(record)
        except records.DuplicateError as error:
            log.warning("skipped: %s", error)
        else:
            kept.append((index, record))
    return kept


def _is_refused(line: Body) -> bool:
    """Returns whether a line has an error and no text."""
    response = line.get("response")
    return "error" in line if response is None else response["status_code"] != 200
