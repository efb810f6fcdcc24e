"""The tables of docs/models.md, docs/transformers.md, docs/tunix.md and docs/vllm.md."""

from typing import Any

from benchmarks.tables import Results, Rows, two


def experts(results: Results) -> Rows:
    ways = "reading alone", "compiled"
    titles = (f"{device}: {way}" for device in ("H100", "4 x v6e") for way in ways)
    yield "tokens of a step", "experts read, of 128", *titles, "a layer on two cores, measured"
    h100, v6e, cpu = (results[f"experts_{name}"]["results"][0]["rows"] for name in ("h100", "v6e", "cpu"))
    for rows in zip(h100, v6e, cpu, strict=True):
        times = [f"{row[name]:.1f}" for row in rows[:2] for name in ("by_sheet_ms", "estimate_ms")]
        tokens, number, measured = rows[0]["tokens"], rows[0]["experts"], rows[2]["measured_ms"]
        yield str(tokens), f"{number:.0f}", *times, f"{measured:.1f}"


def onto_devices(results: Results) -> Rows:
    kinds = ("Hugging Face", "jlade", "Orbax")
    yield "", *kinds
    ways = {way["way"]: way for way in results["loading_devices"]["ways"]}
    for title, mesh, key, form in (
        ("peak of each device, relative to its share", "model=8", "of_share", "{:.3f}x"),
        ("host memory in addition to the devices' arrays, `model=8`", "model=8", "host_bytes", "{} MB"),
        ("the same, `lookahead=2, model=4`", "lookahead=2, model=4", "host_bytes", "{} MB"),
        ("bytes read, relative to the files", "model=8", "read_of_files", "{:.3f}x"),
    ):
        cells = [ways[f"{kind}; {mesh}"][key] for kind in kinds]
        yield title, *(form.format(f"{cell / 1e6:.0f}" if key == "host_bytes" else cell) for cell in cells)


def few_bits(results: Results) -> Rows:
    return quality(results["quantization"], "weights, computing in")


def few_bits_smollm2(results: Results) -> Rows:
    return quality(results["quantization_smollm2"], "weights, computing in")


def cache(results: Results) -> Rows:
    return quality(results["kv_dtype"], "cache, weights")


def quality(found: dict[str, Any], first: str) -> Rows:
    forms = {
        "relative error of the logits": ".1%",
        "KL divergence, nats a token": ".5f",
        "same most likely token": ".1%",
        "perplexity of the texts": ".3f",
    }
    yield first, *forms
    for name, row in found["quality"].items():
        yield name, *(f"{row[measure]:{form}}" for measure, form in forms.items())


def transformers(results: Results) -> Rows:
    yield "`model.generate`", "tokens/s", "speed beside `generate`, least to most", "equal ids"
    ways, prompts = results["transformers"]["ways"], len(results["transformers"]["prompts"])
    for title, name in (
        ("as it is", "transformers"),
        ("`prompt_lookup_num_tokens=10`", "transformers, prompt lookup"),
        ("`custom_generate=lookahead(model, lookahead=None)`", "jlade, plain"),
        ("`custom_generate=lookahead(model)`", "jlade, auto"),
    ):
        way = ways[name]
        least, most = way["fewest_and_most"]
        speed = "1" if name == "transformers" else f"{way['times_transformers']:.2f}x, {least:.2f} to {most:.2f}"
        yield title, f"{way['tokens_per_second']:.1f}", speed, f"{way['equal_texts']} of {prompts}"


def tunix_steps(results: Results) -> Rows:
    yield "by the clock, of all cores", "converted", "as it is", "the model alone"
    for title, name in (("`tree=7`", "tree=7"), ("plain", "plain")):
        steps = results["tunix_steps"]["milliseconds"][name]
        yield title, *(f"{time['wall']:.2f}, {time['cores']:.2f}" for time in steps.values())


def rollout_epochs(results: Results) -> Rows:
    yield "tokens per step in epoch", "1", "2", "3", "4", "5"
    for title, name in (("without earlier rollouts", "without"), ("with earlier rollouts as drafts", "with")):
        epochs = results["rollouts"]["engines"][name]["epochs"]
        yield title, *two(epoch["tokens_per_step"] for epoch in epochs)


def rollouts(results: Results) -> Rows:
    yield "engine", "eight rollouts of a prompt: tokens/s", "speedup", "four rollouts: tokens/s", "speedup"
    for title, name in (
        ("vanilla", "vanilla"),
        ("`LookaheadRollout`, `lookahead=None`", "plain"),
        ('`"auto"`', "auto"),
        ("the tree, without earlier rollouts", "without"),
        ("the tree, with earlier rollouts", "with"),
    ):
        cells = []
        for file in ("rollouts", "rollouts_4"):
            engines = results[file]["engines"]
            speed, vanilla = (
                engine["tokens"] / engine["rollout_seconds"] for engine in (engines[name], engines["vanilla"])
            )
            cells += [f"{10 * round(speed / 10)}", f"{speed / vanilla:.2f}"]
        yield title, *cells


def vllm(results: Results) -> Rows:
    rates = "tokens per step", "tokens per second"
    yield "drafts", f"demo: {rates[0]}", rates[1], f"SmolLM2: {rates[0]}", rates[1]
    for title, name, run in (
        ("plain", "plain", "first"),
        ("vLLM's `ngram`, matches of 5 (its default)", "ngram", "first"),
        ("vLLM's `ngram`, matches of 1 to 8", "ngram 1 to 8", "first"),
        ("`Proposer`", "jlade", "first"),
        ("`Proposer`, again", "jlade", "again"),
    ):
        rows = [model["results"][name][run] for model in results["vllm"]]
        cells = ((f"{row['tokens_per_step']:.2f}", f"{row['tokens_per_second']:.0f}") for row in rows)
        yield title, *sum(cells, ())


DRAFTERS = {
    "vLLM's `ngram`, 5": "vLLM's ngram, 5 to 5",
    "vLLM's `ngram`, 1 to 8": "vLLM's ngram, 1 to 8",
    "`Proposer`, `memory = 0`": "jlade, own text",
    "`Proposer`": "jlade",
}


def vllm_replays(results: Results) -> Rows:
    titles: dict[Any, str] = {
        (texts, drafts): f"{name}, {drafts}"
        for texts, name in (("demo", "demo"), ("smollm2", "SmolLM2"))
        for drafts in (4, 8, 16)
    }
    yield "drafts", *titles.values()
    rows = results["proposer"]["replays"]
    found = {(row["texts"], row["drafts"], row["drafter"]): row["tokens_per_step"] for row in rows}
    for title, drafter in DRAFTERS.items():
        yield title, *two(found[*case, drafter] for case in titles)


def vllm_times(results: Results) -> Rows:
    titles = {(256, 1024): "256 rows of 1024 tokens", (256, 8192): "256 rows of 8192", (1, 8192): "one row of 8192"}
    yield "µs for each row", *titles.values()
    rows = results["proposer"]["microseconds_per_row"]
    found = {(row["rows"], row["length"], row["drafter"]): row["median"] for row in rows}
    for title, drafter in DRAFTERS.items():
        yield title, *(f"{found[*case, drafter]:.1f}" for case in titles)
