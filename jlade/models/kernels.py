"""The devices on which kernels run."""

import jax


def hopper_obstacle(device: jax.Device) -> str | None:
    """Returns the reason why kernels for Hopper GPUs cannot run on a device, None if they can."""
    if getattr(device, "compute_capability", None) != "9.0":
        return f"needs an NVIDIA GPU of compute capability 9.0 (H100, H200), and the device is {device.device_kind}"
    if jax.__version_info__ < (0, 11, 2):
        return f"needs JAX 0.11.2 or newer, and this is {jax.__version__}"
    return None
