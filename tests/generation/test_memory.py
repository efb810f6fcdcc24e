"""Out of memory: an error that says what would fit, and a process that goes on."""

import re
import sys
import weakref

import jax
import jax.numpy as jnp
import pytest

import jlade
from jlade.cli import main
from jlade.conversion import save_hf
from jlade.conversion.checkpoint import Checkpoint
from jlade.generation import memory
from tests.processes import started
from tests.tiny import tiny_llama

LIMITED = """
import re, resource
import jlade
from tests.tiny import tiny_llama

params = tiny_llama(max_positions=1 << 17)
short = dict(max_new_tokens=3, lookahead=None)
expected = jlade.generate(params, [5, 1], **short).tokens

used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), -1))

def error_of(call):
    try:
        call()
    except MemoryError as error:
        print(error)
        return error
    raise AssertionError("no error")

def generate(number, new):
    return jlade.generate(params, [[5, 1]] * number, max_new_tokens=new, eos_ids=range(13), lookahead=None)

# Each call fails at its first large array. LLVM, which can only abort, then has memory to compile the next one.
# A batch, and the number that would fit.
batch = 256
error = error_of(lambda: generate(batch, 60_000))
fitting = int(re.search(r"and (\\d+) would fit", str(error))[1])
assert 1 <= fitting < batch
assert (generate(max(1, fitting // 4), 60_000).lengths == 1).all()

# A stream, and an engine that reads a prompt.
long = tiny_llama(max_positions=1 << 24)
error_of(lambda: list(jlade.stream(long, [5, 1], max_new_tokens=(1 << 23) + 1, lookahead=None)))
with jlade.Engine(long, max_sequences=1, capacity=1 << 24, lookahead=None) as engine:
    error_of(lambda: engine.generate([[5, 1]], max_new_tokens=3))
assert (jlade.generate(params, [5, 1], **short).tokens == expected).all()
print("went on")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux does")
@pytest.mark.slow
def test_a_process_goes_on_with_less():
    with started([["-c", LIMITED]], 1) as (process,):
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, output + errors
    batch, stream, engine, end = output.splitlines()
    free = r"cpu:0 is out of memory, with [\d.]+ [kM]B free: "
    assert re.match(free + r"a batch of 256 with room for 65536 tokens of prompt and text takes [\d.]+ GB, and", batch)
    assert re.match(free + r"a prompt with room for 16777216 tokens .*, and prompt and text of \d+ tokens", stream)
    assert re.match(free + r"to read a prompt takes a row's memory, in addition", engine)
    assert end == "went on"


def fail(error):
    array = jnp.zeros(3)
    seen.append(weakref.ref(array))
    raise error


seen: list = []


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_arrays_of_the_failed_call_are_freed_first(kind):
    device, free = jax.local_devices()[0], []
    error = kind("RESOURCE_EXHAUSTED: Ran out of memory\nin memory space hbm")

    def explain(number):
        free.append((number, seen[-1]()))
        return "3 rows would fit"

    message = r"3 rows would fit \(RESOURCE_EXHAUSTED: Ran out of memory\)$"
    with pytest.raises(MemoryError, match=message) as raised, memory.explained(device, explain):
        fail(error)
    ((number, array),) = free
    assert number > 0
    assert array is None
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("INTERNAL: a fault"), ValueError("no such token")])
def test_other_errors_are_left_alone(error):
    with pytest.raises(type(error)) as raised, memory.explained(jax.local_devices()[0], str):
        fail(error)
    assert raised.value is error


def test_a_checkpoint_that_does_not_fit(tmp_path, monkeypatch, capsys):
    save_hf(tiny_llama(), tmp_path / "model")

    def read(*_, **options):
        raise MemoryError

    monkeypatch.setattr(Checkpoint, "load", read)
    message = r"cpu:0 is out of memory, with .* free: .* has \d+.*; a dtype of fewer bytes, bits=8"
    with pytest.raises(MemoryError, match=message):
        jlade.load(tmp_path / "model")
    with pytest.raises(SystemExit) as ended:
        main(["a", "--model", str(tmp_path / "model")])
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match("jlade complete: error: " + message, line)
