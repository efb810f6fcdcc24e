"""The programs of eight chips or GPUs, made by their own compilers without a device."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jlade
from jlade import LookaheadConfig
from jlade.conversion.tensors import param_shapes
from jlade.costs import work as work_lib
from jlade.costs.work import MeshShape
from jlade.models.attention import plain
from tests.accelerators.needs import device, thorough
from tests.accelerators.shapes import LLAMA, QWEN, pool_bytes, state_bytes
from tests.costs import meshed

OPTIMIZED = True

SETTING = LookaheadConfig.paper(15, 5, 15)
ROWS = 1 + 15 + 4 * 15  # predictions of a step


def inspect(name, config, **sizes):
    found = jlade.inspect(
        param_shapes(config, jnp.bfloat16),
        name,
        mesh=sizes,
        lookahead=SETTING,
        batch_size=sizes.get("data", 1),
    )
    assert found.failure is None
    assert found.copies == []
    assert found.step.host_loops == 0
    assert found.step.vector_products == ()
    return found


def bytes_of(config):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(param_shapes(config, jnp.bfloat16)))


@pytest.mark.parametrize("name", [device("v5e"), thorough(device("h100"))])
def test_lookahead_parallelism_exchanges_predictions_and_accepted_rows(name):
    """Nothing else, and so nothing between the embedding and the output matrix."""
    found = inspect(name, LLAMA, lookahead=8)
    accepted_rows = LLAMA.num_layers * 2 * SETTING.max_accepted * LLAMA.num_kv_heads * LLAMA.head_dim * 2
    are_finite = 4 * SETTING.max_accepted  # the logits of accepted tokens
    assert sum(found.step.exchanges) == 4 * ROWS + are_finite + accepted_rows
    share = bytes_of(LLAMA) + state_bytes(LLAMA, SETTING)
    assert found.memory.needed < 1.1 * share


@pytest.mark.parametrize("name", [thorough(device("v5e")), device("h100")])
def test_tensor_parallelism_sums_twice_in_a_layer(name):
    """And once after the embedding. The maxima of logits and their places are small."""
    found = inspect(name, LLAMA, model=8)
    hidden = 120 * LLAMA.hidden_size * 2
    large = [num_bytes for num_bytes in found.step.exchanges if num_bytes >= 1024]
    assert large == [hidden] * (2 * LLAMA.num_layers + 1)
    assert max(set(found.step.exchanges) - {hidden}) == 4 * ROWS
    pool = pool_bytes(LLAMA, SETTING)  # whole on each device
    share = (bytes_of(LLAMA) + state_bytes(LLAMA, SETTING) - pool) / 8
    assert found.memory.arguments < 1.01 * share + pool


@pytest.mark.thorough
@pytest.mark.parametrize("name", [device("v5e"), device("v6e"), device("h100")])
@pytest.mark.parametrize("sizes", [{"data": 2, "lookahead": 2, "model": 2}, {"lookahead": 2, "model": 4}])
def test_all_axes(name, sizes):
    few = dataclasses.replace(QWEN, num_kv_heads=2)
    inspect(name, few, **sizes)


@pytest.mark.parametrize("sizes", [(1, 2, 4), pytest.param((1, 8, 1), marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", [device("v5e"), thorough(device("h100"))])
def test_planned_work_is_that_of_compiled_programs(name, sizes):
    config = dataclasses.replace(LLAMA, hidden_size=2048, intermediate_size=5504, num_heads=16, num_kv_heads=16)
    program = meshed.compile_steps(name, sizes, config, SETTING, 1, 1024, jnp.bfloat16)
    launched = meshed.step_launches(program, 1024 // plain.CHUNK)
    layout = MeshShape(*sizes)
    shard = work_lib.shard(param_shapes(config, jnp.bfloat16), layout.model)
    work = work_lib.work(shard, layout, SETTING, 1, 1024)
    memory = work_lib.memory(shard, layout, SETTING, 1, 1024)
    found = meshed.collectives(launched)
    expected = sum(each.num_bytes for each in work.collectives)
    assert found == expected
    assert sum(each.times for each in work.collectives) == sum(map(meshed.is_collective, launched))
    stats = program.memory_analysis()
    assert stats.temp_size_in_bytes < memory.temporary
    assert 0 <= stats.argument_size_in_bytes - (memory.weights + memory.cache + memory.pool) < 1e6
    if name == "v5e":  # products of GPUs are calls of cuBLAS, or kernels
        assert work.flops == pytest.approx(sum(x.flops * x.times for x in launched), rel=0.01)
        # Of a model as small as this one, the compiler keeps some matrices on the chip from step to step.
        assert 0.88 < sum(x.traffic * x.times for x in launched) / work.num_bytes < 1.15
