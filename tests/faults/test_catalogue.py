"""Every fault still applies, and the tests that are to find it exist. `make faults` runs them."""

import pathlib
import re

import pytest

from tests.faults.catalogue import FAULTS

ROOT = pathlib.Path(__file__).parents[2]
SINGLE_MODULES = {"config.py", "mesh.py", "files.py", "storage.py", "vocabulary.py"}  # of the top level, with code


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.text.replace(" ", "-"))
def test_a_fault_applies_once_and_its_tests_exist(fault):
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1
    assert fault.new != fault.old
    compile(text.replace(fault.old, fault.new), fault.file, "exec")
    assert fault.tests
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert not name or re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), test
        assert (ROOT / file).is_file(), test


def test_the_catalogue_covers_the_package():
    assert len({fault.text for fault in FAULTS}) == len(FAULTS) >= 60
    folders = {path.parent.name for path in (ROOT / "jlade").glob("*/*.py")}
    covered = {fault.file.split("/")[1] for fault in FAULTS}
    assert folders | SINGLE_MODULES <= covered, sorted((folders | SINGLE_MODULES) - covered)
