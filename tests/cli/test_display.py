import io

import pytest
from rich.console import Console

from jlade.cli.display import Tallies, Tally

TALLIES = {"prompt lookup": Tally(12, 6, 12, 0.5), "plain": Tally(12, 12, 12, 1.0)}


@pytest.mark.parametrize("width", [30, 60, 100])
def test_figures_are_whole_on_terminals_of_any_width(width):
    console = Console(file=io.StringIO(), width=width)
    console.print(Tallies(TALLIES, baseline=TALLIES["plain"]))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for figure in ("12", "6", "2.00", "24", "2.00x", "1.00", "1.00x"):
        assert figure in words
    assert ("┃" in words) == (width == 100)


def test_without_a_baseline_there_is_no_speed():
    console = Console(file=io.StringIO(), width=100)
    console.print(Tallies(TALLIES))
    assert "speed" not in console.file.getvalue()


def test_the_speed_is_that_of_the_timed_tokens():
    tally = Tally(12, 6, 10, 0.5) + Tally(8, 4, 2, 0.5)
    assert (tally.compression, tally.tokens_per_second) == (2.0, 12.0)
    assert (Tally().compression, Tally().tokens_per_second) == (None, None)
