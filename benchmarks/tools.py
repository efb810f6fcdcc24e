"""Throughput of a server with tools in each request, beside that without their grammar.

    python benchmarks/tools.py --model FILE --template tests/clients/chatml_tools.jinja --tools FILE --json results.json

Each of --clients clients asks the same greedy questions twice, in turns: with tool_choice none, for which the prompt
shows the tools but nothing bounds the text, and with auto. Texts without a call have to be the same. FILE has the tools
of an MCP server, as tests/clients/mcp_tools.py writes them. The first round, which compiles, is not counted.
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
    arguments += ["--name", "model", "--template", options.template]
    with measure.served(options.model, *arguments) as (_, url):
        figures = asyncio.run(_rounds(url, tools, options))
    print(json.dumps(figures, indent=1))
    report.write(options.json, vars(options) | {"tools": options.tools.name} | figures)


async def _rounds(url: str, tools: list[dict[str, Any]], options: Any) -> dict[str, Any]:
    questions = [question.turns[0] for each in datasets.samples() for question in each.questions]
    questions = questions[: options.questions]
    rates: dict[str, list[float]] = {"none": [], "auto": []}
    async with httpx.AsyncClient(base_url=url, timeout=3600) as client:
        for number in range(options.rounds + 1):
            texts = {}
            for choice in rates:
                body = {"tools": tools, "tool_choice": choice, "temperature": 0, "max_tokens": options.max_tokens}
                begin = time.perf_counter()
                answers = await _ask(client, body, questions, options.clients)
                seconds = time.perf_counter() - begin
                texts[choice] = [answer["choices"][0]["message"] for answer in answers]
                if number:
                    rates[choice].append(sum(answer["usage"]["completion_tokens"] for answer in answers) / seconds)
            for free, bound in zip(texts["none"], texts["auto"], strict=True):
                assert bound.get("tool_calls") or free["content"] == bound["content"], (free, bound)
    ratio = float(np.median(np.divide(rates["auto"], rates["none"])))
    return {"tokens_per_second": rates, "auto_to_none": ratio, "answers": len(questions)}


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], questions: list[str], number: int) -> list[Any]:
    """Sends a chat for each question, `number` of them at any time, and returns the answers."""
    slots = asyncio.Semaphore(number)

    async def ask(question: str) -> Any:
        async with slots:
            messages = [{"role": "user", "content": question}]
            answer = await client.post("/v1/chat/completions", json=body | {"messages": messages, "model": "model"})
            return answer.raise_for_status().json()

    return await asyncio.gather(*map(ask, questions))


if __name__ == "__main__":
    main()
