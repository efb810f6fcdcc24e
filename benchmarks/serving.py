"""Load on a server: many clients, mixed requests, a part of them cancelled, against the texts of `jlade.generate`.

    python benchmarks/serving.py --json results.json

It starts `jlade serve` and sends --at-once requests together, then --in-sequence more from --clients clients, each of
which waits for its answer. Requests differ in prompt, length, sampling, stop strings and form, whole or streamed. A
tenth goes away in mid-stream. Each text has to be that of `jlade.generate` alone with its seed, its number of tokens
too. Afterwards no row may be taken, and the memory of the server and the programs that it compiled are noted.
"""

import asyncio
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

sys.path[0] = str(pathlib.Path(__file__).parent.parent)  # import from the repository, not from this folder

import httpx
import jax
import numpy as np

import jlade
from benchmarks import measure, report
from jlade import SamplingConfig
from jlade.evaluation import datasets
from jlade.generation import text

CAPACITY = 1024
KINDS = 48  # different requests
SAMPLINGS: list[dict[str, Any]] = [
    *({}, {}),
    {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.8, "min_p": 0.05, "repetition_penalty": 1.1},
]


class Kind(NamedTuple):
    """A request, and the text that it has to get."""

    body: dict[str, Any]  # of /v1/completions
    text: str
    num_tokens: int


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


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=8, metavar="B")
    parser.add_argument("--at-once", type=int, default=200, metavar="N")
    parser.add_argument("--in-sequence", type=int, default=2000, metavar="N")
    parser.add_argument("--clients", type=int, default=16, metavar="N")
    parser.add_argument("--cancelled", type=float, default=0.1, metavar="SHARE")
    options = parser.parse_args(argv)

    params, tokenizer = report.load(options.model)
    kinds = list(_kinds(params, tokenizer))
    chance = np.random.default_rng(1)

    def draw(number: int) -> list[tuple[Kind, bool]]:
        return [(kinds[chance.integers(KINDS)], bool(chance.random() < options.cancelled)) for _ in range(number)]

    at_once, in_sequence = draw(options.at_once), draw(options.in_sequence)
    arguments = "--max-sequences", str(options.rows), "--capacity", str(CAPACITY)
    with tempfile.TemporaryFile("w+") as log:
        begin, compiles = time.perf_counter(), {"JAX_LOG_COMPILES": "1"}
        with measure.served(options.model, *arguments, log=log, environment=compiles) as (server, url):
            figures: dict[str, Any] = {"seconds_to_start": time.perf_counter() - begin}
            figures["programs"] = _num_compiled(log)
            figures |= asyncio.run(_load(url, server.pid, at_once, in_sequence, options.clients))
            figures["compilations"] = _num_compiled(log) - figures["programs"]
            measure.wait_until_idle(url)
    print(json.dumps(figures, indent=1))
    report.write(options.json, vars(options) | figures)


def _kinds(params: Any, tokenizer: text.Tokenizer) -> Iterator[Kind]:
    """Yields requests with their texts: half of them greedy, the others with seeds and all kinds of controls."""
    chance = np.random.default_rng(0)
    questions = [question.turns[0] for each in datasets.samples() for question in each.questions]
    for number in range(KINDS):
        ids = text.encode(tokenizer, questions[number % len(questions)])[-256:]
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        limit, seed = int(chance.integers(4, 128)), int(chance.integers(2**31))
        stop = ["\n\n"] if chance.random() < 0.3 else []
        body = {"prompt": ids, "stop": stop, "max_tokens": limit, "seed": seed, "temperature": 0}
        body |= {"stream": bool(chance.random() < 0.8)} | sampling
        options: Any = {"stop": stop, "max_new_tokens": limit, "key": jax.random.key(seed), "lookahead": None}
        options["sampling"] = SamplingConfig(**sampling)
        out = jlade.generate(params, ids, tokenizer=tokenizer, **options)
        yield Kind(body, out.text[0], int(out.lengths[0]))


async def _load(
    url: str, pid: int, at_once: list[tuple[Kind, bool]], in_sequence: list[tuple[Kind, bool]], clients: int
) -> dict[str, Any]:
    """Sends the requests, and returns figures of the answers and of the server's memory."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=3600, limits=limits) as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        for kind, _ in at_once + in_sequence:
            kind.body["model"] = name
        figures: dict[str, Any] = {"at_once": await _phase(client, at_once, len(at_once))}
        megabytes = [await _megabytes(pid)]
        for part in np.array_split(np.arange(len(in_sequence)), 4):
            requests = [in_sequence[i] for i in part]
            figures[f"in_sequence_{len(megabytes)}"] = await _phase(client, requests, clients)
            megabytes.append(await _megabytes(pid))
    return figures | {"megabytes": megabytes}


def _num_compiled(log: Any) -> int:
    log.seek(0)
    return log.read().count("Finished XLA compilation")


async def _megabytes(pid: int) -> int:
    """Returns the resident memory of a process, after the time in which it gives free memory back."""
    await asyncio.sleep(12)
    return measure.status_bytes("VmRSS", pid) // 2**20


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
        return answer.kind.text.startswith(answer.text)
    return (answer.text, answer.num_tokens) == (answer.kind.text, answer.kind.num_tokens)


def _percentiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{percent}": float(np.percentile(seconds, percent)) for percent in (50, 90, 99)}


async def _ask(client: httpx.AsyncClient, kind: Kind, is_cancelled: bool) -> Answer:
    """Sends a request; one that is cancelled goes away after its first text."""
    answer, begin = Answer(kind, is_cancelled), time.perf_counter()
    body = kind.body | {"stream": kind.body["stream"] or is_cancelled}
    if not body["stream"]:
        completion = (await client.post("/v1/completions", json=body)).raise_for_status().json()
        answer.text, answer.num_tokens = completion["choices"][0]["text"], completion["usage"]["completion_tokens"]
        answer.whole = time.perf_counter() - begin
        return answer
    times: list[float] = []
    body["stream_options"] = {"include_usage": True}
    async with client.stream("POST", "/v1/completions", json=body) as stream:
        stream.raise_for_status()
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                answer.num_tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                times.append(time.perf_counter())
                answer.text += choice["text"]
            if is_cancelled and answer.text:
                break
    answer.whole = time.perf_counter() - begin
    answer.first = times[0] - begin if times else None
    answer.gaps = np.diff(times).tolist()
    return answer


if __name__ == "__main__":
    main()
