"""Tables 2 and 3 and Appendix E of the paper (arXiv 2402.02057), and its numbers beside those of a run."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jlade.config import LookaheadConfig
from jlade.evaluation import drafting, measures, quality, scaling, statistics
from jlade.evaluation.comparison import Results, by_method
from jlade.evaluation.methods import Method, parse
from jlade.evaluation.report import Row, Table
from jlade.evaluation.runs import Result, Run

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


def sampling_table(run: Run, results: Results) -> Table:
    """Returns Table 2: ROUGE, speedup and tokens per step, greedy and sampled."""
    rows: list[Row] = []
    datasets = dict.fromkeys(result.dataset for result in next(iter(results.values())))
    for dataset, (method, *both) in itertools.product(datasets, by_method(results)):
        own, plain = (measures.of_dataset(part, dataset) for part in both)
        scores = quality.rouge_of_each([one.answers[0].text for one in own], [one.reference or "" for one in own])
        rouge = map(_with_interval, zip(*scores, strict=True))
        rows.append((dataset, method.label, *rouge, measures.speedup(own, plain).mean, measures.compression(own)))
    columns = dict.fromkeys(("data set", "method (W, N, G)", "ROUGE-1", "ROUGE-2", "ROUGE-L"), "")
    columns |= {"speedup": ".2f x", "tokens/step": ".2f"}
    note = (
        "Means with 95% bootstrap intervals. Sampled texts of plain and coupled lookahead decoding have the same "
        "random key, so they are equal in float32; those by rejection (Algorithm 4) with a greedy window, the paper's "
        "way to sample, are other draws of the same distribution. The paper reports, for LLaMA-2-7B-Chat at "
        "temperature 1 and 0, 1.64 and 1.72 tokens per step on CNN/Daily Mail, 1.67 and 1.77 on XSum, and ROUGE-1 of "
        "36.5 and 37.8, 19.2 and 19.4, alike for both ways to decode."
    )
    return Table("table2", "Sampling and summaries (Table 2 of the paper)", columns, rows, note)


def _with_interval(values: Sequence[float]) -> str:
    low, high = statistics.interval(values)
    return f"{sum(values) / len(values):.2f} ({low:.1f} to {high:.1f})"


def ablation_methods() -> list[Method]:
    """Returns the methods of Table 3."""
    settings = [LookaheadConfig.paper(w, n, g, pool_from_prompt=prompt) for n, w, g, prompt in ABLATION]
    return [parse("plain"), parse("transformers-lookup"), *map(Method, settings)]


def ablation_table(run: Run, results: Results) -> Table:
    """Returns Table 3: window, candidates and the prompt as reference, each left out."""
    rows: list[Row] = []
    measured = {}
    for i, (method, of_paper) in enumerate(zip(ablation_methods(), PAPER_ABLATION, strict=True), start=1):
        if own := results.get(str(method)):
            measured[i] = measures.compression(own)
            speedup = measures.speedup(own, results[str(method.baseline)]).mean
            rows.append((f"{i}: {method.label}", speedup, measured[i], of_paper))
    columns = {"row: W, N, G": "", "speedup": ".2f x", "tokens/step": ".2f", "paper, 7B": ".2f"}
    title = "Window, candidates and prompt (Table 3 of the paper)"
    return Table("table3", title, columns, rows, _order_note(measured))


def _order_note(measured: dict[int, float]) -> str:
    """Returns where the order of the rows by tokens per step differs from that of the paper."""
    paper = dict(enumerate(PAPER_ABLATION, start=1))
    pairs = [(low, high) for low, high in itertools.permutations(measured, 2) if paper[low] < paper[high]]
    swapped = [f"{low} above {high}" for low, high in pairs if measured[low] >= measured[high]]
    count = f"{len(pairs) - len(swapped)} of {len(pairs)} pairs of rows are in the paper's order"
    return f"{count} by tokens per step" + (f"; these are not: {', '.join(swapped)}." if swapped else ".")


def exactness_table(run: Run, results: Results) -> Table:
    """Returns Appendix E: the answers that differ from plain decoding in float32, and the closeness of the choice."""
    rows: list[Row] = []
    note = (
        "Compared with plain decoding in float32. The gap is the difference of the two largest logits in float32 where "
        "the first different token was chosen: rounding decides between tokens whose logits are close."
    )
    for method, own, plain in by_method(results):
        found = [each for result in own for each in result.differences]
        gaps = [difference.logit_gap for difference in found if difference is not None]
        share = found.count(None) / len(found)
        dtype = method.dtype or run.about["dtype"]
        rows.append((method.label, dtype, len(found), found.count(None), share, max(gaps, default=None)))
        if method != method.baseline and plain:
            note += f" {_compare_differences(method.label, own, plain)}"
    columns = {"method (W, N, G)": "", "dtype": "", "answers": "d", "identical": "d", "share": ".0%"}
    columns |= {"largest top-two gap": ".2g"}
    return Table("exactness", "Identical answers (Appendix E of the paper)", columns, rows, note)


def _compare_differences(label: str, results: Sequence[Result], baselines: Sequence[Result]) -> str:
    """Returns whether a method differs from float32 in more answers than plain decoding of the same dtype does."""
    is_same = ([each is None for result in part for each in result.differences] for part in (results, baselines))
    pairs = list(zip(*is_same, strict=True))
    only, only_plain = pairs.count((False, True)), pairs.count((True, False))
    chance = statistics.sign_test(only_plain, only)
    return (
        f"{label}: {only} answers differ that plain decoding of this dtype has right, and {only_plain} the "
        f"other way round (one-sided sign test: p = {chance:.2g})."
    )


def divergences_table(run: Run, results: Results) -> Table | None:
    """Returns each answer that differs, with the gap where it does; None if there are none."""
    rows: list[Row] = [
        (method.label, f"{result.dataset} {result.question}", turn, difference.position + 1, difference.logit_gap)
        for method, own, _ in by_method(results)
        for result in own
        for turn, difference in enumerate(result.differences, start=1)
        if difference is not None
    ]
    columns = {"method (W, N, G)": "", "question": "", "turn": "d", "first different token": "d", "top-two gap": ".2g"}
    title = "Answers that differ from plain decoding in float32"
    return Table("divergences", title, columns, rows) if rows else None


Here = Callable[[Run, Results], str | None]  # returns the run's number, None if the results lack it


class Entry(NamedTuple):
    """A number of the paper."""

    experiment: str  # whose results have the same number for a run
    place: str  # in the paper
    meaning: str
    conditions: str  # model, data and device of the paper
    number: str
    here: Here


def _lookahead(results: Results, temperature: float | None = None, flag: str = "") -> str | None:
    """Returns the first method with a window, at a temperature and with a flag if they are given."""
    for method, *_ in by_method(results):
        is_lookahead = getattr(method.setting, "window_size", 0) and temperature in (None, method.temperature)
        if is_lookahead and flag in str(method):
            return str(method)
    return None


def _speedup(run: Run, results: Results) -> str | None:
    """Returns the speedup of the first method with a window."""
    if (name := _lookahead(results)) is None:
        return None
    speedup = measures.speedup(results[name], results[str(parse(name).baseline)]).mean
    return None if math.isnan(speedup) else f"{speedup:.2f}x"


def _steps(results: Results, name: str | None) -> str | None:
    return f"{measures.compression(results[name]):.2f}" if name in results else None


def _at(temperature: float, flag: str = "") -> Here:
    """Returns the tokens per step of the lookahead method at a temperature."""
    return lambda run, results: _steps(results, _lookahead(results, temperature, flag))


def _of_row(number: int) -> Here:
    """Returns the tokens per step of a row of Table 3, from 1."""
    return lambda run, results: _steps(results, str(ablation_methods()[number - 1]))


def _same_in_float32(run: Run, results: Results) -> str | None:
    shares = [
        measures.identical(own)
        for method, own, _ in by_method(results)
        if (method.dtype or run.about["dtype"]) == "float32" and _lookahead({str(method): own})
    ]
    return f"{min(shares):.0%} identical" if shares else None


def _fit(run: Run, results: Results) -> str:
    law = scaling.fit(results)
    return f"alpha {law.alpha:.3f}, f {law.f:.3f}"


def _good(run: Run, results: Results) -> str | None:
    row = next(row for row in scaling.configurations_table([(run, results)]).rows if row[0] == "7B, estimated")
    return f"W = {row[3]}, N = {row[4]} (estimated)"


def _on(device: str) -> Here:
    """Returns the highest estimated speedup of a 7B model on a device, at the N of Figure 8."""

    def highest(run: Run, results: Results) -> str | None:
        found = scaling.figure_8_speedups(results, device)
        return f"{max(found):.2f}x (estimated)" if found else None

    return highest


def _parallel(way: str, kind: str = "lookahead") -> Here:
    """Returns the estimated speedup of plain or lookahead decoding by a way to divide a step of a 7B model."""

    def speedup(run: Run, results: Results) -> str | None:
        table = scaling.parallelism(run, results)[0]
        assert isinstance(table, Table)
        row = next(row for row in table.facts()["rows"] if (row["model"], row["devices"]) == ("7B", way))
        return f"{row[f'{kind}, speedup']:.2f}x (estimated)"

    return speedup


def _jacobi(run: Run, results: Results) -> str | None:
    return _steps(results, str(drafting.jacobi_methods()[-1]))


NEWS = "LLaMA-2-7B-Chat, CNN/Daily Mail"
FIGURE_5 = "Figure 5", "speedup of lookahead decoding", "LLaMA-2 and CodeLlama, 5 data sets, A100", "1.5x to 2.3x"
DIVIDED = [  # ways to divide a step in Figures 6 and 7: the method, its model and devices, and its speedup
    ("tensor parallelism", "plain", " without lookahead", "7B, several A100", "0.75x to 0.82x"),
    ("pipeline parallelism", "plain", " without lookahead", "7B and 13B, several A100", "0.75x to 0.82x"),
    ("lookahead parallelism", "lookahead", "", "CodeLlama-7B, ClassEval, 8 A100", "up to 4x"),
]
IN_ALGORITHM_4 = "tokens per step at temperature 1, by rejection", NEWS, "1.64"
IN_E = "answers of plain decoding in float32", f"{CHAT}, 160 answers", "all identical"
JACOBI = "tokens per step of Jacobi decoding", "no model named", "hardly more than 1"
ENTRIES = (
    Entry("jacobi", "Section 2, Algorithm 1", *JACOBI, _jacobi),
    *(Entry(name, *FIGURE_5, _speedup) for name in ("figure5", "methods")),  # the first that a run has
    Entry("figure6-7", "Figure 6", "speedup on one GPU", f"{CHAT}, FlashAttention", "1.8x", _parallel("one device")),
    *(
        Entry("figure6-7", "Figures 6, 7", f"speedup of {way}{words}", of, number, _parallel(f"{way}, 8 devices", kind))
        for way, kind, words, of, number in DIVIDED
    ),
    Entry("table2", "Table 2", "tokens per step, greedy", NEWS, "1.72", _at(0.0)),
    Entry("table2", "Table 2, Algorithm 4", *IN_ALGORITHM_4, _at(1.0, SAMPLING_FLAGS)),
    Entry("table3", "Table 3, row 2", "tokens per step of prompt lookup", CHAT, "1.55", _of_row(2)),
    Entry("table3", "Table 3, row 8", "tokens per step without the prompt", CHAT, "1.96", _of_row(8)),
    Entry("table3", "Table 3, row 9", "tokens per step", CHAT, "2.05", _of_row(9)),
    Entry("figure4", "Figure 4, Equations 5 and 7", "the fitted law", CHAT, "alpha 0.425, f 3.106", _fit),
    Entry("table4", "Table 4", "good W and N of a 7B model", "A100", "W = 15, N = 5", _good),
    Entry("figure8", "Figure 8", "speedup on an A100", CHAT, "more than 1.5x", _on("a100")),
    Entry("figure8", "Figure 8", "speedup on an RTX 3090", "LLaMA-2-7B-Chat, MT-Bench", "1.3x", _on("rtx3090")),
    Entry("exactness", "Appendix E", *IN_E, _same_in_float32),
)


def numbers_table(run: Run, results: Mapping[str, Results]) -> Table | None:
    """Returns the numbers of the paper beside those of a run, given its results by experiment; None without any."""
    rows: list[Row] = []
    for entry in ENTRIES:
        here = entry.here(run, results[entry.experiment]) if results.get(entry.experiment) else None
        if here is not None and (entry.place, entry.meaning) not in [row[:2] for row in rows]:
            rows.append((entry.place, entry.meaning, entry.conditions, entry.number, here))
    columns = dict.fromkeys(("in the paper", "number", "its model, data and device", "the paper's", "here"), "")
    about = run.about
    note = (
        f"Here the model is {about['model']} in {about['dtype']} with {about['parameters'] / 1e6:,.1f} M parameters, "
        f"the data are {', '.join(about['data'])}, and the device is {about['device']} ({about['processor']}). "
        "Estimates are of the paper's model and device, from data sheets, with the tokens per step of this run."
    )
    return Table("paper", "Beside the paper", columns, rows, note) if rows else None
