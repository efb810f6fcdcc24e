"""Tables and figures of the paper (arXiv 2402.02057) and of guides to it, from the results of a run."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from jlade.config import LookaheadConfig
from jlade.evaluation import figures, measures, quality, statistics
from jlade.evaluation.answers import Answer
from jlade.evaluation.comparison import Results
from jlade.evaluation.figures import Figure
from jlade.evaluation.methods import Method, parse
from jlade.evaluation.runs import Result, Run
from jlade.evaluation.tables import Column, Row, Table
from jlade.models.llama import LlamaConfig
from jlade.planning.plan import plan

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
WINDOWS, NGRAMS = (1, 2, 4, 8, 16), (3, 5, 7)  # W = G and N of Figure 4
TREES = (7, 15, 31, 63, 119)  # drafts of the trees beside them
HIT_STEPS = 8  # steps of a point in the figure of hit rates


def _llama(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        max_positions=4096,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
    )


SIZES = {  # of Table 4: LLaMA-2, LLaMA-2 and CodeLlama
    "7B": _llama(4096, 11008, 32, 32, 32),
    "13B": _llama(5120, 13824, 40, 40, 40),
    "34B": _llama(8192, 22016, 48, 64, 8),
}


def sampling_table(results: Results) -> Table:
    """Returns Table 2: ROUGE, speedup and tokens per step, greedy and sampled."""
    rows = []
    datasets = dict.fromkeys(result.dataset for result in next(iter(results.values())))
    for dataset, (name, all_results) in itertools.product(datasets, results.items()):
        of_method = [result for result in all_results if result.dataset == dataset]
        baseline = [result for result in results[str(parse(name).baseline)] if result.dataset == dataset]
        rouge = quality.rouge(
            [result.answers[0].text for result in of_method], [result.reference or "" for result in of_method]
        )
        speedup = statistics.summary(measures.speedups(of_method, baseline)).mean
        rows.append((dataset, parse(name).label, *rouge, speedup, measures.compression(of_method)))
    columns = (
        Column("data set"),
        Column("method (W, N, G)"),
        Column("ROUGE-1", ".2f"),
        Column("ROUGE-2", ".2f"),
        Column("ROUGE-L", ".2f"),
        Column("speedup", ".2f x"),
        Column("tokens/step", ".2f"),
    )
    note = "Sampled texts of plain and lookahead decoding have the same random key, so they are equal in float32."
    return Table("table2", "Sampling and summaries (Table 2 of the paper)", columns, tuple(rows), note)


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
            speedup = statistics.summary(measures.speedups(results[name], results[str(method.baseline)])).mean
            rows.append((f"{i}: {method.label}", speedup, measured[i], of_paper))
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


def scaling_methods() -> list[Method]:
    """Returns the methods of Figure 4."""
    return [Method(LookaheadConfig.paper(w, n, w)) for n, w in itertools.product(NGRAMS, WINDOWS)]


def _compressions(results: Results) -> dict[int, list[tuple[float, float]]]:
    """Returns pairs of W and tokens per step, by N."""
    points: dict[int, list[tuple[float, float]]] = {}
    for method in scaling_methods():
        assert isinstance(method.setting, LookaheadConfig)
        if str(method) in results:
            point = method.setting.window_size, measures.compression(results[str(method)])
            points.setdefault(method.setting.ngram_size, []).append(point)
    return points


def scaling_table(results: Results) -> Table:
    """Returns the measurements of Figure 4, with the fit of tokens per step to log W for each N."""
    points = _compressions(results)
    rows: list[Row] = []
    for ngram_size, of_ngram in points.items():
        fit = statistics.fit_log([int(w) for w, _ in of_ngram], [s for _, s in of_ngram])
        rows.append((str(ngram_size), *(compression for _, compression in of_ngram), fit.slope, fit.r2))
    columns = (
        Column("N"),
        *(Column(f"W = {window:g}", ".2f") for window, _ in next(iter(points.values()))),
        Column("per doubling of W", "+.3f"),
        Column("R² of the log fit", ".3f"),
    )
    return Table(
        "figure4", "Tokens per step by W = G and N (Figure 4 of the paper)", columns, tuple(rows), _fit(results)
    )


def _fit(results: Results) -> str:
    sizes, measured = _sizes(results)
    fit = statistics.fit_scaling(sizes, measured)
    return (
        f"Equations 5 and 7 fit with alpha = {fit.alpha:.3f} and f = {fit.f:.3f}, R² = {fit.r2:.3f}; the paper has "
        "0.425 and 3.106 for LLaMA-2-7B-Chat on MT-Bench."
    )


def _sizes(results: Results) -> tuple[list[tuple[int, int]], list[float]]:
    """Returns pairs of W and N, and the tokens per step of each."""
    found = [((int(w), n), s) for n, of_ngram in _compressions(results).items() for w, s in of_ngram]
    return [size for size, _ in found], [compression for _, compression in found]


def scaling_figures(results: Results) -> list[Figure]:
    """Returns Figure 4: tokens per step against W and N, measured, and by the fitted formula."""
    points = _compressions(results)
    fit = statistics.fit_scaling(*_sizes(results))
    measured = {f"N = {n}": list(of_ngram) for n, of_ngram in points.items()}
    formula = {f"_N = {n}": [(w, _formula(fit, w, n)) for w, _ in of_ngram] for n, of_ngram in points.items()}
    axes = "W = G", "tokens per step"
    return [
        Figure("figure4a", "Tokens per step against W and N, measured", figures.lines(measured, *axes, is_log=True)),
        Figure("figure4b", "The fitted formula", figures.lines(formula, *axes, is_log=True), _fit(results)),
    ]


def tree_methods() -> list[Method]:
    """Returns the methods beside those of Figure 4: trees without a window."""
    return [Method(LookaheadConfig.tree(size)) for size in TREES]


def trees_table(results: Results) -> Table | None:
    """Returns tokens per step by the size of a tree, with their fit to log2 of the tokens of a step.

    A run that is older than trees, or was interrupted, may lack them: None then.
    """
    points = _by_block(results, tree_methods())
    if len(points) < 2:
        return None
    fit = statistics.fit_log([int(tokens) for tokens, _ in points], [s for _, s in points])
    rows = [(int(tokens) - 1, int(tokens), compression) for tokens, compression in points]
    columns = Column("tree", "d"), Column("tokens of a step", "d"), Column("tokens/step", ".2f")
    note = f"Each doubling of the tokens of a step adds {fit.slope:.3f} tokens per step; R² of the fit {fit.r2:.3f}."
    return Table("figure4-trees", "Tokens per step by the size of a tree", columns, tuple(rows), note)


def blocks_figure(results: Results) -> Figure:
    """Returns tokens per step against the tokens of a step, of windows and of trees."""
    series = {
        f"N = {n}": _by_block(results, [each for each in scaling_methods() if _setting(str(each)).ngram_size == n])
        for n in NGRAMS
    } | {"trees": _by_block(results, tree_methods())}
    series = {name: points for name, points in series.items() if points}
    draw = figures.lines(series, "tokens of a step", "tokens per step", is_log=True)
    return Figure("figure4c", "Tokens per step against the tokens of a step", draw)


def _by_block(results: Results, methods: Sequence[Method]) -> list[tuple[float, float]]:
    """Returns pairs of the tokens of a step and tokens per step."""
    return [
        (_setting(str(method)).block_size, measures.compression(results[str(method)]))
        for method in methods
        if str(method) in results
    ]


def _formula(fit: statistics.ScalingFit, window_size: float, ngram_size: int) -> float:
    """Returns the tokens per step of Equations 5 and 7."""
    expected = statistics.expected_tokens(fit.alpha, np.array([int(window_size)]), np.array([ngram_size]))
    return (fit.f - 1 + float(expected[0])) / fit.f


def configurations_table(runs: Sequence[tuple[Run, Results]]) -> Table:
    """Returns Table 4: the fastest W and N by model size, measured for each run, and estimated for A100 GPUs."""
    rows = []
    for run, results in runs:
        speeds = {name: measures.speed(results[name]) for name in map(str, scaling_methods()) if name in results}
        best = max(speeds, key=speeds.__getitem__)
        setting = _setting(best)
        rows.append(
            (
                f"{run.about['model']}, {run.about['parameters'] / 1e6:.1f} M, measured on {run.about['processor']}",
                setting.window_size,
                setting.ngram_size,
                speeds[best] / measures.speed(results[str(Method())]),
            )
        )
    run, results = runs[0]
    for size, config in SIZES.items():
        plain = plan(config, "a100", lookahead=None).options[0].tokens_per_second
        speeds = {
            name: plan(config, "a100", lookahead=_setting(name), compression=max(1.0, measures.compression(of_method)))
            .options[0]
            .tokens_per_second
            for name, of_method in results.items()
            if name in map(str, scaling_methods())
        }
        best = max(speeds, key=speeds.__getitem__)
        setting = _setting(best)
        rows.append((f"{size}, estimated for an A100", setting.window_size, setting.ngram_size, speeds[best] / plain))
    columns = (Column("model"), Column("W = G", "d"), Column("N", "d"), Column("speedup", ".2f x"))
    note = (
        "The fastest of Figure 4's settings. The estimates combine the tokens per step of "
        f"{run.about['model']} with step times from data sheets (`jlade plan`); a larger model's text may be harder or "
        "easier to guess. The paper names W = 15, 10 and 7 with N = 5 for 7B, 13B and 34B on an A100."
    )
    return Table("table4", "Good settings by model size (Table 4 of the paper)", columns, tuple(rows), note)


def _setting(name: str) -> LookaheadConfig:
    setting = parse(name).setting
    assert isinstance(setting, LookaheadConfig)
    return setting


def growth_table(results: Results) -> Table:
    """Returns the n-grams in the pool while texts grow, and how often a step had a draft."""
    (name,) = [name for name in results if parse(name).shows_growth]
    given = measures.answers(results[name])
    longest = max(len(answer.tokens) for answer in given)
    marks = [*(mark for mark in (1, 16, 32, 64, 128, 256, 512) if mark < longest), longest]
    rows: list[Row] = []
    for low, high in itertools.pairwise([0, *marks]):
        found = [[each for each in answer.growth if low < each[0] <= high] for answer in given]
        last = [each[-1] for each in found if each]
        if last:
            steps = list(itertools.chain.from_iterable(_num_drafted(answer, low, high) for answer in given))
            mean = [sum(each[i] for each in last) / len(last) for i in (1, 2)]
            rows.append(
                (f"{low} to {high}", *mean, sum(number > 0 for number in steps) / max(1, len(steps)), len(last))
            )
    columns = (
        Column("tokens of the text"),
        Column("n-grams", ".0f"),
        Column("keys", ".0f"),
        Column("steps with a draft", ".0%"),
        Column("answers", "d"),
    )
    setting = dataclasses.replace(parse(name), shows_growth=False).label
    note = f"At {setting}. The pool begins with the n-grams of the prompt."
    return Table("growth", "Growth of the pool", columns, tuple(rows), note)


def _num_drafted(answer: Answer, low: int, high: int) -> Iterable[int]:
    """Returns the drafted tokens of the steps that began with `low` to `high` tokens."""
    begins = itertools.accumulate(answer.accepted, initial=0)
    return [number for begin, number in zip(begins, answer.num_drafted, strict=False) if low <= begin < high]


def hits_figure(results: Results) -> Figure:
    """Returns the share of steps with a draft over time, with cold and warm pools."""
    series = {}
    for name, of_method in results.items():
        rates = measures.hit_rates(of_method, HIT_STEPS)
        if rates and not parse(name).shows_growth and _setting(name).guess_set_size:
            series[parse(name).label] = [(float(step), 100 * rate) for step, rate in rates]
    draw = figures.lines(series, "step", "% of the steps with a draft")
    note = (
        f"Means over {HIT_STEPS} steps. A cold pool starts empty for each prompt, a warm one with the n-grams of the "
        "prompts before."
    )
    return Figure("hits", "Hits of the pool over time", draw, note)


def exactness_table(run: Run, results: Results) -> Table:
    """Returns Appendix E: the answers that differ from plain decoding in float32, and the closeness of the choice."""
    rows = []
    for name, of_method in results.items():
        found = [difference for result in of_method for difference in result.differences if difference is not None]
        number = len(measures.answers(of_method))
        gaps = sorted(difference.logit_gap for difference in found)
        rows.append(
            (
                parse(name).label,
                parse(name).dtype or run.about["dtype"],
                number,
                number - len(found),
                (number - len(found)) / number,
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
