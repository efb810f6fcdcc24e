"""Tokens per step and speed by the size of a step and by device: Figures 4 and 6 to 8 and Table 4 of the paper."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jlade.config import PLAIN, LookaheadConfig
from jlade.costs.devices import DEVICES
from jlade.costs.plan import Option, pipeline_time, plan
from jlade.costs.work import MeshShape
from jlade.evaluation import measures, report, statistics
from jlade.evaluation.comparison import Results, by_method, device_name
from jlade.evaluation.methods import Method, parse
from jlade.evaluation.report import Figure, Row, Table
from jlade.evaluation.runs import Result, Run
from jlade.models.llama import LlamaConfig

WINDOWS, NGRAMS = (1, 2, 4, 8, 16), (3, 5, 7)  # W = G and N of Figure 4
GOOD = {"7B": (15, 5), "13B": (10, 5), "34B": (7, 5)}  # W = G and N in Table 4
FIGURE_8_NGRAM = 5  # N
TREES = (7, 15, 31, 63, 119)  # drafts of the trees beside Figure 4
TABLE_4_DEVICES = ("a100", "h100", "rtx3090", "rtx4090")
WINDOW = "window W = candidates G"  # the axis of Figures 4 and 8
FIGURE_8_DEVICES = ("a100", "rtx3090")
PARALLEL_FIGURES = {"7B": 6, "13B": 7}
ONE = MeshShape(1, 1, 1)
BFLOAT16 = 2  # bytes
WAYS = {"one device": (ONE, 1)}  # to divide a step in Figures 6 and 7: a mesh, and the stages of a pipeline
for num_devices in (4, 8):
    WAYS |= {
        f"tensor parallelism, {num_devices} devices": (MeshShape(1, 1, num_devices), 1),
        f"pipeline parallelism, {num_devices} devices": (ONE, num_devices),
        f"lookahead parallelism, {num_devices} devices": (MeshShape(1, num_devices, 1), 1),
        f"data parallelism, {num_devices} devices, {num_devices} sequences": (MeshShape(num_devices, 1, 1), 1),
    }

_SHAPES = {  # hidden size, width of the MLP, layers, heads, and heads for keys and values
    "7B": (4096, 11008, 32, 32, 32),  # LLaMA-2
    "13B": (5120, 13824, 40, 40, 40),
    "34B": (8192, 22016, 48, 64, 8),  # CodeLlama
}
SIZES = {  # of Table 4
    name: LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden_size,
        intermediate_size=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        max_positions=4096,
        norm_eps=1e-5,
        rope_theta=10000.0,
    )
    for name, (hidden_size, width, num_layers, num_heads, num_kv_heads) in _SHAPES.items()
}


class Point(NamedTuple):
    """A setting with W = G, and its tokens per step."""

    window_size: int
    ngram_size: int
    compression: float

    @property
    def setting(self) -> LookaheadConfig:
        return LookaheadConfig.paper(self.window_size, self.ngram_size, self.window_size)


def window_methods(windows: Iterable[int] = WINDOWS, ngrams: Iterable[int] = NGRAMS) -> list[Method]:
    """Returns the methods of Figure 4, for each N those of each W = G."""
    return [Method(LookaheadConfig.paper(w, n, w)) for n, w in itertools.product(ngrams, windows)]


def good_methods() -> list[Method]:
    """Returns the methods of Table 4."""
    return [Method(LookaheadConfig.paper(w, n, w)) for w, n in GOOD.values()]


def tree_methods() -> list[Method]:
    """Returns the methods beside those of Figure 4: trees without a window."""
    return [Method(LookaheadConfig.tree(size)) for size in TREES]


def _measured(results: Results) -> dict[Point, list[Result]]:
    """Returns the results of settings with W = G, by N and W."""
    found = {}
    for method, own, _ in by_method(results):
        if isinstance(method.setting, LookaheadConfig) and method.setting.window_size:
            point = Point(method.setting.window_size, method.setting.ngram_size, measures.compression(own))
            if method == Method(point.setting):
                found[point] = own
    return dict(sorted(found.items(), key=lambda item: (item[0].ngram_size, item[0].window_size)))


def _lines(results: Results) -> dict[int, dict[int, float]]:
    """Returns the tokens per step by N and by W = G."""
    lines: dict[int, dict[int, float]] = {}
    for w, n, compression in _measured(results):
        lines.setdefault(n, {})[w] = compression
    return lines


def fit(results: Results) -> statistics.ScalingFit:
    """Returns the fit of Equations 5 and 7 to the measurements of settings with W = G."""
    points = list(_measured(results))
    return statistics.fit_scaling([(w, n) for w, n, _ in points], [compression for *_, compression in points])


def windows(run: Run, results: Results) -> list[Table | Figure]:
    """Returns Figure 4: tokens per step by W and N, measured, with a fit to log W for each N, and by the formula."""
    law, lines = fit(results), _lines(results)
    sizes = sorted({w for line in lines.values() for w in line})
    rows: list[Row] = []
    for n, line in lines.items():
        log_fit = statistics.fit_log(list(line), list(line.values()))
        rows.append((str(n), *map(line.get, sizes), log_fit.slope, log_fit.r2))
    columns = {"N": ""} | {f"W = {w}": ".2f" for w in sizes}
    columns |= {"per doubling of W": "+.3f", "R² of the log fit": ".3f"}
    note = (
        f"Equations 5 and 7 fit with alpha = {law.alpha:.3f} and f = {law.f:.3f}, R² = {law.r2:.3f}; the paper "
        "has 0.425 and 3.106 for LLaMA-2-7B-Chat on MT-Bench."
    )
    measured = {f"N = {n}": list(line.items()) for n, line in lines.items()}
    formula = {f"N = {n}": [(w, law.compression(w, n)) for w in line] for n, line in lines.items()}
    draw = report.lines(measured, WINDOW, "tokens per step", is_log=True)
    draw_formula = report.lines(formula, WINDOW, "tokens per step", is_log=True, dashed=formula)
    title = "Tokens per step by W = G and N (Figure 4 of the paper)"
    return [
        Table("figure4", title, columns, rows, note),
        Figure("figure4a", "Tokens per step against W and N, measured", draw),
        Figure("figure4b", "The fitted formula", draw_formula, note),
    ]


def _trees(results: Results) -> dict[int, float]:
    """Returns the tokens per step of trees by the tokens of a step."""
    return {
        method.setting.block_size: measures.compression(results[str(method)])
        for method in tree_methods()
        if isinstance(method.setting, LookaheadConfig) and str(method) in results
    }


def trees_table(run: Run, results: Results) -> Table | None:
    """Returns tokens per step by the size of a tree, with their fit to log2 of the tokens of a step.

    A run that is older than trees, or was interrupted, may lack them: None then.
    """
    trees = _trees(results)
    if len(trees) < 2:
        return None
    line = statistics.fit_log(list(trees), list(trees.values()))
    rows = [(tokens - 1, tokens, compression) for tokens, compression in trees.items()]
    columns = {"tree": "d", "tokens of a step": "d", "tokens/step": ".2f"}
    note = f"Each doubling of the tokens of a step adds {line.slope:.3f} tokens per step; R² of the fit {line.r2:.3f}."
    return Table("figure4-trees", "Tokens per step by the size of a tree", columns, rows, note)


def blocks_figure(run: Run, results: Results) -> Figure:
    """Returns tokens per step against the tokens of a step, of windows and of trees."""
    series: dict[str, list[tuple[float, float]]] = {}
    for point in _measured(results):
        series.setdefault(f"N = {point.ngram_size}", []).append((point.setting.block_size, point.compression))
    if trees := _trees(results):
        series["trees"] = list(trees.items())
    draw = report.lines(series, "tokens of a step", "tokens per step", is_log=True)
    return Figure("figure4c", "Tokens per step against the tokens of a step", draw)


def configurations_table(runs: Sequence[tuple[Run, Results]]) -> Table:
    """Returns Table 4: the fastest W and N by model size, measured for each run, and estimated for GPUs."""
    rows: list[Row] = []
    for run, results in runs:
        speeds = {point: measures.speed(own) for point, own in _measured(results).items()}
        best = max(speeds, key=speeds.__getitem__)
        model = f"{run.about['model']}, {run.about['parameters'] / 1e6:.1f} M, measured"
        speedup = speeds[best] / measures.speed(results[str(Method())])
        rows.append((model, run.about["processor"], None, best.window_size, best.ngram_size, speedup, None))
    run, results = runs[0]
    points = list(_measured(results))
    for device, size in itertools.product(TABLE_4_DEVICES, SIZES):
        speedups = {point[:2]: _speedup(size, device, point) for point in points}
        fastest = max(speedups, key=lambda pair: speedups[pair] or 0.0)
        setting = fastest if speedups[fastest] else (None, None)
        found = speedups[fastest], speedups.get(GOOD[size])
        rows.append((f"{size}, estimated", DEVICES[device].kind, DEVICES[device].tflops, *setting, *found))
    columns = {"model": "", "device": "", "TFLOP/s": ".0f", "W = G": "d", "N": "d"}
    columns |= {"speedup": ".2f x", "at the paper's W and N": ".2f x"}
    note = (
        "The fastest of the settings that were measured. The estimates combine the tokens per step of "
        f"{run.about['model']} with step times from data sheets (`jlade plan`); a larger model's text may be harder or "
        "easier to guess. A dash stands for a model that exceeds the memory. The paper names W = 15, 10 and 7 with "
        "N = 5 for 7B, 13B and 34B on an A100."
    )
    return Table("table4", "Good settings by model size (Table 4 of the paper)", columns, rows, note)


def _option(size: str, device: str, lookahead: LookaheadConfig, compression: float, layout: MeshShape = ONE) -> Option:
    """Returns the estimate for a sequence on each part of `layout.data`."""
    tokens = max(1.0, compression)
    found = plan(
        SIZES[size],
        device,
        layout.num_devices,
        lookahead=lookahead,
        compression=tokens,
        batch_size=layout.data,
    )
    return next(option for option in found.options if option.layout == layout)


def _speedup(size: str, device: str, point: Point) -> float | None:
    """Returns the estimated speedup of a setting on one device, None if the model exceeds its memory."""
    ahead = _option(size, device, point.setting, point.compression)
    return ahead.tokens_per_second / _option(size, device, PLAIN, 1.0).tokens_per_second if ahead.fits else None


def _at_figure_8(results: Results) -> dict[Point, list[Result]]:
    return {point: own for point, own in _measured(results).items() if point.ngram_size == FIGURE_8_NGRAM}


def figure_8_speedups(results: Results, device: str) -> list[float]:
    """Returns the estimated speedups of a 7B model on a device, by W, at the N of Figure 8."""
    return [_speedup("7B", device, point) or 0.0 for point in _at_figure_8(results)]


def figure_8(run: Run, results: Results) -> list[Table | Figure]:
    """Returns Figure 8: tokens per step and speed by W on this device, beside estimates; [] without its N."""
    points = _at_figure_8(results)
    if not points:
        return []
    plain = measures.speed(results[str(Method())])
    speeds = list(map(measures.speed, points.values()))
    estimates = {DEVICES[device].kind: figure_8_speedups(results, device) for device in FIGURE_8_DEVICES}
    dashed = {f"speedup of 7B, {kind}, estimated": speedups for kind, speedups in estimates.items()}
    lines = {
        "tokens per step": [point.compression for point in points],
        f"speedup, measured on {run.about['device']}": [speed / plain for speed in speeds],
        **dashed,
    }
    series = {
        name: [(point.window_size, value) for point, value in zip(points, line, strict=True)]
        for name, line in lines.items()
    }
    draw = report.lines(series, WINDOW, "tokens per step; speedup, x plain", is_log=True, dashed=dashed)
    note = (
        f"N = {FIGURE_8_NGRAM}. Measured with {run.about['model']}, whose plain decoding gives {plain:.1f} tokens/s. "
        "The estimates, dashed in the figure, take its tokens per step, and step times of a 7B model from data sheets."
    )
    figure = Figure("figure8", "Tokens per step and speedup by device (Figure 8 of the paper)", draw, note)
    rows: list[Row] = [
        (str(point.window_size), point.compression, speed, speed / plain, *estimated)
        for point, speed, *estimated in zip(points, speeds, *estimates.values(), strict=True)
    ]
    columns = {"W = G": "", "tokens/step": ".2f", "tokens/s": ".1f", "speedup": ".2f x"}
    columns |= {f"estimated, 7B on {kind}": ".2f x" for kind in estimates}
    title = f"Tokens per step and speed by W on {device_name(run)} (Figure 8 of the paper)"
    return [Table("figure8", title, columns, rows, note), figure]


def parallelism(run: Run, results: Results) -> list[Table | Figure]:
    """Returns Figures 6 and 7: the speed of a sequence by the way to divide a step among devices, estimated."""
    (name,) = [name for name in results if name != str(Method())]
    setting, compression = parse(name).setting, measures.compression(results[name])
    assert isinstance(setting, LookaheadConfig)
    columns = {"model": "", "devices": ""}
    columns |= {f"{kind}, tokens/s": ".0f" for kind in ("plain", "lookahead")}
    columns |= {f"{kind}, speedup": ".2f x" for kind in ("plain", "lookahead")}
    columns |= {f"{kind}, paper": "" for kind in ("plain", "lookahead")}
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
    for size, number in PARALLEL_FIGURES.items():
        plain = [_sequence_speed(size, PLAIN, 1.0, *way) for way in WAYS.values()]
        found = [_sequence_speed(size, setting, compression, *way) for way in WAYS.values()]
        rows += [
            (size, way, one, other, one / plain[0], other / plain[0], *_of_paper(size, way))
            for way, one, other in zip(WAYS, plain, found, strict=True)
        ]
        groups = [way.replace(", ", "\n", 1) for way in WAYS]
        draw = report.bars(groups, {"plain": plain, "lookahead": found}, "tokens/s of a sequence, estimated")
        title = f"Estimated speed of {size} by the way to divide a step (Figure {number} of the paper)"
        pictures.append(Figure(f"figure{number}", title, draw, note))
    title = "Estimated speed by the way to divide a step (Figures 6 and 7 of the paper)"
    return [Table("figure6-7", title, columns, rows, note + of_paper), *pictures]


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
