"""Devices that are not there, for the choice of kernels."""

import types

import jax
import pytest

from jlade import mesh as mesh_lib
from jlade.models import trial

HOPPER = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
AMPERE = types.SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100")
TPU = types.SimpleNamespace(platform="tpu", device_kind="TPU v5e")
CPU = jax.devices("cpu")[0]
hopper_kernels = pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="kernels for Hopper need JAX 0.11.2")


def record_trials(monkeypatch, *devices):
    """Makes devices pass for those of parameters, and kernels pass; returns the calls of `trial.passes`."""
    calls = []
    monkeypatch.setattr(mesh_lib, "devices_of", lambda params: [*devices])
    monkeypatch.setattr(trial, "passes", lambda *arguments: calls.append(arguments) or True)
    return calls
