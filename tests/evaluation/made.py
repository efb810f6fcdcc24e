"""Results made by hand, in which a step takes a tenth of a second."""

from jlade.evaluation.answers import Answer
from jlade.evaluation.runs import Result, Run

ABOUT = {
    "date": "2026-01-01",
    "command": "jlade bench",
    "processor": "a processor",
    "cores": 2,
    "device": "cpu",
    "model": "tiny",
    "parameters": 1500000,
    "dtype": "float32",
    "mesh": None,
    "data": ["code"],
    "max_new_tokens": 8,
    "seed": 0,
}


def answer(accepted, num_drafted=(), **changes):
    """Returns an answer of steps that accepted these numbers of tokens."""
    steps, tokens = len(accepted), sum(accepted)
    facts = {
        "prompt_tokens": 3,
        "tokens": tuple(range(tokens)),
        "text": "some text",
        "steps": steps,
        "accepted": tuple(accepted),
        "num_drafted": tuple(num_drafted) or (0,) * steps,
        "pool": (0, 0),
        "growth": (),
        "prefill_seconds": 1.0,
        "first_seconds": 1.1,
        "seconds": steps / 10,
        "timed_tokens": tokens,
    }
    return Answer(**(facts | changes))


def result(method, *answers, question="1", dataset="code", differences=None, **changes):
    """Returns a result, whose answers are those of plain decoding by default."""
    differences = (None,) * len(answers) if differences is None else differences
    facts = {"task": dataset, "category": ""} | changes
    return Result(dataset=dataset, question=question, method=method, answers=answers, differences=differences, **facts)


def run(*results, **changes):
    return Run(ABOUT | changes, results)


def rows(table):
    """Returns the texts of a table by the first of each row."""
    return {row[0]: row[1:] for row in table.texts()}


def of(method, compression, **changes):
    """Returns the result of a method whose answer has these tokens per step, with two decimals."""
    tokens = round(100 * compression)
    return [result(str(method), answer([tokens // 100 + (i < tokens % 100) for i in range(100)], **changes))]


def axes_of(figure):
    """Returns the only axes of a figure, drawn."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(layout="constrained")
    figure.draw(canvas)
    (axes,) = canvas.axes
    return axes


def lines_of(figure):
    """Returns the points of each line of a figure, by name."""
    return {line.get_label(): line.get_xydata().tolist() for line in axes_of(figure).lines}
