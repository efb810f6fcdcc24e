import signal

import pytest

import jlade
from jlade import cli
from jlade.conversion import save_hf
from jlade.costs import estimate
from tests.tiny import PAPER, tiny_llama, tiny_tokenizer


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
def tiny_model(tmp_path):
    """The directory of a tiny model with its tokenizer."""
    save_hf(tiny_llama(num_layers=1), tmp_path / "model")
    tiny_tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model"


@pytest.fixture
def bare(tmp_path):
    """A directory with nothing but a config.json."""
    save_hf(tiny_llama(), tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    (tmp_path / "whole" / "config.json").rename(tmp_path / "bare" / "config.json")
    return tmp_path / "bare"


@pytest.fixture
def run(capsys):
    """Returns a function that runs a command and returns what it prints, as `out` and `err`."""

    def run_(*arguments):
        assert cli.main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr()

    return run_


@pytest.fixture
def printed(run):
    """Returns a function that runs a command, which has no errors or warnings, and returns stdout."""

    def run_(*arguments):
        out, err = run(*arguments)
        assert err == ""
        return out

    return run_


@pytest.fixture
def refused(capsys):
    """Returns a function that runs arguments that a command refuses without output, and returns its message."""

    def run_(arguments, status=2):
        with pytest.raises(SystemExit) as exit_info:
            cli.main([str(argument) for argument in arguments])
        assert exit_info.value.code == status
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    return run_
