"""The words of the command, its errors, and its first line."""

import io
import shlex
import signal
import subprocess
import sys
import time
import warnings

import pytest

import jlade
from jlade import cli
from jlade.cli import commands, complete, generate, interrupts
from tests.cli.own_terminal import Terminal


@pytest.mark.parametrize("words", [[], ["help"], ["--help"], ["-h"]])
def test_without_a_prompt_the_commands_are_listed(words, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(words)
    assert exit_info.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in [*commands.COMMANDS, "help"])


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help_of_a_command_is_its_own(name, capsys):
    printed = []
    for words in (["help", name], [name, "--help"]):
        with pytest.raises(SystemExit) as exit_info:
            cli.main(words)
        assert exit_info.value.code == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].startswith(f"usage: jlade {name} ")


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_the_examples_of_a_command_run_it(name):
    examples = commands.COMMANDS[name].parser().examples
    assert examples
    for example in examples:
        command, _ = commands.parse(shlex.split(example.partition("jlade ")[2]))
        assert command is commands.COMMANDS[name], example


@pytest.mark.parametrize("name", ["chat", "serve", "inspect", "plan"])
def test_a_model_is_a_word_or_an_option(name, refused):
    for words in (["a/b"], ["--model", "a/b"], ["a/b", "--model", "a/b"], ["--revision", "r", "--model", "a/b", "a/b"]):
        assert commands.parse([name, *words])[1].model == "a/b"
    assert commands.parse([name])[1].model is None
    for words in (["a/b", "--model", "c"], ["--model", "a/b", "c"]):
        assert "the model is given twice, as a/b and as c" in refused([name, *words])


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_takes_a_revision(name):
    outputs = {"compile": ["--output", "d"], "prior": ["--texts", "a", "--output", "b"]}
    words = ({"complete": ["x"], "trace": ["x"], "convert": ["a", "b"]} | outputs).get(name, [])
    assert commands.parse([name, *words, "--revision", "v1"])[1].revision == "v1"


@pytest.mark.parametrize(
    ("words", "command", "options"),
    [
        (["def f("], complete, {"prompt": "def f("}),
        (["complete", "chat"], complete, {"prompt": "chat"}),
        (["--", "chat"], complete, {"prompt": "chat"}),
        (["--seed", "3", "generate", "a"], generate, {"seed": 3, "files": ["a"]}),
        (["--no-lookahead", "generate", "--seed", "3"], generate, {"seed": 3, "no_lookahead": True}),
        (["--model", "generate", "a"], complete, {"model": "generate", "prompt": "a"}),
        (["--stop", "generate", "generate"], generate, {"stop": ["generate"]}),
        (["import", "--seed", "3"], complete, {"prompt": "import"}),
    ],
    ids=str,
)
def test_the_command_that_the_words_name(words, command, options):
    found, parsed = commands.parse(words)
    assert found is command
    assert vars(parsed).items() >= options.items()


def test_other_errors_are_not_shown_as_errors_of_the_user(monkeypatch, refused):
    def run(options):
        raise TypeError("unsupported operand\ntype(s)")

    monkeypatch.setattr(generate, "run", run)
    message = "jlade generate: TypeError: unsupported operand type(s) (--debug shows the traceback)\n"
    assert refused(["generate"], status=1) == message
    with pytest.raises(TypeError, match="unsupported operand"):
        cli.main(["generate", "--debug"])


def test_a_warning_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(generate, "run", lambda options: warnings.warn("config.json has a new key", stacklevel=1))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.main(["generate"]) == 0
    assert capsys.readouterr().err == "jlade: warning: config.json has a new key\n"


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_closed_streams_are_reported(stream, monkeypatch, capsys):
    monkeypatch.setattr(sys, stream, None)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["generate"])
    words = {"stdin": "standard input is closed", "stdout": "standard output is closed"}
    assert words[stream] in f"{exit_info.value.code} {capsys.readouterr().err}"


@pytest.mark.slow
def test_the_first_line_comes_before_jax_is_imported():
    code = "import jlade.cli.terminal, sys; assert not {'jax', 'numpy'} & set(sys.modules); import jlade.cli.commands"
    subprocess.run([sys.executable, "-c", code], check=True)
    terminal = Terminal("--version")
    try:
        assert "jlade 0" not in terminal.wait_for("starting")
        terminal.wait_for(f"jlade {jlade.__version__}, JAX ")
        assert terminal.process.wait(timeout=120) == 0
    finally:
        terminal.close()


def test_a_status_on_the_terminal_leaves_standard_output_alone(tmp_path):
    code = f"sys.stdout = open({str(tmp_path / 'out')!r}, 'w'); from jlade.cli import terminal; "
    code += "line = terminal.Status('working'); print('result'); line.clear(); print('end', file=sys.stderr)"
    terminal = Terminal(code=code)
    try:
        shown = terminal.wait_for("end")
        assert terminal.process.wait(timeout=120) == 0
    finally:
        terminal.close()
    assert "working" in shown
    assert "result" not in shown
    assert (tmp_path / "out").read_text() == "result\n"


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.2, 0.8])
def test_ctrl_c_while_it_starts_ends_without_a_traceback(seconds):
    # A process that a shell started in the background ignores Ctrl-C, and so do its children.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from jlade.cli import main; sys.exit(main(['generate']))"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", code], **pipes)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=300)
    assert (process.returncode, out, error) == (130, b"", b"")


@pytest.mark.parametrize(("times", "expected"), [(1, ["all"]), (2, [])])
def test_a_delayed_interrupt_comes_at_the_end_and_a_second_one_at_once(times, expected):
    done = []

    def work():
        with interrupts.delayed():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == expected


def test_nothing_is_shown_where_there_is_no_terminal(monkeypatch, refused):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert refused(["generate"]) == "jlade generate: error: - is empty; a prompt needs some text\n"
