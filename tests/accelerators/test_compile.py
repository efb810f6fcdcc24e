"""Programs for devices that are not here, in files."""

import contextlib
import io
import json
import pickle

import jax
import pytest

import jlade
from jlade.generation import saved_programs
from jlade.inspection import targets
from tests.accelerators.needs import device
from tests.tiny import PAPER, tiny_llama


class Reader(pickle.Unpickler):
    """Reads what JAX serialized up to the machine code, which only the device can load."""

    def __init__(self, content, target):
        super().__init__(io.BytesIO(content))
        self._of_kind = {"device": target, "client": None}

    def persistent_load(self, pid):
        kind, *code = pid
        return code[0] if kind == "exec" else self._of_kind[kind]


def check(directory, target):
    """Checks that the programs are for the target, can be read, and are refused here; returns their names."""
    manifest = json.loads((directory / saved_programs.MANIFEST).read_text())
    assert manifest["made_for"]["device"] == target.device_kind
    for each in manifest["programs"]:
        program, arguments, results = pickle.loads((directory / each["file"]).read_bytes())
        read, shapes, _ = Reader(program, target).load()
        assert len(shapes) <= arguments.num_leaves, "without those that the program does not use"
        assert len(read.output_avals) == results.num_leaves
        assert len(read.xla_executable) > 1000
    here = jax.devices()[0]
    with pytest.warns(UserWarning, match=f"device is {target.device_kind} in the file and .* here"):
        found = saved_programs.find(directory, here)
    assert found._programs == []
    return [each["program"] for each in manifest["programs"]]


@pytest.mark.parametrize("name", [device("v5e"), device("h100")])
def test_programs_of_another_device_are_written_and_refused_here(name, tmp_path):
    untimed = pytest.warns(UserWarning, match="tiles that were not timed, as it is not attached")
    with untimed if name == "h100" else contextlib.nullcontext():
        jlade.compile(tiny_llama(), tmp_path / "programs", name, lookahead=PAPER, capacity=64)
    (target,), _ = targets.find(name)
    assert check(tmp_path / "programs", target) == ["_begin_prefix", "_read", "_draw", "_noise", "_start", "_run"]


@pytest.mark.parametrize("name", [device("v5e")])
def test_those_of_an_engine_too(name, tmp_path):
    """Its prompts are read beside the steps of others, as on no CPU."""
    options = {"max_sequences": 1, "capacity": 64, "max_grammar": 0, "lookahead": None}
    jlade.compile_engine(tiny_llama(), tmp_path / "programs", name, **options)
    (target,), _ = targets.find(name)
    names = check(tmp_path / "programs", target)
    assert names.count("_run") == 2, "the steps, and those in which rows read"
    assert {"_read", "_insert", "_keep", "_restore", "of_chunk"} <= set(names)
