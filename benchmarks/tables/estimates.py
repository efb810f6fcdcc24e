"""The tables of docs/accelerators.md and docs/scaling.md: estimates, and measurements beside them."""

from typing import Any

from benchmarks.tables import Results, Rows


def three_digits(number: float) -> str:
    """Returns three digits, also where they end in 0."""
    return f"{number:#.3g}".rstrip(".")


def blocks(results: Results) -> Rows:
    sizes = (1, 2, 8, 32, 60, 120, 240)
    yield "device, model", *map(str, sizes)
    times = {
        (row["device"], row["shape"], row["block"]): f"{row['ms']:.3g}" if row["fits"] else "-"
        for row in results["estimate"]["rows"]
        if (row["batch"], row["capacity"]) == (1, 4096) and row["shape"] != "7b"  # much like 8b
    }
    for model in dict.fromkeys(key[:2] for key in times):
        yield ", ".join(model), *(times[*model, size] for size in sizes)


def few_bits(results: Results) -> Rows:
    sizes = (1, 8, 32, 120)
    yield "device, model", "matrices", *map(str, sizes)
    rows = [row for row in results["estimate_bits"]["rows"] if row["shape"] == "8b"]
    rows += [row for row in results["estimate_mxfp4"]["rows"] if row["device"] == "h100"]  # no conversion on TPUs
    times: dict[Any, dict[int, str]] = {}
    for row in rows:
        bits = row.get("bits", 16)
        matrices = "bfloat16" if bits == 16 else row.get("levels", f"{bits} bits").replace("mxfp4", "MXFP4")
        names = f"{row['device']}, {row['shape']}", matrices
        times.setdefault(names, {})[row["block"]] = three_digits(row["ms"])
    yield from ((*names, *(of_size[size] for size in sizes)) for names, of_size in times.items())


def h200(results: Results) -> Rows:
    yield "step", "tokens", "estimated, ms", "measured, ms", "ratio"
    measured = results["accelerator_7b_nvidia_h200"]["parts"]["steps"]
    for row in results["estimate_7b_h200"]["rows"]:
        if (tokens := row["block"]) in (1, 120):
            times = row["ms"], measured[f"step of {tokens}, ms"]
            cells = (f"{number:.2f}" for number in (*times, times[0] / times[1]))
            yield "plain" if tokens == 1 else "15, 5, 15", str(tokens), *cells


def meshes(results: Results) -> Rows:
    """Yields tokens per second, the mesh and the tokens of a step, by model and device."""
    cases = ((1, 1), (8, 1), (64, 1), (8, 32))  # devices, texts
    yield "model, device", "one device, one text", "8 devices", "64 devices", "8 devices, 32 texts"
    found = {
        (case["model"], case["device"], case["count"], case["batch_size"]): case
        for case in (*results["scaling"]["streams"], *results["scaling"]["batches"])
    }
    for model in ("1b", "8b", "70b"):
        for device in ("v5e", "v6e", "h100", "h200"):
            yield f"{model}, {device}", *(cell(found[model, device, *case]) for case in cases)


def cell(case: dict[str, Any]) -> str:
    if not case["mesh"]:
        return "-"
    size = "plain" if case["block_size"] == 1 else case["block_size"]
    return f"{case['tokens_per_second']:.0f} ({'x'.join(map(str, case['mesh']))}; {size})"
