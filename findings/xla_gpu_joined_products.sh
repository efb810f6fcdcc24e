#!/usr/bin/env bash
# Guess: if XLA for GPUs joins the products of the same tokens with several matrices, it always does so in one way, and
# whether that pays depends on their size alone, as its option (a number of megabytes) suggests.
# Seen: with 1,408 outputs, a multiple of 64, one kernel reads both matrices where they lie. Otherwise XLA writes both to
# one array of 21 MB first, in each run: so with 1,376 outputs, which LLaMA 2 7B has on each of 8 devices.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 \
  nvidia-cuda-nvcc-cu12==12.9.86 numpy==2.4.6
PATH=$(echo "$folder"/venv/lib/python3*/site-packages/nvidia/cuda_nvcc/bin):$PATH \
  JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PYTHON'
import importlib.metadata

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

H100 = """gpu_device_info { threads_per_block_limit:1024 threads_per_warp:32 shared_memory_per_block:49152
shared_memory_per_core:233472 shared_memory_per_block_optin:232448 threads_per_core_limit:2048 core_count:132
fpus_per_core:128 clock_rate_ghz:1.98 block_dim_limit_x:2147483647 block_dim_limit_y:65535 block_dim_limit_z:65535
registers_per_core_limit:65536 registers_per_block_limit:65536 memory_bandwidth:3350000000000 l2_cache_size:52428800
device_memory_size:85000000000 cuda_compute_capability { major:9 minor:0 } } platform_name:"CUDA"
dnn_version_info { major:9 minor:10 patch:2 } runtime_version { major:12 minor:9 }
device_description_str:"NVIDIA H100 80GB HBM3" """


def products(x, gate, up):
    return jnp.dot(x, gate), jnp.dot(x, up)


def kernels_and_megabytes(num_outputs, limit):
    """Returns the number of kernels with products, and the megabytes beside arguments and results."""
    device = topologies.get_topology_desc(platform="cuda", topology_name="", topology="1x1x1", target_config=H100)
    placed = SingleDeviceSharding(device.devices[0])
    matrix = jax.ShapeDtypeStruct((4096, num_outputs), jnp.bfloat16)
    shapes = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16), matrix, matrix
    lowered = jax.jit(products, in_shardings=placed).trace(*shapes).lower(lowering_platforms=("cuda",))
    program = lowered.compile({"xla_gpu_dot_merger_threshold_mb": limit})
    megabytes = round(program.memory_analysis().temp_size_in_bytes / 2**20)
    return program.as_text().count("kind=kCustom"), megabytes


found = {f"{size} outputs, up to {limit} MB": kernels_and_megabytes(size, limit) for size in (1408, 1376) for limit in (0, 4096)}
print(f"jaxlib {importlib.metadata.version('jaxlib')}, products and temporary memory in MB:", found)
assert list(found.values()) == [(2, 3), (1, 6), (2, 3), (1, 27)], found
PYTHON
