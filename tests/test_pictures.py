"""All pictures that jlade draws, of made-up rows in the shapes of real ones: nothing is cut, covered or alike."""

import io
import itertools
import json
import pathlib

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

import benchmarks.scaling
from jlade import LookaheadConfig, NGramConfig, Trial, Tuning
from jlade.config import PLAIN
from jlade.costs.settings import USUAL
from jlade.evaluation import comparison, drafting, report, scaling
from jlade.evaluation.report import Table
from tests.evaluation.made import answer, of, result, run

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"
ON_GPU = run(device="NVIDIA H100 80GB HBM3")
DATASETS = ("MT-Bench", "HumanEval", "HumanEval, infilling", "GSM8K", "MBPP", "ClassEval", "XSum", "CNN/Daily Mail")
USUAL_METHODS = ("plain", "0,4,1", "15,5,15", "transformers", "transformers-lookup")
MORE_METHODS = ("tree=63", "10,5,10:tree=80:no-suffix", "jacobi=16", "5,5,5", "7,5,7:no-prompt", "15,5,15:bfloat16")


def windows(windows=scaling.WINDOWS, ngrams=scaling.NGRAMS):
    """Returns results of plain decoding, of windows and of trees."""
    methods = scaling.window_methods(windows, ngrams)
    results = {str(method): of(method, 1 + method.setting.block_size**0.4 / 5) for method in methods}
    results |= {str(method): of(method, 1.5 + i / 3) for i, method in enumerate(scaling.tree_methods())}
    return results | {"plain": of("plain", 1.0)}


def hits():
    """Returns results of texts of 512 steps with cold and warm pools."""
    drafted = np.random.default_rng(0).random((2, 512)) < 0.6
    names = "15,5,15", "15,5,15:warm"
    return {
        name: [result(name, answer([1] * 512, list(map(int, of_name))))]
        for name, of_name in zip(names, drafted, strict=True)
    }


def throughput(methods, datasets=DATASETS):
    """Returns results of methods on data sets."""
    return {
        name: [result(name, answer([1 + i] * 4), dataset=dataset) for dataset in datasets]
        for i, name in enumerate(methods)
    }


def tuning(tmp_path):
    """Draws the result of a search among the usual settings."""
    settings = [PLAIN, *USUAL, LookaheadConfig.tree(80, ngrams=NGramConfig(10, 5, 10))]
    seconds = [0.02 * (1 + setting.block_size / 200) for setting in settings]
    trials = [
        Trial(each, 2.0, one, 2 / one, 0.04 / one, one / 0.02) for each, one in zip(settings, seconds, strict=True)
    ]
    timed = {size: 0.02 * (1 + size / 200) for size in (1, 4, 8, 16, 32, 64, 120, 240)}
    Tuning(trials[3], tuple(trials), (), timed, "1 x NVIDIA H100 80GB HBM3 (gpu)", 8).plot(tmp_path / "tuning.png")


def estimates(tmp_path):
    """Draws docs/scaling.svg from recorded rows."""
    recorded = json.loads((RESULTS / "scaling.json").read_text(encoding="utf-8"))["axes"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            benchmarks.scaling, "axes", lambda source: [row for row in recorded if row["compression"] == source]
        )
        benchmarks.scaling.plot(str(tmp_path / "scaling.svg"))


def png(*items):
    """Draws the figures among the items."""
    for item in items:
        if not isinstance(item, Table):
            item.png()


PICTURES = {  # the number of names in the legends of each picture, and a function that draws them
    "figure4": ([3, 3], lambda _: png(*scaling.windows(run(), windows()))),
    "figure4, as wide as the paper": (
        [9, 9],
        lambda _: png(*scaling.windows(run(), windows((1, 2, 3, 5, 10, 15, 20, 30, 60, 64), range(3, 12)))),
    ),
    "figure4c": ([4], lambda _: png(scaling.blocks_figure(run(), windows()))),
    "figures 6 and 7": (
        [2, 2],
        lambda _: png(*scaling.parallelism(ON_GPU, {"plain": of("plain", 1.0), "15,5,15": of("15,5,15", 2.0)})),
    ),
    "figure8": ([4], lambda _: png(*scaling.figure_8(ON_GPU, windows()))),
    "throughput": ([5], lambda _: png(comparison.throughput_figure(ON_GPU, throughput(USUAL_METHODS)))),
    "throughput, more methods": (
        [11],
        lambda _: png(comparison.throughput_figure(ON_GPU, throughput(USUAL_METHODS + MORE_METHODS, DATASETS[:2]))),
    ),
    "hits": ([2], lambda _: png(drafting.hits_figure(run(), hits()))),
    "tuning": ([0], tuning),
    "scaling": ([4], estimates),
}


@pytest.fixture
def drawn(monkeypatch):
    """A list of the figures that are saved. Their files are empty."""
    found = []

    def savefig(figure, file, **options):
        found.append(figure)
        if not isinstance(file, io.BytesIO):
            pathlib.Path(file).touch()

    monkeypatch.setattr(Figure, "savefig", savefig)
    return found


def texts(figure):
    """Returns the visible texts of a figure that has been drawn."""
    found = list(figure.texts)
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    for legend in filter(None, legends):
        found += legend.get_texts()
    for axes in figure.axes:
        found += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            found += [tick.label1 for tick in ticks if low <= tick.get_loc() <= high]
    return [text for text in found if text.get_visible() and text.get_text().strip()]


def looks(axes):
    """Returns colour and form of each series of lines and of bars."""
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    bars = [each[0] for each in axes.containers if isinstance(each, BarContainer)]
    bars = [bar for bar, each in zip(bars, axes.containers, strict=True) if not each.get_label().startswith("_")]
    return [
        *((line.get_color(), (line.get_marker(), line.get_linestyle())) for line in lines),
        *((bar.get_facecolor(), bar.get_hatch()) for bar in bars),
    ]


@pytest.mark.parametrize("name", PICTURES)
def test_nothing_is_cut_or_covered_and_no_two_series_look_alike(name, drawn, tmp_path):
    numbers, draw = PICTURES[name]
    draw(tmp_path)
    assert [sum(len(legend.get_texts()) for legend in figure.legends) for figure in drawn] == numbers
    for figure in drawn:
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())
        frame = [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
        assert all((edge == 255).all() for edge in frame), "something reaches the edge"

        boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
        inside = figure.bbox
        for text, box in boxes:
            assert inside.x0 <= box.x0 <= box.x1 <= inside.x1, f"{text!r} is cut"
            assert inside.y0 <= box.y0 <= box.y1 <= inside.y1, f"{text!r} is cut"
        for (text, box), (other, other_box) in itertools.combinations(boxes, 2):
            assert not box.overlaps(other_box), f"{text!r} covers {other!r}"
        for legend, axes in itertools.product(figure.legends, figure.axes):
            assert not legend.get_window_extent().overlaps(axes.get_tightbbox()), "the legend covers the axes"

        for axes in figure.axes:
            bars = sorted(bar.get_window_extent().intervaly.tolist() for bar in axes.patches)
            assert all(high <= low + 0.1 for (_, high), (low, _) in itertools.pairwise(bars)), "a bar covers another"
            found = looks(axes)
            assert len(set(found)) == len(found), "two series look alike"
            forms = {form for _, form in found}
            assert len(forms) == min(len(found), 8), "two series differ in colour alone"


def test_long_names_are_wrapped(drawn):
    """A data set named by its file, and a method with all that a name can have."""
    groups = ["conversations_of_one_week_without_duplicates_2024.jsonl", "code"]
    report.Figure("a", "b", report.bars(groups, {"one": [3.0, 1.0], "other " * 20: [2.0, 4.0]}, "tokens/s")).png()
    (figure,) = drawn
    FigureCanvasAgg(figure).draw()
    boxes = [text.get_window_extent() for text in texts(figure)]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert not any(box.overlaps(other) for box, other in itertools.combinations(boxes, 2))
