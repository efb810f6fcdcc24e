import io
import re

import pytest
from rich.console import Console

from jlade.cli import terminal
from jlade.cli.terminal import Tallies, Tally


def screen(written: str) -> list[str]:
    """Returns the final rows of a terminal."""
    rows, at, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", written):
        if part == "\n":
            at, column = at + 1, 0
            rows += [""] * (at + 1 - len(rows))
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            rows[at] = ""
        elif part.startswith("\x1b") and part.endswith("A"):
            at -= int(part[2:-1])
        elif len(part) == 1:
            rows[at] = rows[at][:column].ljust(column) + part + rows[at][column + 1 :]
            column += 1
    return [row.rstrip() for row in rows]


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_a_long_answer_scrolls_without_loss_or_repetition(size):
    console = Console(file=io.StringIO(), force_terminal=True, width=10, height=4, soft_wrap=True)
    text = "aaaa bbbb cccc\n\ndddddddddddddd\n    e\n" + "ffff " * 7
    with terminal.live_answer(console) as show:
        for begin in range(0, len(text), size):
            show(text[begin : begin + size], 1, "going on")
        show("", 1, "done, a long status")
    rows = ["aaaa bbbb", "cccc", "", "dddddddddd", "dddd", "    e", *["ffff ffff"] * 3, "ffff", "done, a l…", ""]
    assert screen(console.file.getvalue()) == rows


def test_the_colour_shows_the_number_of_tokens():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=40)
    with terminal.live_answer(console) as show:
        for count in (1, 2, 3, 4, 9):
            show(str(count), count, "")
    written = console.file.getvalue()
    assert [re.findall(rf"\x1b\[(\d+)m{n}\x1b", written)[-1] for n in (1, 2, 3, 4, 9)] == ["96", "95", "93", "92", "92"]


def test_a_model_cannot_control_the_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=40)
    with terminal.live_answer(console) as show:
        show("a\x1b]0;title\x07\x1b[2Jb\x9b2Jc\r\n", 1, "")
    assert "a]0;title[2Jb2Jc" in screen(console.file.getvalue())


def test_without_a_terminal_the_text_is_written_unchanged(capsys):
    with terminal.plain_answer() as show:
        show("a\x1b", 1, "going on")
        assert capsys.readouterr().out == "a\x1b"
        show("b\n", 3, "done")
    assert capsys.readouterr().out == "b\n\n"


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
