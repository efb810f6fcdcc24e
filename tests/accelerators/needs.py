"""Marks for tests that need the compiler of an accelerator."""

import importlib.util

import pytest


def _needs(module, extra):
    reason = f"the compiler is not installed: pip install .[{extra}]"
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=reason)


tpu_compiler = _needs("libtpu", "tpu-compiler")
gpu_compiler = _needs("jax_cuda12_plugin", "gpu-compiler")


def device(name):
    """Returns a device's name as a parameter of a test that needs its compiler."""
    return pytest.param(name, marks=tpu_compiler if name.startswith(("v", "tpu")) else gpu_compiler, id=name)


def thorough(case):
    """Returns a parameter of a test that takes long with it."""
    return pytest.param(*case.values, marks=[*case.marks, pytest.mark.thorough], id=case.id)
