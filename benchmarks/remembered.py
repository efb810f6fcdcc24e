"""Tokens per step and time with answers that an engine remembers, on similar requests one after the other.

    python benchmarks/remembered.py tests/golden/prompts.jsonl --every 4 --max-new-tokens 64 --lookahead tree=15

Every prompt of the file is completed, then completed again, and at last "edits" continue the prompt, its answer,
and the prompt once more. All requests of a run have one key, or none. The texts of the runs have to be the same.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import jlade
from benchmarks import report
from jlade.evaluation import datasets
from jlade.lookahead import names

ROUNDS = "first", "again", "edits"


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("data", help="prompts, as `jlade bench --data` reads them")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--lookahead", default="tree=31", metavar="SETTING")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="M")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="complete every K-th prompt")
    options = parser.parse_args()

    params, tokenizer = report.load(options.model, "float32")
    questions = datasets.read(options.data).questions[:: options.every]
    prompts = [report.prompt_ids(tokenizer, question) for question in questions]
    of_engine: Any = {"max_sequences": 1, "lookahead": names.parse(options.lookahead), "max_grammar": 0}
    capacity = max(map(len, prompts)) * 2 + 2 * options.max_new_tokens

    def run(engine: jlade.Engine, key: str | None) -> tuple[dict[str, Any], list[list[int]]]:
        figures, texts, answers = dict[str, Any](), list[list[int]](), list[list[int]]()
        for name in ROUNDS:
            given = prompts
            if name == "edits":
                given = [[*prompt, *answer, *prompt] for prompt, answer in zip(prompts, answers, strict=True)]
            results, begin = list[jlade.Generation](), time.perf_counter()
            for prompt in given:
                request = engine.submit(prompt, max_new_tokens=options.max_new_tokens, eos_ids=(), remember_key=key)
                results.append(request.result())
            seconds = time.perf_counter() - begin
            answers = [result.tokens[0, : result.lengths[0]].tolist() for result in results]
            texts += answers
            tokens, steps = sum(map(len, answers)), sum(int(result.steps[0]) for result in results)
            figures[name] = {"tokens_per_step": tokens / steps, "tokens_per_second": tokens / seconds}
        return figures, texts

    engines = {"none": 0, "remembered": 2**26}
    found, expected = dict[str, Any](), None
    for name, memory in engines.items():
        with jlade.Engine(params, tokenizer, capacity=capacity, remember=memory, **of_engine) as engine:
            engine.submit(prompts[0], max_new_tokens=8).result()  # compiles
            found[name], texts = run(engine, "key" if memory else None)
        assert texts == (expected := expected or texts), "the texts differ"
        print(name, found[name])
    report.write(options.json, vars(options) | found)


if __name__ == "__main__":
    main()
