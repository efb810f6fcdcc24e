"""The tables of docs/accelerators.md, docs/scaling.md and docs/hosts.md: estimates, and measurements beside them."""

import itertools
import math
from typing import Any

import jax

from benchmarks.inflate import LLAMA_3_8B
from benchmarks.tables import Results, Rows
from jlade.config import LookaheadConfig
from jlade.conversion.tensors import param_shapes
from jlade.costs import settings
from jlade.costs.devices import DEVICES
from jlade.lookahead.names import label, parse


def three_digits(number: float) -> str:
    """Returns three digits, also where they end in 0."""
    return f"{number:#.3g}".rstrip(".")


def blocks(results: Results) -> Rows:
    sizes = (1, 2, 8, 32, 60, 120, 240)
    yield "device, model", *map(str, sizes)
    for model, times in steps(results).items():
        yield model, *(times[size, 1, 4096] for size in sizes)


def batches(results: Results) -> Rows:
    yield "device, model", "batch 4", "batch 8", "512 entries", "16384 entries"
    for model, times in steps(results).items():
        sizes = (4, 4096), (8, 4096), (1, 512), (1, 16384)
        yield model, *(f"{times[1, *size]}, {times[120, *size]}" for size in sizes)


def steps(results: Results) -> dict[str, dict[Any, str]]:
    """Returns the times of a step by device and model, and by block, batch and capacity."""
    times: dict[str, dict[Any, str]] = {}
    for row in results["estimate"]["rows"]:
        of_model = times.setdefault(f"{row['device']}, {row['shape']}", {})
        of_model[row["block"], row["batch"], row["capacity"]] = f"{row['ms']:.3g}" if row["fits"] else "-"
    return times


def cpu(results: Results) -> Rows:
    yield "tokens", "estimated, ms", "measured, ms", "ratio"
    for row in results["estimate_134m_cpu"]["rows"]:
        yield str(row["block"]), f"{row['ms']:.1f}", f"{row['measured_ms']:.1f}", f"{row['ratio']:.2f}"


def recurrent(results: Results) -> Rows:
    sizes = (1, 8, 32, 120)
    yield "device, model", *map(str, sizes)
    rows = results["estimate_recurrent"]["rows"]
    times = {(row["device"], row["shape"], row["block"]): three_digits(row["ms"]) for row in rows}
    for model in dict.fromkeys(key[:2] for key in times):
        yield ", ".join(model), *(times[*model, size] for size in sizes)


def four_bits(results: Results) -> Rows:
    yield "device, model", "matrices", "1", "8", "32", "60", "120"
    models: dict[Any, list[str]] = {}
    for row in results["estimate_bits"]["rows"]:
        bits = row.get("bits", 16)
        matrices = "bfloat16" if bits == 16 else f"{bits} bits"
        models.setdefault((f"{row['device']}, {row['shape']}", matrices), []).append(three_digits(row["ms"]))
    yield from ([*names, *cells] for names, cells in models.items())


def mxfp4(results: Results) -> Rows:
    yield "device, model", "matrices", "1", "8", "32", "120"
    models: dict[Any, list[str]] = {}
    for row in results["estimate_mxfp4"]["rows"]:
        if row["device"] == "h100":  # estimates for TPUs lack the conversion, which takes longer
            names = f"h100, {row['shape']}", row["levels"].upper() if "levels" in row else "bfloat16"
            models.setdefault(names, []).append(three_digits(row["ms"]))
    yield from ([*names, *cells] for names, cells in models.items())


def experts(results: Results) -> Rows:
    yield "tokens of a step", "experts read, of 128", "kernels", "estimate", "memory traffic"
    for row in results["experts_h100"]["results"][0]["rows"]:
        times = (f"{row[name]:.1f} ms" for name in ("estimate_ms", "bytes_ms"))
        yield str(row["tokens"]), f"{row['experts']:.0f}", str(row["kernels"]), *times


def published(results: Results) -> Rows:
    yield "model", "devices", "GB of each", "largest capacity, at least", "plain step, ms", "step, ms", "setting"
    for row in results["real_configs"]["rows"]:
        if row["fits"]:
            device, _, number = row["place"].partition("-")
            capacity, setting = row["largest_capacity"], label(parse(row["lookahead"]))
            plain, step = (three_digits(row[f"{name}step_estimate_ms"]) for name in ("plain_", ""))
            yield (
                row["model"],
                f"{number} x {device}" if number else device,
                f"{row['needed_bytes'] / 1e9:.1f}",
                f"{capacity:,}{'' if capacity % 1024 else ', all'}",
                plain,
                "" if setting == "plain" else step,
                setting,
            )


def h200(results: Results) -> Rows:
    yield "step", "tokens", "estimated, ms", "measured, ms", "ratio"
    measured = results["accelerator_7b_nvidia_h200"]["parts"]["steps"]
    for row in results["estimate_7b_h200"]["rows"]:
        if (tokens := row["block"]) in (1, 120):
            times = row["ms"], measured[f"step of {tokens}, ms"]
            cells = (f"{number:.2f}" for number in (*times, times[0] / times[1]))
            yield "plain" if tokens == 1 else "15, 5, 15", str(tokens), *cells


def attention(results: Results) -> Rows:
    yield "heads, KV heads", "tokens", "kernel, µs a layer", "plain, µs a layer", "error, kernel and plain"
    found = results["attention_nvidia_h200"]
    for plain, kernel in zip(found["cases"][::2], found["cases"][1::2], strict=True):
        assert (kernel["implementation"], plain["implementation"]) == ("gpu", "plain")
        times = (f"{1e6 * case['seconds'] / found['layers']:.1f}" for case in (kernel, plain))
        errors = f"{kernel['relative_error']:.4f}, {plain['relative_error']:.4f}"
        yield f"{kernel['heads']}, {kernel['kv_heads']}", str(kernel["tokens"]), *times, errors


def outside(results: Results) -> Rows:
    yield "setting", "v5e, ms", "share of the step", "H100, ms", "share of the step"
    found = results["estimate_tree"]["devices"]
    for title, name in (("10, 5, 10, tree of 80", "10,5,10:tree=80"), ("15, 5, 15", "15,5,15"), ("plain", "plain")):
        rows = [found[device][name] for device in ("v5e", "h100")]
        yield (
            title,
            *(cell for row in rows for cell in (f"{row['outside_ms']:.2f}", f"{row['share_of_32_layers']:.1%}")),
        )


def streams(results: Results) -> Rows:
    return meshes(results["scaling"]["streams"], "count", 1)  # a single text leaves the axis `data` at 1


def texts(results: Results) -> Rows:
    return meshes(results["scaling"]["batches"], "batch_size", 0)


def meshes(cases: list[dict[str, Any]], columns: str, first: int) -> Rows:
    """Yields tokens per second, the mesh from its axis `first` on, and the tokens of a step, by model and device."""
    yield "model, device", *map(str, dict.fromkeys(case[columns] for case in cases))
    for names, of_row in itertools.groupby(cases, key=lambda case: (case["model"], case["device"])):
        cells = []
        for case in of_row:
            size = "plain" if case["block_size"] == 1 else case["block_size"]
            mesh = "x".join(map(str, (case["mesh"] or [])[first:]))
            cells.append(f"{case['tokens_per_second']:.0f} ({mesh}; {size})" if mesh else "-")
        yield ", ".join(names), *cells


def sizes(results: Results) -> Rows:
    yield "setting", "tokens of a step", "tokens per step"
    found = results.bench("bench_smollm2_sizes")
    for setting in settings.measured():
        name = label(setting)
        shown = f"{name}: `LookaheadConfig()`" if setting == LookaheadConfig() else name
        yield shown, str(setting.block_size), f"{found[name]['all']:.2f}"


def axes(results: Results) -> Rows:
    yield "eight devices", "`model`", "`lookahead`", "`model`, plain decoding", "collective of equal speed"
    for row in results["scaling"]["axes"]:
        if (row["compression"], row["count"]) == ("smollm2", 8):
            speeds = (f"{row[axis]:.0f}" for axis in ("model", "lookahead", "model, plain decoding"))
            yield row["device"], *speeds, f"{row['microseconds_of_equal_speed']:.0f} µs"


def billion(results: Results) -> Rows:
    """A billion prompts of 512 tokens and texts of 256 on 64 machines of eight H100s."""
    yield "quantity", "arithmetic", "value"
    (case,) = [
        case
        for case in results["scaling"]["batches"]
        if (case["model"], case["device"], case["count"], case["batch_size"]) == ("8b", "h100", 8, 128)
    ]
    assert case["mesh"] == [4, 1, 2]  # of a machine's four workers
    speed, sheet = case["tokens_per_second"], DEVICES["h100"]
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(LLAMA_3_8B, "bfloat16")))
    reading = 2 * parameters * 512 / (8 * 0.8 * 1e12 * sheet.tflops)  # seconds of a machine for a prompt
    writing = 256 / speed  # seconds of a machine for a text
    of_texts, of_prompts = 1e9 * writing / 3600, 1e9 * reading / 3600
    operations = f"2 x {parameters / 1e9:.2f} billion parameters x 512 operations"
    rate = f"0.8 of eight times {sheet.tflops:.0f} TFLOP/s"
    source = "[scaling.md](scaling.md#estimates): 128 texts"
    sum_ = f"({of_texts:,.0f} + {of_prompts:,.0f}) / 64"
    part = 4 * 10_000 * (writing + reading) / 60
    of_part = f"4 x 10,000 x (256 / {speed:,.0f} s + {1000 * reading:.2f} ms)"
    yield "tokens of a machine in a second, texts alone", source, f"{speed:,.0f}"
    yield "texts", f"1,000,000,000 x 256 / {speed:,.0f} s", f"{of_texts:,.0f} machine-hours"
    yield "prompts", f"{operations} at {rate}: {1000 * reading:.2f} ms each", f"{of_prompts:,.0f} machine-hours"
    yield "together on 64 machines", sum_, f"{(of_texts + of_prompts) / 64:.0f} hours"
    yield "parts of 10,000 records", "1,000,000,000 / 10,000", f"{1e9 / 10_000:,.0f}"
    yield "a part, on one of a machine's four workers", of_part, f"{part:.1f} minutes"
    yield "results", "1,000,000,000 lines of 5 kB, assumed", "5 TB in 100,000 files"
