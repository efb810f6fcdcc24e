"""Devices: the data sheet of each, with the description that its compiler takes, and the processor's name."""

import functools
import pathlib
import platform
from typing import NamedTuple


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
# 6 and 4 links; a ring of devices uses two of them. NVLink 5, 4 and 3 have 1800, 900 and 600 GB/s, both ways together;
# PCIe 5.0 and 4.0 with 16 lanes have 64 and 32 each way.
_A100 = Gpu((8, 0), 108, 1.41, 40)
DEVICES = {
    "v4": Device("TPU v4", "TPU v4", 275.0, 1.228, 32 * 2**30, 100.0, Tpu("v4:2x2x1", 1.05)),
    "v5e": Device("TPU v5 lite", "TPU v5 lite", 197.0, 0.819, 16 * 2**30, 100.0, Tpu("v5e:2x2", 1.5)),
    "v5p": Device("TPU v5", "TPU v5", 459.0, 2.765, 95 * 2**30, 200.0, Tpu("v5p:2x2x1", 1.75)),
    "v6e": Device("TPU v6 lite", "TPU v6 lite", 918.0, 1.64, 32 * 2**30, 224.0, Tpu("v6e:2x2", 1.75)),
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


def of_kind(device_kind: str) -> Device:
    """Returns the device of JAX's `device_kind`, by the longest part of it that is known, or else `UNKNOWN`."""
    known = (device for device in DEVICES.values() if device.part in device_kind)
    return max(known, key=lambda device: len(device.part), default=UNKNOWN)


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
