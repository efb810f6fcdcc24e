"""`jlade generate`: completions of files, of their lines, of records in JSON lines, or of standard input."""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

import jlade
from jlade import mesh
from jlade.cli import arguments, distributed, terminal
from jlade.cli.arguments import FilePrompt
from jlade.errors import check_int
from jlade.files import append_line
from jlade.generation import prompts as prompts_lib
from jlade.generation import text
from jlade.generation.options import Keywords
from jlade.generation.prompts import DEFAULT_NEW_TOKENS, SMALLEST_CAPACITY, round_up
from jlade.generation.results import FAILURES
from jlade.models.llama import LlamaParams
from jlade.server import records
from jlade.server.protocol import Completion
from jlade.server.records import Record

Line = dict[str, Any]  # of --json
Result = tuple["_Item", jlade.Generation | None]  # None for a prompt that cannot be completed


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = arguments.Parser(
        prog="jlade generate",
        description="Print the completion of each file, line or record, in order. A file whose name ends in .jsonl "
        "holds records: objects with prompt or messages and other fields of OpenAI's interface, or lines of OpenAI's "
        "batches. The options below are the defaults of these fields.",
        epilog="Each prompt has its own random key, so that --batch-size does not change a text.",
        examples=[
            "jlade generate notes.py --max-new-tokens 64",
            "jlade generate prompts.txt --lines --batch-size 8 --output texts.jsonl",
        ],
    )
    result.add_argument("files", nargs="*", metavar="FILE", help="file with a prompt; - or none for standard input")
    result.add_argument("--lines", action="store_true", help="each non-blank line is a prompt")
    at_once = "prompts to decode at once, each followed by the next when it ends"
    arguments.add_integer(result, "--batch-size", "B", at_once, 1)
    result.add_argument("--json", action="store_true", help="print a line with a JSON object for each prompt")
    result.add_argument("--logprobs", action="store_true", help="add the tokens' log-probabilities to --json")
    result.add_argument(
        "--output",
        metavar="FILE",
        help="write the lines of --json to FILE, each as soon as it is there; a job that was interrupted goes on after "
        "the lines that FILE has",
    )
    result.add_argument(
        "--skip-invalid", action="store_true", help="report a prompt that cannot be completed, and go on without it"
    )
    distributed.add_arguments(result)
    arguments.add_shared(result, has_batches=True)
    arguments.add_grammar(result)
    arguments.add(result, "--programs")
    return result


class _Item(NamedTuple):
    """A prompt of the job: its number, and its tokens and options or the reason why it cannot be completed."""

    prompt: FilePrompt | Record
    number: int  # from 0
    ids: list[int]
    options: Keywords  # of its own
    completion: Completion | None  # by a record
    error: str | None


class _Job(NamedTuple):
    """The prompts to complete, the arguments for each call, and the file of the results."""

    items: list[_Item]
    params: LlamaParams
    request: Keywords
    batch_size: int
    given: Line  # the options in the lines of --output
    output: pathlib.Path | None  # standard output if None


def run(options: argparse.Namespace) -> None:
    """Runs the command. It checks all prompts before it decodes any.

    Raises:
      FloatingPointError: at the end, if texts ended for one of `FAILURES`.
    """
    with distributed.joined(options), contextlib.ExitStack() as stack:
        with distributed.agreed():
            request, prompts = _read(options)
        # Loading may be an exchange itself. An error there ends this process, and JAX ends the others.
        with terminal.Status("loading") if distributed.is_first() else contextlib.nullcontext():
            params, tokenizer = arguments.load(options)
        with distributed.agreed():
            job, num_done = _prepare(params, request | {"tokenizer": tokenizer}, prompts, options)
        same = vars(options) | {"distributed": None}
        distributed.check_equal("prompts or options", (same, [item.prompt for item in job.items]))
        num_done = distributed.of_first(num_done)
        hidden = job.output is None and sys.stdout.isatty()  # the completions are there to see
        advance = stack.enter_context(terminal.bar(len(job.items), num_done, "prompts", hidden))
        failed: list[str] = []
        try:
            for reasons in _complete(job, num_done, options):
                advance(len(reasons))
                num_done += len(reasons)
                failed += [FAILURES[reason] for reason in reasons if reason in FAILURES]
        except KeyboardInterrupt:
            print(f"{num_done} of {len(job.items)} prompts are completed", file=sys.stderr)
            raise
        if options.output:
            print(f"{options.output}: {num_done} prompts")
        if failed:
            why = "; ".join(dict.fromkeys(failed))
            raise FloatingPointError(f"{len(failed)} of {len(job.items)} texts ended early: {why}")


def _read(options: argparse.Namespace) -> tuple[Keywords, list[FilePrompt | Record]]:
    """Returns the arguments for each call, and the prompts."""
    check_int("--batch-size", options.batch_size, 1)
    if options.logprobs and not (options.json or options.output):
        raise ValueError("--logprobs needs --json or --output: the text has no place for log-probabilities")
    arguments.make_mesh(options)  # checks --mesh
    names = options.files or ["-"]
    of_records = [name.endswith(records.SUFFIX) for name in names]
    request = arguments.request(options, are_defaults=any(of_records)) | {"logprobs": options.logprobs}
    request |= {"grammar": arguments.grammar(options), "programs": options.programs}
    prompts: list[FilePrompt | Record] = []
    for name, has_records in zip(names, of_records, strict=True):
        if has_records:
            prompts += records.parse(name, arguments.read(name))
        else:
            prompts += arguments.read_prompts(name, options.lines)
    return request, prompts


def _prepare(
    params: LlamaParams,
    request: Keywords,
    prompts: list[FilePrompt | Record],
    options: argparse.Namespace,
) -> tuple[_Job, int]:
    """Returns the job, and the number of its prompts that the file of --output has."""
    directory, capacity = functools.partial(arguments.find, options), params.decoder.max_positions
    reader, ids = records.RecordReader(params, request, directory, capacity), records.CustomIds()
    checked = (_check(params, prompt, number, request, options, reader, ids) for number, prompt in enumerate(prompts))
    items = [item for item in checked if item is not None]
    completions = (item.completion for item in items if item.completion is not None)
    request |= {"logprobs": options.logprobs or any(completion.options.get("logprobs") for completion in completions)}
    groups = mesh.size(mesh.mesh_of(params), mesh.DATA)
    batch_size = options.batch_size
    if options.programs is None:  # which are for as many prompts
        batch_size = min(batch_size, -(-len(items) // groups) * groups)
    given = _given(options)
    output = pathlib.Path(options.output) if options.output and distributed.is_first() else None
    num_done = 0 if output is None else _num_done(output, items, given)
    return _Job(items, params, request, batch_size, given, output), num_done


def _complete(job: _Job, num_done: int, options: argparse.Namespace) -> Iterator[list[str | None]]:
    """Writes the results of the prompts that are not done, and yields why the texts of each piece of work ended.

    It is None for a prompt that cannot be completed.
    """
    as_lines = options.json or options.output
    if job.batch_size == 1 and not as_lines:
        for item in job.items[num_done:]:
            yield [_stream(job, item)]
        return
    for results in _work(job, num_done):
        for item, out in results:
            if as_lines:
                _write(job, json.dumps(_line(job, item, out, options)))
            elif out is not None:
                print(out.text[0], flush=True)
        yield [None if out is None else out.finish_reason[0] for _, out in results]


def _work(job: _Job, num_done: int) -> Iterator[list[Result]]:
    """Yields the results of the prompts that are not done, as they come.

    Several prompts at once are the rows of an engine. Several processes, which must take the same steps, have batches,
    and so have the constraints of a checkpoint.
    """
    if job.batch_size > 1 and jax.process_count() == 1 and not job.request["constraint"]:
        for result in _with_engine(job, job.items[num_done:]):
            yield [result]
        return
    for begin in range(num_done, len(job.items), job.batch_size):
        yield list(_with_batch(job, job.items[begin : begin + job.batch_size]))


def _check(
    params: LlamaParams,
    prompt: FilePrompt | Record,
    number: int,
    request: Keywords,
    options: argparse.Namespace,
    reader: records.RecordReader,
    custom_ids: records.CustomIds,
) -> _Item | None:
    """Returns the prompt with its tokens, or with its error if --skip-invalid is given.

    A record with the custom_id of an earlier one is then None: who joins results by their ids finds one line for each.
    """
    completion = None
    try:
        if isinstance(prompt, Record):
            custom_ids.add(prompt)
            ids, own, completion = reader.read(prompt)
            if completion.tools is not None and not (options.json or options.output):
                raise ValueError(f"{prompt.source}: tools need --json or --output: the text has no place for calls")
        else:
            ids = text.encode(request["tokenizer"], prompt.text)
            arguments.check_positions(params, prompt.source, ids, options.max_new_tokens)
            own = _own(params, ids, request)
    except ValueError as error:
        if not options.skip_invalid:
            raise
        if distributed.is_first():
            print(f"skipped: {error}", file=sys.stderr)
        if isinstance(error, records.DuplicateError):
            return None
        return _Item(prompt, number, [], {}, None, str(error))
    # The first prompt has the key of `jlade PROMPT`, and so the same text.
    return _Item(prompt, number, ids, {"key": records.key(request["key"], number)} | own, completion, None)


def _own(params: LlamaParams, ids: list[int], request: Keywords) -> Keywords:
    """Returns the options of a prompt that has none of its own, as a record has them."""
    limit = request["max_new_tokens"] or min(DEFAULT_NEW_TOKENS, params.decoder.max_positions - len(ids))
    own = {name: request[name] for name in ("sampling", "min_new_tokens", "grammar")}
    stop = request["stop"] or params.decoder.stop_strings
    return own | {"max_new_tokens": limit, "stop": stop, "eos_ids": params.decoder.eos_ids}


def _stream(job: _Job, item: _Item) -> str | None:
    """Prints the completion of a prompt as it is generated, and returns why it ended."""
    if item.error is not None:
        return None
    with terminal.Status("compiling and reading") if sys.stdout.isatty() else contextlib.nullcontext():
        pieces = jlade.stream(job.params, prompts_lib.whole([item.ids]), **(job.request | item.options))
        first = next(pieces)
    for piece in itertools.chain([first], pieces):
        print(piece.text, end="", flush=True)
    print(flush=True)
    reason: str = piece.generation.finish_reason[0]
    return reason


def size_of_engine(batch_size: int, longest: int, max_positions: int) -> Keywords:
    """Returns the arguments of the engine for prompts and texts of as many tokens."""
    return {"max_sequences": batch_size, "capacity": min(round_up(longest, SMALLEST_CAPACITY), max_positions)}


def _with_engine(job: _Job, items: list[_Item]) -> Iterator[Result]:
    """Completes prompts in the rows of an engine and yields the results, also of those that cannot be completed."""
    valid = [item for item in items if item.error is None]
    options = job.request | records.together([item.options for item in valid])
    del options["constraint"]
    of_engine = {name: options.pop(name) for name in ("tokenizer", "lookahead", "prior", "kv_dtype", "programs")}
    longest = max((len(item.ids) + item.options["max_new_tokens"] for item in valid), default=0)
    size = size_of_engine(job.batch_size, longest, job.params.config.max_positions)
    with jlade.Engine(job.params, **size, **of_engine) as engine:
        results = engine.map(prompts_lib.whole([item.ids for item in valid]), **options) if valid else iter(())
        for item in items:
            out = None if item.error is not None else next(results)
            if isinstance(out, Exception):
                raise out
            yield item, out


def _with_batch(job: _Job, items: list[_Item]) -> Iterator[Result]:
    """Completes a batch and yields the results of its prompts, also of those that cannot be completed."""
    valid = [item for item in items if item.error is None]
    if valid:
        # The first prompt fills up the batch, as programs are compiled for a batch size.
        filled = valid + valid[:1] * (job.batch_size - len(valid))
        options = job.request | records.together([item.options for item in filled])
        out = jlade.generate(job.params, prompts_lib.whole([item.ids for item in filled]), **options)
    sequence = itertools.count()
    for item in items:
        yield item, None if item.error is not None else _one(out, next(sequence))


def _one(out: jlade.Generation, i: int) -> jlade.Generation:
    """Returns the result of one sequence of a batch."""
    names = "tokens", "lengths", "steps", "accepted", "finish_reason", "text", "logprobs"
    arrays = {name: array[i : i + 1] for name in names if (array := getattr(out, name)) is not None}
    return dataclasses.replace(out, **arrays)


def _line(job: _Job, item: _Item, out: jlade.Generation | None, options: argparse.Namespace) -> Line:
    """Returns the result of a prompt as a line of --json."""
    if isinstance(item.prompt, Record):
        line = records.result(item.prompt, job.given, job.request, item.completion, out, item.error)
        if item.prompt.is_of_batch:
            return line
    else:
        line = _identity(item.prompt, job.given)
        line |= {"error": item.error} if out is None else records.text_fields(out, options.logprobs)
    return line if options.output else {name: value for name, value in line.items() if name != "options"}


def _write(job: _Job, line: str) -> None:
    if job.output is None:
        print(line, flush=True)
    else:
        append_line(job.output, line)


def _num_done(path: pathlib.Path, job: list[_Item], given: Line) -> int:
    """Returns the number of prompts that the file of --output has. Cuts off the part of a line after them."""
    if path.exists() and not path.is_file():
        raise ValueError(f"--output must be a file, got {path}")
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    for number, line in enumerate(whole, start=1):
        if number > len(job) or not records.is_line_of(_identity(job[number - 1].prompt, given), line):
            raise ValueError(
                f"{path}:{number} is not the record of this job's prompt {number} with these options; name another "
                "file, or remove this one"
            )
    with path.open("a", encoding="utf-8") as file:  # also shows whether it can be written
        file.truncate(sum(map(len, whole)))
    return len(whole)


def _identity(prompt: FilePrompt | Record, given: Line) -> Line:
    """Returns the part of a line that shows which prompt and which options it is of."""
    if isinstance(prompt, Record):
        return prompt.identity(given)
    return {"source": prompt.source, "prompt": prompt.text, "options": given}


def _given(options: argparse.Namespace) -> Line:
    """Returns the options that decide the texts, if they are not the defaults."""
    defaults = vars(parser().parse_args([]))
    of_files = {"files", "lines", "output", "json", "skip_invalid"}
    of_process = {"batch_size", "debug", "mesh", "strict", "distributed", "programs"}
    given = {name: value for name, value in vars(options).items() if value != defaults[name]}
    return {name: value for name, value in given.items() if name not in of_files | of_process}
