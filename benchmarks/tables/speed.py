"""The tables of README.md, docs/speed.md and docs/choosing.md."""

import json
import re
from typing import Any

from benchmarks.tables import ROOT, Results, Rows, two

TASKS = {
    "mtbench": "MT-Bench",
    "gsm8k": "GSM8K",
    "cnndm": "CNN/DailyMail",
    "rag": "retrieval",
    "humaneval": "HumanEval",
    "all": "all",
}
DEFAULT = "tree of 119"  # `LookaheadConfig()` in the files
LABELS = {  # of names in the files
    DEFAULT: f"{DEFAULT}: `LookaheadConfig()`",
    "jlade's choice": '`"auto"`',
    "transformers": "transformers, plain",
    "transformers, prompt lookup": "transformers, prompt lookup of 10 tokens",
}


def label(name: str) -> str:
    name = re.sub(r", temperature [0-9.]+$", "", name)
    return LABELS.get(name, name.replace(", without the prompt", " without n-grams of the prompt"))


def by_task(found: dict[str, dict[str, float]], tasks: dict[str, str] = TASKS) -> Rows:
    """Yields the tokens per step of all settings but plain decoding, by task."""
    yield "tokens per step", *tasks.values()
    for name, row in found.items():
        if row["all"] > 1:
            yield label(name), *two(row[task] for task in tasks)


def all_settings(results: Results) -> dict[str, dict[str, Any]]:
    """Returns the tokens per step of every setting on the 29 prompts for SmolLM2."""
    return results.bench("bench_smollm2_prompts") | results.bench("bench_smollm2_tree")


def of_others(program: str) -> list[str]:
    """Returns the tokens per step of another program on the prompts for SmolLM2, by task."""
    lines = (ROOT / "benchmarks" / "prompts" / "smollm2.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    cells = []
    for task in TASKS:
        chosen = [prompt for prompt in prompts if task in ("all", prompt["kind"])]
        cells.append(sum(len(x["greedy"]) for x in chosen) / sum(x["steps"][program] for x in chosen))
    return two(cells)


def settings(results: Results) -> Rows:
    yield "setting", "tokens in a step", "tokens/step"
    found = all_settings(results)
    for setting, size, name in (
        ("`LookaheadConfig()`: a tree of 119 drafts", "120", DEFAULT),
        ("`10,5,10:tree=80`: a window and a tree", "120", "10, 5, 10, tree of 80"),
        ("`LookaheadConfig.tree(63)`", "64", "tree of 63"),
        ("`LookaheadConfig.paper(15, 5, 15)`", "120", "15, 5, 15"),
        ("the same without n-grams of the prompt", "120", "15, 5, 15, without the prompt"),
    ):
        yield setting, size, f"{found[name]['all']:.2f}"
    yield "the same by the official package", "120", of_others("official_15_5_15")[-1]
    yield "transformers, prompt lookup of 10 tokens", "11", f"{found['transformers, prompt lookup']['all']:.2f}"


def readme_h200(results: Results) -> Rows:
    yield "method", "step, ms", "in plain steps", "tokens/step", "tokens/s", "speedup"
    parts = results["accelerator_7b_nvidia_h200"]["parts"]
    steps, texts = parts["steps"], parts["batch 1"]
    yield "plain", f"{steps['step of 1, ms']:.2f}", "1.00", "1.00", f"{texts['code: plain, tokens/s']:.0f}", "1.00x"
    for title, step, name in (
        ("`LookaheadConfig.paper(15, 5, 15)`", "120", "15, 5, 15"),
        ("`10,5,10:tree=80`", "window and tree", "window and tree"),
        ("`LookaheadConfig.tree(63)`", "tree of 63", "tree of 63"),
    ):
        times = two([steps[f"step of {step}, ms"], steps[f"step of {step}, x step of 1"]])
        compression, rate, gain = (texts[f"code: {name}, {key}"] for key in ("compression", "tokens/s", "speedup"))
        yield title, *times, f"{compression:.2f}", f"{rate:.0f}", f"{gain:.2f}x"


def smollm2(results: Results) -> Rows:
    yield "tokens per step", "tokens of a step", *TASKS.values()
    rows = all_settings(results).items()
    found = {name: two(row[task] for task in TASKS) for name, row in rows if row["all"] > 1}
    racer = "RACER ([arXiv 2604.14885](https://arxiv.org/abs/2604.14885))"
    found |= {"official package, 15, 5, 15, without the prompt": of_others("official_15_5_15")}
    found |= {racer: of_others("racer_64")}
    sizes = {"prompt lookup 0, 4, 1": 4, "transformers, prompt lookup": 11, "7, 5, 7": 56, "tree of 63": 64, racer: 64}
    for name, cells in sorted(found.items(), key=lambda row: float(row[1][-1])):
        yield label(name), str(sizes.get(name, 120)), *cells


def smollm2_sampled(results: Results) -> Rows:
    return by_task(results.bench("bench_smollm2_sampled"))


def warm(results: Results) -> Rows:
    found = results["warm_smollm2"]["tokens_per_step"]
    tasks = [task for task in TASKS if task in found]
    yield "tokens per step", *(TASKS[task] for task in tasks)
    for title, way in (("no corpus", "cold"), ("token ids", "texts"), ("states", "states")):
        yield title, *two(found[task][way] for task in tasks)


def smollm2_methods(results: Results) -> Rows:
    return methods(results.bench("bench_smollm2_cpu", "methods"))


def methods(found: dict[str, dict[str, Any]]) -> Rows:
    yield "method", "tokens per step", "tokens/s", "speedup, 95% interval", "identical texts"
    for name, row in found.items():
        speedup = "1.00x" if name == "plain" else f"{row['speedup']:.2f}x, {row['95% interval']}"
        yield label(name), f"{row['tokens/step']:.2f}", f"{row['tokens/s']:.0f}", speedup, f"{row['identical']:.0%}"


def figure4(results: Results) -> Rows:
    yield "N", "W = G = 1", "2", "4", "8", "16", "per doubling of W", "R² of the fit to log W"
    for row in results["bench_smollm2_long"]["figure4"]["rows"]:
        windows = two(row[f"W = {size}"] for size in (1, 2, 4, 8, 16))
        yield row["N"], *windows, f"{row['per doubling of W']:+.3f}", f"{row['R² of the log fit']:.3f}"


def table3(results: Results) -> Rows:
    yield "row: W, N, G", "tokens per step", "paper, 7B"
    for row in results["bench_smollm2_long"]["table3"]["rows"][1:]:
        yield row["row: W, N, G"], *two([row["tokens/step"], row["paper, 7B"]])


def demo(results: Results) -> Rows:
    found = results.bench("bench_demo", "methods")
    return methods({name: row for name, row in found.items() if "without the prompt" not in name})


def edits(results: Results) -> Rows:
    yield "tree of 63, tokens per step", "tokens found in the old program", "without", "with the prediction"
    for task, row in results["edits_smollm2"]["tokens_per_step"].items():
        title = "answers that copy" if task == "copies" else task
        yield title, f"{row['copied']:.0%}", *two([row["without"], row["with"]])


def prior(results: Results) -> Rows:
    yield "model", "setting", "temperature", "code or HumanEval", "prose or MT-Bench", "all"
    for model, file in (("demo", "prior_demo"), ("SmolLM2", "prior_smollm2_63"), ("SmolLM2", "prior_smollm2")):
        first, second = ("code", "prose") if model == "demo" else ("humaneval", "mtbench")
        for run, found in results[file]["tokens_per_step"].items():
            setting, temperature = run.replace("=", " of ").split(", ")
            ways = [way for way in ("without", "with") if way in found["all"]]
            cells = [", ".join(two(found[task][way] for way in ways)) for task in (first, second, "all")]
            temperature = "greedy" if temperature == "0.0" else temperature
            yield model, setting, temperature if len(ways) == 2 else f"{temperature}, with it alone", *cells


def corpus(results: Results) -> Rows:
    yield "tokens", "index, s", "step, ms", "relative to none"
    found = results["corpus"]
    first = found["step_seconds"]["0"]
    for size, seconds in found["step_seconds"].items():
        index = "" if size == "0" else f"{found['index_seconds'][size]:.2f}"
        yield f"{int(size):,}".replace(",", " "), index, f"{1000 * seconds:.2f}", f"{seconds / first:.2f}x"


def overhead(results: Results) -> Rows:
    yield "setting", "tokens in a step", "ms per step", "share outside the model"
    for name, part in results["overhead"]["parts"].items():
        if "block" in part:
            title = name.replace("=", " of ") if "tree" in name else name.replace(",", ", ")
            yield title, str(part["block"]), f"{part['step, ms']:.1f}", f"{part['outside the model, %']:.1f}%"


def loading(results: Results) -> Rows:
    yield "", "time", "relative to safetensors", "peak memory, relative to the weights"
    ways = {row["way"]: row for row in results["loading"]["ways"]}
    for title, name in (
        ("safetensors alone, bfloat16", "safetensors"),
        ("`jlade.load`, bfloat16", "bfloat16"),
        ("`jlade.load`, float32", "float32"),
    ):
        way = ways[name]
        yield title, f"{way['seconds']:.2f} s", f"{way['of_safetensors']:.2f}x", f"{way['of_weights']:.3f}x"


def few_bits(results: Results) -> Rows:
    yield "weights", "bytes, relative to float32", "tokens/s", "relative to float32"
    found = results["quantization_134m"]["speed"]
    for title, name in (("float32", "float32"), ("int8", "int8"), ("four bits", "4 bits")):
        size, rate = (found[name][key] for key in ("weights, MB", "plain decoding, tokens/s"))
        share = size / found["float32"]["weights, MB"]
        yield title, f"{share:.2f}x", f"{rate:.1f}", f"{found[name]['speed']:.2f}x"


def by_text(results: Results) -> Rows:
    yield "text", "tokens per step of `tree=63`, SmolLM2"
    for title, task in (
        ("chat (MT-Bench)", "mtbench"),
        ("summaries (CNN/DailyMail)", "cnndm"),
        ("maths (GSM8K)", "gsm8k"),
        ("answers from retrieved passages", "rag"),
        ("code (HumanEval)", "humaneval"),
    ):
        yield title, f"{all_settings(results)['tree of 63'][task]:.2f}"
