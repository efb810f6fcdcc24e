"""The tables of docs/serving.md."""

from benchmarks.tables import Results, Rows


def throughput(results: Results) -> Rows:
    yield "lengths of the texts", "static batches, tokens/s", "engine, tokens/s", "ratio"
    for title, name in (("evenly spaced", "engine"), ("geometrically spaced", "engine_geometric")):
        rates = results[name]["tokens_per_second"]
        yield title, f"{rates['static']:.0f}", f"{rates['engine']:.0f}", f"{results[name]['ratio']:.2f}"


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
