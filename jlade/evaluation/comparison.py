"""A comparison of methods: speed, steps, tasks, accepted tokens, tests passed; Figure 5 of arXiv 2402.02057."""

import dataclasses
from collections.abc import Sequence

from jlade.evaluation import figures, measures, runs
from jlade.evaluation.figures import Figure
from jlade.evaluation.methods import Method, parse
from jlade.evaluation.runs import Result, Run
from jlade.evaluation.tables import Column, Row, Table

Results = dict[str, list[Result]]  # by method


def methods_table(run: Run, results: Results) -> Table:
    """Returns tokens per step, speed and share of identical answers of each method."""
    rows = []
    for name, of_method in results.items():
        speedup = measures.speedup(of_method, results[str(parse(name).baseline)])
        is_greedy = not parse(name).temperature
        rows.append(
            (
                parse(name).label,
                measures.compression(of_method),
                measures.speed(of_method),
                measures.first_token(of_method),
                speedup and speedup.mean,
                speedup and speedup.median,
                speedup and f"{speedup.low:.2f} to {speedup.high:.2f}",
                measures.identical(of_method) if is_greedy else None,
            )
        )
    columns = (
        Column("method"),
        Column("tokens/step", ".2f"),
        Column("tokens/s", ".1f"),
        Column("first token, s", ".2f"),
        Column("speedup", ".2f x"),
        Column("median", ".2f x"),
        Column("95% interval"),
        Column("identical", ".0%"),
    )
    number = len(next(iter(results.values())))
    note = (
        f"{number} questions, {runs.limit(run.about)} for each turn. Tokens per step counts every "
        "forward pass that gives tokens. Tokens per second excludes prefill and answers of one token; the median "
        "time to the first token includes prefill. Speedup is the mean over the questions, relative to plain decoding "
        "by jlade, with a bootstrap interval. Identical is the share of the answers that equal those of plain decoding "
        "in float32."
    ) + devices_note(run, results)
    return Table("methods", "Methods", columns, tuple(rows), note)


ID_BYTES = 8  # of a token id of torch


def costs_table(results: Results) -> Table:
    """Returns memory, training and determinism of each method, with its speedup, as a guide compares methods."""
    rows: list[Row] = []
    for name, of_method in results.items():
        method = parse(name)
        baseline = results[str(method.baseline)]
        speedup = measures.speedup(of_method, baseline)
        memory = _lookup_bytes(of_method) if method.setting is None else measures.memory(of_method, baseline)
        same = measures.same(of_method, baseline)
        rows.append((method.label, speedup and speedup.mean, memory, "none", method.agreement, same))
    columns = (
        Column("method"),
        Column("speedup", ".2f x"),
        Column("memory, bytes", ",.0f"),
        Column("training"),
        Column("same as plain decoding"),
        Column("measured", ".0%"),
    )
    note = (
        "Memory of a sequence beyond that of plain decoding, by the shapes of arrays: pool, table of recycled logits, "
        "window and drafts; of transformers' prompt lookup a copy of the text with the candidates. No method has a "
        "draft model or trained heads. Greedy texts are those of plain decoding, and so are coupled samples with the "
        "same key; rejection keeps their distribution. Measured is the share of the answers with the tokens of plain "
        "decoding in the same dtype, in which rounding can decide."
    )
    return Table("costs", "Memory, training and determinism", columns, tuple(rows), note)


def _lookup_bytes(results: Sequence[Result]) -> float:
    """Returns the mean bytes of the texts with their candidates, which transformers' prompt lookup copies in a step."""
    lookup_tokens = parse(results[0].method).lookup_tokens
    lengths = [each.prompt_tokens + len(each.tokens) + lookup_tokens for each in measures.answers(results)]
    return ID_BYTES * sum(lengths) / len(lengths) if lookup_tokens else 0.0


def tasks_table(results: Results) -> Table:
    """Returns tokens per step by task, as Spec-Bench (arXiv 2401.07851) arranges methods and tasks."""
    tasks = _names(results, "task")
    rows: list[Row] = [
        (
            parse(name).label,
            *(measures.compression([one for one in of_method if one.task == task]) for task in tasks),
            measures.compression(of_method),
        )
        for name, of_method in results.items()
    ]
    columns = (Column("tokens/step"), *(Column(task, ".2f") for task in [*tasks, "all"]))
    return Table("tasks", "Tokens per step by task", columns, tuple(rows))


def throughput_table(run: Run, results: Results) -> Table:
    """Returns tokens per second by data set, the numbers of `throughput_figure`."""
    datasets = _names(results, "dataset")
    columns = (Column("tokens/s"), *(Column(name, ".1f") for name in datasets))
    rows: list[Row] = [(parse(name).label, *_speeds(of_method, datasets)) for name, of_method in results.items()]
    return Table("throughput", "Throughput by data set", columns, tuple(rows), devices_note(run, results).strip())


def throughput_figure(run: Run, results: Results) -> Figure:
    """Returns Figure 5 of arXiv 2402.02057 for this model and its devices: tokens per second by data set."""
    datasets = _names(results, "dataset")
    series = {parse(name).label: _speeds(of_method, datasets) for name, of_method in results.items()}
    title = f"Throughput by data set: {run.about['model']} on {run.about['mesh'] or run.about['device']}"
    note = "As Figure 5 of the paper, for the devices of this run. Prefill is excluded." + devices_note(run, results)
    return Figure("throughput", title, figures.bars(datasets, series, "tokens/s"), note)


def device_name(run: Run) -> str:
    """Returns the device of a run, or its processor, with the mesh that divides it."""
    device = run.about["processor"] if run.about["device"] == "cpu" else run.about["device"]
    return f"{device}, divided as {run.about['mesh']}" if run.about["mesh"] else device


def figure_5(run: Run, results: Results) -> list[Table | Figure | None]:
    """Returns Figure 5 for this model and device: speed by data set, with and without lookahead decoding."""
    title = f"Speed by data set on {device_name(run)} (Figure 5 of the paper): {run.about['model']}"
    figure = dataclasses.replace(throughput_figure(run, results), name="figure5", title=title)
    plain = str(Method())
    (lookahead,) = [name for name in results if name != plain and parse(name).setting is not None]
    rows: list[Row] = []
    for dataset in dict.fromkeys(result.dataset for result in results[lookahead]):
        of_dataset = {name: measures.of_dataset(of_method, dataset) for name, of_method in results.items()}
        speedup = measures.speedup(of_dataset[lookahead], of_dataset[plain])
        interval = speedup and f"{speedup.low:.2f} to {speedup.high:.2f}"
        speeds = map(measures.speed, of_dataset.values())
        compression = measures.compression(of_dataset[lookahead])
        rows.append((dataset, *speeds, compression, speedup and speedup.mean, interval))
    columns = (
        Column("data set"),
        *(Column(f"{parse(name).label}, tokens/s", ".1f") for name in results),
        Column("tokens/step", ".2f"),
        Column("speedup", ".2f x"),
        Column("95% interval"),
    )
    note = (
        f"Tokens per step and speedup are those of {parse(lookahead).label}, the latter relative to plain decoding by "
        "jlade. Prefill is excluded. The paper reports 1.5x to 2.3x, relative to transformers, on an A100."
    ) + devices_note(run, results)
    return [Table("figure5", title, columns, tuple(rows), note), figure]


def accepted_table(results: Results) -> Table:
    """Returns the share of the steps that accepted each number of tokens."""
    by_jlade = {name: of_method for name, of_method in results.items() if parse(name).setting is not None}
    shares = {name: measures.accepted_shares(of_method) for name, of_method in by_jlade.items()}
    most = max(map(len, shares.values()))
    rows = tuple((parse(name).label, *each, *[None] * (most - len(each))) for name, each in shares.items())
    columns = (Column("share of steps that accept"), *(Column(str(i + 1), ".0%") for i in range(most)))
    return Table("accepted", "Accepted tokens of a step", columns, rows)


def right_table(results: Results) -> Table | None:
    """Returns the share of the questions with a right answer by data set, None if no answer was judged."""
    judged: dict[str, dict[str, list[bool]]] = {}
    for name, of_method in results.items():
        for result in of_method:
            if result.passed is not None:
                judged.setdefault(result.dataset, {}).setdefault(name, []).append(result.passed)
    if not judged:
        return None
    rows: list[Row] = [
        (parse(name).label, *(sum(right[name]) / len(right[name]) for right in judged.values())) for name in results
    ]
    heads = [f"{dataset} ({len(next(iter(right.values())))})" for dataset, right in judged.items()]
    columns = (Column("right answers"), *(Column(head, ".1%") for head in heads))
    note = (
        "In parentheses the number of questions. Programs must pass their tests (pass@1), numbers equal the right one, "
        "and of choices the letter counts that the model finds most probable."
    )
    return Table("right", "Right answers", columns, tuple(rows), note)


def devices_note(run: Run, results: Results) -> str:
    """Returns a sentence if methods of transformers ran on another device than those of jlade."""
    other = run.about.get("transformers_device")
    is_compared = any(parse(name).setting is None for name in results)
    if not is_compared or other is None or (other == "cpu") == (run.about["device"] == "cpu"):
        return ""
    return f" transformers ran on another device, {other}: its speed does not compare."


def _names(results: Results, field: str) -> list[str]:
    """Returns the values of a field of the results, each once."""
    return list(dict.fromkeys(getattr(result, field) for result in next(iter(results.values()))))


def _speeds(results: Sequence[Result], datasets: Sequence[str]) -> list[float]:
    return [measures.speed(measures.of_dataset(results, name)) for name in datasets]
