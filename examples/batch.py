"""A batch job: the prompts of a file are completed, many at a time, and a job that was stopped goes on.

    python examples/batch.py prompts.jsonl answers.jsonl --model path/to/model

Each line of the first file is a JSON object with "prompt". Its answer becomes the same line of the second file, with
"text" and "finish_reason" added, or "error" if the prompt is wrong, as soon as it and those before it are complete. Run
the same command again after an interruption: complete lines are kept. `jlade generate --output` does this from the
command line; copy this file to change how prompts are read, checked or stored.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax

import jlade
from jlade.generation.text import Tokenizer


def complete(
    prompts: Path,
    answers: Path,
    params: jlade.LlamaParams,
    tokenizer: Tokenizer,
    *,
    rows: int = 8,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
) -> int:
    """Writes the answers that are missing, and returns their number.

    Args:
      prompts, answers: the two files.
      params, tokenizer: of the model.
      rows: prompts that are completed at a time.
      max_new_tokens, temperature: of all answers.

    Raises:
      ValueError: `answers` are not those of the first `prompts`.
    """
    records: list[dict[str, Any]] = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    num_done = _keep_whole_lines(answers, records)
    left = records[num_done:]
    if not left:
        return 0
    # Each prompt has its own key, so that an answer depends neither on the rows nor on where the job was stopped.
    keys = jax.random.split(jax.random.key(0), len(records))[num_done:]
    sampling = jlade.SamplingConfig(temperature=temperature)
    with (
        answers.open("a", encoding="utf-8") as file,
        jlade.Engine(params, tokenizer, max_sequences=rows) as engine,
    ):
        results = engine.map(
            [record["prompt"] for record in left], key=keys, sampling=sampling, max_new_tokens=max_new_tokens
        )
        for record, result in zip(left, results, strict=True):
            if isinstance(result, Exception):
                answer = {"error": str(result)}
            else:
                answer = {"text": result.text[0], "finish_reason": result.finish_reason[0]}
            print(json.dumps(record | answer), file=file, flush=True)
    return len(left)


def _keep_whole_lines(answers: Path, records: list[dict[str, Any]]) -> int:
    """Cuts off a line that was being written when the job was stopped, and returns the number of the others."""
    content = answers.read_bytes() if answers.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        answers.write_bytes(whole)
    lines = whole.splitlines()
    if [json.loads(line)["prompt"] for line in lines] != [record["prompt"] for record in records[: len(lines)]]:
        raise ValueError(f"{answers} has answers to other prompts: remove it, or name another file")
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", metavar="PATH", help="by default the demo model inside the package")
    parser.add_argument("--rows", type=int, default=8, metavar="B", help="prompts that are completed at a time")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="M")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    options = parser.parse_args()

    params, tokenizer = jlade.demo() if options.model is None else jlade.load(options.model)
    if tokenizer is None:
        parser.error(f"{options.model} has no tokenizer.json")
    number = complete(
        options.prompts,
        options.answers,
        params,
        tokenizer,
        rows=options.rows,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
    )
    print(f"{number} answers written to {options.answers}")


if __name__ == "__main__":
    main()
