"""Experiments: which questions and methods each table and figure needs, and how it is made from a run."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jlade.config import LookaheadConfig
from jlade.evaluation import comparison, datasets, measures, paper
from jlade.evaluation.comparison import Results
from jlade.evaluation.datasets import Dataset, Question
from jlade.evaluation.figures import Figure
from jlade.evaluation.methods import Method, parse
from jlade.evaluation.runs import Cell, Run, plan
from jlade.evaluation.tables import Table

USUAL = ("plain", "prompt-lookup", "15,5,15", "transformers", "transformers-lookup")
FEW = 8  # questions of the experiments that need many methods

Item = Table | Figure
Questions = list[tuple[str, Question]]  # with the name of the data set


Present = Callable[[Sequence[tuple[Run, Results]]], list[Item | None]]


class Experiment(NamedTuple):
    """A table or figure, or several of the same results.

    Attributes:
      summary: one line.
      methods: their names.
      chooses: returns whether it asks a question.
      present: makes tables and figures of runs and their results by method.
      limit: questions by default; None for all.
    """

    summary: str
    methods: tuple[str, ...]
    chooses: Callable[[Question], bool]
    present: Present
    limit: int | None = FEW


def _each(present: Callable[[Run, Results], list[Item | None]]) -> Present:
    return lambda runs: [item for run, results in runs for item in present(run, results)]


def _names(methods: Sequence[Method]) -> tuple[str, ...]:
    return tuple(map(str, methods))


def _any(question: Question) -> bool:
    return True


LOOKAHEAD = str(Method(LookaheadConfig()))
EXPERIMENTS: dict[str, Experiment] = {
    "methods": Experiment(
        "speed, tokens per step and accepted tokens of --methods, by task and data set (Figures 5 to 7, Spec-Bench)",
        USUAL,
        _any,
        _each(
            lambda run, results: [
                comparison.methods_table(run, results),
                comparison.tasks_table(results),
                comparison.throughput_figure(run, results),
                comparison.throughput_table(results),
                comparison.accepted_table(results),
                comparison.tests_table(results),
            ]
        ),
        limit=None,
    ),
    "table2": Experiment(
        "sampling and ROUGE of summaries",
        ("plain", LOOKAHEAD, "plain:t=1", f"{LOOKAHEAD}:t=1"),
        lambda question: question.reference is not None,
        _each(lambda run, results: [paper.sampling_table(results)]),
        limit=None,
    ),
    "table3": Experiment(
        "window, candidates and prompt, each left out, on chat questions",
        _names(paper.ablation_methods()),
        lambda question: question.task == "MT-Bench",
        _each(lambda run, results: [paper.ablation_table(results)]),
    ),
    "figure4": Experiment(
        "tokens per step against W and N, with the fit of alpha and f",
        _names(paper.scaling_methods()),
        _any,
        _each(lambda run, results: [paper.scaling_table(results), *paper.scaling_figures(results)]),
    ),
    "table4": Experiment(
        "good W and N by model size",
        ("plain", *_names(paper.scaling_methods())),
        _any,
        lambda runs: [paper.configurations_table(runs)],
    ),
    "pool": Experiment(
        "growth of the pool, and its hits with cold and warm pools",
        (LOOKAHEAD, f"{LOOKAHEAD}:warm", f"{LOOKAHEAD}:growth"),
        _any,
        _each(lambda run, results: [paper.growth_table(results), paper.hits_figure(results)]),
    ),
    "exactness": Experiment(
        "answers identical to plain decoding in float32, by dtype",
        tuple(f"{name}:{dtype}" for dtype in ("float32", "bfloat16") for name in ("plain", LOOKAHEAD)),
        _any,
        _each(lambda run, results: [paper.exactness_table(run, results), paper.divergences_table(results)]),
    ),
}


def cells(
    names: Sequence[str],
    sets: Sequence[Dataset],
    dtype: str,
    methods: Sequence[str] | None = None,
    limit: int | None = None,
    seed: int | None = None,
) -> list[Cell]:
    """Returns the questions and methods that experiments need, question by question.

    Args:
      names: of the experiments.
      sets: data sets.
      dtype: of the run.
      methods: names of those that the experiment "methods" compares; None for the usual ones.
      limit: most questions of each experiment, spread over data sets and tasks; None for the experiments' own.
      seed: chooses the questions at random; None chooses the first ones.

    Raises:
      ValueError: an experiment has no question, or the name of a method is wrong.
    """
    questions = [(dataset.name, question) for dataset in sets for question in dataset.questions]
    asked: dict[tuple[str, str], list[Method]] = {}
    for name in names:
        experiment = EXPERIMENTS[name]
        chosen = [pair for pair in questions if experiment.chooses(pair[1])]
        if not chosen and len(names) == 1:
            raise ValueError(f"no question of the data is of use for {name}: {experiment.summary}")
        most = limit or experiment.limit
        selected = set(datasets.select([question for _, question in chosen], most, seed)) if most and chosen else None
        of_experiment = methods if name == "methods" and methods is not None else experiment.methods
        for dataset, question in chosen:
            if selected is None or question in selected:
                asked.setdefault((dataset, question.id), []).extend(parse(each, dtype) for each in of_experiment)
    return [
        cell
        for dataset, question in questions
        if (dataset, question.id) in asked
        for cell in plan(dataset, question, _possible(asked[dataset, question.id]), dtype)
    ]


def present(names: Sequence[str], runs: Sequence[Run]) -> dict[str, list[Item]]:
    """Returns the tables and figures of each experiment that the runs have results for."""
    presented = {}
    for name in names:
        experiment = EXPERIMENTS[name]
        found = [(run, _results(name, run)) for run in runs]
        found = [(run, results) for run, results in found if any(results.values())]
        if found:
            presented[name] = [item for item in experiment.present(found) if item is not None]
    return presented


def _results(name: str, run: Run) -> Results:
    """Returns the results of an experiment's methods, those of the comparison being all that answered everything."""
    answered = [result for result in run.results if result.error is None]
    counts: dict[str, int] = {}
    for result in answered:
        counts[result.method] = counts.get(result.method, 0) + 1
    if name == "methods":
        methods = [method for method, count in counts.items() if count == max(counts.values())]
        methods = [method for method in methods if not parse(method).shows_growth]
    else:
        names = [str(parse(method, run.about["dtype"])) for method in EXPERIMENTS[name].methods]
        methods = [method for method in names if method in counts]
        if len(methods) < min(2, len(EXPERIMENTS[name].methods)):
            return {}
    return measures.by_method(answered, methods)


def _possible(methods: Sequence[Method]) -> list[Method]:
    """Returns the methods without those of transformers if torch is missing."""
    has_torch = importlib.util.find_spec("torch") is not None
    return [method for method in methods if method.setting is not None or has_torch]
