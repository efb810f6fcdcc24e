"""Tables 2 and 3 and Appendix E of the paper (arXiv 2402.02057), and its numbers beside those of a run."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jlade.config import LookaheadConfig
from jlade.evaluation import drafting, measures, quality, scaling, statistics
from jlade.evaluation.comparison import Results
from jlade.evaluation.methods import Method, parse
from jlade.evaluation.runs import Result, Run
from jlade.evaluation.tables import Column, Row, Table

# Sampling in Section 3.2: Algorithm 4, and n-grams drawn greedily. No row of the paper's tables claims the window of
# Algorithm 2, a row for each token: the numbers come from the authors' code, which moves it by a row for each step.
SAMPLING_FLAGS = ":rejection:greedy-window"

CHAT = "LLaMA-2-7B-Chat, MT-Bench, A100"

# Table 3: N, W, G and whether the prompt's n-grams are in the pool.
ABLATION = (
    (10, 1, 3, True),
    (5, 1, 10, True),
    (5, 1, 30, False),
    (5, 1, 30, True),
    (5, 30, 1, False),
    (5, 15, 15, False),
    (5, 15, 15, True),
)
# S by row of Table 3, for LLaMA-2-7B-Chat on MT-Bench; the first two rows are plain decoding and prompt lookup.
PAPER_ABLATION = (1.00, 1.55, 1.45, 1.51, 1.12, 1.59, 1.79, 1.96, 2.05)


def sampling_table(results: Results) -> Table:
    """Returns Table 2: ROUGE, speedup and tokens per step, greedy and sampled."""
    rows = []
    datasets = dict.fromkeys(result.dataset for result in next(iter(results.values())))
    for dataset, (name, all_results) in itertools.product(datasets, results.items()):
        of_method = measures.of_dataset(all_results, dataset)
        baseline = measures.of_dataset(results[str(parse(name).baseline)], dataset)
        scores = quality.rouge_of_each(
            [result.answers[0].text for result in of_method], [result.reference or "" for result in of_method]
        )
        rouge = [_with_interval(column) for column in zip(*scores, strict=True)]
        speedup = measures.speedup(of_method, baseline)
        rows.append((dataset, parse(name).label, *rouge, speedup and speedup.mean, measures.compression(of_method)))
    texts = map(Column, ("data set", "method (W, N, G)", "ROUGE-1", "ROUGE-2", "ROUGE-L"))
    columns = (*texts, Column("speedup", ".2f x"), Column("tokens/step", ".2f"))
    note = (
        "Means with 95% bootstrap intervals. Sampled texts of plain and coupled lookahead decoding have the same "
        "random key, so they are equal in float32; those by rejection (Algorithm 4) with a greedy window, the paper's "
        "way to sample, are other draws of the same distribution. The paper reports, for LLaMA-2-7B-Chat at "
        "temperature 1 and 0, 1.64 and 1.72 tokens per step on CNN/Daily Mail, 1.67 and 1.77 on XSum, and ROUGE-1 of "
        "36.5 and 37.8, 19.2 and 19.4, alike for both ways to decode."
    )
    return Table("table2", "Sampling and summaries (Table 2 of the paper)", columns, tuple(rows), note)


def _with_interval(values: Sequence[float]) -> str:
    low, high = statistics.interval(values)
    return f"{sum(values) / len(values):.2f} ({low:.1f} to {high:.1f})"


def ablation_methods() -> list[Method]:
    """Returns the methods of Table 3."""
    settings = [LookaheadConfig.paper(w, n, g, pool_from_prompt=prompt) for n, w, g, prompt in ABLATION]
    return [parse("plain"), parse("transformers-lookup"), *map(Method, settings)]


def ablation_table(results: Results) -> Table:
    """Returns Table 3: window, candidates and the prompt as reference, each left out."""
    rows: list[Row] = []
    measured = {}
    for i, (method, of_paper) in enumerate(zip(ablation_methods(), PAPER_ABLATION, strict=True), start=1):
        name = str(method)
        if name in results:
            measured[i] = measures.compression(results[name])
            speedup = measures.speedup(results[name], results[str(method.baseline)])
            rows.append((f"{i}: {method.label}", speedup and speedup.mean, measured[i], of_paper))
    columns = (
        Column("row: W, N, G"),
        Column("speedup", ".2f x"),
        Column("tokens/step", ".2f"),
        Column("paper, 7B", ".2f"),
    )
    title = "Window, candidates and prompt (Table 3 of the paper)"
    return Table("table3", title, columns, tuple(rows), _order_note(measured))


def _order_note(measured: dict[int, float]) -> str:
    """Returns where the order of the rows by tokens per step differs from that of the paper."""
    paper = dict(enumerate(PAPER_ABLATION, start=1))
    pairs = [(low, high) for low, high in itertools.permutations(measured, 2) if paper[low] < paper[high]]
    swapped = [f"{low} above {high}" for low, high in pairs if measured[low] >= measured[high]]
    count = f"{len(pairs) - len(swapped)} of {len(pairs)} pairs of rows are in the paper's order"
    return f"{count} by tokens per step" + (f"; these are not: {', '.join(swapped)}." if swapped else ".")


def exactness_table(run: Run, results: Results) -> Table:
    """Returns Appendix E: the answers that differ from plain decoding in float32, and the closeness of the choice."""
    rows = []
    for name, of_method in results.items():
        differences = [each for result in of_method for each in result.differences if each is not None]
        number = len(measures.answers(of_method))
        gaps = sorted(difference.logit_gap for difference in differences)
        rows.append(
            (
                parse(name).label,
                parse(name).dtype or run.about["dtype"],
                number,
                number - len(differences),
                (number - len(differences)) / number,
                max(gaps, default=None),
            )
        )
    columns = (
        Column("method (W, N, G)"),
        Column("dtype"),
        Column("answers", "d"),
        Column("identical", "d"),
        Column("share", ".0%"),
        Column("largest top-two gap", ".2g"),
    )
    note = (
        "Compared with plain decoding in float32. The gap is the difference of the two largest logits in float32 where "
        "the first different token was chosen: rounding decides between tokens whose logits are close."
    )
    for name, of_method in results.items():
        baseline = str(parse(name).baseline)
        if name != baseline and baseline in results:
            note += f" {_compare_differences(name, of_method, results[baseline])}"
    return Table("exactness", "Identical answers (Appendix E of the paper)", columns, tuple(rows), note)


def _compare_differences(name: str, results: Sequence[Result], baselines: Sequence[Result]) -> str:
    """Returns whether a method differs from float32 in more answers than plain decoding of the same dtype does."""
    pairs = [
        (one is None, other is None)
        for result, baseline in zip(results, baselines, strict=True)
        for one, other in zip(result.differences, baseline.differences, strict=True)
    ]
    only, only_plain = pairs.count((False, True)), pairs.count((True, False))
    chance = statistics.sign_test(only_plain, only)
    return (
        f"{parse(name).label}: {only} answers differ that plain decoding of this dtype has right, and {only_plain} the "
        f"other way round (one-sided sign test: p = {chance:.2g})."
    )


def divergences_table(results: Results) -> Table | None:
    """Returns each answer that differs, with the gap where it does; None if there are none."""
    rows = [
        (parse(name).label, f"{result.dataset} {result.question}", turn, difference.position + 1, difference.logit_gap)
        for name, of_method in results.items()
        for result in of_method
        for turn, difference in enumerate(result.differences, start=1)
        if difference is not None
    ]
    columns = (
        Column("method (W, N, G)"),
        Column("question"),
        Column("turn", "d"),
        Column("first different token", "d"),
        Column("top-two gap", ".2g"),
    )
    return (
        Table("divergences", "Answers that differ from plain decoding in float32", columns, tuple(rows))
        if rows
        else None
    )


class Entry(NamedTuple):
    """A number of the paper."""

    experiment: str  # whose results have the same number for a run
    place: str  # in the paper
    meaning: str
    conditions: str  # model, data and device of the paper
    number: str
    here: Callable[[Run, Results], str | None]  # returns the run's number, None if the results lack it


def _lookahead(results: Results) -> str | None:
    """Returns the first method with a window."""
    return next((name for name in results if getattr(parse(name).setting, "window_size", 0)), None)


def _speedup(results: Results, name: str | None) -> str | None:
    if name is None:
        return None
    speedup = measures.speedup(results[name], results[str(parse(name).baseline)])
    return None if speedup is None else f"{speedup.mean:.2f}x"


def _steps(results: Results, name: str | None) -> str | None:
    return None if name is None or name not in results else f"{measures.compression(results[name]):.2f}"


def _at(temperature: float, flag: str = "") -> Callable[[Run, Results], str | None]:
    """Returns the tokens per step of the lookahead method at a temperature."""

    def steps(run: Run, results: Results) -> str | None:
        names = [name for name in results if parse(name).temperature == temperature and _lookahead({name: []})]
        return _steps(results, next((name for name in names if flag in name), None))

    return steps


def _of_row(number: int) -> Callable[[Run, Results], str | None]:
    """Returns the tokens per step of a row of Table 3, from 1."""
    return lambda run, results: _steps(results, str(ablation_methods()[number - 1]))


def _same_in_float32(run: Run, results: Results) -> str | None:
    shares = [
        measures.identical(of_method)
        for name, of_method in results.items()
        if (parse(name).dtype or run.about["dtype"]) == "float32" and _lookahead({name: []})
    ]
    return f"{min(shares):.0%} identical" if shares else None


def _fit(run: Run, results: Results) -> str:
    fit = scaling.fit(results)
    return f"alpha {fit.alpha:.3f}, f {fit.f:.3f}"


def _good(run: Run, results: Results) -> str | None:
    row = next(row for row in scaling.configurations_table([(run, results)]).rows if row[0] == "7B, estimated")
    return f"W = {row[3]}, N = {row[4]} (estimated)"


def _on(device: str) -> Callable[[Run, Results], str | None]:
    """Returns the highest estimated speedup of a 7B model on a device, at the N of Figure 8."""

    def highest(run: Run, results: Results) -> str | None:
        found = scaling.figure_8_speedups(results, device)
        return f"{max(found):.2f}x (estimated)" if found else None

    return highest


def _parallel(way: str, column: int) -> Callable[[Run, Results], str | None]:
    """Returns the estimated speedup of a way to divide a step of a 7B model."""

    def speedup(run: Run, results: Results) -> str | None:
        table = scaling.parallelism(run, results)[0]
        assert isinstance(table, Table)
        row = next(row for row in table.rows if row[:2] == ("7B", way))
        return f"{row[column]:.2f}x (estimated)"

    return speedup


ENTRIES = (
    Entry(
        "jacobi",
        "Section 2, Algorithm 1",
        "tokens per step of Jacobi decoding",
        "no model named",
        "hardly more than 1",
        lambda run, results: _steps(results, str(drafting.jacobi_methods()[-1])),
    ),
    *(
        Entry(
            experiment,
            "Figure 5",
            "speedup of lookahead decoding",
            "LLaMA-2 and CodeLlama, 5 data sets, A100",
            "1.5x to 2.3x",
            lambda run, results: _speedup(results, _lookahead(results)),
        )
        for experiment in ("figure5", "methods")  # the first that a run has
    ),
    Entry("figure6-7", "Figure 6", "speedup on one GPU", f"{CHAT}, FlashAttention", "1.8x", _parallel("one device", 5)),
    Entry(
        "figure6-7",
        "Figures 6, 7",
        "speedup of tensor parallelism without lookahead",
        "7B, several A100",
        "0.75x to 0.82x",
        _parallel("tensor parallelism, 8 devices", 4),
    ),
    Entry(
        "figure6-7",
        "Figures 6, 7",
        "speedup of pipeline parallelism without lookahead",
        "7B and 13B, several A100",
        "0.75x to 0.82x",
        _parallel("pipeline parallelism, 8 devices", 4),
    ),
    Entry(
        "figure6-7",
        "Figures 6, 7",
        "speedup of lookahead parallelism",
        "CodeLlama-7B, ClassEval, 8 A100",
        "up to 4x",
        _parallel("lookahead parallelism, 8 devices", 5),
    ),
    Entry("table2", "Table 2", "tokens per step, greedy", "LLaMA-2-7B-Chat, CNN/Daily Mail", "1.72", _at(0.0)),
    Entry(
        "table2",
        "Table 2, Algorithm 4",
        "tokens per step at temperature 1, by rejection",
        "LLaMA-2-7B-Chat, CNN/Daily Mail",
        "1.64",
        _at(1.0, SAMPLING_FLAGS),
    ),
    Entry("table3", "Table 3, row 2", "tokens per step of prompt lookup", CHAT, "1.55", _of_row(2)),
    Entry("table3", "Table 3, row 8", "tokens per step without the prompt", CHAT, "1.96", _of_row(8)),
    Entry("table3", "Table 3, row 9", "tokens per step", CHAT, "2.05", _of_row(9)),
    Entry("figure4", "Figure 4, Equations 5 and 7", "the fitted law", CHAT, "alpha 0.425, f 3.106", _fit),
    Entry("table4", "Table 4", "good W and N of a 7B model", "A100", "W = 15, N = 5", _good),
    Entry("figure8", "Figure 8", "speedup on an A100", CHAT, "more than 1.5x", _on("a100")),
    Entry("figure8", "Figure 8", "speedup on an RTX 3090", "LLaMA-2-7B-Chat, MT-Bench", "1.3x", _on("rtx3090")),
    Entry(
        "exactness",
        "Appendix E",
        "answers of plain decoding in float32",
        f"{CHAT}, 160 answers",
        "all identical",
        _same_in_float32,
    ),
)


def numbers_table(run: Run, results: Mapping[str, Results]) -> Table | None:
    """Returns the numbers of the paper beside those of a run, given its results by experiment; None without any."""
    rows: list[Row] = []
    for entry in ENTRIES:
        here = entry.here(run, results[entry.experiment]) if results.get(entry.experiment) else None
        if here is not None and (entry.place, entry.meaning) not in [row[:2] for row in rows]:
            rows.append((entry.place, entry.meaning, entry.conditions, entry.number, here))
    columns = map(Column, ("in the paper", "number", "its model, data and device", "the paper's", "here"))
    about = run.about
    note = (
        f"Here the model is {about['model']} in {about['dtype']} with {about['parameters'] / 1e6:,.1f} M parameters, "
        f"the data are {', '.join(about['data'])}, and the device is {about['device']} ({about['processor']}). "
        "Estimates are of the paper's model and device, from data sheets, with the tokens per step of this run."
    )
    return Table("paper", "Beside the paper", tuple(columns), tuple(rows), note) if rows else None
