"""Throughput of a server with tools in each request, beside that without their grammar.

    python benchmarks/tools.py --model FILE --template tests/clients/chatml_tools.jinja --tools FILE --json results.json

Greedy questions are asked as chats with tools, --clients of them at once, and their prompts as completions, which have
the same tokens and no grammar. Texts without a call have to be the same. FILE has the tools of an MCP server, as
tests/clients/mcp_tools.py writes them. The first round, which reads the tools, is not counted.
"""

import asyncio
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path[0] = str(pathlib.Path(__file__).parent.parent)  # import from the repository, not from this folder

import httpx
import numpy as np

from benchmarks import measure, report
from jlade.evaluation import datasets


def main(argv: Sequence[str] | None = None) -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--template", required=True, help="a chat template that shows tools")
    parser.add_argument("--tools", type=pathlib.Path, required=True, metavar="FILE")
    parser.add_argument("--rows", type=int, default=4, metavar="B")
    parser.add_argument("--capacity", type=int, default=8192, metavar="C")
    parser.add_argument("--clients", type=int, default=4, metavar="N")
    parser.add_argument("--questions", type=int, default=16, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    options = parser.parse_args(argv)

    tools = []
    for tool in json.loads(options.tools.read_text(encoding="utf-8"))["tools"]:
        described = {"description": tool["description"] or "", "parameters": tool["inputSchema"]}
        tools.append({"type": "function", "function": {"name": tool["name"], **described}})
    arguments = ["--max-sequences", str(options.rows), "--capacity", str(options.capacity)]
    arguments += ["--name", "model", "--template", options.template, "--warm-up"]
    with measure.served(options.model, *arguments) as (_, url):
        figures = asyncio.run(_rounds(url, tools, options))
    print(json.dumps(figures, indent=1))
    report.write(options.json, vars(options) | {"tools": options.tools.name} | figures)


async def _rounds(url: str, tools: list[dict[str, Any]], options: Any) -> dict[str, Any]:
    questions = [question.turns[0] for each in datasets.samples() for question in each.questions]
    shared = {"model": "model", "temperature": 0, "max_tokens": options.max_tokens, "return_token_ids": True}
    chats = []
    for question in questions[: options.questions]:
        chats.append({"messages": [{"role": "user", "content": question}], "tools": tools, **shared})
    bound_rates, free_rates = [], []
    async with httpx.AsyncClient(base_url=url, timeout=3600) as client:
        for number in range(options.rounds + 1):
            bound, bound_rate = await _ask(client, "/v1/chat/completions", chats, options.clients)
            prompts = [{"prompt": answer["prompt_token_ids"], **shared} for answer in bound]
            free, free_rate = await _ask(client, "/v1/completions", prompts, options.clients)
            for chat, completion in zip(bound, free, strict=True):
                (one,), (other,) = chat["choices"], completion["choices"]
                assert one["message"].get("tool_calls") or one["token_ids"] == other["token_ids"], (one, other)
            if number:
                bound_rates.append(bound_rate)
                free_rates.append(free_rate)
    return {
        "prompt_tokens": int(np.median([len(body["prompt"]) for body in prompts])),
        "calls": sum(bool(answer["choices"][0]["message"].get("tool_calls")) for answer in bound),
        "tokens_per_second": {"tools": bound_rates, "free": free_rates},
        "ratio": float(np.median(np.divide(bound_rates, free_rates))),
    }


async def _ask(client: httpx.AsyncClient, path: str, bodies: list[Any], number: int) -> tuple[list[Any], float]:
    """Sends the requests, `number` of them at any time, and returns the answers and their tokens per second."""
    slots = asyncio.Semaphore(number)

    async def ask(body: Any) -> Any:
        async with slots:
            return (await client.post(path, json=body)).raise_for_status().json()

    begin = time.perf_counter()
    answers = await asyncio.gather(*map(ask, bodies))
    seconds = time.perf_counter() - begin
    return answers, sum(answer["usage"]["completion_tokens"] for answer in answers) / seconds


if __name__ == "__main__":
    main()
