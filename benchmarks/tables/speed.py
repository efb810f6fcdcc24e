"""The tables of README.md, docs/speed.md, docs/when_to_use.md and docs/choosing.md."""

import itertools
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
WINDOW_AND_TREE = "10, 5, 10, tree of 80"
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
        ("`10,5,10:tree=80`: a window and a tree", "120", WINDOW_AND_TREE),
        ("`LookaheadConfig.tree(63)`", "64", "tree of 63"),
        ("`LookaheadConfig.paper(15, 5, 15)`", "120", "15, 5, 15"),
        ("the same without n-grams of the prompt", "120", "15, 5, 15, without the prompt"),
    ):
        yield setting, size, f"{found[name]['all']:.2f}"
    yield "the same by the official package", "120", of_others("official_15_5_15")[-1]
    yield "transformers, prompt lookup of 10 tokens", "11", f"{found['transformers, prompt lookup']['all']:.2f}"


def readme_h200(results: Results) -> Rows:
    yield "method", "step, ms", "in plain steps", "tokens/step", "tokens/s", "speedup"
    labels = {"`LookaheadConfig.paper(15, 5, 15)`": "15, 5, 15", "`10,5,10:tree=80`": "window and tree"}
    yield from on_h200(results, ["code"], labels | {"`LookaheadConfig.tree(63)`": "tree of 63"})


def h200(results: Results) -> Rows:
    titles = "tokens/step", "tokens/s", "speedup"
    yield "method", "step, ms", "in plain steps", "code: tokens/step", *titles[1:], "prose: tokens/step", *titles[1:]
    labels = {"15, 5, 15": "15, 5, 15", WINDOW_AND_TREE: "window and tree"}
    yield from on_h200(results, ["code", "prose"], labels | {"tree of 63": "tree of 63"})


def on_h200(results: Results, kinds: list[str], labels: dict[str, str]) -> Rows:
    """Yields the times of a step, and for each kind of text tokens per step, tokens per second and speedup."""
    parts = results["accelerator_7b_nvidia_h200"]["parts"]
    steps, texts = parts["steps"], parts["batch 1"]
    plain = (("1.00", f"{texts[f'{kind}: plain, tokens/s']:.0f}", "1.00x") for kind in kinds)
    yield "plain", f"{steps['step of 1, ms']:.2f}", "1.00", *itertools.chain(*plain)
    for title, name in labels.items():
        step = "120" if name == "15, 5, 15" else name
        cells = two([steps[f"step of {step}, ms"], steps[f"step of {step}, x step of 1"]])
        for kind in kinds:
            compression, rate, gain = (texts[f"{kind}: {name}, {x}"] for x in ("compression", "tokens/s", "speedup"))
            cells += [f"{compression:.2f}", f"{rate:.0f}", f"{gain:.2f}x"]
        yield [title, *cells]


def h200_transformers(results: Results) -> Rows:
    yield "program", "tokens/s"
    found = results["versus_transformers_7b_nvidia_h200"]["parts"]["batch 1"]
    for title, name in (
        ("transformers", "transformers eager"),
        ("jlade, plain", "jlade plain"),
        (f"jlade, {WINDOW_AND_TREE}", "jlade lookahead"),
    ):
        yield title, f"{found[f'{name}, tokens/s']:.0f}"


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


def busy(results: Results) -> Rows:
    yield "speedup", *TASKS.values()
    rounds = results["busy_core"]["speedup"]
    for title in ("alone", "beside a busy process"):
        yield title, *(f"{rounds[f'{title}, round 1'][task]:.2f}x" for task in TASKS)


def auto(results: Results) -> Rows:
    yield "12 prompts of", "tokens per step", "speedup, 95% interval"
    for title, name in (
        ("Spec-Bench, of six of its tasks", "bench_spec_bench_cpu"),
        ("the samples of jlade", "bench_samples_cpu"),
    ):
        found = results.bench(name, "methods")["jlade's choice"]
        yield title, f"{found['tokens/step']:.2f}", f"{found['speedup']:.2f}x, {found['95% interval']}"


def samples(results: Results) -> Rows:
    tasks = ("CNN/DailyMail", "XSum", "GSM8K", "HumanEval", "MBPP", "MT-Bench")
    return by_task(results.bench("bench_smollm2"), {f"{task} sample": task for task in tasks} | {"all": "all"})


def right(results: Results) -> Rows:
    yield "method", "HumanEval, pass@1", "GSM8K", "MMLU", "tokens per step", "speedup, 95% interval"
    found, speeds = (results.bench("bench_smollm2_right", table) for table in ("right", "methods"))
    for name in ("plain", "prompt lookup 0, 4, 1", "tree of 7"):
        shares = [f"{share:.0%}" for task, share in found[name].items() if task != "right answers"]
        interval = "" if name == "plain" else f", {speeds[name]['95% interval']}"
        yield name, *shares, f"{speeds[name]['tokens/step']:.2f}", f"{speeds[name]['speedup']:.2f}x{interval}"


def figure4(results: Results) -> Rows:
    yield "N", "W = G = 1", "2", "4", "8", "16", "per doubling of W", "R² of the fit to log W"
    for row in results["bench_smollm2_long"]["figure4"]["rows"]:
        windows = two(row[f"W = {size}"] for size in (1, 2, 4, 8, 16))
        yield row["N"], *windows, f"{row['per doubling of W']:+.3f}", f"{row['R² of the log fit']:.3f}"


def table3(results: Results) -> Rows:
    yield "row: W, N, G", "tokens per step", "paper, 7B"
    for row in results["bench_smollm2_long"]["table3"]["rows"][1:]:
        yield row["row: W, N, G"], *two([row["tokens/step"], row["paper, 7B"]])


def window(results: Results) -> Rows:
    tree = {"tree of 63": results.bench("bench_smollm2_tree_10")["tree of 63"]}  # which accepts more than before
    return by_task(results.bench("bench_smollm2_paper") | tree)


def hits(results: Results) -> Rows:
    yield "15, 5, 15", "steps that accept a draft", "tokens of such a step"
    rows = results["bench_smollm2_paper"]["hits-by-kind"]["rows"]
    found = {row["kind of text"]: row for row in rows if row["method"] == "15, 5, 15"}
    for title, kind in (("chat", "mtbench"), ("code", "humaneval")):
        yield title, f"{found[kind]['hits h']:.0%}", f"{found[kind]['tokens of a hit L']:.1f}"


def moves(results: Results) -> Rows:
    yield "the window moves by", "with", "without"
    found = {(row["move"], row["first"], row["ngrams_of_text"]): row for row in results["windows"]["rows"]}
    for title, move, first in (
        ("a row", "row", "drawn"),
        ("a row, and a column for each further token", "columns", "drawn"),
        ("a row for each token, drawn from the text", "token", "drawn"),
        ("a row for each token, copies of the oldest", "copies", "drawn"),
        ("a row; the first window grows by a row a step", "row", "levels"),
        ("a row; the first window is from the pool", "row", "pool"),
    ):
        yield title, *two(found[move, first, of_text]["tokens_per_step"] for of_text in (True, False))


def beside(results: Results) -> Rows:
    yield "beside the tree", "greedy", "temperature 0.7"
    found = results["beside_tree"]["tokens_per_step"]
    for title, use in (
        ("a tree of 119", "tree"),
        ("a window of 40", "window"),
        ("the window, where the forecast is below the mean", "low"),
        ("the window, and its n-grams as drafts by their probability", "n-grams"),
        ("5 tokens after each of the likely ends of the tree", "columns"),
        ("a Jacobi chain after the most likely path", "jacobi"),
        ("no tokens; what follows the best rejected sibling", "siblings"),
        ("19 masks with the mean embedding of the prompt", "prompt probes"),
        ("19 masks with the mean embedding of the vocabulary", "probes"),
        ("the same, two masks behind each of 9 drafts", "two probes"),
    ):
        yield title, *two(found[f"{use}, temperature {temperature}"]["all"] for temperature in ("0", "0.7"))


def demo(results: Results) -> Rows:
    return methods(results.bench("bench_demo", "methods"))


def demo_window(results: Results) -> Rows:
    return by_task(results.bench("bench_demo_paper"), {task: task for task in ("code", "prose", "all")})


def demo_pool(results: Results) -> Rows:
    yield "tokens of the text", "n-grams", "first tokens", "steps with a draft"
    for row in results["bench_demo_paper"]["growth"]["rows"][1:]:
        tokens = row["tokens of the text"].replace("1 to 16", "up to 16")
        yield tokens, f"{row['n-grams']:.0f}", f"{row['keys']:.0f}", f"{row['steps with a draft']:.0%}"


def demo_official(results: Results) -> Rows:
    yield "W, N, G", "n-grams of the prompt in the pool", "official package", "jlade", "ratio"
    path = ROOT / "benchmarks" / "prompts" / "demo_official.json"
    for title, theirs in json.loads(path.read_text(encoding="utf-8")).items():
        ours, size = results.bench("bench_demo")[title]["all"], title.removesuffix(", without the prompt")
        yield size, "yes" if size == title else "no", f"{theirs:.3f}", f"{ours:.3f}", f"{ours / theirs:.2f}x"


def demo_sampled(results: Results) -> Rows:
    yield "tokens per step on code, prose", "temperature 0.3", "0.7", "1.0"
    found: dict[str, list[str]] = {}
    for name, row in results.bench("bench_demo_sampled").items():
        found.setdefault(label(name), []).append(f"{row['code']:.2f}, {row['prose']:.2f}")
    yield from ([name, *cells] for name, cells in found.items() if name != "plain")


def edits(results: Results) -> Rows:
    yield "tree of 63, tokens per step", "tokens found in the old program", "without", "with the prediction"
    for task, row in results["edits_smollm2"]["tokens_per_step"].items():
        title = "answers that copy" if task == "copies" else task
        yield title, f"{row['copied']:.0%}", *two([row["without"], row["with"]])


def prior(results: Results) -> Rows:
    yield "model", "setting", "temperature", "code or HumanEval", "prose or MT-Bench", "all"
    for run, found in results["prior_demo"]["tokens_per_step"].items():
        setting, temperature = run.replace("=", " of ").split(", ")
        cells = (f"{found[task]['without']:.2f}, {found[task]['with']:.2f}" for task in ("code", "prose", "all"))
        yield "demo", setting, "greedy" if temperature == "0.0" else temperature, *cells
    without, tasks = results.bench("bench_smollm2_tree"), ("humaneval", "mtbench", "all")
    for file in ("prior_smollm2_63", "prior_smollm2"):
        for run, found in results[file]["tokens_per_step"].items():
            setting, temperature = run.replace("=", " of ").split(", ")
            having = two(found[task]["with"] for task in tasks)
            if temperature == "0.0":
                pairs = zip(two(without[setting][task] for task in tasks), having, strict=True)
                yield "SmolLM2", setting, "greedy", *map(", ".join, pairs)
            else:
                yield "SmolLM2", setting, f"{temperature}, with it alone", *having


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


def loops(results: Results) -> Rows:
    yield "loop", "plain, 64 steps", "tree of 7, 10 steps"
    parts = results["overhead"]["parts"]
    for title, key in (
        ("`jlade.run_steps`, 8 steps a call", "run_steps, 8, x decode"),
        ("`jlade.run_steps`, 1 step a call", "run_steps, 1, x decode"),
        ("`jlade.step` under `jax.jit`, which copies the cache", "step under jit, x decode"),
    ):
        yield title, *(f"{parts[name][key]:.2f}x" for name in ("loops, plain", "loops, tree=7"))


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


def presets(results: Results) -> Rows:
    yield "name", "W, N, G", "for", "tokens of a step", "tokens per step: code, chat"
    found = results.bench("bench_smollm2_paper") | results.bench("bench_smollm2_tree_10")
    for title, size, purpose, tokens, name in (
        ('`code`, `LookaheadConfig.preset("code")`', "8, 6, 15", "code and templates", "115", "8, 6, 15"),
        ("`prose`", "7, 5, 10", "general text", "68", "7, 5, 10"),
        ("`creative`", "5, 4, 8", "free writing", "39", "5, 4, 8"),
        ("`tree=63`, on the same prompts", "", "any", "64", "tree of 63"),
    ):
        yield title, size, purpose, tokens, ", ".join(two(found[name][task] for task in ("humaneval", "mtbench")))


def agreement(results: Results) -> Rows:
    yield "model", "copy", "same token", "gain", "share for 1.2x"
    for name, found in results["agreement"]["models"].items():
        for bits in ("8 bits", "4 bits"):
            copy, least = found["copies"][bits], found["agreement_for_least_gain"][bits]
            model = {"demo": "demo", "smollm2": "SmolLM2"}[name]
            yield model, bits, f"{copy['agreement']:.1%}", f"{copy['gain']:.2f}x", f"{least:.1%}"
