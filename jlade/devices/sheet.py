"""Data sheets of devices, the processor's name, and the device that holds parameters."""

import functools
import pathlib
import platform
from typing import Any, NamedTuple

import jax


class Sheet(NamedTuple):
    """The peak rates of a device."""

    tflops: float  # dense bfloat16 matrix products
    terabytes: float  # memory bandwidth, per second
    gigahertz: float = 0.0  # of a TPU's clock: its rate of matrix products divided by the width of its matrix units


# Keys are parts of JAX's `device_kind`; the first that matches counts. From NVIDIA's data sheets, for the RTX cards
# from its Ada whitepaper (rates with float32 sums), and from Google's Cloud TPU documentation of each version.
SHEETS = {
    "B200": Sheet(2250.0, 8.0),
    "H200": Sheet(989.0, 4.8),
    "H100 PCIe": Sheet(756.0, 2.0),
    "H100 NVL": Sheet(835.0, 3.9),
    "H100": Sheet(989.0, 3.35),
    "A100-SXM4-40GB": Sheet(312.0, 1.555),
    "A100-PCIE-40GB": Sheet(312.0, 1.555),
    "A100": Sheet(312.0, 2.039),
    "L40S": Sheet(362.0, 0.864),
    "L40": Sheet(181.0, 0.864),
    "L4": Sheet(121.0, 0.3),
    "RTX 4090": Sheet(165.2, 1.008),
    "RTX 3090": Sheet(71.0, 0.936),
    "TPU v4": Sheet(275.0, 1.228, 1.05),
    "TPU v5 lite": Sheet(197.0, 0.819, 1.5),  # v5e
    "TPU v5": Sheet(459.0, 2.765, 1.75),  # v5p
    "TPU v6 lite": Sheet(918.0, 1.64, 1.75),  # v6e
}
UNKNOWN = SHEETS["RTX 3090"]  # the least arithmetic per byte of all of them


def sheet(device_kind: str) -> Sheet:
    """Returns the sheet of JAX's `device_kind`, `UNKNOWN` when there is none."""
    return next((sheet for name, sheet in SHEETS.items() if name in device_kind), UNKNOWN)


def default_device() -> jax.Device:
    """Returns the device of arrays without a sharding."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]  # a device, a platform's name, or None
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def device_of(params: Any) -> tuple[jax.Device, int]:
    """Returns a device that holds the pytree `params`, and how many devices hold it.

    Arrays on no device (NumPy, `jax.ShapeDtypeStruct`, tracers) get JAX's default device.
    """
    arrays = (x for x in jax.tree.leaves(params) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer))
    devices = next((array.devices() for array in arrays), None) or {default_device()}
    return min(devices, key=lambda device: device.id), len(devices)


@functools.cache
def processor() -> str:
    """Returns the processor's name, as JAX calls every processor "cpu"."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()
