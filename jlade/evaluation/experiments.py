"""Experiments: which questions and methods each table and figure needs, and how it is made from a run."""

import dataclasses
import importlib.util
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jlade.evaluation import comparison, datasets, drafting, measures, paper, scaling
from jlade.evaluation.comparison import Results
from jlade.evaluation.datasets import Dataset, Question
from jlade.evaluation.methods import Method, parse
from jlade.evaluation.report import Item, Section
from jlade.evaluation.runs import Cell, Run, plan
from jlade.files import written_whole

LOOKAHEAD = "lookahead"  # in the names of methods: the setting of the run
WINDOWS = "windows"  # in the place of a method: those of each W = G and N of the run
USUAL = ("plain", "prompt-lookup", LOOKAHEAD, "transformers", "transformers-lookup")
FEW = 4  # questions of the experiments that need many methods
SELECTIONS = "experiments.json"

Make = Callable[[Run, Results], Item | list[Item] | None]
Present = Callable[[Sequence[tuple[Run, Results]]], list[Item]]


class Selection(NamedTuple):
    """The part of a run that an experiment needs."""

    methods: tuple[str, ...]  # their names
    questions: tuple[tuple[str, str], ...]  # data set and id of each


class Experiment(NamedTuple):
    """A table or figure, or several of the same results."""

    title: str  # of its section in a report
    summary: str  # one line of help
    explanation: str  # for readers of a report
    methods: tuple[str, ...]  # their names
    present: Present  # makes tables and figures of runs and their results by method
    chooses: Callable[[Question], bool] = lambda question: True  # whether it asks a question
    limit: int | None = FEW  # questions by default; None for all


def _each(*makers: Make) -> Present:
    """Returns a function that presents each run by itself; the items of several runs have its number and model."""

    def present_all(runs: Sequence[tuple[Run, Results]]) -> list[Item]:
        items = []
        for i, (run, results) in enumerate(runs, start=1):
            made = [make(run, results) for make in makers]
            of_run = [
                item for each in made for item in (each if isinstance(each, list) else [each]) if item is not None
            ]
            if len(runs) > 1:
                end = f", run {i}: {run.about['model']}"
                of_run = [dataclasses.replace(x, name=f"{x.name}-{i}", title=x.title + end) for x in of_run]
            items += of_run
        return items

    return present_all


def _names(methods: Sequence[Method]) -> tuple[str, ...]:
    return tuple(map(str, methods))


EXPERIMENTS: dict[str, Experiment] = {
    "methods": Experiment(
        "Methods",
        "speed, tokens per step, accepted tokens and memory of --methods, by task and data set (Spec-Bench)",
        "Each method answers the same questions. More tokens per step mean fewer passes through the model; the speed "
        "also depends on the time of a step.",
        USUAL,
        _each(
            *(comparison.methods_table, comparison.costs_table, comparison.tasks_table),
            *(comparison.throughput_figure, comparison.throughput_table, comparison.accepted_table),
            *(drafting.hits_table, comparison.right_table),
        ),
        limit=None,
    ),
    "figure5": Experiment(
        "Speed by data set (Figure 5)",
        "speed by data set on this device, of transformers, plain and lookahead decoding",
        "Code repeats itself more than chats do, so it gains more from the same steps.",
        ("plain", LOOKAHEAD, "transformers"),
        _each(comparison.figure_5),
        lambda question: not question.choices,
        limit=None,
    ),
    "table2": Experiment(
        "Sampling (Table 2)",
        "sampling and ROUGE of summaries",
        "Greedy and sampled summaries are compared with their references. Lookahead decoding changes the number of "
        "steps, not the texts.",
        (
            *("plain", LOOKAHEAD),
            *(f"{name}:t={t}" for t in ("0.5", "1") for name in ("plain", LOOKAHEAD, LOOKAHEAD + paper.SAMPLING_FLAGS)),
        ),
        _each(paper.sampling_table),
        lambda question: question.reference is not None,
        limit=None,
    ),
    "table3": Experiment(
        "Parts (Table 3)",
        "window, candidates and prompt, each left out, on chat questions",
        "The window, the candidates and the n-grams of the prompt are reduced or left out, one at a time.",
        _names(paper.ablation_methods()),
        _each(paper.ablation_table),
        lambda question: question.task.startswith("MT-Bench"),
    ),
    "figure4": Experiment(
        "Windows (Figure 4)",
        "tokens per step against W and N, with the fit of alpha and f, and against the size of a tree",
        "Tokens per step are measured at several windows W = G and lengths N of n-grams, and compared with the paper's "
        "formula; trees of drafts of the same sizes beside them.",
        (WINDOWS, *_names(scaling.tree_methods())),
        _each(scaling.windows, scaling.trees_table, scaling.blocks_figure),
    ),
    "table4": Experiment(
        "Settings (Table 4)",
        "good W and N by model size",
        "The fastest setting depends on model and device: it is measured here, and estimated for larger ones on GPUs.",
        ("plain", WINDOWS, *_names(scaling.good_methods())),
        lambda runs: [scaling.configurations_table(runs)],
    ),
    "figure8": Experiment(
        "Devices (Figure 8)",
        "tokens per step and speed by W, measured on this device, beside estimates for two GPUs",
        "A device with less arithmetic to spare gains less from the same tokens per step.",
        ("plain", WINDOWS),
        _each(scaling.figure_8),
    ),
    "figure6-7": Experiment(
        "Several devices (Figures 6 and 7)",
        "the speed of tensor, pipeline, lookahead and data parallelism, estimated for 7B and 13B",
        "Lookahead parallelism divides the tokens of a step, tensor parallelism the weights of each layer, pipeline "
        "parallelism the layers, data parallelism the sequences.",
        ("plain", LOOKAHEAD),
        _each(scaling.parallelism),
    ),
    "jacobi": Experiment(
        "Jacobi decoding (Algorithm 1)",
        "steps of Jacobi decoding, and the iterations in which its guesses converge",
        "All guesses are updated in each step, and those that have converged are accepted.",
        ("plain", *_names(drafting.jacobi_methods())),
        _each(drafting.jacobi_table, drafting.convergence_table),
    ),
    "pool": Experiment(
        "Pool",
        "growth of the pool, and its hits with cold and warm pools",
        "The pool collects n-grams while a text grows. A step can accept several tokens only if the pool has a draft.",
        (LOOKAHEAD, f"{LOOKAHEAD}:warm", f"{LOOKAHEAD}:growth"),
        _each(drafting.growth_table, drafting.hits_figure),
    ),
    "exactness": Experiment(
        "Exactness",
        "answers identical to plain decoding in float32, by dtype",
        "Lookahead decoding gives the text of plain decoding. In low precision rounding can choose another token where "
        "two are almost equally likely.",
        tuple(f"{name}:{dtype}" for dtype in ("float32", "bfloat16") for name in ("plain", LOOKAHEAD)),
        _each(paper.exactness_table, paper.divergences_table),
    ),
}


def select(
    names: Sequence[str],
    sets: Sequence[Dataset],
    dtype: str,
    methods: Sequence[str] | None = None,
    limit: int | None = None,
    seed: int | None = None,
    lookahead: str = "15,5,15",
    windows: Sequence[int] = scaling.WINDOWS,
    ngrams: Sequence[int] = scaling.NGRAMS,
) -> dict[str, Selection]:
    """Returns the questions and methods of each experiment.

    Args:
      names: of the experiments.
      sets: data sets.
      dtype: of the run.
      methods: those that the experiment "methods" compares with their baselines; None for the usual ones. Where torch
        is missing, methods of transformers are left out of these and of other experiments.
      limit: most questions of each experiment, spread over data sets and tasks; None for the experiments' own.
      seed: chooses the questions at random; None chooses the first ones.
      lookahead: setting of the experiments that do not vary it; `windows` and `ngrams` are W = G and N of the others.

    Raises:
      ValueError: the only experiment has no question; the name of a method is wrong; or one of `methods` needs torch.
    """
    variable = {WINDOWS: _names(scaling.window_methods(windows, ngrams))}
    compared = None if methods is None else [parse(each, dtype) for each in methods]
    for method in compared or ():
        if not _is_possible(method):
            raise ValueError(f"the method {method} needs torch: pip install torch transformers")
    questions = [(dataset.name, question) for dataset in sets for question in dataset.questions]
    selections = {}
    for name in names:
        experiment = EXPERIMENTS[name]
        chosen = [pair for pair in questions if experiment.chooses(pair[1])]
        if not chosen and len(names) == 1:
            raise ValueError(f"no question of the data is of use for {name}: {experiment.summary}")
        max_questions = limit or experiment.limit
        if max_questions and chosen:
            kept = set(datasets.select([question for _, question in chosen], max_questions, seed))
            chosen = [pair for pair in chosen if pair[1] in kept]
        if name == "methods" and compared is not None:
            given = [*(method.baseline for method in compared), *compared]
        else:
            all_names = [x for each in experiment.methods for x in variable.get(each, (_with(each, lookahead),))]
            given = [method for each in all_names if _is_possible(method := parse(each, dtype))]
        keys = tuple((dataset, question.id) for dataset, question in chosen)
        selections[name] = Selection(tuple(dict.fromkeys(map(str, given))), keys)
    return selections


def cells(selections: Iterable[Selection], sets: Sequence[Dataset], dtype: str) -> list[Cell]:
    """Returns all that experiments need, question by question."""
    methods: dict[tuple[str, str], list[Method]] = {}
    for selection in selections:
        for key in selection.questions:
            methods.setdefault(key, []).extend(map(parse, selection.methods))
    return [
        cell
        for dataset in sets
        for question in dataset.questions
        for cell in plan(dataset.name, question, methods.get((dataset.name, question.id), ()), dtype)
    ]


def store(directory: pathlib.Path, selections: Mapping[str, Selection]) -> dict[str, Selection]:
    """Writes the selections to a directory, beside those of experiments that were made before, and returns all."""
    known = load(directory) | dict(selections)
    with written_whole(directory / SELECTIONS, replace=True) as file:
        file.write_text(json.dumps({name: each._asdict() for name, each in known.items()}), encoding="utf-8")
    return known


def load(directory: pathlib.Path) -> dict[str, Selection]:
    """Returns the selections in a directory, {} if there are none."""
    file = directory / SELECTIONS
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {name: Selection(tuple(x["methods"]), tuple(map(tuple, x["questions"]))) for name, x in content.items()}


def present(names: Sequence[str], runs: Sequence[tuple[Run, Mapping[str, Selection]]]) -> dict[str, Section]:
    """Returns the tables and figures of each experiment that the runs have results for."""
    presented = {}
    for name in names:
        found = [(run, results(run, selections[name])) for run, selections in runs if name in selections]
        if found := [(run, of_run) for run, of_run in found if any(of_run.values())]:
            title, _, explanation, *_ = experiment = EXPERIMENTS[name]
            presented[name] = Section(title, explanation, experiment.present(found))
    return presented


def beside_paper(run: Run, selections: Mapping[str, Selection]) -> dict[str, Section]:
    """Returns a section with the paper's numbers beside those of a run, {} if it has none of them."""
    found = {name: results(run, selection) for name, selection in selections.items()}
    table = paper.numbers_table(run, {name: of_run for name, of_run in found.items() if any(of_run.values())})
    meaning = "Numbers of arXiv 2402.02057 and the same ones of this run, whose model, data and device differ."
    return {} if table is None else {"paper": Section("Beside the paper", meaning, [table])}


def results(run: Run, selection: Selection) -> Results:
    """Returns the results of a run that an experiment needs, by method."""
    questions = set(selection.questions)
    found = [result for result in run.results if (result.dataset, result.question) in questions]
    answered = {result.method for result in found}
    return measures.by_method(found, [method for method in selection.methods if method in answered])


def _with(name: str, lookahead: str) -> str:
    """Returns the name of a method with a setting in the place of `LOOKAHEAD`."""
    base, colon, flags = name.partition(":")
    return f"{lookahead if base == LOOKAHEAD else base}{colon}{flags}"


def _is_possible(method: Method) -> bool:
    """Whether the method can run here: those of transformers need torch."""
    return method.setting is not None or all(map(importlib.util.find_spec, ("torch", "transformers")))
