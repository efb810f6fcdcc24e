"""Puts a fault into the package for the tests of a process: `JLADE_FAULT="its text" pytest -p tests.faults.plugin`."""

import os

import hypothesis
import pytest

from tests.faults.catalogue import FAULTS

VARIABLE = "JLADE_FAULT"
NO_ASSERTION = 9  # the exit status if a test fails otherwise: a wrong function that cannot be called shows nothing


# Before conftest.py. Only the target's module and those below it are imported then, so that whatever takes the function
# at its own import, such as a table or `jax.jit`, takes the wrong one.
@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    next(fault for fault in FAULTS if fault.text == os.environ[VARIABLE]).apply()


def pytest_configure():
    """Leaves out what Hypothesis does after the first failure: simpler examples, and other failures."""
    usual, phases = hypothesis.settings.get_profile("jlade"), [hypothesis.Phase.generate]
    hypothesis.settings.register_profile("fault", usual, phases=phases, report_multiple_bugs=False)
    hypothesis.settings.load_profile("fault")


def pytest_exception_interact(call):
    if not isinstance(call.excinfo.value, AssertionError | pytest.fail.Exception):
        pytest.exit(f"no assertion fails, but {call.excinfo.exconly()}\n{call.excinfo.traceback[-1]}", NO_ASSERTION)
