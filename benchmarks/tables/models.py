"""The tables of docs/models.md and docs/integrations.md."""

from typing import Any

from benchmarks.tables import Results, Rows


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
