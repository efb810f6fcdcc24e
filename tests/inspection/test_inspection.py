import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import jlade
from jlade import LookaheadConfig
from jlade.config import SMALL_BLOCK
from jlade.conversion import save_hf
from jlade.drafts import recycled as recycling
from jlade.inspection import targets
from tests.tiny import tiny_llama

OPTIMIZED = True
PARAMS = tiny_llama(vocab_size=101, hidden_size=32, intermediate_size=88)


@pytest.fixture(scope="module")
def found():
    return jlade.inspect(PARAMS, "cpu", lookahead=LookaheadConfig.paper(3, 4, 2), capacity=64)


@pytest.mark.slow
def test_a_model_on_this_machine(found):
    config = PARAMS.config
    assert (found.device, found.device_kind, found.attention, found.dtype) == ("cpu", "cpu", "plain", "float32")
    weights = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    cache = 2 * config.num_layers * config.num_kv_heads * 64 * config.head_dim
    pool = config.vocab_size * 2 * 4
    assert 0 <= found.memory.arguments - 4 * (weights + cache + pool) < 4096  # the text and other small arrays
    assert found.fits
    assert found.memory.largest_capacity == config.max_positions
    assert found.copies == []
    assert found.step.time.arithmetic > 5 * found.plain_step.time.arithmetic  # a block of 15 tokens
    assert found.step_seconds > 0
    assert found.plain_step_seconds > 0
    assert len(found.chunks) == 1


@pytest.mark.slow
def test_facts_are_json(found):
    facts = json.loads(json.dumps(found.facts()))
    assert facts["lookahead"] == "3,4,2"
    assert facts["step_estimate_ms"] == 1e3 * found.step.time.total
    assert facts["step_measured_ms"] == 1e3 * found.step_seconds
    assert facts["copies_in_loop"] == facts["host_loops_in_step"] == facts["collectives_per_step"] == 0
    assert facts["kernels_per_step"] > 10


@pytest.mark.slow
def test_a_directory_with_nothing_but_a_config(tmp_path, found):
    save_hf(PARAMS, tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    (tmp_path / "whole" / "config.json").rename(tmp_path / "bare" / "config.json")
    bare = jlade.inspect(tmp_path / "bare", "cpu", lookahead=LookaheadConfig.paper(3, 4, 2), capacity=64)
    differing = {"compile_seconds", "step_seconds", "plain_step_seconds"}
    for field in dataclasses.fields(bare):
        if field.name not in differing:
            assert getattr(bare, field.name) == getattr(found, field.name)


@pytest.mark.slow
def test_default_setting_and_int8(tmp_path):
    save_hf(PARAMS, tmp_path / "whole")
    found = jlade.inspect(tmp_path / "whole", "cpu", bits=8, capacity=64, dtype="bfloat16")
    assert (found.lookahead, found.dtype, found.bits) == (SMALL_BLOCK, "bfloat16", 8)
    matrices = sum(leaf.size for leaf in jax.tree.leaves(PARAMS) if leaf.ndim == 2)
    pairs = 40 * recycling.num_places(PARAMS.config.vocab_size)
    assert found.memory.arguments < 2 * matrices + pairs + 60_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "h300"}, "device must be one of 'cpu', 'v4', .*; got 'h300'"),
        ({"capacity": 65}, "capacity must be at most 64, the model's positions, got 65"),
        ({"capacity": 1}, "capacity must be at least 2, got 1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"bits": 8}, "dtype and bits are for a directory"),
        ({"dtype": "float32"}, "dtype and bits are for a directory"),
        ({"attention": "gpu"}, "attention 'gpu' needs an NVIDIA GPU"),
        ({"attention": "fast"}, "attention must be one of"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        jlade.inspect(PARAMS, **({"device": "cpu", "capacity": 64} | arguments))


@pytest.mark.parametrize(("name", "module", "extra"), [("v5e", "libtpu", "tpu"), ("h100", "jax_cuda12_plugin", "gpu")])
def test_a_compiler_that_is_not_installed(name, module, extra, monkeypatch):
    find_spec = targets.importlib.util.find_spec
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None if name == module else find_spec(name))
    with pytest.raises(ValueError, match=rf'pip install "jlade\[{extra}-compiler\]"'):
        jlade.inspect(PARAMS, name, capacity=64)


def test_a_program_that_the_compiler_refuses(monkeypatch):
    """As XLA refuses what needs more memory than a TPU has."""

    def refuse(*arguments, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")

    monkeypatch.setattr(targets, "compiled", refuse)
    found = jlade.inspect(PARAMS, "cpu", capacity=64)
    assert not found.fits
    assert found.failure.startswith("RESOURCE_EXHAUSTED")
    facts = json.loads(json.dumps(found.facts()))
    assert facts["step_estimate_ms"] is facts["copies_in_loop"] is facts["needed_bytes"] is None
    assert facts["argument_bytes"] > 0


@pytest.mark.slow
def test_parameters_may_be_shapes(found):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), PARAMS)
    again = jlade.inspect(shapes, "cpu", lookahead=LookaheadConfig.paper(3, 4, 2), capacity=64)
    assert again.memory == found.memory
