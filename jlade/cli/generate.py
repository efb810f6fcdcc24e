"""`jlade generate`: completions of files, of their lines, or of standard input."""

import argparse
import contextlib
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np

import jlade
from jlade import mesh
from jlade.cli import distributed, progress, status
from jlade.cli import options as options_lib
from jlade.cli.options import Prompt
from jlade.config import check_int
from jlade.generation import text
from jlade.generation.options import Keywords
from jlade.generation.prompts import round_up
from jlade.generation.request import MOST_NEW_TOKENS, SMALLEST_CAPACITY
from jlade.models.llama import LlamaParams

Record = dict[str, Any]  # a line of --json


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = options_lib.Parser(
        prog="jlade generate",
        description="Print the completion of each file, or of each line, in order.",
        epilog="Each prompt has its own random key, so that --batch-size does not change a text.",
    )
    result.add_argument("files", nargs="*", metavar="FILE", help="a prompt; - or none for standard input")
    result.add_argument("--lines", action="store_true", help="each non-blank line is a prompt")
    result.add_argument(
        "--batch-size",
        type=int,
        default=1,
        metavar="B",
        help="prompts to decode at once, each followed by the next when it ends (default: %(default)s)",
    )
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
    options_lib.add_shared(result)
    return result


class _Item(NamedTuple):
    """A prompt of the job: its number, and its tokens or the reason why it cannot be completed."""

    prompt: Prompt
    number: int  # from 0
    ids: list[int]
    error: str | None


class _Job(NamedTuple):
    """The prompts to complete, the arguments for each call, and the place of the results."""

    items: list[_Item]
    params: LlamaParams
    request: Keywords
    batch_size: int
    given: Record  # the options in the records of --output
    file: TextIO


def run(options: argparse.Namespace) -> None:
    """Runs the command. It checks all prompts before it decodes any."""
    with distributed.joined(options), contextlib.ExitStack() as stack:
        with distributed.agreed():
            request, prompts = _read(options)
        # Loading may be an exchange itself. An error there ends this process, and JAX ends the others.
        with status.show("loading") if distributed.is_first() else contextlib.nullcontext():
            params, tokenizer = options_lib.load(options)
        with distributed.agreed():
            job, num_done = _prepare(params, request | {"tokenizer": tokenizer}, prompts, options, stack)
        same = vars(options) | {"distributed": None}
        distributed.check_equal("prompts or options", (same, [item.prompt for item in job.items]))
        num_done = distributed.of_first(num_done)
        hidden = job.file.isatty()  # the completions are there to see
        advance = stack.enter_context(progress.bar(len(job.items), num_done, "prompts", hidden))
        try:
            for number in _complete(job, num_done, options):
                num_done += advance(number)
        except KeyboardInterrupt:
            print(f"{num_done} of {len(job.items)} prompts are completed", file=sys.stderr)
            raise
        if options.output:
            print(f"{options.output}: {num_done} prompts")


def _read(options: argparse.Namespace) -> tuple[Keywords, list[Prompt]]:
    """Returns the arguments for each call, and the prompts."""
    check_int("--batch-size", options.batch_size, 1)
    if options.logprobs and not (options.json or options.output):
        raise ValueError("--logprobs needs --json or --output: the text has no place for log-probabilities")
    options_lib.make_mesh(options)  # checks --mesh
    request = options_lib.request(options) | {"logprobs": options.logprobs}
    prompts = [prompt for name in options.files or ["-"] for prompt in options_lib.read_prompts(name, options.lines)]
    return request, prompts


def _prepare(
    params: LlamaParams,
    request: Keywords,
    prompts: list[Prompt],
    options: argparse.Namespace,
    stack: contextlib.ExitStack,
) -> tuple[_Job, int]:
    """Returns the job, and the number of its prompts that the file of --output has."""
    items = [_check(params, prompt, number, request, options) for number, prompt in enumerate(prompts)]
    groups = mesh.size(mesh.mesh_of(params), mesh.DATA)
    batch_size = min(options.batch_size, -(-len(items) // groups) * groups)
    given = _given(options)
    file, num_done = stack.enter_context(_opened(options.output, items, given))
    return _Job(items, params, request, batch_size, given, file), num_done


def _complete(job: _Job, num_done: int, options: argparse.Namespace) -> Iterator[int]:
    """Writes the results of the prompts that are not done, and yields the number of prompts of each piece of work."""
    as_records = options.json or options.output
    if job.batch_size == 1 and not as_records:
        for item in job.items[num_done:]:
            _stream(job, item)
            yield 1
        return
    for records in _work(job, num_done):
        for record in records:
            if as_records:
                record |= {"options": job.given} if options.output else {}
                print(json.dumps(record), file=job.file, flush=True)
            elif "text" in record:
                print(record["text"], file=job.file, flush=True)
        yield len(records)


def _work(job: _Job, num_done: int) -> Iterator[list[Record]]:
    """Yields the records of the prompts that are not done, as they come.

    Several prompts at once are the rows of an engine; several processes, which must take the same steps, have batches.
    """
    if job.batch_size > 1 and jax.process_count() == 1:
        for record in _with_engine(job, job.items[num_done:]):
            yield [record]
        return
    for begin in range(num_done, len(job.items), job.batch_size):
        yield list(_records(job, job.items[begin : begin + job.batch_size]))


def _check(params: LlamaParams, prompt: Prompt, number: int, request: Keywords, options: argparse.Namespace) -> _Item:
    """Returns the prompt with its tokens, or with its error if --skip-invalid is given."""
    tokenizer = request["tokenizer"]
    assert tokenizer is not None
    try:
        ids = text.encode(tokenizer, prompt.text)
        options_lib.check_positions(params, prompt.source, ids, options.max_new_tokens)
    except ValueError as error:
        if not options.skip_invalid:
            raise
        if distributed.is_first():
            print(f"skipped: {error}", file=sys.stderr)
        return _Item(prompt, number, [], str(error))
    return _Item(prompt, number, ids, None)


def _key(request: Keywords, item: _Item) -> jax.Array:
    """Returns the key of a prompt. The first one has that of `jlade PROMPT`, and so the same text."""
    key = request["key"]
    assert key is not None
    return jax.random.fold_in(key, item.number) if item.number else key


def _stream(job: _Job, item: _Item) -> None:
    """Prints the completion of a prompt as it is generated."""
    if item.error is not None:
        return
    with status.show("compiling and reading") if job.file.isatty() else contextlib.nullcontext():
        pieces = jlade.stream(job.params, item.ids, **(job.request | {"key": _key(job.request, item)}))
        first = next(pieces)
    for piece in itertools.chain([first], pieces):
        print(piece.text, end="", file=job.file, flush=True)
    print(file=job.file, flush=True)


def _with_engine(job: _Job, items: list[_Item]) -> Iterator[Record]:
    """Completes prompts in the rows of an engine and yields their records, also of those that cannot be completed."""
    valid = [item for item in items if item.error is None]
    options = dict(job.request)
    of_engine = {name: options.pop(name) for name in ("tokenizer", "lookahead")}
    if valid:
        keys = [np.asarray(jax.random.key_data(_key(job.request, item))) for item in valid]
        options["key"] = jax.random.wrap_key_data(jnp.asarray(np.stack(keys)))
    limit, most = options["max_new_tokens"] or MOST_NEW_TOKENS, job.params.config.max_positions
    longest = max((len(item.ids) for item in valid), default=0)
    capacity = min(round_up(longest + limit, SMALLEST_CAPACITY), most)
    with jlade.Engine(job.params, max_sequences=job.batch_size, capacity=capacity, **of_engine) as engine:
        results = engine.map([item.ids for item in valid], **options) if valid else iter(())
        for item in items:
            yield _record(item, None if item.error is not None else _completion(next(results), 0))


def _records(job: _Job, batch: list[_Item]) -> Iterator[Record]:
    """Completes a batch and yields the records of its prompts, also of those that cannot be completed."""
    valid = [item for item in batch if item.error is None]
    if valid:
        # The first prompt fills up the batch, as programs are compiled for a batch size.
        filled = valid + valid[:1] * (job.batch_size - len(valid))
        keys = jnp.stack([_key(job.request, item) for item in filled])
        out = jlade.generate(job.params, [item.ids for item in filled], **(job.request | {"key": keys}))
    sequence = itertools.count()
    for item in batch:
        yield _record(item, None if item.error is not None else _completion(out, next(sequence)))


def _record(item: _Item, completion: Record | None) -> Record:
    result = {"error": item.error} if completion is None else completion
    return {"source": item.prompt.source, "prompt": item.prompt.text, **result}


def _completion(out: jlade.Generation, i: int) -> Record:
    length = int(out.lengths[i])
    record = {
        "text": out.text[i],
        "token_ids": out.tokens[i, :length].tolist(),
        "finish_reason": out.finish_reason[i],
        "tokens": length,
        "steps": int(out.steps[i]),
        "compression": float(out.compression[i]),
    }
    return record if out.logprobs is None else record | {"logprobs": out.logprobs[i, :length].tolist()}


@contextlib.contextmanager
def _opened(output: str | None, job: list[_Item], given: Record) -> Iterator[tuple[TextIO, int]]:
    """Yields the file to write to, standard output by default, and the number of prompts that it has already.

    Process 0 alone writes to the file of --output.
    """
    if output is None or not distributed.is_first():
        yield sys.stdout, 0
        return
    path = pathlib.Path(output)
    if path.exists() and not path.is_file():
        raise ValueError(f"--output must be a file, got {output}")
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]  # an interruption may leave a part of a line
    for number, line in enumerate(whole, start=1):
        if number > len(job) or not _is_record_of(job[number - 1].prompt, given, line):
            raise ValueError(
                f"{path}:{number} is not the record of this job's prompt {number} with these options; name another "
                "file, or remove this one"
            )
    with path.open("a", encoding="utf-8") as file:
        file.truncate(sum(map(len, whole)))
        yield file, len(whole)


def _is_record_of(prompt: Prompt, given: Record, line: bytes) -> bool:
    expected = {"source": prompt.source, "prompt": prompt.text, "options": given}
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and expected.items() <= record.items()


def _given(options: argparse.Namespace) -> Record:
    """Returns the options that decide the texts, if they are not the defaults."""
    defaults = vars(parser().parse_args([]))
    others = ("files", "lines", "output", "skip_invalid", "batch_size", "json", "debug", "mesh", "distributed")
    given = {name: value for name, value in vars(options).items() if value != defaults[name]}
    return {name: value for name, value in given.items() if name not in others}
