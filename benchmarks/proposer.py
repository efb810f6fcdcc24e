"""jlade's drafts for vLLM without a model: their time, and the tokens per step of recorded texts.

    python benchmarks/proposer.py
    python benchmarks/proposer.py --texts benchmarks/prompts/smollm2.jsonl    # {"ids": [prompt], "greedy": [answer]}

A call of `Proposer.propose` is timed by rows and length. The rows are pieces of the prompts and answers of the tests.
Then a target that knows the answers decodes them, one after the other: it accepts drafts while they agree, and adds a
token. Where vLLM is installed, its own n-gram drafter does the same, with matches of 5 tokens, which is its default,
and of 1 to 8. No JAX is needed.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Import from the repository, not from this folder.
ROOT = Path(__file__).parent.parent
sys.path[0] = str(ROOT)

import numpy as np

from benchmarks.vllm_proposer import provenance
from jlade.integrations.vllm import Proposer

Text = tuple[list[int], list[int]]  # prompt and answer
Drafter = Callable[[list[list[int]], np.ndarray, np.ndarray], list[list[int]]]

LENGTHS = (256, 1024, 8192)
ROWS = (1, 16, 64, 256)
REPEAT = 20


class WithoutMemory(Proposer):
    """Drafts from the row's own text alone."""

    memory = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", metavar="FILE", help="default: those of the tests, by the demo model")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    texts = golden_texts()
    timed = [of_size for rows in ROWS for of_size in times(texts, rows)]
    for line in timed:
        print(json.dumps(line))
    named = {"demo": texts}
    if options.texts:
        lines = map(json.loads, Path(options.texts).read_text(encoding="utf-8").splitlines())
        named[Path(options.texts).stem] = [(line["ids"], line["greedy"]) for line in lines]
    replays = [
        {"texts": name, "number": len(some), "drafts": num_tokens, "drafter": drafter} | replay(propose, some)
        for name, some in named.items()
        for num_tokens in (4, 8, 16)
        for drafter, propose in drafters(num_tokens, 1, 2048)
    ]
    for line in replays:
        print(json.dumps(line))
    figures = provenance() | {
        "microseconds_per_row": timed,
        "replays": replays,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def golden_texts() -> list[Text]:
    """Returns the prompts of the tests, and the greedy answers of the demo model."""
    folder = ROOT / "tests" / "golden"
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = {line["id"]: line["ids"] for line in map(json.loads, lines)}
    answers = json.loads((folder / "greedy.json").read_text(encoding="utf-8"))
    return [(prompts[name], answer) for name, answer in answers.items()]


def config(num_tokens: int, rows: int, max_len: int, least: int, most: int) -> Any:
    """Returns what drafters read of vLLM's configuration."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=num_tokens, prompt_lookup_min=least, prompt_lookup_max=most
        ),
        model_config=SimpleNamespace(max_model_len=max_len),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def drafters(num_tokens: int, rows: int, max_len: int) -> Iterable[tuple[str, Drafter]]:
    """Yields new drafters with their names."""
    if importlib.util.find_spec("vllm"):
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        for least, most in ((5, 5), (1, 8)):
            own = NgramProposer(config(num_tokens, rows, max_len, least, most))
            yield f"vLLM's ngram, {least} to {most}", lambda *arguments, own=own: own.propose(num_tokens, *arguments)
    yield "jlade, own text", WithoutMemory(config(num_tokens, rows, max_len, 0, 0)).propose
    yield "jlade", Proposer(config(num_tokens, rows, max_len, 0, 0)).propose


def times(texts: list[Text], rows: int) -> Iterable[dict[str, Any]]:
    """Yields the time of a call with 8 drafts by length, in microseconds for each row: median and least of `REPEAT`."""
    source = np.concatenate([prompt + answer for prompt, answer in texts]).astype(np.int32)
    random = np.random.default_rng(0)
    for length in LENGTHS:
        begins = random.integers(len(source), size=rows)
        tokens = source[(begins[:, None] + np.arange(length + 64)) % len(source)]
        lengths = np.full(rows, length, np.int32)
        for name, propose in drafters(8, rows, length + 64):
            seconds = []
            for _ in range(REPEAT):
                begin = time.perf_counter()
                propose([[0, 0]] * rows, lengths, tokens)  # two tokens accepted in each row
                seconds.append(time.perf_counter() - begin)
            median, least = (1e6 * each / rows for each in (statistics.median(seconds), min(seconds)))
            of_call = {"median": round(median, 1), "least": round(least, 1)}
            yield {"rows": rows, "length": length, "drafter": name} | of_call


def replay(propose: Drafter, texts: list[Text]) -> dict[str, float]:
    """Returns tokens per step, and the share of drafts that are accepted, when known answers are decoded in order."""
    num_steps = num_tokens = num_drafted = 0
    for prompt, answer in texts:
        text = np.array(prompt + answer, np.int32)
        row = np.zeros((1, len(text) + 64), np.int32)
        row[0, : len(text)] = text
        length, new = len(prompt) + 1, 1  # prefill makes the first token
        while length < len(text):
            drafts = propose([text[length - new : length].tolist()], np.array([length], np.int32), row)[0]
            agrees = [a == b for a, b in zip(drafts, text[length : len(text) - 1].tolist(), strict=False)]
            new = 1 + (agrees.index(False) if False in agrees else len(agrees))
            length += new
            num_steps, num_tokens, num_drafted = num_steps + 1, num_tokens + new, num_drafted + len(drafts)
    share = (num_tokens - num_steps) / max(num_drafted, 1)
    return {"tokens_per_step": round(num_tokens / num_steps, 3), "accepted_of_drafted": round(share, 3)}


if __name__ == "__main__":
    main()
