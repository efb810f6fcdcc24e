"""Programs that are compiled ahead of their first call."""

import jax
import jax.numpy as jnp

from jlade.decoding import ahead


def test_a_program_for_the_cpu_beside_a_tpu_goes_without_its_options(monkeypatch):
    options = {"cpu": ahead.COMPILER_OPTIONS["tpu"]}  # which the compiler for CPUs does not know
    monkeypatch.setattr(ahead, "COMPILER_OPTIONS", options)

    @ahead.jit(static_argnames="factor")
    def times(x, factor):
        return x * factor

    shape = times(jax.ShapeDtypeStruct((3,), jnp.int32), 2)
    assert shape == jax.ShapeDtypeStruct((3,), jnp.int32)
    assert times(jnp.arange(3), 2).tolist() == [0, 2, 4]
    assert times(jnp.arange(3), 3).tolist() == [0, 3, 6]
