"""The tables of docs/serving.md, and one of docs/usage.md."""

from benchmarks.tables import Results, Rows, two


def throughput(results: Results) -> Rows:
    yield "lengths of the texts", "static batches, tokens/s", "engine, tokens/s", "ratio"
    for title, name in (("evenly spaced", "engine"), ("geometrically spaced", "engine_geometric")):
        rates = results[name]["tokens_per_second"]
        yield title, f"{rates['static']:.0f}", f"{rates['engine']:.0f}", f"{results[name]['ratio']:.2f}"


def remembered(results: Results) -> Rows:
    yield "tokens per step", "remembered", "not remembered"
    for title, part in (
        ("prompts for the first time", "first"),
        ("the same again", "again"),
        ("an earlier prompt and its answer, repeated in a prompt", "edits"),
    ):
        ways = (results["remembered"][way][part] for way in ("remembered", "none"))
        yield title, *(f"{way['tokens_per_step']:.1f}" for way in ways)


def prefixes(results: Results) -> Rows:
    yield "with prefixes, relative to without", "speed"
    for title, name in (
        ("first token of the second turn of a chat: 32 tokens after 512 and an answer of 32", "second turn"),
        ("first tokens of eight continuations of a prompt of 512 tokens, submitted at once", "continuations"),
        ("texts of 32 tokens, of prompts that share nothing", "prompts that share nothing"),
    ):
        yield title, f"{results['prefixes'][name]['ratio']:.2f}x"


def under_load(results: Results) -> Rows:
    yield "requests", "tokens/s", "first token, median", "between pieces, median"
    found = results["serving"]
    for title, name in (
        ("200 at once", "at_once"),
        ("the first 500 by 16 clients", "in_sequence_1"),
        ("the last 500", "in_sequence_4"),
    ):
        part = found[name]
        first, between = (part[f"{key}_seconds"]["p50"] for key in ("first_token", "between_pieces"))
        yield title, f"{part['tokens_per_second']:.0f}", f"{first:.1f} s", f"{1000 * between:.0f} ms"


def json_schemas(results: Results) -> Rows:
    yield "schemas", "MaskBench, every 60th", "JSON Schema's tests, draft 7"
    found = [results[f"json_schema_{name}"] for name in ("maskbench", "suite")]
    assert [part["wrong"] for part in found] == [[], []]  # no invalid instance is accepted
    yield "all", *(str(part["schemas"]) for part in found)
    for title, outcome in (
        ("pass: valid instances are accepted, invalid ones refused", "passes"),
        ("are refused by keyword", "refused"),
        ("are too large", "too large"),
        ("refuse a valid instance, as by the order of its properties", "refuses a valid instance"),
        ("are refused otherwise, as no value fits the depth", "wrong schema"),
        (f"take over {found[0]['limit']} s", "too slow"),
    ):
        yield title, *(str(part["outcomes"].get(outcome, 0)) for part in found)


def grammar_drafts(results: Results) -> Rows:
    yield "calls", "tokens per step", "without the grammar's drafts", "gain", "least gain of a call"
    found = results["grammar_drafts"]
    rates = two([found["tokens_per_step"], found["tokens_per_step_without"]])
    yield str(found["tasks"]), *rates, f"{found['gain']:.2f}x", f"{found['least_gain']:.2f}x"


def programs(results: Results) -> Rows:
    yield "model, what is there", "call", "process", "processors", "traces", "compilations"
    names = {"nothing": "nothing", "cache": "JAX's persistent cache", "programs": "programs made ahead"}
    for file, model, title in (
        ("programs", "demo", "demo"),
        ("programs_smollm2", "smollm2", "smollm2"),
        ("programs_engine", "demo", "demo in an engine"),
    ):
        for way, name in names.items():
            found = results[file]["models"][model]["ways"][way]
            times = (f"{found[time]:.1f}" for time in ("call", "process", "process_cpu"))
            yield f"{title}, {name}", *times, *(f"{found[count]:.0f}" for count in ("traces", "compilations"))
