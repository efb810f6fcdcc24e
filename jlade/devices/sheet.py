"""The device that holds a model's parameters."""

from typing import Any

import jax


def device_of(params: Any) -> tuple[jax.Device, int]:
    """Returns a device that holds the pytree `params`, and how many devices hold it.

    Arrays on no device (NumPy, `jax.ShapeDtypeStruct`, tracers) get JAX's default device.
    """
    arrays = (x for x in jax.tree.leaves(params) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer))
    devices = next((array.devices() for array in arrays), {jax.devices()[0]})
    return min(devices, key=lambda device: device.id), len(devices)
