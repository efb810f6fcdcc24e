"""Tables 2 and 3 and Appendix E of the paper (arXiv 2402.02057), from the results of a run."""

import itertools
from collections.abc import Sequence

from jlade.config import LookaheadConfig
from jlade.evaluation import measures, quality, statistics
from jlade.evaluation.comparison import Results
from jlade.evaluation.methods import Method, parse
from jlade.evaluation.runs import Result, Run
from jlade.evaluation.tables import Column, Row, Table

# Sampling in Section 3.2: Algorithm 4, and n-grams drawn greedily. No row of the paper's tables claims the window of
# Algorithm 2, a row for each token: the numbers come from the authors' code, which moves it by a row for each step.
SAMPLING_FLAGS = ":rejection:greedy-window"

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
