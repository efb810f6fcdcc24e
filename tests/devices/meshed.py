"""The step of a program on a mesh, compiled for devices that need not be there, and its work."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jlade.conversion.tensors import param_shapes
from jlade.decoding import loop, prefill, sharding
from jlade.decoding.state import Inputs, Program
from jlade.decoding.stopping import Stopping
from jlade.devices import hlo, mesh
from jlade.devices.compiled import COLLECTIVES
from jlade.devices.launches import launches
from jlade.devices.mesh import MODEL
from jlade.models import sharding as model_sharding
from jlade.models.llama import Llama


def compile_steps(config, devices, setting, batch_size, capacity, dtype, platform):
    """Returns the compiled program that makes steps on the mesh `devices`, with plain attention."""
    divided = model_sharding.mesh_for(config, devices)
    params = param_shapes(config, dtype)
    axes = MODEL if mesh.size(divided, *MODEL) > 1 else ()
    program = Program(Llama(config, "plain", axes), setting, mesh=divided)

    def start(params):
        lengths = jnp.ones(batch_size, jnp.int32)
        stopping = Stopping(capacity - lengths, jnp.full((batch_size, 1), -1, jnp.int32))
        inputs = Inputs(jnp.zeros((batch_size, capacity), jnp.int32), lengths, stopping, jax.random.key(0))
        cache = Llama(config).init_cache(params, batch_size, capacity)
        return prefill.start(cache, inputs, dataclasses.replace(program, mesh=None))

    def steps(params, state, max_steps):
        return loop._steps(params, state, max_steps, program)

    def place(tree, specs):
        def shape(x, spec):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(divided, spec))

        return jax.tree.map(shape, tree, jax.tree.broadcast(specs, tree))

    state = jax.eval_shape(start, params)
    arguments = (
        place(params, sharding.param_specs(params, program)),
        place(state, sharding.state_specs(state.constants.stopping, program)),
        place(jax.ShapeDtypeStruct((), jnp.int32), PartitionSpec()),
    )
    return jax.jit(steps, donate_argnums=1).trace(*arguments).lower(lowering_platforms=(platform,)).compile()


def step_launches(program, trips):
    """Returns the instructions of a step; attention reads `trips` chunks of the cache."""
    module = hlo.Module(program.as_text())
    return list(launches(module, module.body(module.loops(module.entry)[-1]), trips))


def collectives(launched):
    """Returns the bytes of the operands of all-reduces, which are the only collectives."""
    found = list(filter(is_collective, launched))
    assert {launch.instruction.opcode for launch in found} <= {"all-reduce", "all-reduce-start"}
    return sum(operand.num_bytes * launch.times for launch in found for operand in launch.operands)


def is_collective(launch):
    """Returns whether an instruction exchanges arrays between devices."""
    return launch.instruction.opcode.startswith(COLLECTIVES)
