"""A comparison of methods: speed, steps, tasks, accepted tokens, tests passed; Figure 5 of arXiv 2402.02057."""

import dataclasses
from collections.abc import Iterator, Sequence

from jlade.evaluation import measures, report, runs
from jlade.evaluation.methods import Method, parse
from jlade.evaluation.report import Figure, Row, Table
from jlade.evaluation.runs import Result, Run

Results = dict[str, list[Result]]  # by method, to the same questions
ID_BYTES = 8  # of a token id of torch


def by_method(results: Results) -> Iterator[tuple[Method, list[Result], list[Result]]]:
    """Yields each method with its results and those of its baseline, [] where there are none."""
    for name, own in results.items():
        method = parse(name)
        yield method, own, results.get(str(method.baseline), [])


def methods_table(run: Run, results: Results) -> Table:
    """Returns tokens per step, speed and share of identical answers of each method."""
    rows: list[Row] = []
    for method, own, plain in by_method(results):
        speed, speedup = (measures.compression(own), measures.speed(own)), measures.speedup(own, plain)
        identical = None if method.temperature else measures.identical(own)
        summary = speedup.mean, speedup.median, speedup.interval
        rows.append((method.label, *speed, measures.first_token(own), *summary, identical))
    columns = {"method": "", "tokens/step": ".2f", "tokens/s": ".1f", "first token, s": ".2f"}
    columns |= {"speedup": ".2f x", "median": ".2f x", "95% interval": "", "identical": ".0%"}
    note = (
        f"{len(next(iter(results.values())))} questions, {runs.limit(run.about)} for each turn. Tokens per step counts "
        "every forward pass that gives tokens. Tokens per second excludes prefill and answers of one token; the median "
        "time to the first token includes prefill. Speedup is the mean over the questions, relative to plain decoding "
        "by jlade, with a bootstrap interval. Identical is the share of the answers that equal those of plain decoding "
        "in float32."
    )
    return Table("methods", "Methods", columns, rows, note + devices_note(run, results))


def costs_table(run: Run, results: Results) -> Table:
    """Returns memory, training and determinism of each method, with its speedup, as a guide compares methods."""
    rows: list[Row] = []
    for method, own, plain in by_method(results):
        memory = _lookup_bytes(method, own) if method.setting is None else measures.memory(own, plain)
        speedup, same = measures.speedup(own, plain).mean, measures.same(own, plain)
        rows.append((method.label, speedup, memory, "none", method.agreement, same))
    columns = {"method": "", "speedup": ".2f x", "memory, bytes": ",.0f"}
    columns |= {"training": "", "same as plain decoding": "", "measured": ".0%"}
    note = (
        "Memory of a sequence beyond that of plain decoding, by the shapes of arrays: pool, table of recycled logits, "
        "window and drafts; of transformers' prompt lookup a copy of the text with the candidates. No method has a "
        "draft model or trained heads. Greedy texts are those of plain decoding, and so are coupled samples with the "
        "same key; rejection keeps their distribution. Measured is the share of the answers with the tokens of plain "
        "decoding in the same dtype, in which rounding can decide."
    )
    return Table("costs", "Memory, training and determinism", columns, rows, note)


def _lookup_bytes(method: Method, results: Sequence[Result]) -> float:
    """Returns the mean bytes of the texts with their candidates, which transformers' prompt lookup copies in a step."""
    lengths = [each.prompt_tokens + len(each.tokens) + method.lookup_tokens for each in measures.answers(results)]
    return ID_BYTES * sum(lengths) / len(lengths) if method.lookup_tokens else 0.0


def tasks_table(run: Run, results: Results) -> Table:
    """Returns tokens per step by task, as Spec-Bench (arXiv 2401.07851) arranges methods and tasks."""
    tasks = _values(results, "task")
    columns = {"tokens/step": ""} | dict.fromkeys([*tasks, "all"], ".2f")
    rows: list[Row] = []
    for method, own, _ in by_method(results):
        parts = {task: [one for one in own if one.task == task] for task in tasks} | {"all": own}
        rows.append((method.label, *map(measures.compression, parts.values())))
    return Table("tasks", "Tokens per step by task", columns, rows)


def _speeds(results: Results) -> dict[str, list[float]]:
    """Returns the tokens per second of each method, by its label, on each data set."""
    datasets = _values(results, "dataset")
    return {
        method.label: [measures.speed(measures.of_dataset(own, name)) for name in datasets]
        for method, own, _ in by_method(results)
    }


def throughput_table(run: Run, results: Results) -> Table:
    """Returns tokens per second by data set, the numbers of `throughput_figure`."""
    columns = {"tokens/s": ""} | dict.fromkeys(_values(results, "dataset"), ".1f")
    rows: list[Row] = [(label, *speeds) for label, speeds in _speeds(results).items()]
    return Table("throughput", "Throughput by data set", columns, rows, devices_note(run, results).strip())


def throughput_figure(run: Run, results: Results) -> Figure:
    """Returns Figure 5 of arXiv 2402.02057 for this model and its devices: tokens per second by data set."""
    title = f"Throughput by data set: {run.about['model']} on {run.about['mesh'] or run.about['device']}"
    note = "As Figure 5 of the paper, for the devices of this run. Prefill is excluded." + devices_note(run, results)
    draw = report.bars(_values(results, "dataset"), _speeds(results), "tokens/s")
    return Figure("throughput", title, draw, note)


def device_name(run: Run) -> str:
    """Returns the device of a run, or its processor, with the mesh that divides it."""
    device = run.about["processor"] if run.about["device"] == "cpu" else run.about["device"]
    return f"{device}, divided as {run.about['mesh']}" if run.about["mesh"] else device


def figure_5(run: Run, results: Results) -> list[Table | Figure]:
    """Returns Figure 5 for this model and device: speed by data set, with and without lookahead decoding."""
    title = f"Speed by data set on {device_name(run)} (Figure 5 of the paper): {run.about['model']}"
    plain = str(Method())
    (lookahead,) = [name for name in results if name != plain and parse(name).setting is not None]
    rows: list[Row] = []
    for dataset in _values(results, "dataset"):
        part = {name: measures.of_dataset(own, dataset) for name, own in results.items()}
        speedup = measures.speedup(part[lookahead], part[plain])
        steps = measures.compression(part[lookahead])
        rows.append((dataset, *map(measures.speed, part.values()), steps, speedup.mean, speedup.interval))
    columns = {"data set": ""} | {f"{parse(name).label}, tokens/s": ".1f" for name in results}
    columns |= {"tokens/step": ".2f", "speedup": ".2f x", "95% interval": ""}
    note = (
        f"Tokens per step and speedup are those of {parse(lookahead).label}, the latter relative to plain decoding by "
        "jlade. Prefill is excluded. The paper reports 1.5x to 2.3x, relative to transformers, on an A100."
    )
    figure = dataclasses.replace(throughput_figure(run, results), name="figure5", title=title)
    return [Table("figure5", title, columns, rows, note + devices_note(run, results)), figure]


def accepted_table(run: Run, results: Results) -> Table:
    """Returns the share of the steps that accepted each number of tokens."""
    shares = {
        method.label: measures.accepted_shares(own)
        for method, own, _ in by_method(results)
        if method.setting is not None
    }
    numbers = range(1, 1 + max(map(len, shares.values())))
    columns = {"share of steps that accept": ""} | {str(number): ".0%" for number in numbers}
    rows: list[Row] = [(label, *own, *[None] * (len(numbers) - len(own))) for label, own in shares.items()]
    return Table("accepted", "Accepted tokens of a step", columns, rows)


def right_table(run: Run, results: Results) -> Table | None:
    """Returns the share of the questions with a right answer by data set, None if no answer was judged."""
    judged = {name: [one for one in own if one.passed is not None] for name, own in results.items()}
    datasets = list(dict.fromkeys(one.dataset for own in judged.values() for one in own))
    if not datasets:
        return None
    rows: list[Row] = []
    for name, own in judged.items():
        parts = [[one.passed for one in measures.of_dataset(own, dataset)] for dataset in datasets]
        rows.append((parse(name).label, *(part.count(True) / len(part) for part in parts)))
    numbers = [len(measures.of_dataset(next(iter(judged.values())), dataset)) for dataset in datasets]
    heads = [f"{dataset} ({number})" for dataset, number in zip(datasets, numbers, strict=True)]
    note = (
        "In parentheses the number of questions. Programs must pass their tests (pass@1), numbers equal the right one, "
        "and of choices the letter counts that the model finds most probable."
    )
    return Table("right", "Right answers", {"right answers": ""} | dict.fromkeys(heads, ".1%"), rows, note)


def devices_note(run: Run, results: Results) -> str:
    """Returns a sentence if methods of transformers ran on another device than those of jlade."""
    other = run.about.get("transformers_device")
    is_compared = any(parse(name).setting is None for name in results)
    if not is_compared or other is None or (other == "cpu") == (run.about["device"] == "cpu"):
        return ""
    return f" transformers ran on another device, {other}: its speed does not compare."


def _values(results: Results, field: str) -> list[str]:
    """Returns the values of a field of the results, each once."""
    return list(dict.fromkeys(getattr(result, field) for result in next(iter(results.values()))))
