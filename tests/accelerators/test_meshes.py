"""The work of a step on a mesh against the programs that the compilers of TPUs and GPUs make for eight devices."""

import jax.numpy as jnp
import pytest
from jax.experimental import topologies

import jlade
from jlade import LookaheadConfig
from jlade.conversion.tensors import param_shapes
from jlade.devices import targets
from jlade.devices import work as work_lib
from jlade.devices.work import Layout
from jlade.models.attention import plain
from jlade.models.llama import LlamaConfig
from tests.accelerators.needs import device
from tests.devices import meshed

OPTIMIZED = True

CONFIG = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5504,
    num_layers=2,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    max_positions=1024,
)
SETTING = LookaheadConfig(15, 5, 15)


def eight(name):
    """Returns eight devices, which need not be there."""
    targets.find(name)  # sets what the compiler asks for
    if name == "v5e":
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    target = targets.TARGETS[name]
    description = targets.description(target)
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x8", target_config=description
    ).devices


@pytest.mark.parametrize("sizes", [(1, 2, 4), pytest.param((1, 8, 1), marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", [device("v5e"), device("h100")])
def test_work_is_that_of_compiled_programs(name, sizes):
    mesh, platform = jlade.make_mesh(*sizes, devices=eight(name)), "tpu" if name == "v5e" else "cuda"
    program = meshed.compile_steps(CONFIG, mesh, SETTING, 1, 1024, jnp.bfloat16, platform)
    launched = meshed.step_launches(program, 1024 // plain.CHUNK)
    layout = Layout(*sizes)
    shard = work_lib.shard(param_shapes(CONFIG, jnp.bfloat16), layout.model)
    work = work_lib.work(shard, layout, SETTING, 1, 1024)
    memory = work_lib.memory(shard, layout, SETTING, 1, 1024)
    found = meshed.collectives(launched)
    expected = sum(each.num_bytes for each in work.collectives)
    if name == "v5e" and layout.model > 1:  # it compares the highest logits in bfloat16, before their conversion
        expected -= 2 * work_lib._share_size(SETTING, layout)[1]
    assert found == expected
    assert sum(each.times for each in work.collectives) == sum(map(meshed.is_collective, launched))
    stats = program.memory_analysis()
    assert stats.temp_size_in_bytes < memory.temporary
    assert 0 <= stats.argument_size_in_bytes - (memory.weights + memory.cache + memory.pool) < 1e6
    if name == "v5e":  # products of GPUs are calls of cuBLAS, or kernels
        assert work.flops == pytest.approx(sum(x.flops * x.times for x in launched), rel=0.01)
        assert work.num_bytes < sum(x.traffic * x.times for x in launched) < 1.15 * work.num_bytes
