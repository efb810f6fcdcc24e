"""Tokens per step and speed by the size of a step and by device: Figures 4 and 6 to 8 and Table 4 of the paper."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jlade.config import PLAIN, LookaheadConfig
from jlade.costs.devices import DEVICES
from jlade.costs.plan import Option, pipeline_time, plan
from jlade.costs.work import MeshShape
from jlade.evaluation import figures, measures, statistics
from jlade.evaluation.comparison import Results, device_name
from jlade.evaluation.figures import Figure
from jlade.evaluation.methods import Method, parse
from jlade.evaluation.runs import Run
from jlade.evaluation.tables import Column, Row, Table
from jlade.models.llama import LlamaConfig

WINDOWS, NGRAMS = (1, 2, 4, 8, 16), (3, 5, 7)  # W = G and N of Figure 4
GOOD = {"7B": (15, 5), "13B": (10, 5), "34B": (7, 5)}  # W = G and N in Table 4
FIGURE_8_NGRAM = 5  # N
TREES = (7, 15, 31, 63, 119)  # drafts of the trees beside Figure 4
TABLE_4_DEVICES = ("a100", "h100", "rtx3090", "rtx4090")
WINDOW = "window W = candidates G"  # the axis of Figures 4 and 8
FIGURE_8_DEVICES = ("a100", "rtx3090")
PARALLEL = (4, 8)  # devices of Figures 6 and 7
PARALLEL_FIGURES = {"7B": 6, "13B": 7}
ONE = MeshShape(1, 1, 1)
BFLOAT16 = 2  # bytes


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
        norm_eps=1e-5,
        rope_theta=10000.0,
    )


SIZES = {  # of Table 4: LLaMA-2, LLaMA-2 and CodeLlama
    "7B": _llama(4096, 11008, 32, 32, 32),
    "13B": _llama(5120, 13824, 40, 40, 40),
    "34B": _llama(8192, 22016, 48, 64, 8),
}


class Point(NamedTuple):
    """A setting with W = G, and its tokens per step."""

    window_size: int
    ngram_size: int
    compression: float

    @property
    def setting(self) -> LookaheadConfig:
        return LookaheadConfig.paper(self.window_size, self.ngram_size, self.window_size)

    @property
    def name(self) -> str:
        return str(Method(self.setting))


def window_methods(windows: Iterable[int] = WINDOWS, ngrams: Iterable[int] = NGRAMS) -> list[Method]:
    """Returns the methods of Figure 4, for each N those of each W = G."""
    return [Method(LookaheadConfig.paper(w, n, w)) for n, w in itertools.product(ngrams, windows)]


def good_methods() -> list[Method]:
    """Returns the methods of Table 4."""
    return [Method(LookaheadConfig.paper(w, n, w)) for w, n in GOOD.values()]


def tree_methods() -> list[Method]:
    """Returns the methods beside those of Figure 4: trees without a window."""
    return [Method(LookaheadConfig.tree(size)) for size in TREES]


def _points(results: Results) -> list[Point]:
    """Returns the measurements of settings with W = G, by N and W."""
    points = []
    for name, of_method in results.items():
        setting = parse(name).setting
        if isinstance(setting, LookaheadConfig) and not setting.has_tree and setting.window_size:
            point = Point(setting.window_size, setting.ngram_size, measures.compression(of_method))
            points += [point] if point.name == name else []
    return sorted(points, key=lambda point: (point.ngram_size, point.window_size))


def _by_ngram(points: Iterable[Point]) -> dict[int, list[tuple[float, float]]]:
    """Returns pairs of W and tokens per step, by N."""
    by_ngram: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        by_ngram.setdefault(point.ngram_size, []).append((point.window_size, point.compression))
    return by_ngram


def windows_table(results: Results) -> Table:
    """Returns the measurements of Figure 4, with the fit of tokens per step to log W for each N."""
    points = _by_ngram(_points(results))
    windows = sorted({window for of_ngram in points.values() for window, _ in of_ngram})
    rows: list[Row] = []
    for ngram_size, of_ngram in points.items():
        line = statistics.fit_log([int(w) for w, _ in of_ngram], [s for _, s in of_ngram])
        rows.append((str(ngram_size), *map(dict(of_ngram).get, windows), line.slope, line.r2))
    columns = (
        Column("N"),
        *(Column(f"W = {window:g}", ".2f") for window in windows),
        Column("per doubling of W", "+.3f"),
        Column("R² of the log fit", ".3f"),
    )
    return Table(
        "figure4", "Tokens per step by W = G and N (Figure 4 of the paper)", columns, tuple(rows), _note(results)
    )


def fit(results: Results) -> statistics.ScalingFit:
    """Returns the fit of Equations 5 and 7 to the measurements of settings with W = G."""
    points = _points(results)
    sizes = [(point.window_size, point.ngram_size) for point in points]
    return statistics.fit_scaling(sizes, [point.compression for point in points])


def _note(results: Results) -> str:
    law = fit(results)
    return (
        f"Equations 5 and 7 fit with alpha = {law.alpha:.3f} and f = {law.f:.3f}, R² = {law.r2:.3f}; the paper "
        "has 0.425 and 3.106 for LLaMA-2-7B-Chat on MT-Bench."
    )


def windows_figures(results: Results) -> list[Figure]:
    """Returns Figure 4: tokens per step against W and N, measured, and by the fitted formula."""
    points = _points(results)
    law = fit(results)
    measured = {f"N = {n}": of_ngram for n, of_ngram in _by_ngram(points).items()}
    formula = {f"N = {n}": [(w, _formula(law, w, n)) for w, _ in of_n] for n, of_n in _by_ngram(points).items()}
    draw = figures.lines(measured, WINDOW, "tokens per step", is_log=True)
    draw_formula = figures.lines(formula, WINDOW, "tokens per step", is_log=True, dashed=formula)
    return [
        Figure("figure4a", "Tokens per step against W and N, measured", draw),
        Figure("figure4b", "The fitted formula", draw_formula, _note(results)),
    ]


def _formula(law: statistics.ScalingFit, window_size: float, ngram_size: int) -> float:
    """Returns the tokens per step of Equations 5 and 7."""
    expected = statistics.expected_tokens(law.alpha, np.array([int(window_size)]), np.array([ngram_size]))
    return (law.f - 1 + float(expected[0])) / law.f


def _trees(results: Results) -> list[tuple[float, float]]:
    """Returns pairs of the tokens of a step and tokens per step."""
    return [
        (method.setting.block_size, measures.compression(results[str(method)]))
        for method in tree_methods()
        if isinstance(method.setting, LookaheadConfig) and str(method) in results
    ]


def trees_table(results: Results) -> Table | None:
    """Returns tokens per step by the size of a tree, with their fit to log2 of the tokens of a step.

    A run that is older than trees, or was interrupted, may lack them: None then.
    """
    points = _trees(results)
    if len(points) < 2:
        return None
    line = statistics.fit_log([int(tokens) for tokens, _ in points], [s for _, s in points])
    rows = [(int(tokens) - 1, int(tokens), compression) for tokens, compression in points]
    columns = Column("tree", "d"), Column("tokens of a step", "d"), Column("tokens/step", ".2f")
    note = f"Each doubling of the tokens of a step adds {line.slope:.3f} tokens per step; R² of the fit {line.r2:.3f}."
    return Table("figure4-trees", "Tokens per step by the size of a tree", columns, tuple(rows), note)


def blocks_figure(results: Results) -> Figure:
    """Returns tokens per step against the tokens of a step, of windows and of trees."""
    series: dict[str, list[tuple[float, float]]] = {}
    for point in _points(results):
        series.setdefault(f"N = {point.ngram_size}", []).append((point.setting.block_size, point.compression))
    series |= {"trees": _trees(results)}
    series = {name: points for name, points in series.items() if points}
    draw = figures.lines(series, "tokens of a step", "tokens per step", is_log=True)
    return Figure("figure4c", "Tokens per step against the tokens of a step", draw)


def configurations_table(runs: Sequence[tuple[Run, Results]]) -> Table:
    """Returns Table 4: the fastest W and N by model size, measured for each run, and estimated for GPUs."""
    rows: list[Row] = []
    for run, results in runs:
        speeds = {point: measures.speed(results[point.name]) for point in _points(results)}
        best = max(speeds, key=speeds.__getitem__)
        model = f"{run.about['model']}, {run.about['parameters'] / 1e6:.1f} M, measured"
        speedup = speeds[best] / measures.speed(results[str(Method())])
        rows.append((model, run.about["processor"], None, best.window_size, best.ngram_size, speedup, None))
    run, results = runs[0]
    points = _points(results)
    for device, size in itertools.product(TABLE_4_DEVICES, SIZES):
        rate = DEVICES[device].tflops
        speedups = {point: _speedup(size, device, point) for point in points}
        named = [(point.window_size, point.ngram_size) == GOOD[size] for point in points]
        of_paper = next((speedups[point] for point, is_named in zip(points, named, strict=True) if is_named), None)
        best = max(points, key=lambda point: speedups[point] or 0.0)
        w, n = (best.window_size, best.ngram_size) if speedups[best] else (None, None)
        rows.append((f"{size}, estimated", DEVICES[device].kind, rate, w, n, speedups[best], of_paper))
    columns = (
        Column("model"),
        Column("device"),
        Column("TFLOP/s", ".0f"),
        Column("W = G", "d"),
        Column("N", "d"),
        Column("speedup", ".2f x"),
        Column("at the paper's W and N", ".2f x"),
    )
    note = (
        "The fastest of the settings that were measured. The estimates combine the tokens per step of "
        f"{run.about['model']} with step times from data sheets (`jlade plan`); a larger model's text may be harder or "
        "easier to guess. A dash stands for a model that exceeds the memory. The paper names W = 15, 10 and 7 with "
        "N = 5 for 7B, 13B and 34B on an A100."
    )
    return Table("table4", "Good settings by model size (Table 4 of the paper)", columns, tuple(rows), note)


def _option(size: str, device: str, lookahead: LookaheadConfig, compression: float, layout: MeshShape) -> Option:
    """Returns the estimate for a sequence on each part of `layout.data`."""
    given = {"lookahead": lookahead, "compression": max(1.0, compression), "batch_size": layout.data}
    options = plan(SIZES[size], device, layout.num_devices, **given).options  # type: ignore[arg-type]
    return next(option for option in options if option.layout == layout)


def _speedup(size: str, device: str, point: Point) -> float | None:
    """Returns the estimated speedup of a setting on one device, None if the model exceeds its memory."""
    plain = _option(size, device, PLAIN, 1.0, ONE)
    ahead = _option(size, device, point.setting, point.compression, ONE)
    return ahead.tokens_per_second / plain.tokens_per_second if ahead.fits else None


def _figure_8_points(results: Results) -> list[Point]:
    """Returns the measurements of the settings of Figure 8, by W."""
    return [point for point in _points(results) if point.ngram_size == FIGURE_8_NGRAM]


def figure_8_speedups(results: Results, device: str) -> list[float]:
    """Returns the estimated speedups of a 7B model on a device, by W."""
    return [_speedup("7B", device, point) or 0.0 for point in _figure_8_points(results)]


def figure_8(run: Run, results: Results) -> list[Table | Figure | None]:
    """Returns Figure 8: tokens per step and speed by W on this device, beside estimates; [] without its N."""
    points = _figure_8_points(results)
    if not points:
        return []
    windows = [point.window_size for point in points]
    plain = measures.speed(results[str(Method())])
    speeds = [measures.speed(results[point.name]) for point in points]
    estimates = {DEVICES[device].kind: figure_8_speedups(results, device) for device in FIGURE_8_DEVICES}
    dashed = {f"speedup of 7B, {kind}, estimated": speedups for kind, speedups in estimates.items()}
    lines = {
        "tokens per step": [point.compression for point in points],
        f"speedup, measured on {run.about['device']}": [speed / plain for speed in speeds],
    } | dashed
    series: dict[str, list[tuple[float, float]]] = {
        name: list(zip(windows, values, strict=True)) for name, values in lines.items()
    }
    draw = figures.lines(series, WINDOW, "tokens per step; speedup, x plain", is_log=True, dashed=dashed)
    note = (
        f"N = {FIGURE_8_NGRAM}. The solid lines are measured with {run.about['model']}. The dashed lines are "
        "estimates: its tokens per step, with step times of a 7B model from data sheets."
    )
    figure = Figure("figure8", "Tokens per step and speedup by device (Figure 8 of the paper)", draw, note)
    rows: list[Row] = [
        (str(point.window_size), point.compression, speed, speed / plain, *estimated)
        for point, speed, *estimated in zip(points, speeds, *estimates.values(), strict=True)
    ]
    columns = (
        Column("W = G"),
        Column("tokens/step", ".2f"),
        Column("tokens/s", ".1f"),
        Column("speedup", ".2f x"),
        *(Column(f"estimated, 7B on {kind}", ".2f x") for kind in estimates),
    )
    title = f"Tokens per step and speed by W on {device_name(run)} (Figure 8 of the paper)"
    note = (
        f"N = {FIGURE_8_NGRAM}. Measured with {run.about['model']}, whose plain decoding gives {plain:.1f} "
        "tokens/s. The estimates take its tokens per step, and step times of a 7B model from data sheets."
    )
    return [Table("figure8", title, columns, tuple(rows), note), figure]


def parallelism(run: Run, results: Results) -> list[Table | Figure | None]:
    """Returns Figures 6 and 7: the speed of a sequence by the way to divide a step among devices, estimated."""
    (name,) = [name for name in results if name != str(Method())]
    setting, compression = parse(name).setting, measures.compression(results[name])
    assert isinstance(setting, LookaheadConfig)
    columns = (
        Column("model"),
        Column("devices"),
        Column("plain, tokens/s", ".0f"),
        Column("lookahead, tokens/s", ".0f"),
        Column("plain, speedup", ".2f x"),
        Column("lookahead, speedup", ".2f x"),
        Column("plain, paper"),
        Column("lookahead, paper"),
    )
    note = (
        f"Estimates for A100 GPUs from data sheets (`jlade plan`), for each sequence, at {parse(name).label}, with the "
        f"{compression:.2f} tokens per step of {run.about['model']}. jlade has no pipeline parallelism. For one text "
        "its stages run one after the other, so a step is estimated to take the time of one device and, between "
        "stages, that of a message with the hidden states of the step's tokens. The overhead of a framework is not "
        "counted."
    )
    of_paper = (
        " The paper's numbers are measured, relative to plain decoding by transformers. On one GPU they are for "
        "MT-Bench with FlashAttention. The range covers tensor parallelism by DeepSpeed and pipeline parallelism by "
        "Accelerate, for all models, tasks and numbers of GPUs. The highest speedup of lookahead parallelism is for "
        "ClassEval."
    )
    rows: list[Row] = []
    pictures = []
    ways = _ways()
    for size, number in PARALLEL_FIGURES.items():
        plain = [_sequence_speed(size, PLAIN, 1.0, layout, stages) for _, layout, stages in ways]
        found = [_sequence_speed(size, setting, compression, layout, stages) for _, layout, stages in ways]
        rows += [
            (size, way, one, other, one / plain[0], other / plain[0], *_of_paper(size, way))
            for (way, *_), one, other in zip(ways, plain, found, strict=True)
        ]
        groups = [way.replace(", ", "\n", 1) for way, *_ in ways]
        draw = figures.bars(groups, {"plain": plain, "lookahead": found}, "tokens/s of a sequence, estimated")
        title = f"Estimated speed of {size} by the way to divide a step (Figure {number} of the paper)"
        pictures.append(Figure(f"figure{number}", title, draw, note))
    title = "Estimated speed by the way to divide a step (Figures 6 and 7 of the paper)"
    return [Table("figure6-7", title, columns, tuple(rows), note + of_paper), *pictures]


def _ways() -> list[tuple[str, MeshShape, int]]:
    """Returns the ways to divide a step: their names, the sizes of the mesh, and the stages of a pipeline."""
    ways = [("one device", ONE, 1)]
    for number in PARALLEL:
        ways += [
            (f"tensor parallelism, {number} devices", MeshShape(1, 1, number), 1),
            (f"pipeline parallelism, {number} devices", ONE, number),
            (f"lookahead parallelism, {number} devices", MeshShape(1, number, 1), 1),
            (f"data parallelism, {number} devices, {number} sequences", MeshShape(number, 1, 1), 1),
        ]
    return ways


def _sequence_speed(size: str, setting: LookaheadConfig, compression: float, layout: MeshShape, stages: int) -> float:
    """Returns the estimated tokens per second of a sequence on A100 GPUs."""
    option = _option(size, "a100", setting, compression, layout)
    hidden_states = BFLOAT16 * setting.block_size * SIZES[size].hidden_size
    return option.compression / pipeline_time(option.step, hidden_states, stages, DEVICES["a100"])


def _of_paper(size: str, way: str) -> tuple[str | None, str | None]:
    """Returns the speedups of plain and of lookahead decoding that the text of Section 5.2 states."""
    if way.startswith(("tensor", "pipeline")):
        return "0.75x to 0.82x", None
    if way == "lookahead parallelism, 8 devices":
        return None, "up to 4x"
    return ("1.07x", "1.9x") if (size, way) == ("7B", "one device") else (None, None)
