"""Tokens per step on cold prompts with a prior and without.

    jlade prior --model smollm2 --texts answers --output build/smollm2.safetensors
    python benchmarks/prior.py build/smollm2.safetensors --model smollm2 --data benchmarks/prompts/smollm2.jsonl

Every prompt is decoded alone, both ways, by each setting and at each temperature. The texts have to be the same. Only
steps are counted, so the time does not matter. The prior must not know the prompts: keep them out of its texts.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)  # import from the repository, not from this folder

import numpy as np
from rich.progress import track

import jlade
from benchmarks import report
from jlade.evaluation import datasets
from jlade.lookahead import names

WAYS = ("without", "with")


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("prior", help="a file of `jlade prior`")
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--data", default=str(report.DEMO_PROMPTS), help="prompts, as `jlade bench --data` reads them")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="decode every K-th prompt")
    parser.add_argument("--lookahead", nargs="+", default=["tree=63", "tree=119"], metavar="SETTING")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], metavar="T")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="M")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--note", help="about the texts of the prior, for the file")
    options = parser.parse_args()

    params, tokenizer = report.load(options.model, "float32")
    prior = jlade.load_prior(options.prior)
    questions = datasets.read(options.data).questions[:: options.every]
    runs, rows = {}, list[list[str]]()
    for setting in options.lookahead:
        for temperature in options.temperatures:
            counts: dict[str, dict[str, list[int]]] = {}
            for question in track(questions, f"{setting}, {temperature}"):
                outs = {}
                for way in options.ways:
                    outs[way] = jlade.generate(
                        params,
                        report.prompt_ids(tokenizer, question),
                        max_new_tokens=options.max_new_tokens,
                        lookahead=names.parse(setting),
                        sampling=jlade.SamplingConfig(temperature=temperature),
                        prior=prior if way == "with" else None,
                    )
                    np.testing.assert_array_equal(outs[way].tokens, outs[options.ways[0]].tokens)
                    for task in (question.task, "all"):
                        tokens, steps = counts.setdefault(task, {}).get(way, [0, 0])
                        counts[task][way] = [tokens + int(outs[way].lengths[0]), steps + int(outs[way].steps[0])]
            rates = {task: {way: tokens / steps for way, (tokens, steps) in of.items()} for task, of in counts.items()}
            runs[f"{setting}, {temperature}"] = rates
            for task, of_task in rates.items():
                rows.append([setting, f"{temperature}", task, *(f"{of_task[way]:.2f}" for way in options.ways)])
    report.print_table(["setting", "temperature", "task", *options.ways], rows, "Tokens per step")
    figures = {"model": options.model or "demo", "prompts": len(questions), "max_new_tokens": options.max_new_tokens}
    report.write(options.json, figures | {"prior": f"{prior}", "texts": options.note, "tokens_per_step": runs})


if __name__ == "__main__":
    main()
