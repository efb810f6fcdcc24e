"""The step of a program on a mesh of devices that need not be there, and its work."""

import math

import jlade
from jlade import mesh
from jlade.conversion.tensors import param_shapes
from jlade.inspection import hlo, targets
from jlade.inspection.compiled import COLLECTIVES
from jlade.inspection.launches import launches
from jlade.inspection.model_programs import ModelPrograms
from jlade.mesh import MODEL
from jlade.models import sharding
from jlade.models.llama import Llama


def compile_steps(name, sizes, config, setting, batch_size, capacity, dtype):
    """Returns the compiled program that makes steps on a mesh of `sizes`, with plain attention."""
    devices, _ = targets.find(name, math.prod(sizes))
    divided = sharding.mesh_for(config, jlade.make_mesh(*sizes, devices=devices))
    decoder = Llama(config, "plain", axes=MODEL if mesh.size(divided, *MODEL) > 1 else ())
    params = param_shapes(config, dtype)
    return ModelPrograms(params, decoder, devices[0], batch_size, capacity, divided).decoding(setting)


def step_launches(program, trips):
    """Returns the instructions of a step; attention reads `trips` chunks of the cache."""
    module = hlo.Module(program.as_text())
    return list(launches(module, module.body(module.loops(module.entry)[-1]), trips))


def collectives(launched):
    """Returns the bytes of the operands of all collectives."""
    found = list(filter(is_collective, launched))
    opcodes = {launch.instruction.opcode.removesuffix("-start") for launch in found}
    assert opcodes <= {"all-reduce", "all-gather"}, opcodes
    return sum(operand.num_bytes * launch.times for launch in found for operand in launch.operands)


def is_collective(launch):
    """Returns whether an instruction exchanges arrays between devices."""
    return launch.instruction.opcode.startswith(COLLECTIVES)
