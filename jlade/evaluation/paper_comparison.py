"""A run beside the paper (arXiv 2402.02057): its tables and figures, each with a number of the paper and the run's."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jlade.evaluation import drafting, measures, paper, scaling
from jlade.evaluation.comparison import Results
from jlade.evaluation.methods import parse
from jlade.evaluation.runs import Run
from jlade.evaluation.tables import Column, Row, Table

CHAT = "LLaMA-2-7B-Chat, MT-Bench, A100"


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
    return lambda run, results: _steps(results, str(paper.ablation_methods()[number - 1]))


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


def _jacobi(run: Run, results: Results) -> str | None:
    return _steps(results, str(drafting.jacobi_methods()[-1]))


ENTRIES = (
    Entry(
        "jacobi",
        "Section 2, Algorithm 1",
        "tokens per step of Jacobi decoding",
        "no model named",
        "hardly more than 1",
        _jacobi,
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
        _at(1.0, paper.SAMPLING_FLAGS),
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


def table(run: Run, results: Mapping[str, Results]) -> Table | None:
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
