"""Every figure of README.md and docs/ is that of a result file, or has a source.

For each page a function yields the sentences and rows that the files in benchmarks/results make. A page must contain
them. Numbers with a decimal point or a unit that are left need an entry in `SOURCES`.
"""

import functools
import json
import math
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import pytest

import jlade
from benchmarks import device_report, scaling
from jlade.config import LookaheadConfig
from jlade.conversion.tensors import param_shapes
from jlade.costs import settings
from jlade.costs.devices import DEVICES
from jlade.costs.work import MeshShape
from jlade.evaluation.scaling import SIZES
from jlade.evaluation.statistics import LogFit, fit_log
from jlade.lookahead import names
from tests.costs import compiled

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NUMBER = re.compile(r"(?<![\w.,:=/-])(?:\d[\d, ]*\d|\d)(?:\.\d+)?(?:%|x\b| (?:ms|µs|MB|GB|s)\b)?(?![\w.]*\w)")


@functools.cache
def read(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def bench(name: str, table: str = "tasks") -> dict[str, dict[str, Any]]:
    """Returns the rows of a table of `jlade bench` by their first cells."""
    rows = read(name)[table]["rows"]
    return {each[next(iter(each))]: each for each in rows}


def engine() -> Iterator[str]:
    even, geometric = read("engine"), read("engine_geometric")
    yield f"at {even['ratio']:.2f} times the throughput of static batches of eight"
    yield f"with geometrically spaced lengths at {geometric['ratio']:.2f} times"
    load, hot = (read(name)["tokens_per_second"] for name in ("engine_load", "engine_load_hot"))
    real = read("engine_load_smollm2")["tokens_per_second"]
    shares, gains, real_shares = (
        [statistics.median(each["engine"]) / statistics.median(each["plain"]) for each in rates.values()]
        for rates in (hot, load, real)
    )
    yield "{:.2f}, {:.2f}, {:.2f} and {:.2f} times the throughput of an engine with".format(*shares)
    yield f"and greedy text at {min(gains):.1f} to {max(gains):.1f} times"
    yield "is decoded at {:.2f}, {:.2f}, {:.2f} and {:.2f} times that throughput".format(*real_shares)
    alone, late = (read("engine_long_smollm2")["between_pieces"][name] for name in ("alone", "with long prompts"))
    yield f"is {1e3 * alone['median']:.0f} ms in the median and {1e3 * alone['p99']:.0f} ms for 99% of them"
    yield (
        f"it is {1e3 * late['median']:.0f} ms and {1e3 * late['p99']:.0f} ms, "
        f"{late['p99'] / late['median']:.1f} times the median"
    )
    kept = read("prefixes")
    yield f"has its first token {kept['second turn']['ratio']:.1f} times as fast as without prefixes"
    yield f"have theirs {kept['continuations']['ratio']:.1f} times as fast"
    answers = read("remembered")
    names, parts = ("remembered", "none"), ("again", "first", "edits")
    rates = [answers[name][part]["tokens_per_step"] for part in parts for name in names]
    yield (
        "accept {:.1f} tokens per step instead of {:.1f}, and the first time {:.1f} and {:.1f}. Prompts that repeat an "
        "earlier prompt and its answer, which their own text has too, accept {:.1f} instead of {:.1f}"
    ).format(*rates)
    pressed = read("pages")
    counts = pressed["counts"]
    yield f"Of {pressed['number']:,} requests in eight rows of {pressed['capacity']:,} tokens"
    yield f"with pages for {pressed['cache_tokens']:,}"
    yield f"{counts['right']:,} had the recorded text and {counts['cancelled']} were cancelled"
    lost = 1 - kept["prompts that share nothing"]["ratio"]
    yield f"Prompts that share nothing lose {lost:.0%} of their throughput"


def server() -> Iterator[str]:
    faults = read("server_faults")
    memory = faults["megabytes"]
    yield f"{faults['count']:,} malformed requests in {faults['seconds']:.0f} s"
    yield f"grew from {memory[0]:,} to {memory[-1]:,} MB"
    large = read("large_prompts")
    yield f"whose longest pause is {large['alone']:.2f} s alone"
    one = [large[name] for name in ("prompt", "prompt of one letter", "prompt of spaces", "prediction")]
    yield f"prompts and predictions within {bound(each['seconds'] for each in one)} s"
    turns = large["conversation of many turns"]
    alone = large["conversation"]["seconds"]
    yield f"conversations within {alone:.2f} s, one of 80,000 messages in {turns['seconds']:.2f} s"
    pauses = [each["pause"] for each in [*one, large["conversation"]]]
    yield f"They pause the stream for up to {bound(pauses)} s"
    yield f"that conversation for {turns['pause']:.2f} s"
    load = read("serving")
    yield f"200 requests at once get {load['at_once']['tokens_per_second']:.0f} tokens/s in eight rows"
    parts = [load[f"in_sequence_{number}"] for number in range(1, 5)]
    first = statistics.median(each["first_token_seconds"]["p50"] for each in parts)
    between = statistics.median(each["between_pieces_seconds"]["p50"] for each in parts)
    yield f"have their first token after {first:.1f} s"
    yield f"and {1000 * between:.0f} ms between pieces"
    lists = [each["pause"] for name, each in large.items() if name in ("empty lists", "empty objects", "numbers")]
    yield f"and bodies of a million values for up to {max(lists):.2f} s"
    refused = [each["seconds"] for each in large.values() if isinstance(each, dict) and each.get("status") == 400]
    yield f"are refused within {math.ceil(10 * max(refused)) / 10:.1f} s"
    first, *later = read("serving_memory")["megabytes"]
    after = ", ".join(f"{each:,}" for each in later[:-1])
    yield f"{first:,} MB after the first 200 requests, and {after} and {later[-1]:,} MB after each 500"
    begin, *_, end = load["megabytes"]
    yield f"from {begin:,} to {end:,} MB"
    yield f"{load['ratio']:.2f} times the throughput of static batches of the same requests"


def bound(values: Iterable[float]) -> str:
    """Returns a bound of some seconds, rounded up to two places."""
    return f"{math.ceil(100 * max(values)) / 100:.2f}"


def models() -> Iterator[str]:
    places = [read(name)["results"][0]["rows"] for name in ("experts_h100", "experts_v6e")]
    for h100, v6e in zip(*places, strict=True):
        times = [each[of] for each in (h100, v6e) for of in ("by_sheet_ms", "estimate_ms")]
        yield row(str(h100["tokens"]), f"{h100['experts']:.0f}", *(f"{each:.1f}" for each in times))
    cpu = next(each for each in read("experts_cpu")["results"] if each["model"] == "qwen3-30b-a3b")
    first, *middle, last = [each["measured_ms"] for each in cpu["rows"]]
    yield f"takes {first:.1f}, {middle[0]:.0f}, {middle[1]:.0f} and {last:.0f} ms for these tokens"
    ways = {each["way"]: each | {"megabytes": each["host_bytes"] / 1e6} for each in read("loading_devices")["ways"]}
    for label, mesh, form in (
        ("peak of each device, relative to its share", "model=8", "{of_share:.3f}x"),
        ("host memory in addition to the devices' arrays, `model=8`", "model=8", "{megabytes:.0f} MB"),
        ("the same, `lookahead=2, model=4`", "lookahead=2, model=4", "{megabytes:.0f} MB"),
        ("bytes read, relative to the files", "model=8", "{read_of_files:.3f}x"),
    ):
        yield row(label, *(form.format(**ways[f"{kind}; {mesh}"]) for kind in ("Hugging Face", "jlade", "Orbax")))
    (oss,) = [x for x in read("real_configs")["rows"] if (x["model"], x["place"]) == ("gpt-oss-20b", "h100")]
    yield f"gpt-oss-20b takes {oss['needed_bytes'] / 1e9:.0f} GB in bfloat16"
    yield f"1.1 B parameters take {loading()['bfloat16']['of_weights']:.3f}x the memory of the weights"
    forms = {
        "relative error of the logits": ".1%",
        "KL divergence, nats a token": ".5f",
        "same most likely token": ".1%",
        "perplexity of the texts": ".3f",
    }
    of_smollm2 = {name: label for name, label in (QUANTIZED | OF_FILE).items() if not name.startswith("Q4_1")}
    for name, labels in {"quantization": QUANTIZED, "quantization_smollm2": of_smollm2}.items():
        quality = read(name)["quality"]
        for kind, label in labels.items():
            yield row(label, *(format(quality[kind][key], form) for key, form in forms.items()))
    size = {name: each["weights, MB"] for name, each in read("quantization_smollm2")["quality"].items()}
    yield f"to {size['4 bits, float32'] / size['float32']:.2f}x the bytes of float32"
    quality = read("kv_dtype")["quality"]
    kinds = ("int8, float32", "int8, bfloat16", "float8_e4m3fn, float32", "float8_e4m3fn, bfloat16")
    yield from quality_rows([quality[name] for name in (*kinds, "bfloat16")], quality["float32"])
    yield f"For heads of 128 elements that is {(128 + 4) / (2 * 128):.2f}x the bytes of bfloat16"
    speed = read("quantization_134m")["speed"]
    for kind, label in (("int8", "int8 takes"), ("4 bits", "Four bits take")):
        share, gain = speed[kind]["weights, MB"] / speed["float32"]["weights, MB"], speed[kind]["speed"]
        yield f"{label} {share:.2f}x the bytes of float32 and run{'s' * (kind == 'int8')} at {gain:.2f}x its speed"


def quality_rows(kinds: list[dict[str, float]], float32: dict[str, float]) -> Iterator[str]:
    """Yields the rows of a table of kinds of weights or caches."""
    for label, key, form in (
        ("relative error of the logits", "relative error of the logits", ".1%"),
        ("KL divergence, nats per token", "KL divergence, nats a token", ".5f"),
        ("same most likely token", "same most likely token", ".1%"),
        (
            f"perplexity of the texts (float32: {float32['perplexity of the texts']:.3f})",
            "perplexity of the texts",
            ".3f",
        ),
    ):
        yield row(label, *(format(each[key], form) for each in kinds))


QUANTIZED = {  # kinds of weights and their rows
    "float32": "float32",
    "bfloat16": "bfloat16",
    "int8, float32": "int8, computing in float32",
    "int8, bfloat16": "int8, computing in bfloat16",
    "4 bits, float32": "four bits, computing in float32",
    "4 bits, bfloat16": "four bits, computing in bfloat16",
    "4 bits, calibrated": "four bits, calibrated, computing in float32",
    "Q4_0, float32": "Q4_0, computing in float32",
    "Q4_1, float32": "Q4_1, computing in float32",
}
OF_FILE = {"bits=4 of the file": "four bits of the file, computing in float32"}


def loading() -> dict[str, dict[str, Any]]:
    return {each["way"]: each for each in read("loading")["ways"]}


def transformers() -> Iterator[str]:
    ways, prompts = read("transformers")["ways"], len(read("transformers")["prompts"])
    for label, name in {
        "as it is": "transformers",
        "`prompt_lookup_num_tokens=10`": "transformers, prompt lookup",
        "`custom_generate=lookahead(model, lookahead=None)`": "jlade, plain",
        "`custom_generate=lookahead(model)`": "jlade, auto",
    }.items():
        way = ways[name]
        least, most = way["fewest_and_most"]
        speed = "1" if name == "transformers" else f"{way['times_transformers']:.2f}x, {least:.2f} to {most:.2f}"
        yield row(label, f"{way['tokens_per_second']:.1f}", speed, f"{way['equal_texts']} of {prompts}")
    yield f"without lookahead it is {ways['jlade, plain']['times_transformers']:.2f} times as fast"
    yield f"compiles, {ways['jlade, auto']['most_seconds_of_a_first_call']:.0f} seconds"


def tunix() -> Iterator[str]:
    steps = read("tunix_steps")["milliseconds"]
    for label, name in (("`tree=7`", "tree=7"), ("plain", "plain")):
        yield row(label, *(f"{each['wall']:.2f}" for each in steps[name].values()))
    cores = ["{:.2f}, {:.2f} and {:.2f} ms".format(*(x["cores"] for x in each.values())) for each in steps.values()]
    yield f"{cores[0]} for the tree; {cores[1]} for plain steps"
    engines = read("rollouts")["engines"]
    for label, name in (("without earlier rollouts", "without"), ("with earlier rollouts as drafts", "with")):
        yield row(label, *(f"{epoch['tokens_per_step']:.2f}" for epoch in engines[name]["epochs"]))
    vanilla = rollout_speed(engines["vanilla"])
    for label, name in (
        ("vanilla", "vanilla"),
        ("`LookaheadRollout`, `lookahead=None`", "plain"),
        ('`"auto"`', "auto"),
        ("the tree, without earlier rollouts", "without"),
        ("the tree, with earlier rollouts", "with"),
    ):
        speed = rollout_speed(engines[name])
        shown = "1" if name == "vanilla" else f"{speed / vanilla:.2f}"
        yield row(label, f"{10 * round(speed / 10)}", shown)
    four = read("rollouts_4")["engines"]
    speeds = {name: 10 * round(rollout_speed(each) / 10) for name, each in four.items()}
    yield f"{speeds['vanilla']} tokens/s vanilla, {speeds['plain']} plain, {speeds['auto']} with"
    yield f"{speeds['with']} with the tree and earlier rollouts"
    yield f"of {four['with']['epochs'][-1]['tokens_per_step']:.2f} tokens per step in the fifth epoch"


def rollout_speed(engine: dict[str, float]) -> float:
    return engine["tokens"] / engine["rollout_seconds"]


def vllm() -> Iterator[str]:
    demo, smollm2 = (each["results"] for each in read("vllm"))
    for label, name, which in (
        ("plain", "plain", "first"),
        ("vLLM's `ngram`, matches of 5 (its default)", "ngram", "first"),
        ("vLLM's `ngram`, matches of 1 to 8", "ngram 1 to 8", "first"),
        ("`Proposer`", "jlade", "first"),
        ("`Proposer`, again", "jlade", "again"),
    ):
        cells = [each[name][which] for each in (demo, smollm2)]
        shown = [f"{each[key]:{form}}" for each in cells for key, form in SPEEDS]
        yield row(label, *shown)
    gain: list[float] = [smollm2["jlade"]["first"][key] / smollm2["plain"]["first"][key] for key, _ in SPEEDS]
    yield "{:.2f}x the tokens per step gave {:.2f}x the speed".format(*gain)
    replays = {(each["texts"], each["drafts"], each["drafter"]): each for each in read("proposer")["replays"]}
    for label, name in (
        ("vLLM's `ngram`, 5", "vLLM's ngram, 5 to 5"),
        ("vLLM's `ngram`, 1 to 8", "vLLM's ngram, 1 to 8"),
        ("`Proposer`, `memory = 0`", OWN),
        ("`Proposer`", "jlade"),
    ):
        found = [replays[texts, drafts, name] for texts in ("demo", "smollm2") for drafts in (4, 8, 16)]
        yield row(label, *(f"{each['tokens_per_step']:.2f}" for each in found))
    times = {(each["rows"], each["length"], each["drafter"]): each for each in read("proposer")["microseconds_per_row"]}
    many, short, one = (
        times[size, length, "jlade"]["median"] for size, length in ((256, 8192), (256, 1024), (1, 8192))
    )
    found = [replays["smollm2", drafts, name]["tokens_per_step"] for drafts in (4, 8, 16) for name in ("jlade", OWN)]
    gains = [with_ / own - 1 for with_, own in zip(found[::2], found[1::2], strict=True)]
    yield f"adds {min(gains):.0%} to {max(gains):.0%} for SmolLM2"
    theirs = [
        times[size, length, "vLLM's ngram, 5 to 5"]["median"] for size, length in ((256, 8192), (256, 1024), (1, 8192))
    ]
    yield "takes {:.1f}, {:.1f} and {:.1f} µs".format(*theirs)
    yield f"takes {many:.0f} µs for each of 256 rows of 8192 tokens, {short:.0f} µs at 1024 tokens, and {one:.0f} µs"


OWN = "jlade, own text"
SPEEDS = (("tokens_per_step", ".2f"), ("tokens_per_second", ".0f"))


def accelerators() -> Iterator[str]:
    found = {
        (each["device"], each["shape"], each["block"], each["batch"], each["capacity"]): each for each in estimates()
    }
    for device in ("v5e", "v5p", "v6e", "h100", "h200"):
        for shape in ("1b", "7b", "8b"):
            times = [found[device, shape, block, 1, 4096] for block in (1, 2, 8, 32, 60, 120, 240)]
            yield row(f"{device}, {shape}", *map(shown_ms, times))
            others = [
                ", ".join(shown_ms(found[device, shape, block, batch, capacity]) for block in (1, 120))
                for batch, capacity in ((4, 4096), (8, 4096), (1, 512), (1, 16384))
            ]
            yield row(f"{device}, {shape}", *others)
    names = {"qwen3.6-35b-a3b": "Qwen3.6 35B-A3B", "qwen3-next-80b-a3b": "Qwen3-Next 80B-A3B"}
    names["qwen3-30b-a3b"] = "Qwen3 30B-A3B, attention alone"
    times = {(each["device"], each["shape"], each["block"]): each["ms"] for each in read("estimate_recurrent")["rows"]}
    for device, shape in dict.fromkeys(key[:2] for key in times):
        yield row(
            f"{device}, {names[shape]}", *(three_digits(times[device, shape, block]) for block in (1, 8, 32, 120))
        )
    of_bits = {}
    for each in read("estimate_bits")["rows"]:
        of_bits.setdefault((each["device"], each["shape"], each.get("bits", 16)), []).append(each)
    shares = {"ms": [], "memory_ms": []}
    for (device, shape, bits), rows in of_bits.items():
        cells = (three_digits(each["ms"]) for each in rows)
        yield row(f"{device}, {shape}", "bfloat16" if bits == 16 else f"{bits} bits", *cells)
        for side, found in shares.items():
            found += [rows[0][side] / of_bits[device, shape, 16][0][side]] if bits == 4 else []
    yield "takes {:.2f} to {:.2f} of the time, as it reads {:.2f} to {:.2f} of the bytes".format(
        *(bound(shares[side]) for side in shares for bound in (min, max))
    )
    of_levels = {}
    for each in read("estimate_mxfp4")["rows"]:
        matrices = each["levels"].upper() if "levels" in each else "bfloat16"
        of_levels.setdefault((each["device"], each["shape"], matrices), []).append(three_digits(each["ms"]))
    for (device, shape, matrices), cells in of_levels.items():
        if device == "h100":  # those of TPUs lack the conversion, which takes longer
            yield row(f"{device}, {shape}", matrices, *cells)
    for each in read("experts_h100")["results"][0]["rows"]:
        times = [f"{each[of]:.1f} ms" for of in ("estimate_ms", "bytes_ms")]
        yield row(str(each["tokens"]), f"{each['experts']:.0f}", str(each["kernels"]), *times)
    before = [each["ms"] for each in read("estimate")["before"] if (each["device"], each["shape"]) == ("v6e", "8b")][
        1:5
    ]
    yield f"take {min(before):.1f} to {max(before):.1f} ms on a v6e"
    for each in read("estimate_134m_cpu")["rows"]:
        yield row(str(each["block"]), f"{each['ms']:.1f}", f"{each['measured_ms']:.1f}", f"{each['ratio']:.2f}")
    rates = read("estimate_134m_cpu")["rates"]
    yield f"({rates['flops'] / 1e9:.0f} GFLOP/s, {rates['bytes'] / 1e9:.1f} GB/s"
    tree = {name: each["10,5,10:tree=80"] for name, each in read("estimate_tree")["devices"].items()}
    paper = {name: each["15,5,15"] for name, each in read("estimate_tree")["devices"].items()}
    yield f"{tree['v5e']['outside_ms']:.2f} ms outside the layers and the output matrix on a v5e"
    yield f"{tree['h100']['outside_ms']:.2f} ms on an H100"
    yield "{:.1%} and {:.1%} of the step".format(*(each["share_of_32_layers"] for each in tree.values()))
    less = {name: tree[name]["outside_ms"] - paper[name]["outside_ms"] for name in tree}
    yield f"takes {less['v5e']:.2f} ms less on a v5e and {less['h100']:.2f} ms less on an H100"
    for each in read("real_configs")["rows"]:
        if each["fits"]:
            is_plain = each["step_estimate_ms"] == each["plain_step_estimate_ms"]
            capacity = f"{each['largest_capacity']:,}{'' if each['largest_capacity'] % 1024 else ', all'}"
            times = [three_digits(each["plain_step_estimate_ms"])]
            times += ["" if is_plain else three_digits(each["step_estimate_ms"])]
            cells = [f"{each['needed_bytes'] / 1e9:.1f}", capacity, *times]
            yield f"| {' | '.join(cells)} |".replace("|  |", "| |")

    yield from measured_on_h200()


def measured_on_h200() -> Iterator[str]:
    """Yields estimates beside measured steps, and the times of attention."""
    steps = h200()["steps"]
    for each in read("estimate_7b_h200")["rows"]:
        if (tokens := each["block"]) in (1, 120):
            measured = steps[f"step of {tokens}, ms"]
            cells = f"{each['ms']:.2f}", f"{measured:.2f}", f"{each['ms'] / measured:.2f}"
            yield row("plain" if tokens == 1 else "15, 5, 15", str(tokens), *cells)
    device = h200()["device"]
    yield f"multiplied at {device['bfloat16 product, TFLOP/s']:.0f} of 989 TFLOP/s"
    rates = [device[f"{way}, GB/s"] / 1e3 for way in ("copy", "read")]
    yield "copied at {:.1f} of 4.8 TB/s and read at {:.1f}".format(*rates)
    attention = read("attention_nvidia_h200")
    for kernel, plain in zip(attention["cases"][1::2], attention["cases"][::2], strict=True):
        assert (kernel["implementation"], plain["implementation"]) == ("gpu", "plain")
        times = [f"{1e6 * each['seconds'] / attention['layers']:.1f}" for each in (kernel, plain)]
        errors = ", ".join(f"{each['relative_error']:.4f}" for each in (kernel, plain))
        yield row(f"{kernel['heads']}, {kernel['kv_heads']}", str(kernel["tokens"]), *times, errors)


def h200() -> dict[str, dict[str, Any]]:
    """Returns the parts of the measurement of a 7 B shape on an H200."""
    return read("accelerator_7b_nvidia_h200")["parts"]


def on_h200(kinds: Iterable[str], labels: dict[str, str]) -> Iterator[str]:
    """Yields rows of step times, and for each kind of text of tokens per step, tokens per second and speedup."""
    steps, texts = h200()["steps"], h200()["batch 1"]
    for label, name in labels.items():
        is_plain = name == "plain"
        step = "1" if is_plain else "120" if name == "15, 5, 15" else name
        cells = [f"{steps[f'step of {step}, ms']:.2f}"]
        cells += ["1.00" if is_plain else f"{steps[f'step of {step}, x step of 1']:.2f}"]
        for kind in kinds:
            compression, gain = (
                (1, 1) if is_plain else (texts[f"{kind}: {name}, {x}"] for x in ("compression", "speedup"))
            )
            cells += [f"{compression:.2f}", f"{texts[f'{kind}: {name}, tokens/s']:.0f}", f"{gain:.2f}x"]
        yield row(label, *cells)


def h200_section() -> Iterator[str]:
    """Yields the figures of the section of docs/speed.md on an H200."""
    labels = {name: name for name in ("plain", "15, 5, 15", "tree of 63")}
    yield from on_h200(("code", "prose"), labels | {"10, 5, 10, tree of 80: `LookaheadConfig()`": "window and tree"})
    versus = read("versus_transformers_7b_nvidia_h200")["parts"]["batch 1"]
    ours = [versus[f"jlade {way}, tokens/s"] for way in ("plain", "lookahead")]
    yield f"writes {versus['transformers eager, tokens/s']:.0f} tokens/s of one of these prompts, jlade "
    yield "jlade {:.0f} plainly and {:.0f} with".format(*ours)
    exact = read("exactness_nvidia_h200")["parts"]
    greedy = [each["equal texts"] for name, each in exact.items() if name.startswith(EXACT) and "sampled" not in name]
    sampled = [each["equal texts"] for name, each in exact.items() if name.startswith(f"{EXACT}, sampled")]
    assert {*greedy, exact[DEFAULT_FLOAT32]["equal texts"]} == {"26/26"}
    assert set(sampled) == {"234/234"}
    yield f"all {234 * len(sampled)} texts sampled"
    yield f"{exact['float32']['equal texts'].split('/')[0]} of the 26 plain texts are those of the CPU"
    bfloat16 = [exact[name]["equal texts"].split("/")[0] for name in ("bfloat16", f"bfloat16: {DEFAULT}")]
    yield "in bfloat16, {} and {}".format(*bfloat16)
    memory, steps, texts = (h200()[part] for part in ("memory", "steps", "batch 1"))
    yield f"Weights take {memory['weights, GB']:.2f} GB, the cache {memory['cache, GB']:.2f} GB"
    yield f"and everything else {memory['peak above weights and cache, GB']:.2f} GB"
    times = sorted(value for name, value in texts.items() if name.startswith("compiling"))
    yield f"compiles in {times[0]:.0f} s, the others in {times[1]:.0f} to {times[-1]:.0f} s"
    share = steps["weights read, x rate of the copy"]
    yield f"at {share:.2f} of the rate of a copy, {h200()['device']['copy, GB/s']:.0f} GB/s"


EXACT, DEFAULT = "float32, exact products", "10, 5, 10, tree of 80"
DEFAULT_FLOAT32 = f"float32: {DEFAULT}"


def estimates() -> list[dict[str, Any]]:
    return read("estimate")["rows"]


def shown_ms(each: dict[str, Any]) -> str:
    return f"{each['ms']:.3g}" if each["fits"] else "-"


def three_digits(number: float) -> str:
    """Returns three digits, also where they end in 0."""
    return f"{number:#.3g}".rstrip(".")


def device_numbers() -> Iterator[str]:
    yield re.sub(r"```.*?```", "", device_report.page(ROOT / "benchmarks" / "results"), flags=re.DOTALL)


def hosts() -> Iterator[str]:
    """A billion prompts of 512 tokens and texts of 256 on 64 machines of eight H100s, by scaling.md."""
    prompts, machines, workers, size = 1e9, 64, 4, 10_000
    (found,) = [
        each
        for each in read("scaling")["batches"]
        if (each["model"], each["device"], each["count"], each["batch_size"]) == ("8b", "h100", 8, 128)
    ]
    assert found["mesh"] == [workers, 1, 2]
    speed, sheet = found["tokens_per_second"], DEVICES["h100"]
    parameters = sum(math.prod(each.shape) for each in jax.tree.leaves(param_shapes(scaling.EIGHT, "bfloat16")))
    reading = 2 * parameters * 512 / (8 * 0.8 * 1e12 * sheet.tflops)  # seconds of a machine for a prompt
    texts, read_all = prompts * 256 / speed / 3600, prompts * reading / 3600
    whole = texts + read_all
    part = size * workers * (256 / speed + reading)  # seconds of a worker
    yield row(
        "tokens of a machine in a second, texts alone", "[scaling.md](scaling.md#estimates): 128 texts", f"{speed:,.0f}"
    )
    yield row("texts", f"1,000,000,000 x 256 / {speed:,.0f} s", f"{texts:,.0f} machine-hours")
    yield row(
        "prompts",
        f"2 x {parameters / 1e9:.2f} billion parameters x 512 operations at 0.8 of eight times {sheet.tflops:.0f} "
        f"TFLOP/s: {1000 * reading:.2f} ms each",
        f"{read_all:,.0f} machine-hours",
    )
    yield row("together on 64 machines", f"({texts:,.0f} + {read_all:,.0f}) / 64", f"{whole / machines:.0f} hours")
    yield row("parts of 10,000 records", "1,000,000,000 / 10,000", f"{prompts / size:,.0f}")
    yield row(
        "a part, on one of a machine's four workers",
        f"4 x 10,000 x (256 / {speed:,.0f} s + {1000 * reading:.2f} ms)",
        f"{part / 60:.1f} minutes",
    )
    yield row("results", "1,000,000,000 lines of 5 kB, assumed", "5 TB in 100,000 files")
    yield f"the two parts that it had are repeated: at most {2 * part / 60:.0f} minutes of one worker"
    failures = whole / 1000
    yield f"{failures:.1f} failures take {failures * 2 * part / 3600:.1f} machine-hours in all"


def scaling_page() -> Iterator[str]:
    found = read("scaling")
    yield from scaling.table(found["streams"], "count")
    yield from scaling.table(found["batches"], "batch_size")
    sizes, measured = bench("bench_smollm2_sizes"), settings.measured()
    for setting in measured:
        label = names.label(setting)
        shown = f"{label}: `LookaheadConfig()`" if setting == LookaheadConfig() else label
        yield row(shown, str(setting.block_size), f"{sizes[label]['all']:.2f}")
    law = trees_law()
    yield f"{law.intercept:.2f} + {law.slope:.3f} log2(tokens of a step), with R² = {law.r2:.3f}"
    windows = [setting for setting in measured if setting.tree_size is None]
    slope = fit_log([x.block_size for x in windows], [sizes[names.label(x)]["all"] for x in windows]).slope
    yield f"A doubling of the windows above adds {slope:.3f}"
    speeds = {(each["compression"], each["device"], each["count"]): each for each in found["axes"]}
    h100, v5e = speeds["smollm2", "h100", 8], speeds["smollm2", "v5e", 8]
    yield f"On eight H100 it makes {h100['model']:.0f} tokens per second, `lookahead` {h100['lookahead']:.0f}"
    yield f"On eight v5e it makes {v5e['model']:.0f}, `lookahead` {v5e['lookahead']:.0f}"
    equal = [each["microseconds_of_equal_speed"] for each in (v5e, h100)]
    yield "if a collective took {:.0f} µs on v5e, or {:.0f} µs on H100".format(*equal)
    yield f"{h100['model, plain decoding']:.0f} tokens per second on eight H100"
    yield f"on eight v5e, {v5e['model, plain decoding']:.0f}, it is not"
    yield from parallel_on_a100()
    ratios = compiled.ratios()
    medians = {device: statistics.median(found) for device, found in ratios.items()}
    h100, v5e, v6e, v5p = (f"{medians[name]:.2f}" for name in ("h100", "v5e", "v6e", "v5p"))
    assert h100 == f"{medians['h200']:.2f}"
    yield f"estimated steps are {h100} of those of [compiled programs]"
    single = [ratio for device, found in ratios.items() if device != "v5p" for ratio in found]
    yield f"{v5e} for v5e, {v6e} for v6e ({min(single):.2f} to {max(single):.2f} in single cases), and {v5p} for v5p"


def parallel_on_a100() -> Iterator[str]:
    """Yields estimates of LLaMA-2-7B, and the collectives with which tensor parallelism is as slow as the paper's."""
    plans = {count: jlade.plan(SIZES["7B"], "a100", count, lookahead=None).options for count in (1, 8)}
    one, eight = (next(x for x in plans[n] if x.layout == MeshShape(1, 1, n)) for n in (1, 8))
    setting = LookaheadConfig.paper(15, 5, 15)
    (wide,) = jlade.plan(SIZES["7B"], "a100", lookahead=setting, compression=1.96).options
    yield f"comes to {wide.tokens_per_second / one.tokens_per_second:.2f}x on an A100"
    yield f"the estimate for eight A100 is {one.step.total / eight.step.total:.1f} times that of one"
    number = sum(each.times for each in eight.collectives)
    seconds = (one.step.total / 0.8 - eight.step.total + eight.step.collective) / number
    yield f"each of its {number} collectives would have to take {1e6 * seconds:.0f} µs"


def trees_law() -> LogFit:
    """Returns the fit of the tokens per step of trees to the tokens of a step."""
    sizes = bench("bench_smollm2_sizes")
    trees = [setting for setting in settings.measured() if setting.window_size == 0]
    return fit_log([x.block_size for x in trees], [sizes[names.label(x)]["all"] for x in trees])


TASKS = ["mtbench", "gsm8k", "cnndm", "rag", "humaneval", "all"]


def of_others(program: str) -> list[str]:
    """Returns the tokens per step of another program on the prompts for SmolLM2, by task."""
    lines = (ROOT / "benchmarks" / "prompts" / "smollm2.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    cells = []
    for task in TASKS:
        chosen = [each for each in prompts if task in ("all", each["kind"])]
        tokens, steps = sum(len(each["greedy"]) for each in chosen), sum(each["steps"][program] for each in chosen)
        cells.append(f"{tokens / steps:.2f}")
    return cells


def by_task(name: str, label: str) -> list[str]:
    return [f"{bench(name)[label][task]:.2f}" for task in TASKS]


def speed() -> Iterator[str]:
    prompts, trees = (functools.partial(by_task, f"bench_smollm2_{name}") for name in ("prompts", "tree"))
    for label, size, cells in (
        ("plain", 1, prompts("plain")),
        ("prompt lookup 0, 4, 1", 4, prompts("prompt lookup 0, 4, 1")),
        ("transformers, prompt lookup of 10 tokens", 11, prompts("transformers, prompt lookup")),
        (
            "official package, 15, 5, 15 without n-grams of the prompt",
            120,
            of_others("official_15_5_15"),
        ),
        ("15, 5, 15 without n-grams of the prompt", 120, prompts("15, 5, 15, without the prompt")),
        ("7, 5, 7", 56, prompts("7, 5, 7")),
        ("15, 5, 15", 120, prompts("15, 5, 15")),
        ("RACER ([arXiv 2604.14885](https://arxiv.org/abs/2604.14885))", 64, of_others("racer_64")),
        ("tree of 63", 64, trees("tree of 63")),
        ("10, 5, 10, tree of 80: `LookaheadConfig()`", 120, trees("10, 5, 10, tree of 80")),
        ("the same without n-grams of the pool", 120, trees("10, 5, 10, tree of 80, without pool")),
        ("tree of 119", 120, trees("tree of 119")),
    ):
        yield row(label, str(size), *cells)
    for label in ("10, 5, 10, tree of 80", "tree of 119"):
        yield row(label, *by_task("bench_smollm2_sampled", f"{label}, temperature 0.7"))
    yield row("15, 5, 15", *by_task("bench_smollm2_paper", "15, 5, 15"))
    yield row("tree of 63", *by_task("bench_smollm2_tree_10", "tree of 63"))
    for label, of_file in (
        ("Jacobi decoding, 16 guesses", "Jacobi, 16 guesses"),
        ("15, 5, 15, a row for each token", "15, 5, 15, a row for each token"),
        ("15, 5, 15 without n-grams of the prompt", "15, 5, 15, without the prompt"),
        ("the same, a row for each token", "15, 5, 15, without the prompt, a row for each token"),
        ("`code`: 8, 6, 15", "8, 6, 15"),
        ("`prose`: 7, 5, 10", "7, 5, 10"),
        ("`creative`: 5, 4, 8", "5, 4, 8"),
    ):
        yield row(label, *by_task("bench_smollm2_paper", of_file))
    kinds = {
        each["kind of text"]: each
        for each in read("bench_smollm2_paper")["hits-by-kind"]["rows"]
        if each["method"] == "15, 5, 15"
    }
    chat, code = kinds["mtbench"], kinds["humaneval"]
    yield f"accepts a draft in {chat['hits h']:.0%} of the steps on chat and in {code['hits h']:.0%} on code"
    yield f"such a step gives {chat['tokens of a hit L']:.1f} and {code['tokens of a hit L']:.1f} tokens"
    windows = {(each["move"], each["first"], each["ngrams_of_text"]): each for each in read("windows")["rows"]}
    for label, way in (
        ("a row", ("row", "drawn")),
        ("a row, and a column for each further token", ("columns", "drawn")),
        ("a row for each token, drawn from the text", ("token", "drawn")),
        ("a row for each token, copies of the oldest", ("copies", "drawn")),
        ("a row; the first window grows by a row a step", ("row", "levels")),
        ("a row; the first window is from the pool", ("row", "pool")),
    ):
        yield row(label, *(f"{windows[*way, of_text]['tokens_per_step']:.2f}" for of_text in (True, False)))
    beside = read("beside_tree")["tokens_per_step"]
    for label, use in (
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
        yield row(label, *(f"{beside[f'{use}, temperature {t}']['all']:.2f}" for t in ("0", "0.7")))
    small = {use: of_use["all"] for use, of_use in read("beside_tree_demo")["tokens_per_step"].items()}
    gains = (small[use] / small[f"tree,{use.split(',')[1]}"] - 1 for use in small if "probes" in use)
    yield f"masks gain up to {max(gains):.0%} (`beside_tree_demo.json`)"
    warm = read("warm_smollm2")["tokens_per_step"]
    for label, way in (("no corpus", "cold"), ("token ids", "texts"), ("states", "states")):
        yield row(label, *(f"{warm[task][way]:.2f}" for task in TASKS if task in warm))
    yield from h200_section()
    yield from speeds("bench_smollm2_cpu", SMOLLM2_METHODS)
    yield from beside_a_busy_process()
    yield from smollm2_samples()
    yield from demo()
    edits = read("edits_smollm2")["tokens_per_step"]
    for task, each in edits.items():
        label = "answers that copy" if task == "copies" else task
        yield row(label, f"{each['copied']:.0%}", f"{each['without']:.2f}", f"{each['with']:.2f}")
    yield from priors()
    corpus = read("corpus")
    first = corpus["step_seconds"]["0"]
    for size, seconds in corpus["step_seconds"].items():
        index = "" if size == "0" else f"{corpus['index_seconds'][size]:.2f}"
        yield row(f"{int(size):,}".replace(",", " "), index, f"{1000 * seconds:.2f}", f"{seconds / first:.2f}x")
    parts = read("overhead")["parts"]
    for name, part in parts.items():
        if "block" in part:
            label = name.replace("=", " of ") if "tree" in name else name.replace(",", ", ")
            cells = f"{part['step, ms']:.1f}", f"{part['outside the model, %']:.1f}%"
            yield row(label, str(part["block"]), *cells)
    for label, key in (
        ("`jlade.run_steps`, 8 steps a call", "run_steps, 8, x decode"),
        ("`jlade.run_steps`, 1 step a call", "run_steps, 1, x decode"),
        ("`jlade.step` under `jax.jit`, which copies the cache", "step under jit, x decode"),
    ):
        yield row(label, *(f"{parts[name][key]:.2f}x" for name in ("loops, plain", "loops, tree=7")))
    call = parts["generate"]
    yield f"takes {call['generate, ms']:.1f} ms, of which {call['outside the programs, ms']:.1f} ms are outside"
    ways = loading()
    for label, way in (
        ("safetensors alone, bfloat16", "safetensors"),
        ("`jlade.load`, bfloat16", "bfloat16"),
        ("`jlade.load`, float32", "float32"),
    ):
        each = ways[way]
        peak = f"{each['of_weights']:.2f}x" if way == "safetensors" else f"{each['of_weights']:.3f}x"
        yield row(label, f"{each['seconds']:.2f} s", f"{each['of_safetensors']:.2f}x", peak)
    int8 = read("quantization_134m")["speed"]
    rates = [int8[name]["plain decoding, tokens/s"] for name in ("int8", "4 bits", "float32")]
    yield "runs at {:.1f} tokens/s with int8 weights, at {:.1f} in four bits, and at {:.1f} in float32".format(*rates)


def beside_a_busy_process() -> Iterator[str]:
    rounds = read("busy_core")["speedup"]
    for label in ("alone", "beside a busy process"):
        both = [rounds[f"{label}, round {number}"] for number in (1, 2)]
        yield row(label, *(", ".join(f"{each[task]:.2f}x" for each in both) for task in TASKS))


def least_of_auto() -> float:
    """The speedup over all tasks, alone, of the slower round."""
    rounds = read("busy_core")["speedup"]
    return min(speedups["all"] for name, speedups in rounds.items() if name.startswith("alone"))


def priors() -> Iterator[str]:
    for run, found in read("prior_demo")["tokens_per_step"].items():
        setting, temperature = run.split(", ")
        cells = (f"{found[task]['without']:.2f}, {found[task]['with']:.2f}" for task in ("code", "prose", "all"))
        yield row("demo", setting.replace("=", " of "), "greedy" if temperature == "0.0" else temperature, *cells)
    without, tasks = bench("bench_smollm2_tree"), ("humaneval", "mtbench", "all")
    for run, found in {
        **read("prior_smollm2_63")["tokens_per_step"],
        **read("prior_smollm2")["tokens_per_step"],
    }.items():
        setting, temperature = run.replace("=", " of ").split(", ")
        if temperature == "0.0":
            cells = (f"{without[setting][task]:.2f}, {found[task]['with']:.2f}" for task in tasks)
            yield row("SmolLM2", setting, "greedy", *cells)
        else:
            yield row(
                "SmolLM2", setting, f"{temperature}, with it alone", *(f"{found[task]['with']:.2f}" for task in tasks)
            )


SMOLLM2_METHODS = {
    "plain": "plain",
    '`"auto"`': "jlade's choice",
    "prompt lookup 0, 4, 1": "prompt lookup 0, 4, 1",
    "transformers, plain": "transformers",
    "transformers, prompt lookup of 10 tokens": "transformers, prompt lookup",
}


def speeds(name: str, labels: dict[str, str]) -> Iterator[str]:
    """Yields rows of tokens per step, tokens per second, and the speedup with its interval."""
    found = bench(name, "methods")
    for label, of_file in labels.items():
        each = found[of_file]
        speedup = "1.00x" if of_file == "plain" else f"{each['speedup']:.2f}x, {each['95% interval']}"
        yield row(label, f"{each['tokens/step']:.2f}", f"{each['tokens/s']:.0f}", speedup, f"{each['identical']:.0%}")


def smollm2_samples() -> Iterator[str]:
    tasks = [f"{task} sample" for task in ("CNN/DailyMail", "XSum", "GSM8K", "HumanEval", "MBPP", "MT-Bench")]
    for label, of_file in (
        ("prompt lookup 0, 4, 1", "prompt lookup 0, 4, 1"),
        ("lookahead 7, 5, 7", "7, 5, 7"),
        ("transformers, prompt lookup", "transformers, prompt lookup"),
    ):
        yield row(label, *(f"{bench('bench_smollm2')[of_file][task]:.2f}" for task in [*tasks, "all"]))
    right, methods = bench("bench_smollm2_right", "right"), bench("bench_smollm2_right", "methods")
    for name in ("plain", "prompt lookup 0, 4, 1", "tree of 7"):
        shares = [value for key, value in right[name].items() if key != "right answers"]
        interval = "" if name == "plain" else f", {methods[name]['95% interval']}"
        gain = f"{methods[name]['speedup']:.2f}x{interval}"
        yield row(name, *(f"{share:.0%}" for share in shares), f"{methods[name]['tokens/step']:.2f}", gain)
    long = read("bench_smollm2_long")
    for each in long["figure4"]["rows"]:
        windows = [f"{each[f'W = {w}']:.2f}" for w in (1, 2, 4, 8, 16)]
        yield row(each["N"], *windows, f"{each['per doubling of W']:+.3f}", f"{each['R² of the log fit']:.3f}")
    yield long["figure4"]["note"].split(";")[0].rstrip(".")
    for each in long["table3"]["rows"][1:]:
        yield row(each["row: W, N, G"], f"{each['tokens/step']:.2f}", f"{each['paper, 7B']:.2f}")
    yield long["table3"]["note"].split(" pairs")[0]  # in the paper's order
    dtypes = {each["method (W, N, G)"]: each for each in long["exactness"]["rows"]}
    plain, ours = dtypes["plain, bfloat16"], dtypes["15, 5, 15, bfloat16"]
    yield f"plain decoding gives {plain['identical']} of {plain['answers']} answers of float32"
    yield f"gives {ours['identical']}"
    yield f"at most {plain['largest top-two gap']:.2f} and {ours['largest top-two gap']:.3f}"


def demo() -> Iterator[str]:
    auto = bench("bench_demo_auto", "methods")["jlade's choice"]
    yield f"is {auto['speedup']:.2f}x as fast as plain decoding there, at {auto['tokens/step']:.2f} tokens per step"
    yield from speeds(
        "bench_demo",
        {
            "plain": "plain",
            "10, 2, 10 without n-grams of the prompt": "Jacobi 10, 2, 10, without the prompt",
            "prompt lookup 0, 5, 10": "prompt lookup 0, 5, 10",
            "prompt lookup 0, 4, 1": "prompt lookup 0, 4, 1",
            "15, 5, 15 without n-grams of the prompt": "15, 5, 15, without the prompt",
            "15, 5, 15": "15, 5, 15",
            "tree of 7": "tree of 7",
            "10, 5, 10, tree of 80: `LookaheadConfig()`": "10, 5, 10, tree of 80",
            "transformers, plain": "transformers",
            "transformers, prompt lookup of 10 tokens": "transformers, prompt lookup",
        },
    )
    for label, of_file in (
        ("15, 5, 15", "15, 5, 15"),
        ("15, 5, 15, a row for each token", "15, 5, 15, a row for each token"),
        ("15, 5, 15 without n-grams of the prompt", "15, 5, 15, without the prompt"),
        ("the same, a row for each token", "15, 5, 15, without the prompt, a row for each token"),
        ("Jacobi decoding, 16 guesses", "Jacobi, 16 guesses"),
    ):
        yield row(label, *(f"{bench('bench_demo_paper')[of_file][task]:.2f}" for task in ("code", "prose", "all")))
    official = json.loads((ROOT / "benchmarks" / "prompts" / "demo_official.json").read_text(encoding="utf-8"))
    for label, theirs in official.items():
        ours, size = bench("bench_demo")[label]["all"], label.removesuffix(", without the prompt")
        with_prompt = "yes" if size == label else "no"
        yield row(size, with_prompt, f"{theirs:.3f}", f"{ours:.3f}", f"{ours / theirs:.2f}x")
    for each in read("bench_demo_paper")["growth"]["rows"][1:]:
        tokens = each["tokens of the text"].replace("1 to 16", "up to 16")
        yield row(tokens, f"{each['n-grams']:.0f}", f"{each['keys']:.0f}", f"{each['steps with a draft']:.0%}")
    for label, of_file in (
        ("15, 5, 15", "15, 5, 15"),
        ("15, 5, 15, greedy window", "15, 5, 15, greedy window"),
        ("15, 5, 15, by rejection, greedy window: the paper's", "15, 5, 15, by rejection, greedy window"),
        ("10, 5, 10, tree of 80: `LookaheadConfig()`", "10, 5, 10, tree of 80"),
        ("tree of 7", "tree of 7"),
    ):
        found = [bench("bench_demo_sampled")[f"{of_file}, temperature {t}"] for t in ("0.3", "0.7", "1")]
        yield row(label, *(f"{each['code']:.2f}, {each['prose']:.2f}" for each in found))


def readme() -> Iterator[str]:
    found = bench("bench_smollm2_prompts") | bench("bench_smollm2_tree")
    for label, size, name in (
        ("`LookaheadConfig.tree(119)`: a [tree of drafts](docs/choosing.md#a-tree-of-drafts)", 120, "tree of 119"),
        ("`LookaheadConfig()`: a window and a tree", 120, "10, 5, 10, tree of 80"),
        ("`LookaheadConfig.tree(63)`", 64, "tree of 63"),
        ("`LookaheadConfig.paper(15, 5, 15)`", 120, "15, 5, 15"),
        ("the same without n-grams of the prompt", 120, "15, 5, 15, without the prompt"),
        ("transformers, prompt lookup of 10 tokens", 11, "transformers, prompt lookup"),
    ):
        yield row(label, str(size), f"{found[name]['all']:.2f}")
    yield row("the same by the official package", "120", of_others("official_15_5_15")[-1])
    cpu = bench("bench_smollm2_cpu", "methods")
    auto, lookup = (cpu[name]["speedup"] for name in ("jlade's choice", "transformers, prompt lookup"))
    yield f"it is {least_of_auto():.2f}x to {auto:.2f}x as fast as plain decoding"
    yield f"and transformers with prompt lookup {lookup:.2f}x"
    labels = {"plain": "plain", "`LookaheadConfig.paper(15, 5, 15)`": "15, 5, 15"}
    labels |= {"`LookaheadConfig()`": "window and tree", "`LookaheadConfig.tree(63)`": "tree of 63"}
    yield from on_h200(["code"], labels)


def when_to_use() -> Iterator[str]:
    found, ten = bench("bench_smollm2_prompts") | bench("bench_smollm2_tree"), bench("bench_smollm2_paper")
    for size, name, setting in (
        (4, "prompt lookup 0, 4, 1", "LookaheadConfig.paper(0, 4, 1)"),
        (120, "15, 5, 15", "LookaheadConfig.paper(15, 5, 15)"),
        (120, "tree of 119", "LookaheadConfig.tree(119)"),
        (64, "tree of 63", "LookaheadConfig.tree(63)"),
        (120, "10, 5, 10, tree of 80", "LookaheadConfig()"),
    ):
        yield f"| {found[name]['all']:.2f}, of {size} | `{setting}` |"
    yield f"| {ten['Jacobi, 16 guesses']['all']:.2f}, of 17 tokens a step, on ten prompts |"
    for label, task in (
        ("chat (MT-Bench)", "mtbench"),
        ("summaries (CNN/DailyMail)", "cnndm"),
        ("maths (GSM8K)", "gsm8k"),
        ("answers from retrieved passages", "rag"),
        ("code (HumanEval)", "humaneval"),
    ):
        yield row(label, f"{found['tree of 63'][task]:.2f}")
    ten |= bench("bench_smollm2_tree_10")
    for size, name in ((115, "8, 6, 15"), (68, "7, 5, 10"), (39, "5, 4, 8"), (64, "tree of 63")):
        yield f"| {size} | {ten[name]['humaneval']:.2f}, {ten[name]['mtbench']:.2f} |"
    sampled = bench("bench_smollm2_sampled")["tree of 119, temperature 0.7"]["all"]
    yield f"makes {sampled:.2f} tokens per step at temperature 0.7 on 15 of the prompts"
    yield f"{found['tree of 119']['all']:.2f} greedily on all"
    auto = bench("bench_smollm2_cpu", "methods")[SMOLLM2_METHODS[AUTO]]["speedup"]
    yield f"which is {least_of_auto():.2f}x to {auto:.2f}x as fast"
    (plain,), (wide,) = (
        [x["ms"] for x in estimates() if tuple(x[k] for k in KEYS) == ("v5e", "7b", block, 1, 4096)]
        for block in (1, 120)
    )
    yield f"at {wide / plain:.2f} plain steps on a TPU v5e"
    yield f"takes {h200()['steps']['step of 120, x step of 1']:.2f} plain steps on an H200"


AUTO, KEYS = '`"auto"`', ("device", "shape", "block", "batch", "capacity")


def choosing() -> Iterator[str]:
    found, sampled = bench("bench_smollm2_tree"), bench("bench_smollm2_sampled")
    greedy = found["tree of 119"]["all"] / found["10, 5, 10, tree of 80"]["all"] - 1
    drawn = (
        sampled["tree of 119, temperature 0.7"]["all"] / sampled["10, 5, 10, tree of 80, temperature 0.7"]["all"] - 1
    )
    yield f"accepts {greedy:.0%} more tokens per step of SmolLM2, {drawn:.0%} more at temperature 0.7"
    warm = read("warm_smollm2")["tokens_per_step"]["all"]
    yield f"made SmolLM2 accept {warm['states'] / warm['cold']:.2f}x the tokens per step"
    for name, found in read("agreement")["models"].items():
        for bits in ("8 bits", "4 bits"):
            copy, least = found["copies"][bits], found["agreement_for_least_gain"][bits]
            cells = f"{copy['agreement']:.1%}", f"{copy['gain']:.2f}x", f"{least:.1%}"
            yield row({"demo": "demo", "smollm2": "SmolLM2"}[name], bits, *cells)
    yield f"is indexed once, in {read('corpus')['index_seconds']['1000000']:.1f} s for a million tokens"


def how_it_works() -> Iterator[str]:
    pools = [each for each in read("pool")["rows"] if each["pool"] == "jlade"]
    tokens, candidates = (max(each[f"{of}_lost"] for each in pools) for of in ("tokens_per_step", "candidates"))
    yield f"loses at most {tokens:.2%} of the tokens per step and {candidates:.1%} of the candidates"


def grammar() -> Iterator[str]:
    mask, suite = read("json_schema_maskbench"), read("json_schema_suite")
    assert mask["wrong"] == suite["wrong"] == []
    found = mask["outcomes"]
    yield f"Of {mask['schemas']} schemas of [MaskBench](https://github.com/guidance-ai/jsonschemabench), every 60th"
    yield f"every 60th, {found['passes']} pass"
    yield f"{found['refused']} are refused by keyword, {found['too large']} are too large"
    yield f"{found['refuses a valid instance']} refuse a valid instance"
    yield f"and {found['too slow']} take over {mask['limit']} s"
    yield f"Of {suite['schemas']} schemas of JSON Schema's own tests (draft 7) {suite['outcomes']['passes']} pass"
    times = mask["seconds"]
    yield f"takes {1000 * times['p50']:.0f} ms in the median and {times['p99']:.1f} s in the 99th percentile"
    for tokens, tables in mask["tables"].items():
        assert tables["too slow"] == 0
        yield f"The {tables['tables']} automata have tables"
        seconds, classes, size = (tables[name] for name in ("seconds", "classes", "megabytes"))
        yield row(
            f"{int(tokens):,}",
            f"{tables['trie_seconds']:.1f} s",
            f"{1000 * seconds['p50']:.0f} ms, {seconds['p99']:.1f} s",
            ", ".join(f"{classes[name]:,.0f}" for name in ("p50", "p99", "max")),
            f"{size['p50']:.2f}, {size['p99']:.0f}, {size['max']:.0f} MB",
        )
    drafts = read("grammar_drafts")
    yield f"On {drafts['tasks']} calls of functions and records with schemas"
    yield f"accepts {drafts['tokens_per_step']:.2f} tokens of SmolLM2's"
    yield f"{drafts['tokens_per_step_without']:.2f} without the grammar's drafts: {drafts['gain']:.2f} times as many"
    yield f"at least {drafts['least_gain']:.2f} times for each task"
    costs = {name: read(f"grammar_cost_{name}") for name in ("cpu", "h100", "v5e")}
    assert {cost[name]["copies_in_loop"] for cost in costs.values() for name in ("with", "without")} == {0}
    assert {(cost["states"], cost["classes"]) for cost in costs.values()} == {(10_000, 255)}
    assert costs["cpu"]["added_measured"] < 0.01
    yield f"it adds {costs['h100']['added_estimate']:.1%} to the estimated time on an H100"
    yield f"{costs['v5e']['added_estimate']:.1%} on a TPU v5e"


def usage() -> Iterator[str]:
    names = {"nothing": "nothing", "cache": "JAX's persistent cache", "programs": "programs made ahead"}
    for file, model in (("programs", "demo"), ("programs_smollm2", "smollm2"), ("programs_engine", "demo")):
        facts = read(file)
        found, setting = facts["models"][model], facts.get("lookahead", "auto")
        model += "" if setting == "auto" else f" at {setting}"
        model += " in an engine" if "engine" in facts else ""
        for way, name in names.items():
            each = found["ways"][way]
            times = (f"{each[time]:.1f}" for time in ("call_cpu", "process_cpu", "call"))
            yield row(f"{model}, {name}", *times, *(f"{each[count]:.0f}" for count in ("traces", "compilations")))
        yield f"{found['program_bytes'] / 1e6:.0f} MB for {model}"


FIGURES: dict[str, Callable[[], Iterator[str]]] = {
    "README.md": readme,
    "accelerators.md": accelerators,
    "choosing.md": choosing,
    "device_numbers.md": device_numbers,
    "engine.md": engine,
    "grammar.md": grammar,
    "hosts.md": hosts,
    "how_it_works.md": how_it_works,
    "models.md": models,
    "scaling.md": scaling_page,
    "server.md": server,
    "speed.md": speed,
    "transformers.md": transformers,
    "tunix.md": tunix,
    "usage.md": usage,
    "vllm.md": vllm,
    "when_to_use.md": when_to_use,
}


def text_of(page: pathlib.Path) -> str:
    """Returns the text of a page outside of examples, with a space in the place of each line's end."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(text.split())


@functools.cache
def figures_of(page: pathlib.Path) -> list[str]:
    """Returns the sentences and rows that a page must have."""
    return [" ".join(figure.split()) for figure in FIGURES.get(page.name, lambda: iter(()))()]


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@each_page
def test_figures_are_those_of_the_files(page):
    text = text_of(page)
    assert [figure for figure in figures_of(page) if figure not in text] == []


VERSION, SETTING, SHAPES = "a version", "a setting, or a number of the code", "computed from shapes"
PAPER, OTHERS = "the paper", "their authors, as the page says"
SOURCES: dict[str, dict[str, str]] = {
    "accelerators.md": {
        "3.12": VERSION,
        "0.12": VERSION,
        "1.1": SETTING,
        "2 µs": SETTING,
        **dict.fromkeys(
            ("1.5", "0.6", "0.7", "1.6 µs", "0.3 µs", "21 ms"),
            "schedules of the compiler for a v5e, and its data sheet",
        ),
        "0.8": "shares of a data sheet, near those measured on an H200",
        "0.9": "shares of a data sheet, near those measured on an H200",
        **dict.fromkeys(("3.5", "2.9", "4.2", "0.1 ms", "0.2 µs", "7 µs"), "a profile; benchmarks/NOTES.md"),
        "1.07": PAPER,
        "1.12": PAPER,
        "1.10": "the paper's Tables 2 and 3, as tests/costs/test_plan.py checks",
    },
    "README.md": {"3.11": VERSION, "4.6": VERSION, "13 MB": SHAPES, "5 MB": SHAPES},
    "choosing.md": {
        "1.5x": "benchmarks/NOTES.md",
        "2.2x": "benchmarks/NOTES.md",
        "0.7 MB": SHAPES,
        "4.8 MB": SHAPES,
        "84 MB": SHAPES,
        "1.2x": SETTING,
    },
    "datasets.md": {"95%": SETTING},
    "evaluation.md": {"0.5": SETTING, "95%": SETTING},
    "install.md": {"3.11": VERSION, "93 MB": "the package index", "400 MB": "the installed packages, Ray 2.60"},
    "models.md": {
        "1.1": "the size of TinyLlama",
        "3.1": VERSION,
        "3.2": VERSION,
        "3.3": VERSION,
        "4.5": VERSION,
        "4.6": VERSION,
        "4.7": VERSION,
        "5 GB": SETTING,
        "5.0 MB": SHAPES,
        "11.2 GB": SHAPES,
        "66.6 GB": SHAPES,
        "131 MB": SHAPES,
    },
    "scaling.md": {
        "2%": SETTING,
        "0.5 GB": SETTING,
        "1 µs": "assumed, as the page says",
        "2 µs": "assumed, as the page says",
        "5 µs": "assumed, as the page says",
        "450 GB": "a data sheet",
        "224 GB": "a data sheet",
        "50 GB": "a data sheet",
        "1.00": "tests/costs/test_plan.py",
        "1.34x": "benchmarks/NOTES.md",
        "1.25x": "benchmarks/NOTES.md",
        "6, 1.20x": "benchmarks/NOTES.md",
        "0.8": "reported by others, as accelerators.md says",
        "0.9": "reported by others, as accelerators.md says",
        "0.75": PAPER,
        "0.82": PAPER,
        "1.07": PAPER,
        "1.12": PAPER,
        "1.78x": PAPER,
        "1.96": PAPER,
        "1.98": PAPER,
        "0.425": PAPER,
        "3.106": PAPER,
        "1.10": "the paper's Tables 2 and 3, as tests/costs/test_plan.py checks",
    },
    "server.md": {"4 MB": SETTING, **dict.fromkeys(("2.5", "3.1", "3.2", "3.5", "3.6", "4.5"), VERSION)},
    "speed.md": {
        "0.5625": "arithmetic: four bits, and two numbers of 16 for each 64 weights",
        "1.1": "the size of TinyLlama",
        "5.5": SHAPES,
        "90%": SETTING,
        "0.7": SETTING,
        "1.0": SETTING,
        "95%": SETTING,
        **dict.fromkeys(("2.11", "2.13", "5.17", "5.23", "5.24"), VERSION),
        "1.96": PAPER,
        "2.05": PAPER,
        "0.425": PAPER,
        "3.106": PAPER,
    },
    "transformers.md": {"2.13": VERSION, "5.23": VERSION},
    "usage.md": {"0.0": SETTING, "93 MB": "the package index"},
    "vllm.md": {"0.32": VERSION, "12 MB": SHAPES},
    "when_to_use.md": {
        "2x": OTHERS,
        "3x": OTHERS,
        "2.2x": OTHERS,
        "3.6x": OTHERS,
        "4.34": OTHERS,
        "1.64": OTHERS,
        "7, 5, 7, 1.75": OTHERS,
        "2.73": OTHERS,
    },
}


@each_page
def test_other_figures_have_a_source(page):
    text = text_of(page)
    for figure in figures_of(page):
        text = text.replace(figure, " ")
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|arXiv \S+|[(]?[Ss]ections? \d\.\d|temperature \d\.\d", " ", text)
    left = {match[0] for match in NUMBER.finditer(text) if re.search(r"\.\d|[^\d, ]", match[0])}
    assert sorted(left) == sorted(SOURCES.get(page.name, {}))


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda file: file.stem)
def test_results_name_their_command_and_machine(file):
    content = json.loads(file.read_text(encoding="utf-8"))
    for each in content if isinstance(content, list) else [content]:
        about = each.get("run", each)
        assert {"date", "command", "processor"} <= about.keys()
        assert not re.search(r"/tmp|/bench[A-Z]", about["command"])
        data = re.search(r"--data (\S+)", about["command"])
        assert data is None or (ROOT / data[1]).exists() or data[1] == "HumanEval.jsonl.gz"  # of its authors
