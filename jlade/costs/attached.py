"""Accelerators of the machine that JAX does not see: without its plugin, JAX runs on the CPU and says nothing."""

import functools
import logging
import pathlib

import jax

EXTRAS = {"an NVIDIA GPU": ("cuda12", "cuda13"), "a TPU": ("tpu",)}
DEVICE_FILES = {"an NVIDIA GPU": ("dev/nvidia[0-9]*",), "a TPU": ("dev/accel[0-9]*", "dev/vfio/[0-9]*")}


def unseen(root: pathlib.Path = pathlib.Path("/")) -> str | None:
    """Returns a message if the machine has a GPU or TPU and JAX uses the CPU though nobody asked for it.

    Args:
      root: the root of the file system.
    """
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]  # those that the user chose, or None
    if (platforms and "cpu" in platforms.split(",")) or jax.default_backend() != "cpu":
        return None
    for device, patterns in DEVICE_FILES.items():
        if any(any(root.glob(pattern)) for pattern in patterns):
            installs = " or ".join(f'pip install "jlade[{extra}]"' for extra in EXTRAS[device])
            return f"this machine has {device}, but JAX runs on the CPU: {installs}, see docs/install.md"
    return None


@functools.cache
def log_unseen() -> None:
    """Logs the message of `unseen` once in a process, as a warning of the logger "jlade"."""
    message = unseen()
    if message is not None:
        logging.getLogger("jlade").warning("%s", message)
