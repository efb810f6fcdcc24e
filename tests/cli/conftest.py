import signal

import pytest

from jlade import cli


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
