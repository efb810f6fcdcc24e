"""Devices: the data sheet of each, with the description that its compiler takes, and those of this machine."""

import functools
import logging
import os
import pathlib
import platform
from typing import NamedTuple

import jax


class Tpu(NamedTuple):
    """A TPU, as its compiler names it."""

    topology: str
    gigahertz: float  # of its clock: its rate of matrix products divided by the width of its matrix units


class Gpu(NamedTuple):
    """An NVIDIA GPU, described for its compiler; see `ARCHITECTURES`."""

    capability: tuple[int, int]
    multiprocessors: int
    gigahertz: float
    cache: float  # mebibytes


class Device(NamedTuple):
    """A device by its data sheet: its peak rates."""

    kind: str  # JAX's `device_kind`
    part: str  # of the `device_kind`, by which JAX's device is recognized
    tflops: float  # dense bfloat16 matrix products
    terabytes: float  # memory bandwidth, per second
    memory: int  # bytes, of a GPU those that CUDA reports
    link: float  # gigabytes per second, each way, to other devices: NVLink, PCIe, or two of a TPU's links
    target: Tpu | Gpu  # for its compiler

    @property
    def platform(self) -> str:
        """JAX's name of its compiler's platform."""
        return "gpu" if isinstance(self.target, Gpu) else "tpu"


# From Google's Cloud TPU documentation of each version and from NVIDIA's data sheets, for the RTX cards from its Ada
# whitepaper (rates with float32 sums). Links: a TPU v4, v5e, v5p and v6e has 2400, 1600, 4800 and 3584 Gbit/s in 6, 4,
# 6 and 4 links; a ring of devices uses two of them. A chip of TPU7x is two devices, each with half of its rates; its
# memory is that which the compiler grants. NVLink 5, 4 and 3 have 1800, 900 and 600 GB/s, both ways together;
# PCIe 5.0 and 4.0 with 16 lanes have 64 and 32 each way.
_A100 = Gpu((8, 0), 108, 1.41, 40)
DEVICES = {
    "v4": Device("TPU v4", "TPU v4", 275.0, 1.228, 32 * 2**30, 100.0, Tpu("v4:2x2x1", 1.05)),
    "v5e": Device("TPU v5 lite", "TPU v5 lite", 197.0, 0.819, 16 * 2**30, 100.0, Tpu("v5e:2x2", 1.5)),
    "v5p": Device("TPU v5", "TPU v5", 459.0, 2.765, 95 * 2**30, 200.0, Tpu("v5p:2x2x1", 1.75)),
    "v6e": Device("TPU v6 lite", "TPU v6 lite", 918.0, 1.64, 32 * 2**30, 224.0, Tpu("v6e:2x2", 1.75)),
    "tpu7x": Device("TPU7x", "TPU7x", 1153.5, 3.69, 101_726_299_750, 100.0, Tpu("tpu7x:2x2x1", 2.2)),
    "a100": Device("NVIDIA A100-SXM4-80GB", "A100", 312.0, 2.039, 85_100_000_000, 300.0, _A100),
    "a100-40gb": Device("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", 312.0, 1.555, 42_298_834_944, 300.0, _A100),
    "a100-pcie": Device("NVIDIA A100 80GB PCIe", "A100 80GB PCIe", 312.0, 1.935, 85_100_000_000, 32.0, _A100),
    "a100-pcie-40gb": Device("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB", 312.0, 1.555, 42_298_834_944, 32.0, _A100),
    "l4": Device("NVIDIA L4", "L4", 121.0, 0.3, 24_100_000_000, 32.0, Gpu((8, 9), 58, 2.04, 48)),
    "l40": Device("NVIDIA L40", "L40", 181.0, 0.864, 47_800_000_000, 32.0, Gpu((8, 9), 142, 2.49, 96)),
    "l40s": Device("NVIDIA L40S", "L40S", 362.0, 0.864, 47_800_000_000, 32.0, Gpu((8, 9), 142, 2.52, 96)),
    "rtx3090": Device(
        "NVIDIA GeForce RTX 3090", "RTX 3090", 71.0, 0.936, 25_400_000_000, 32.0, Gpu((8, 6), 82, 1.70, 6)
    ),
    "rtx4090": Device(
        "NVIDIA GeForce RTX 4090", "RTX 4090", 165.2, 1.008, 25_300_000_000, 32.0, Gpu((8, 9), 128, 2.52, 72)
    ),
    "h100": Device("NVIDIA H100 80GB HBM3", "H100", 989.0, 3.35, 84_978_434_048, 450.0, Gpu((9, 0), 132, 1.98, 50)),
    "h100-pcie": Device("NVIDIA H100 PCIe", "H100 PCIe", 756.0, 2.0, 84_942_979_072, 64.0, Gpu((9, 0), 114, 1.755, 50)),
    "h100-nvl": Device("NVIDIA H100 NVL", "H100 NVL", 835.0, 3.9, 99_961_274_368, 64.0, Gpu((9, 0), 132, 1.785, 60)),
    "h200": Device("NVIDIA H200", "H200", 989.0, 4.8, 150_700_000_000, 450.0, Gpu((9, 0), 132, 1.98, 60)),
    "b200": Device("NVIDIA B200", "B200", 2250.0, 8.0, 191_514_411_008, 900.0, Gpu((10, 0), 148, 1.965, 126.5)),
}
# By capability: lanes for float32, and bytes of shared memory, of a multiprocessor.
ARCHITECTURES = dict.fromkeys([(8, 6), (8, 9)], (128, 102400)) | dict.fromkeys([(9, 0), (10, 0)], (128, 233472))
ARCHITECTURES[8, 0] = 64, 167936
UNKNOWN = DEVICES["rtx3090"]  # the least arithmetic per byte of all of them
MACHINE = 8  # GPUs that are linked; others are reached over the network. A TPU's links reach a whole slice.
NETWORK = 50.0  # gigabytes per second, each way, of each GPU: InfiniBand with 400 Gbit/s, as in a DGX H100
EXTRAS = {"an NVIDIA GPU": ("cuda12", "cuda13"), "a TPU": ("tpu",)}  # of the package, with the plugins of JAX
DEVICE_FILES = {"an NVIDIA GPU": ("dev/nvidia[0-9]*",), "a TPU": ("dev/accel[0-9]*", "dev/vfio/[0-9]*")}


def of_kind(device_kind: str) -> Device:
    """Returns the device of JAX's `device_kind`, by the longest part of it that is known, or else `UNKNOWN`."""
    matching = (device for device in DEVICES.values() if device.part in device_kind)
    return max(matching, key=lambda device: len(device.part), default=UNKNOWN)


def named(name: str, *others: str) -> Device:
    """Returns the device of a name.

    Raises:
      ValueError: there is none; the message lists the names, and `others` before them.
    """
    if name not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(map(repr, (*others, *DEVICES)))}; got {name!r}")
    return DEVICES[name]


@functools.cache
def processor() -> str:
    """Returns the processor's name, as JAX calls every processor "cpu"."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()


def memory_of(name: str) -> int:
    """Returns the bytes of a device's memory. `name` is a key of `DEVICES`, or "cpu"."""
    return DEVICES[name].memory if name in DEVICES else _of_host()


def memory_of_attached(device: jax.Device) -> int:
    """Returns the bytes of an attached device's memory that JAX may use."""
    stats = device.memory_stats()
    return _of_host() if stats is None else int(stats["bytes_limit"])


def _of_host() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes(device: jax.Device) -> int:
    """Returns the bytes that new arrays may take on a device."""
    stats = device.memory_stats()
    if stats is not None:
        return max(0, int(stats["bytes_limit"] - stats["bytes_in_use"]))
    # A CPU, with the memory of the host and the limit of the process.
    try:
        available = int(_field("/proc/meminfo", "MemAvailable")) * 1024
        used = int(_field("/proc/self/status", "VmSize")) * 1024
        limit = pathlib.Path("/proc/self/limits").read_text().partition("Max address space")[2].split()[0]
    except OSError:  # not Linux
        return 0
    return available if limit == "unlimited" else max(0, min(available, int(limit) - used))


def _field(file: str, name: str) -> str:
    """Returns the number of a line "name: number kB"."""
    return pathlib.Path(file).read_text().partition(f"{name}:")[2].split()[0]


def unseen(root: pathlib.Path = pathlib.Path("/")) -> str | None:
    """Returns a message if the machine has a GPU or TPU and JAX uses the CPU though nobody asked for it.

    Without its plugin for the device, JAX runs on the CPU and says nothing.

    Args:
      root: the root of the file system.
    """
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]  # those that the user chose, or None
    if (platforms and "cpu" in platforms.split(",")) or jax.default_backend() != "cpu":
        return None
    for device, patterns in DEVICE_FILES.items():
        if any(any(root.glob(pattern)) for pattern in patterns):
            installs = " or ".join(f'pip install "jlade[{extra}]"' for extra in EXTRAS[device])
            return f"this machine has {device}, but JAX runs on the CPU: {installs}, see docs/start.md"
    return None


@functools.cache
def log_unseen() -> None:
    """Logs the message of `unseen` once in a process, as a warning of the logger "jlade"."""
    message = unseen()
    if message is not None:
        logging.getLogger("jlade").warning("%s", message)
