"""Data sheets of devices, and the processor's name."""

import functools
import pathlib
import platform
from typing import NamedTuple


class Sheet(NamedTuple):
    """The peak rates of a device."""

    tflops: float  # dense bfloat16 matrix products
    terabytes: float  # memory bandwidth, per second
    gigahertz: float = 0.0  # of a TPU's clock: its rate of matrix products divided by the width of its matrix units
    link: float = 32.0  # gigabytes per second, each way, to other devices: NVLink, PCIe, or two of a TPU's links


# Keys are parts of JAX's `device_kind`; the first that matches counts. From NVIDIA's data sheets, for the RTX cards
# from its Ada whitepaper (rates with float32 sums), and from Google's Cloud TPU documentation of each version. Links:
# NVLink 5, 4 and 3 have 1800, 900 and 600 GB/s, both ways together; PCIe 5.0 and 4.0 with 16 lanes have 64 and 32 each
# way, the default. A TPU v4, v5e, v5p and v6e has 2400, 1600, 4800 and 3584 Gbit/s in 6, 4, 6 and 4 links; a ring of
# devices uses two of them.
SHEETS = {
    "B200": Sheet(2250.0, 8.0, link=900.0),
    "H200": Sheet(989.0, 4.8, link=450.0),
    "H100 PCIe": Sheet(756.0, 2.0, link=64.0),
    "H100 NVL": Sheet(835.0, 3.9, link=64.0),
    "H100": Sheet(989.0, 3.35, link=450.0),
    "A100-SXM4-40GB": Sheet(312.0, 1.555, link=300.0),
    "A100-PCIE-40GB": Sheet(312.0, 1.555),
    "A100 80GB PCIe": Sheet(312.0, 1.935),
    "A100": Sheet(312.0, 2.039, link=300.0),
    "L40S": Sheet(362.0, 0.864),
    "L40": Sheet(181.0, 0.864),
    "L4": Sheet(121.0, 0.3),
    "RTX 4090": Sheet(165.2, 1.008),
    "RTX 3090": Sheet(71.0, 0.936),
    "TPU v4": Sheet(275.0, 1.228, 1.05, 100.0),
    "TPU v5 lite": Sheet(197.0, 0.819, 1.5, 100.0),  # v5e
    "TPU v5": Sheet(459.0, 2.765, 1.75, 200.0),  # v5p
    "TPU v6 lite": Sheet(918.0, 1.64, 1.75, 224.0),  # v6e
}
MACHINE = 8  # GPUs that are linked; others are reached over the network. A TPU's links reach a whole slice.
NETWORK = 50.0  # gigabytes per second, each way, of each GPU: InfiniBand with 400 Gbit/s, as in a DGX H100
UNKNOWN = SHEETS["RTX 3090"]  # the least arithmetic per byte of all of them


def sheet(device_kind: str) -> Sheet:
    """Returns the sheet of JAX's `device_kind`, `UNKNOWN` when there is none."""
    return next((sheet for name, sheet in SHEETS.items() if name in device_kind), UNKNOWN)


class Tpu(NamedTuple):
    """A kind of TPU, as its compiler names it."""

    device_kind: str
    topology: str
    memory: int  # bytes


class Gpu(NamedTuple):
    """A kind of NVIDIA GPU, described for its compiler."""

    device_kind: str
    capability: tuple[int, int]
    multiprocessors: int
    lanes: int  # of each multiprocessor, for float32
    gigahertz: float
    shared_memory: int  # bytes of a multiprocessor
    cache: int  # bytes
    memory: int  # bytes
    bandwidth: float  # bytes per second


TARGETS: dict[str, Tpu | Gpu] = {
    "v4": Tpu("TPU v4", "v4:2x2x1", 32 * 2**30),
    "v5e": Tpu("TPU v5 lite", "v5e:2x2", 16 * 2**30),
    "v5p": Tpu("TPU v5", "v5p:2x2x1", 95 * 2**30),
    "v6e": Tpu("TPU v6 lite", "v6e:2x2", 32 * 2**30),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 167936, 41943040, 85_100_000_000, 2.039e12),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 128, 2.04, 102400, 50331648, 24_100_000_000, 3.0e11),
    "rtx3090": Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 128, 1.70, 102400, 6291456, 25_400_000_000, 9.36e11),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 2.52, 102400, 75497472, 25_300_000_000, 1.008e12),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 233472, 52428800, 84_978_434_048, 3.352e12),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 1.98, 233472, 62914560, 150_700_000_000, 4.8e12),
}


@functools.cache
def processor() -> str:
    """Returns the processor's name, as JAX calls every processor "cpu"."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()
