"""Each fault has its target, which can be replaced, and its tests. `make faults` runs them."""

import inspect
import pathlib
import re

import pytest

from tests.faults.catalogue import FAULTS

ROOT = pathlib.Path(__file__).parents[2]
SINGLE_MODULES = {"config", "mesh", "files", "storage", "vocabulary"}  # of the top level, with code
VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.text.replace(" ", "-"))
def test_a_wrong_function_has_the_arguments_of_the_right_one(fault):
    right = fault.function()
    of_right, of_wrong = (inspect.signature(each).parameters for each in (right, fault.wrong(right)))
    named = [name for name, parameter in of_wrong.items() if parameter.kind not in VARIADIC]
    assert len(named) < len(of_wrong) or named == list(of_right)


@pytest.mark.parametrize("test", dict.fromkeys(test for fault in FAULTS for test in fault.tests))
def test_a_test_exists(test):
    file, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(" if name else "", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_the_catalogue_covers_the_package():
    assert len({fault.text for fault in FAULTS}) == len(FAULTS) >= 60
    folders = {path.parent.name for path in (ROOT / "jlade").glob("*/*.py")}
    assert folders | SINGLE_MODULES <= {fault.target.split(".")[1] for fault in FAULTS}
