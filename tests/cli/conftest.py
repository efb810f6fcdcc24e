import signal

import pytest

import jlade
from jlade import cli
from jlade.costs import estimate
from tests.tiny import PAPER


@pytest.fixture(autouse=True)
def small_model(small_demo, monkeypatch):
    """Makes one layer of the demo model and a block that compiles soon the defaults of all commands."""
    monkeypatch.setattr("jlade.cli.arguments.DEMO", small_demo)
    monkeypatch.setattr(estimate, "SMALL_BLOCK", PAPER)


@pytest.fixture(scope="session")
def demo(small_demo):
    """Its parameters and tokenizer, in float32."""
    return jlade.load(small_demo, "float32")


@pytest.fixture(autouse=True)
def interruptible():
    """Lets Ctrl-C interrupt; a process that a shell started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def refused(capsys):
    """Returns a function that runs arguments that a command refuses without output, and returns its message."""

    def run(arguments):
        with pytest.raises(SystemExit) as exit_info:
            cli.main(arguments)
        assert exit_info.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    return run
