"""The speed on the attached device: Figures 5 and 8 of the paper (arXiv 2402.02057)."""

import dataclasses

from jlade.costs.devices import DEVICES
from jlade.evaluation import comparison, measures, scaling
from jlade.evaluation.comparison import Results
from jlade.evaluation.figures import Figure
from jlade.evaluation.methods import Method, parse
from jlade.evaluation.runs import Run
from jlade.evaluation.tables import Column, Row, Table


def name_of(run: Run) -> str:
    """Returns the device of a run, or its processor, with the mesh that divides it."""
    device = run.about["processor"] if run.about["device"] == "cpu" else run.about["device"]
    return f"{device}, divided as {run.about['mesh']}" if run.about["mesh"] else device


def figure_5(run: Run, results: Results) -> list[Table | Figure | None]:
    """Returns Figure 5 for this model and device: speed by data set, with and without lookahead decoding."""
    title = f"Speed by data set on {name_of(run)} (Figure 5 of the paper): {run.about['model']}"
    figure = dataclasses.replace(comparison.throughput_figure(run, results), name="figure5", title=title)
    plain = str(Method())
    (lookahead,) = [name for name in results if name != plain and parse(name).setting is not None]
    rows: list[Row] = []
    for dataset in dict.fromkeys(result.dataset for result in results[lookahead]):
        found = {name: measures.of_dataset(of_method, dataset) for name, of_method in results.items()}
        speedup = measures.speedup(found[lookahead], found[plain])
        interval = speedup and f"{speedup.low:.2f} to {speedup.high:.2f}"
        speeds = map(measures.speed, found.values())
        compression = measures.compression(found[lookahead])
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
    ) + comparison.devices_note(run, results)
    return [Table("figure5", title, columns, tuple(rows), note), figure]


def figure_8(run: Run, results: Results) -> list[Table | Figure | None]:
    """Returns Figure 8: tokens per step and speed by W on this device, beside estimates; [] without its N."""
    figure = scaling.devices_figure(run, results)
    if figure is None:
        return []
    estimates = [scaling.figure_8_speedups(results, device) for device in scaling.FIGURE_8_DEVICES]
    plain = measures.speed(results[str(Method())])
    rows: list[Row] = []
    for point, *estimated in zip(scaling.figure_8_points(results), *estimates, strict=True):
        speed = measures.speed(results[point.name])
        rows.append((str(point.window_size), point.compression, speed, speed / plain, *estimated))
    kinds = [DEVICES[device].kind for device in scaling.FIGURE_8_DEVICES]
    columns = (
        Column("W = G"),
        Column("tokens/step", ".2f"),
        Column("tokens/s", ".1f"),
        Column("speedup", ".2f x"),
        *(Column(f"estimated, 7B on {kind}", ".2f x") for kind in kinds),
    )
    title = f"Tokens per step and speed by W on {name_of(run)} (Figure 8 of the paper)"
    note = (
        f"N = {scaling.FIGURE_8_NGRAM}. Measured with {run.about['model']}, whose plain decoding gives {plain:.1f} "
        "tokens/s. The estimates take its tokens per step, and step times of a 7B model from data sheets."
    )
    return [Table("figure8", title, columns, tuple(rows), note), figure]
