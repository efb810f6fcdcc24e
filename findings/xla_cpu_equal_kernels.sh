#!/usr/bin/env bash
# Guess: the time to compile an unrolled model for a CPU grows with its layers, as each has kernels of its own, so a scan
# over the layers is what shortens it.
# Seen: XLA compiles equal fusions of a program once, so that 2 layers and 30 have as many kernels. A scatter is compiled
# again in each layer, though all of them are equal: it alone makes the kernels grow with the layers.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
cat > "$folder/model.py" <<'PYTHON'
import sys

import jax
import jax.numpy as jnp

num_layers, writes = int(sys.argv[1]), sys.argv[2] == "writes"


def model(x, weights, caches):
    after = []
    for (first, second), cache in zip(weights, caches, strict=True):
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)
        x = x + jnp.tanh(normed @ first) @ second
        after.append(cache.at[jnp.argmax(x, axis=1)].set(x, mode="drop") if writes else cache)
    return x, after


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


weights = [(shape(256, 512), shape(512, 256))] * num_layers
jax.jit(model, donate_argnums=2).lower(shape(8, 256), weights, [shape(64, 256)] * num_layers).compile()
PYTHON
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import importlib.metadata
import os
import pathlib
import subprocess
import sys

folder = pathlib.Path(sys.argv[1])


def num_kernels(num_layers: int, way: str) -> int:
    dump = folder / f"{way}{num_layers}"
    command = [sys.executable, folder / "model.py", str(num_layers), way]
    subprocess.run(command, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_dump_to={dump}"})
    return len(list(dump.glob("*.ir-with-opt.ll")))


kernels = {way: [num_kernels(number, way) for number in (2, 30)] for way in ("reads", "writes")}
print(f"jaxlib {importlib.metadata.version('jaxlib')}: kernels compiled for 2 layers and for 30, without and with a scatter")
print(f"in each layer: {kernels['reads']}, {kernels['writes']}")
assert kernels["reads"][0] == kernels["reads"][1] and kernels["writes"][1] - kernels["writes"][0] >= 28, kernels
PYTHON
