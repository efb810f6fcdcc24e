"""W, N and G from a device's data sheet: a block as wide as its idle arithmetic."""

import numpy as np

from jlade.config import MAX_BLOCK_SIZE, PLAIN, SMALL_BLOCK, LookaheadConfig
from jlade.devices.sheet import sheet

# Attention and the operations between the products need part of the peak rates. With this margin the 120 tokens that
# the paper found best for a 7B model on an A100 are just within.
MARGIN = 0.8

# On two cores of an AMD EPYC a step of 120 tokens takes 10.5 times a plain step (docs/speed.md), as if this many were
# free.
FREE_TOKENS_ON_CPU = 12.0

SLACK = 1.15  # an interpolated step time may be too long by this factor

# Widest first: the settings of Table 4 of arXiv 2402.02057, then smaller ones.
SETTINGS = (
    LookaheadConfig(15, 5, 15),
    LookaheadConfig(10, 5, 10),
    LookaheadConfig(7, 5, 7),
    LookaheadConfig(5, 4, 5),
    SMALL_BLOCK,
)


def free_tokens(device_kind: str) -> float:
    """Returns T, the most tokens whose arithmetic takes no longer than reading the weights.

    With P weights of b bytes, a matrix rate F and a bandwidth M, that is 2·P·T / F = MARGIN · P·b / M. P cancels out.
    b is 2 here: float32 has twice the bytes, and GPUs multiply it, by default as TF32, at half the rate.

    Args:
      device_kind: the attribute of a `jax.Device`.
    """
    device = sheet(device_kind)
    return MARGIN * device.tflops / device.terabytes


def estimate(platform: str, device_kind: str, batch_size: int = 1) -> LookaheadConfig:
    """Returns the widest of `SETTINGS` whose step takes about as long as a plain one, or `config.PLAIN`.

    Args:
      platform: "cpu", "gpu" or "tpu". CPUs have no idle arithmetic; they get the setting that was fastest in tests.
      device_kind: the attribute of a `jax.Device`.
      batch_size: B. The sequences of a batch share one read of the weights, so a step has the tokens of B blocks.
    """
    if platform == "cpu":
        return SMALL_BLOCK
    room = free_tokens(device_kind) / batch_size
    return next((setting for setting in SETTINGS if setting.block_size <= room), PLAIN)


def step_times(platform: str, device_kind: str, batch_size: int = 1) -> dict[int, float]:
    """Returns the time of a step by block size: constant while its tokens are free, then proportional to them.

    The unit is the time of reading the weights. Arguments are those of `estimate`.
    """
    room = (FREE_TOKENS_ON_CPU if platform == "cpu" else free_tokens(device_kind)) / batch_size
    return {size: max(1.0, size / room) for size in (1, max(1, int(room)), MAX_BLOCK_SIZE)}


def speed_limit(setting: LookaheadConfig, step_times: dict[int, float]) -> float:
    """Returns the speed, relative to plain decoding, of a setting that accepts N tokens in every step.

    Args:
      setting: W, N and G.
      step_times: times by block size, in ascending order from 1; interpolated between sizes, constant above the
        largest.
    """
    sizes, times = list(step_times), list(step_times.values())
    return SLACK * setting.max_accepted * times[0] / float(np.interp(setting.block_size, sizes, times))
