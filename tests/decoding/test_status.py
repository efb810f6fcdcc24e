"""The line that says that programs compile: what a terminal shows, and that nothing else does."""

import re
import time

import jax.numpy as jnp

from jlade.decoding import ahead, status
from tests.cli.own_terminal import Terminal

CODE = """
import sys, time
import jax.numpy as jnp
from jlade.decoding import ahead, status
status.PATIENCE = 0.5

@ahead.jit(static_argnames="seconds")
def program(x, seconds):
    time.sleep(seconds)
    return x + 1

program(jnp.ones(1), seconds=0)
print("quick")
program(jnp.ones(1), seconds=1.5)
program(jnp.ones(1), seconds=1.6)
print("slow")
from jlade.cli import terminal
time.sleep(1.2 * status.PAUSE)
with terminal.Status("reading"):
    program(jnp.ones(1), seconds=1.7)
with terminal.bar(3, 0, "prompts"):
    time.sleep(1.2 * status.PAUSE)
    program(jnp.ones(1), seconds=1.8)
print("end")
"""


def test_a_terminal_shows_what_compiles_for_long():
    terminal = Terminal(code=CODE)
    try:
        assert "compiling" not in terminal.wait_for("quick")
        alone = terminal.wait_for("slow")
        inside = terminal.wait_for("end")
        assert terminal.process.wait(timeout=120) == 0
    finally:
        terminal.close()
    assert re.search(r"compiling, \d done, \d s", alone)
    erased = "\x1b[2K"
    assert alone.rstrip("slow").rstrip().endswith((erased, f"{erased}\x1b[?25h")), repr(alone)
    assert inside.index("reading") < inside.index("compiling, 0 done") < inside.index("0/3")
    assert "compiling, 0 done" in inside[inside.index("0/3") :]


def test_without_a_terminal_nothing_is_written(capfd, monkeypatch):
    monkeypatch.setattr(status, "PATIENCE", 0.1)

    @ahead.jit()
    def program(x):
        time.sleep(0.5)
        assert status.compiling().startswith("compiling, ")
        return x + 1

    program(jnp.ones(1))
    assert status.compiling() == ""
    assert capfd.readouterr() == ("", "")
