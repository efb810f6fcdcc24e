"""Tokens per step with a corpus: the texts of other prompts, as token ids or as the states of their calls.

    python benchmarks/warm.py benchmarks/prompts/smollm2.jsonl --lookahead tree=63 --every 3

Every prompt of the file, with a field `ids` or `prompt`, is decoded three times: cold, with the tokens of all other
prompts and their greedy texts as corpus, and with the states of their calls. The texts have to be the same. Only steps
are counted, so the time does not matter.
"""

import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import numpy as np

import jlade
from benchmarks import report
from jlade.evaluation import datasets
from jlade.lookahead import names

WAYS = ("cold", "texts", "states")


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("data", help="prompts, as `jlade bench --data` reads them")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lookahead", default="tree=119", metavar="SETTING")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="M")
    parser.add_argument(
        "--every", type=int, default=1, metavar="K", help="decode every K-th prompt; all are in the corpus"
    )
    options = parser.parse_args()

    params, tokenizer = report.load(options.model, "float32")
    questions = datasets.read(options.data).questions
    prompts = [report.prompt_ids(tokenizer, question) for question in questions]
    setting = names.parse(options.lookahead)

    def decode(index: int, corpus: list[Any] | None = None) -> jlade.Generation:
        return jlade.generate(
            params,
            prompts[index],
            max_new_tokens=options.max_new_tokens,
            lookahead=setting,
            corpus=corpus,
            keep_state=True,
        )

    cold = [decode(index) for index in range(len(prompts))]
    whole = [[*ids, *out.tokens[0, : out.lengths[0]].tolist()] for ids, out in zip(prompts, cold, strict=True)]
    counts: dict[str, dict[str, list[int]]] = {}
    for index in range(0, len(prompts), options.every):
        corpora: dict[str, list[Any]] = {"texts": whole, "states": [out.state for out in cold]}
        runs = {way: decode(index, [*each[:index], *each[index + 1 :]]) for way, each in corpora.items()}
        for way, out in {"cold": cold[index], **runs}.items():
            np.testing.assert_array_equal(out.tokens, cold[index].tokens)
            for task in (questions[index].task, "all"):
                tokens, steps = counts.setdefault(task, {}).get(way, [0, 0])
                counts[task][way] = [tokens + int(out.lengths[0]), steps + int(out.steps[0])]
    rates = {task: {way: tokens / steps for way, (tokens, steps) in of.items()} for task, of in counts.items()}
    rows = ([task, *(f"{of_task[way]:.2f}" for way in WAYS)] for task, of_task in rates.items())
    report.print_table(["task", *WAYS], rows, f"Tokens per step, {names.label(setting)}")
    report.write(options.json, {"lookahead": options.lookahead, "tokens_per_step": rates})


if __name__ == "__main__":
    main()
