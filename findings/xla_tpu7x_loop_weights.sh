#!/usr/bin/env bash
# Guess: a program for a TPU7x that multiplies by bfloat16 matrices in a loop reads them where they lie, as one for a v6e
# does, since nothing changes them.
# Seen: the compiler for TPU7x first copies all of them to tiles of 16 rows in place of 8, so that the memory of a model
# is needed twice. A product outside a loop, and int8 in one, copy nothing. An option of the compiler that is not
# documented leaves the matrices as they are; the similar one without "control" in its name changes nothing.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 libtpu==0.0.42.1 numpy==2.4.6
export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5litepod-4 TPU_WORKER_HOSTNAMES=localhost
export TPU_LOG_DIR=disabled ALLOW_MULTIPLE_LIBTPU_LOAD=1
"$folder/venv/bin/python" - <<'PYTHON'
import importlib.metadata

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

OPTION = "xla_tpu_{}_large_2nd_minor_layout_for_x16"


def once(weights, x):
    for weight in weights:
        x = jnp.tanh(jnp.dot(x, weight, preferred_element_type=jnp.float32)).astype(weight.dtype)
    return x


def looped(weights, x):
    return jax.lax.fori_loop(0, x.shape[0], lambda _, x: once(weights, x), x)


def megabytes(topology, run, dtype=jnp.bfloat16, option=None):
    """Returns those of the arguments, and those of what the program needs beside arguments and results."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    shapes = jax.ShapeDtypeStruct((2, 4096, 4096), dtype), jax.ShapeDtypeStruct((64, 4096), dtype)
    program = jax.jit(run, in_shardings=SingleDeviceSharding(device)).trace(*shapes).lower(lowering_platforms=("tpu",))
    memory = program.compile(option and {OPTION.format(option): False}).memory_analysis()
    return memory.argument_size_in_bytes // 10**6, memory.temp_size_in_bytes // 10**6


found = {
    "v6e, loop": megabytes("v6e:2x2", looped),
    "tpu7x, loop": megabytes("tpu7x:2x2x1", looped),
    "tpu7x, no loop": megabytes("tpu7x:2x2x1", once),
    "tpu7x, loop, int8": megabytes("tpu7x:2x2x1", looped, jnp.int8),
    "tpu7x, loop, enable": megabytes("tpu7x:2x2x1", looped, option="enable"),
    "tpu7x, loop, control": megabytes("tpu7x:2x2x1", looped, option="control"),
}
print(f"libtpu {importlib.metadata.version('libtpu')}, arguments and temporary memory in MB:", found)
assert list(found.values()) == [(67, 0), (67, 67), (67, 0), (33, 0), (67, 67), (67, 0)], found
PYTHON
