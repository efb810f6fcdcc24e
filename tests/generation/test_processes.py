"""Processes that share a mesh give the tokens and the steps of one device."""

import json

import pytest

from jlade.conversion import save_hf
from tests.generation import on_processes
from tests.processes import ROOT, finish, free_address, started
from tests.tiny import tiny_llama

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("number", "num_devices", "meshes"), [(2, 4, ["2,2,2", "1,8,1"]), (4, 2, ["1,2,4"])], ids=["2x4", "4x2"]
)
def test_processes_give_the_results_of_one_device(number, num_devices, meshes, tmp_path):
    params = tiny_llama(vocab_size=16, num_layers=1)
    expected = on_processes.results(params, tmp_path)
    save_hf(params, tmp_path / "model")
    script, address = ROOT / "tests" / "generation" / "on_processes.py", free_address()
    commands = [[str(script), address, str(number), str(i), str(tmp_path), *meshes] for i in range(number)]
    with started(commands, num_devices) as running:
        for status, _, errors in finish(running):
            assert status == 0, errors
    for index in range(number):
        found = json.loads((tmp_path / str(index) / "results.json").read_text(encoding="utf-8"))
        assert len(found) == len(meshes)
        for results in found:
            assert results.items() <= expected.items()
    assert ("pool" in found[0]) == (meshes[0] == "2,2,2"), "one mesh has all results"
