"""The time of a step from a device's data sheet, and a setting from it: a block as wide as the idle arithmetic."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jlade.choosing.sheet import sheet
from jlade.config import MAX_BLOCK_SIZE, PLAIN, SMALL_BLOCK, LookaheadConfig
from jlade.lookahead import division

# Shares of the data sheet's rates that programs reach: on an H200 a matrix product ran at 790 of 989 TFLOP/s, a copy at
# 4.3 of 4.8 TB/s.
ARITHMETIC = 0.8
BANDWIDTH = 0.9
KERNEL = 2e-6  # seconds of the shortest kernel of a GPU, with its launch in a CUDA graph; assumed, not measured

SEVERAL = 1.15  # times the bytes that CPUs read when they multiply weights by several vectors; measured

SLACK = 1.15  # an interpolated step time may be too long by this factor

SETTINGS = (LookaheadConfig(), *map(LookaheadConfig.tree, (63, 31, 15, 7, 3)))  # widest first
WIDE = tuple(map(LookaheadConfig.tree, (959, 479, 239)))  # for several devices that share the tokens of a step


class Rates(NamedTuple):
    """The rates that programs reach on a device, per second."""

    flops: float
    bytes: float
    cycles: float | None = None  # of a TPU's clock
    kernel: float = 0.0  # seconds that every kernel takes at least
    overlaps: bool = True  # whether memory is read during arithmetic


# Two cores of an AMD EPYC with AVX-512, in float32. Their ratio decides, and it differs less than the rates.
CPU = Rates(flops=180e9, bytes=35e9, overlaps=False)


class Time(NamedTuple):
    """Seconds of some work."""

    total: float
    arithmetic: float
    memory: float


def rates(platform: str, device_kind: str) -> Rates:
    """Returns the rates that a device is estimated to reach.

    Args:
      platform: "cpu", "gpu" or "tpu".
      device_kind: the attribute of a `jax.Device`.
    """
    if platform == "cpu":
        return CPU
    device = sheet(device_kind)
    return Rates(
        flops=ARITHMETIC * 1e12 * device.tflops,
        bytes=BANDWIDTH * 1e12 * device.terabytes,
        cycles=1e9 * device.gigahertz if device.gigahertz else None,
        kernel=KERNEL if platform == "gpu" else 0.0,
    )


def time(rates: Rates, flops: float, num_bytes: float, cycles: int = 0) -> Time:
    """Returns the time of one operation: of its arithmetic or of its memory traffic, whichever takes longer.

    On a device that does one after the other it is their sum.

    Args:
      rates: of the device.
      flops: multiplications and additions of matrix products.
      num_bytes: read from and written to main memory.
      cycles: a compiler's estimate of the arithmetic, which is then used instead of `flops`; 0 for none.
    """
    arithmetic = cycles / rates.cycles if cycles and rates.cycles else flops / rates.flops
    memory = num_bytes / rates.bytes
    total = max(arithmetic, memory) if rates.overlaps else arithmetic + memory
    return Time(max(total, rates.kernel), arithmetic, memory)


def step_time(rates: Rates, block_size: int, batch_size: int = 1, weight_bytes: float = 2.0) -> Time:
    """Returns the time of a step, per parameter of the model: of its products with the weights alone.

    Args:
      rates: of the device.
      block_size: tokens of each sequence.
      batch_size: B. The sequences of a batch share one read of the weights.
      weight_bytes: of each parameter.
    """
    if not rates.overlaps and block_size * batch_size > 1:
        weight_bytes *= SEVERAL
    return time(rates._replace(kernel=0.0), 2.0 * block_size * batch_size, weight_bytes)


def estimate(
    platform: str, device_kind: str, batch_size: int = 1, weight_bytes: float = 2.0, lookahead: int = 1
) -> LookaheadConfig:
    """Returns the widest of `SETTINGS` whose step takes as long as a plain one, or `config.PLAIN`.

    Args:
      platform: "cpu", "gpu" or "tpu". CPUs have no idle arithmetic; they get a block of 8 tokens.
      device_kind: the attribute of a `jax.Device`.
      batch_size: B.
      weight_bytes: of each parameter. On GPUs and TPUs float32 counts as bfloat16: GPUs multiply it, as TF32, at half
        the rate.
      lookahead: devices that share the tokens of a step. With more than one the trees of `WIDE` are settings too.
    """
    if platform == "cpu":
        return SMALL_BLOCK
    device = rates(platform, device_kind)

    def is_free(setting: LookaheadConfig) -> bool:
        tokens, _ = division.share_size(setting, lookahead)
        step = step_time(device, tokens, batch_size, min(weight_bytes, 2.0))
        return step.arithmetic <= step.memory

    return next(filter(is_free, (*WIDE, *SETTINGS) if lookahead > 1 else SETTINGS), PLAIN)


def bytes_of_weight(params: Any) -> float:
    """Returns the mean bytes of a parameter of a pytree."""
    leaves = [leaf for leaf in jax.tree.leaves(params) if hasattr(leaf, "dtype")]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / max(1, sum(leaf.size for leaf in leaves))


def step_times(platform: str, device_kind: str, batch_size: int = 1, weight_bytes: float = 2.0) -> dict[int, float]:
    """Returns the time of a step by block size, in seconds per parameter. Arguments are those of `estimate`."""
    device = rates(platform, device_kind)
    weight_bytes = weight_bytes if platform == "cpu" else min(weight_bytes, 2.0)
    sizes = sorted({1, MAX_BLOCK_SIZE, *(setting.block_size for setting in SETTINGS)})
    return {size: step_time(device, size, batch_size, weight_bytes).total for size in sizes}


def speed_limit(setting: LookaheadConfig, step_times: dict[int, float]) -> float:
    """Returns the speed, relative to plain decoding, of a setting that accepts as many tokens as it can in every step.

    Args:
      setting: the setting.
      step_times: times by block size, in ascending order from 1; interpolated between sizes, constant above the
        largest.
    """
    sizes, times = list(step_times), list(step_times.values())
    return SLACK * setting.max_accepted * times[0] / float(np.interp(setting.block_size, sizes, times))
