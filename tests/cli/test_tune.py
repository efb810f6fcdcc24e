import dataclasses
import json
import pathlib
import re
import signal
import warnings

import pytest
from rich.progress import TimeRemainingColumn

import jlade
from jlade import cli
from jlade.cli.tune import PROMPTS
from jlade.config import PLAIN, SMALL_BLOCK
from jlade.costs import choice, estimate, search
from jlade.costs.settings import USUAL
from tests.tiny import slow

SHORT = ["--settings", "tree=7", "--max-new-tokens", "16"]


@pytest.fixture(autouse=True)
def usual_block(small_model, monkeypatch):
    """Leaves the default as it is: it is among the settings that are measured."""
    monkeypatch.setattr(estimate, "SMALL_BLOCK", SMALL_BLOCK)


@pytest.fixture
def asked(monkeypatch):
    """Returns the arguments of the calls of `jlade.tune`, which measures nothing here."""
    calls = []

    def tune(params, prompts, **arguments):
        calls.append({"prompts": prompts, **arguments})
        one = jlade.Trial(SMALL_BLOCK, 2.0, 0.5, 4.0, 1.5, 1.2)
        return jlade.Tuning(one, (one,), (), {1: 0.5}, "here", 1, path=pathlib.Path("here"))

    monkeypatch.setattr(jlade, "tune", tune)
    return calls


@pytest.mark.slow
def test_it_measures_prints_plots_and_stores(demo, tmp_path, capsys):
    (tmp_path / "a.py").write_text("import os\n")
    arguments = [str(tmp_path / "a.py"), *SHORT, "--no-fallback", "--json", "--plot", str(tmp_path / "a.svg")]
    assert cli.main(["tune", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    figures = json.loads(captured.out)
    plain, small = figures["trials"]
    assert plain["tokens_per_step"] == 1
    assert small["lookahead"]["drafts"]["size"] == 7
    assert set(figures["step_times"]) == {"1", "8"}
    assert (tmp_path / "a.svg").exists()

    params, tokenizer = demo
    chosen = choice.choose(params, params.decoder, 1)
    assert jlade.LookaheadConfig.from_dict(figures["lookahead"]) == chosen
    lookahead = jlade.LookaheadConfig.from_dict(small["lookahead"])
    expected = jlade.generate(params, "import os\n", tokenizer=tokenizer, max_new_tokens=16, lookahead=lookahead)
    assert small["tokens_per_step"] == expected.compression[0]


def test_arguments_reach_the_function(asked, demo, tmp_path, capsys):
    (tmp_path / "lines").write_text("one\n\ntwo\n")
    arguments = ["--lines", "--batch-size", "2", "--temperature", "0.5", "--no-store", "--force", "--no-fallback"]
    arguments += ["--settings", "tree=7", "5,3,2"]
    assert cli.main(["tune", str(tmp_path / "lines"), *arguments]) == 0
    _, tokenizer = demo
    (call,) = asked
    assert [tokenizer.decode(ids) for ids in call["prompts"]] == ["one", "two"]
    assert call["settings"] == [SMALL_BLOCK, jlade.LookaheadConfig.paper(5, 3, 2)]
    assert call["sampling"] == jlade.SamplingConfig(temperature=0.5)
    assert (call["batch_size"], call["max_new_tokens"]) == (2, 128)
    assert not call["store"]
    assert call["force"]
    assert not call["adaptive"]
    assert "tree of 7" in capsys.readouterr().out


def test_without_prompts_it_takes_its_own(asked, capsys):
    assert cli.main(["tune"]) == 0
    (call,) = asked
    assert len(call["prompts"]) == len(PROMPTS)
    assert call["settings"] == USUAL


def test_a_terminal_shows_a_bar_of_the_measurements(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich assume a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(TimeRemainingColumn, "max_refresh", None)  # of 0.5 s

    def tune(*arguments, progress, **options):
        for doing, num_done, total in (("a step of 1 token", 0, 9), ("tree of 7", 3, 7), ("done", 5, 5)):
            progress(doing, num_done, total)
        raise KeyboardInterrupt

    monkeypatch.setattr(jlade, "tune", tune)
    assert cli.main(["tune", *SHORT]) == 130
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert re.search(r"0/9 measurements ━+ 0:00:00 left: -:--:-- a step of 1 token", shown)
    assert re.search(r"3/7 measurements [━╸╺]+ 0:00:00 left: 0:00:0\d tree of 7", shown), "a new total keeps the speed"
    assert re.search(r"5/5 measurements ━+ 0:00:00 left: 0:00:00 done", shown)


@pytest.mark.parametrize("number", [0, 1, slow(4)])
def test_ctrl_c_prints_what_was_measured_and_stores_nothing(number, demo, monkeypatch, capsys):
    tune = jlade.tune
    for module in (estimate, search):  # a busy machine rules out no setting by the times of its steps
        monkeypatch.setattr(module, "SLACK", 100.0)

    def interrupted(*arguments, progress, **options):
        def interrupt(doing, done, total):
            progress(doing, done, total)
            if done == number:
                signal.raise_signal(signal.SIGINT)

        return tune(*arguments, progress=interrupt, **options)

    monkeypatch.setattr(jlade, "tune", interrupted)
    assert cli.main(["tune", *SHORT]) == 130
    printed = capsys.readouterr()
    assert printed.err == ""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.out.splitlines() if "│" in line]
    expected = {0: [], 1: [["1"]], 4: [["1"], ["4"], ["8"], ["plain", "1"], ["tree of 7", "8"]]}[number]
    assert [row[: len(cells)] for row, cells in zip(rows, expected, strict=True)] == expected
    params, _ = demo
    assert choice.load(choice.key(params, params.decoder, 1)) is None
    assert cli.main(["tune", *SHORT, "--json"]) == 130
    assert capsys.readouterr().out == "", "half a result is no JSON"


@pytest.mark.filterwarnings("default")
def test_a_result_that_cannot_be_stored_is_shown_with_the_reason(asked, monkeypatch, capsys):
    tune = jlade.tune

    def unstored(*arguments, **options):
        warnings.warn("the result is not stored: the disk is full", stacklevel=1)
        return dataclasses.replace(tune(*arguments, **options), path=None)

    monkeypatch.setattr(jlade, "tune", unstored)
    with pytest.raises(SystemExit, match="1"):
        cli.main(["tune"])
    printed = capsys.readouterr()
    assert "tree of 7" in printed.out
    assert printed.err == "jlade: warning: the result is not stored: the disk is full\n"
    assert cli.main(["tune", "--no-store"]) == 0


def test_the_tuned_setting_is_the_default_of_the_commands(demo, capsys):
    params, _ = demo
    tuned = jlade.LookaheadConfig.paper(2, 3, 1)
    choice.save(choice.key(params, params.decoder, 1), tuned, {})
    assert cli.main(["import os\n", "--max-new-tokens", "2", "--json"]) == 0
    assert jlade.LookaheadConfig.from_dict(json.loads(capsys.readouterr().out)["lookahead"]) == tuned


def test_the_commands_decode_plainly_where_that_was_fastest(demo, capsys):
    params, _ = demo
    choice.save(choice.key(params, params.decoder, 1), PLAIN, {})
    assert cli.main(["import os\n", "--max-new-tokens", "2", "--json"]) == 0
    assert "plain" not in json.loads(capsys.readouterr().out)
