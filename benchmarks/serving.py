"""Load on a server: many clients, mixed requests, a part of them cancelled, against the texts of `jlade.generate`.

    python benchmarks/serving.py --json results.json

It starts `jlade serve` and sends --at-once requests together, then --in-sequence more from --clients clients, each of
which waits for its answer. Requests differ in prompt, length, sampling, stop strings and form, whole or streamed. A
tenth goes away in mid-stream. Each text has to be that of `jlade.generate` alone with its seed, its number of tokens
too. Afterwards no row may be taken, and the memory of the server and the programs that it compiled are noted.

The requests at once are also decoded by `jlade.generate` in static batches of as many rows, in order of arrival, as the
throughput to compare with.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

sys.path[0] = str(pathlib.Path(__file__).parent.parent)  # import from the repository, not from this folder

import httpx
import jax
import numpy as np

import jlade
from benchmarks import report
from jlade import SamplingConfig
from jlade.evaluation import datasets
from jlade.generation import text

CAPACITY = 1024
KINDS = 48  # different requests


@dataclasses.dataclass(frozen=True)
class Kind:
    """A request, and the text that it has to get."""

    body: dict[str, Any]  # of /v1/completions
    options: dict[str, Any]  # of `jlade.generate`
    expected: str = ""
    num_tokens: int = 0


@dataclasses.dataclass
class Answer:
    """The answer to a request, and its times in seconds."""

    kind: Kind
    is_cancelled: bool
    text: str = ""
    num_tokens: int | None = None
    first: float | None = None  # to the first text, of streams
    gaps: list[float] = dataclasses.field(default_factory=list)  # between pieces, of streams
    whole: float = 0.0


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=8, metavar="B")
    parser.add_argument("--at-once", type=int, default=200, metavar="N")
    parser.add_argument("--in-sequence", type=int, default=2000, metavar="N")
    parser.add_argument("--clients", type=int, default=16, metavar="N")
    parser.add_argument("--cancelled", type=float, default=0.1, metavar="SHARE")
    options = parser.parse_args()

    params, tokenizer = report.load(options.model)
    kinds = [_complete(params, tokenizer, kind) for kind in _kinds(tokenizer)]
    chance = np.random.default_rng(1)

    def draw(number: int) -> list[tuple[Kind, bool]]:
        return [(kinds[chance.integers(KINDS)], bool(chance.random() < options.cancelled)) for _ in range(number)]

    at_once, in_sequence = draw(options.at_once), draw(options.in_sequence)
    with tempfile.TemporaryFile("w+") as log:
        figures = asyncio.run(_load(options, at_once, in_sequence, log))
    figures["static"] = _static(params, tokenizer, [kind for kind, _ in at_once], options.rows)
    figures["ratio"] = figures["at_once"]["tokens_per_second"] / figures["static"]["tokens_per_second"]
    print(json.dumps(figures, indent=1))
    report.write(options.json, vars(options) | figures)


def _kinds(tokenizer: text.Tokenizer) -> Iterator[Kind]:
    """Yields requests without their texts: half of them greedy, the others with seeds and all kinds of controls."""
    chance = np.random.default_rng(0)
    questions = [question.turns[0] for each in datasets.samples() for question in each.questions]
    samplings: list[dict[str, Any]] = [
        {},
        {},
        {"presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.8, "min_p": 0.05, "repetition_penalty": 1.1},
    ]
    for number in range(KINDS):
        ids = text.encode(tokenizer, questions[number % len(questions)])[-256:]
        sampling = samplings[number % len(samplings)]
        limit, seed = int(chance.integers(4, 128)), int(chance.integers(2**31))
        stop = ["\n\n"] if chance.random() < 0.3 else []
        common = {"prompt": ids, "stop": stop}
        body = common | {"max_tokens": limit, "seed": seed, "stream": bool(chance.random() < 0.8), "temperature": 0}
        options = common | {"max_new_tokens": limit, "key": jax.random.key(seed)}
        yield Kind(body | sampling, options | {"sampling": SamplingConfig(**sampling)})


def _complete(params: Any, tokenizer: text.Tokenizer, kind: Kind) -> Kind:
    """Returns a request with the text of plain decoding."""
    given = dict(kind.options)
    out = jlade.generate(params, given.pop("prompt"), lookahead=None, tokenizer=tokenizer, **given)
    return dataclasses.replace(kind, expected=out.text[0], num_tokens=int(out.lengths[0]))


async def _load(
    options: argparse.Namespace, at_once: list[tuple[Kind, bool]], in_sequence: list[tuple[Kind, bool]], log: Any
) -> dict[str, Any]:
    """Serves, sends the requests, and returns figures of the answers and of the server."""
    model = [] if options.model == "demo" else [options.model]
    command = ["serve", *model, "--port", "0", "--max-sequences", str(options.rows), "--capacity", str(CAPACITY)]
    server = subprocess.Popen(
        [sys.executable, "-m", "jlade", *command],
        stdout=log,
        stderr=log,
        env=os.environ | {"JAX_LOG_COMPILES": "1"},
    )
    try:
        begin = time.perf_counter()
        address = await _address(server, log)
        seconds = time.perf_counter() - begin
        compiled = _num_compiled(log)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=address, timeout=3600, limits=limits) as client:
            name = (await client.get("/v1/models")).json()["data"][0]["id"]
            for kind, _ in at_once + in_sequence:
                kind.body["model"] = name
            figures: dict[str, Any] = {"seconds_to_start": seconds, "programs": compiled}
            figures["at_once"] = await _phase(client, at_once, len(at_once))
            memory = [await _memory(server.pid)]
            for part in np.array_split(np.arange(len(in_sequence)), 4):
                figures[f"in_sequence_{len(memory)}"] = await _phase(
                    client, [in_sequence[i] for i in part], options.clients
                )
                memory.append(await _memory(server.pid))
            figures["megabytes"] = memory
            figures["compilations"] = _num_compiled(log) - compiled
            metrics = (await client.get("/metrics")).text
            running = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} ([\d.]+)$", metrics, re.MULTILINE)
            assert [float(number) for number in running] == [0, 0], metrics
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        return figures
    except BaseException:
        log.seek(0)
        print(log.read()[-5000:], file=sys.stderr)
        raise
    finally:
        server.kill()
        server.wait()


async def _address(server: subprocess.Popen[bytes], log: Any) -> str:
    """Waits until the server listens."""
    while server.poll() is None:
        log.seek(0)
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read())
        if found:
            return found[0]
        await asyncio.sleep(0.5)
    raise RuntimeError(f"the server ended with {server.returncode}")


def _num_compiled(log: Any) -> int:
    log.seek(0)
    return log.read().count("Finished XLA compilation")


async def _memory(pid: int) -> int:
    """Returns the resident memory of a process in megabytes, after the time in which it gives free memory back."""
    await asyncio.sleep(12)
    status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) // 1024  # type: ignore[index]


async def _phase(client: httpx.AsyncClient, requests: list[tuple[Kind, bool]], number: int) -> dict[str, Any]:
    """Sends requests, `number` of them at any time, checks the answers and returns figures."""
    begin, left, answers = time.perf_counter(), iter(requests), []

    async def work() -> None:
        for kind, is_cancelled in left:
            answers.append(await _ask(client, kind, is_cancelled))

    await asyncio.gather(*(work() for _ in range(number)))
    seconds = time.perf_counter() - begin
    wrong = [answer for answer in answers if not _is_right(answer)]
    assert not wrong, f"{len(wrong)} of {len(answers)} answers are wrong, such as {wrong[0]}"
    whole = [answer for answer in answers if not answer.is_cancelled]
    first = [answer.first for answer in answers if answer.first is not None]
    tokens = sum(answer.kind.num_tokens for answer in whole)
    return {
        "requests": len(answers),
        "cancelled": len(answers) - len(whole),
        "seconds": seconds,
        "tokens": tokens,  # of whole answers
        "tokens_per_second": tokens / seconds,
        "first_token_seconds": _percentiles(first),
        "between_pieces_seconds": _percentiles([gap for answer in answers for gap in answer.gaps]),
        "request_seconds": _percentiles([answer.whole for answer in whole]),
    }


def _is_right(answer: Answer) -> bool:
    """Returns whether a text is the expected one, or its beginning if the client went away."""
    if answer.is_cancelled:
        return answer.kind.expected.startswith(answer.text)
    return (answer.text, answer.num_tokens) == (answer.kind.expected, answer.kind.num_tokens)


def _percentiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{percent}": float(np.percentile(seconds, percent)) for percent in (50, 90, 99)}


async def _ask(client: httpx.AsyncClient, kind: Kind, is_cancelled: bool) -> Answer:
    """Sends a request; one that is cancelled goes away after its first text."""
    answer = Answer(kind, is_cancelled)
    body = kind.body | {"stream": kind.body["stream"] or is_cancelled}
    begin = last = time.perf_counter()
    if not body["stream"]:
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        completion = response.json()
        answer.text, answer.num_tokens = completion["choices"][0]["text"], completion["usage"]["completion_tokens"]
        answer.whole = time.perf_counter() - begin
        return answer
    body["stream_options"] = {"include_usage": True}
    async with client.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200, await stream.aread()
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                answer.num_tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                now = time.perf_counter()
                if answer.first is None:
                    answer.first = now - begin
                else:
                    answer.gaps.append(now - last)
                last = now
                answer.text += choice["text"]
            if is_cancelled and answer.text:
                break
    answer.whole = time.perf_counter() - begin
    return answer


def _static(params: Any, tokenizer: text.Tokenizer, kinds: list[Kind], rows: int) -> dict[str, float]:
    """Decodes the requests in batches and returns figures of the second of two runs; the first one compiles."""
    for _ in range(2):
        begin, tokens = time.perf_counter(), 0
        for first in range(0, len(kinds), rows):
            batch = kinds[first : first + rows]
            batch += batch[:1] * (rows - len(batch))  # programs are compiled for a batch size
            each: Any = {
                name: [kind.options[name] for kind in batch] for name in ("max_new_tokens", "stop", "sampling")
            }
            keys = jax.numpy.stack([kind.options["key"] for kind in batch])
            prompts = [kind.options["prompt"] for kind in batch]
            out = jlade.generate(params, prompts, tokenizer=tokenizer, key=keys, **each)
            assert list(out.text) == [kind.expected for kind in batch]
            tokens += sum(kind.num_tokens for kind in kinds[first : first + rows])
        seconds = time.perf_counter() - begin
    return {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}


if __name__ == "__main__":
    main()
