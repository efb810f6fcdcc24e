"""Devices that are not there, for the choice of kernels."""

import types

import jax
import pytest

HOPPER = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
AMPERE = types.SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100")
MI300 = types.SimpleNamespace(platform="gpu", compute_capability="gfx942", device_kind="AMD Instinct MI300X")
TPU = types.SimpleNamespace(platform="tpu", device_kind="TPU v5e")
CPU = jax.devices("cpu")[0]
hopper_kernels = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="kernels for Hopper need JAX 0.11.2")
