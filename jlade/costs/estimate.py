"""The time of a step from a device's data sheet, and a setting from it: a block as wide as the idle arithmetic."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jlade.config import MAX_BLOCK_SIZE, PLAIN, SMALL_BLOCK, LookaheadConfig
from jlade.costs import devices
from jlade.costs import settings as settings_lib
from jlade.costs.devices import Tpu
from jlade.lookahead import division
from jlade.models.architecture import LlamaConfig
from jlade.models.quantization import dense_shape, is_quantized

# Shares of the data sheet's rates that programs reach. Others report of an H200 that matrix products run at 790 of 989
# TFLOP/s and copies at 4.3 of 4.8 TB/s; jlade has not been measured there.
ARITHMETIC = 0.8
BANDWIDTH = 0.9
KERNEL = 2e-6  # seconds of the shortest kernel of a GPU, with its launch in a CUDA graph; assumed, not measured

SEVERAL = 1.15  # times the bytes that CPUs read when they multiply weights by several vectors; measured

SLACK = 1.15  # an interpolated step time may be too long by this factor


class Rates(NamedTuple):
    """The rates that programs reach on a device, per second."""

    flops: float
    bytes: float
    cycles: float | None = None  # of a TPU's clock
    kernel: float = 0.0  # seconds that every kernel takes at least
    overlaps: bool = True  # whether memory is read during arithmetic


# Two cores of an AMD EPYC with AVX-512, in float32. Their ratio decides, and it differs less than the rates.
CPU = Rates(flops=180e9, bytes=35e9, overlaps=False)


class Weights(NamedTuple):
    """The weights of a model.

    Attributes:
      num_bytes: the mean of a parameter.
      in_experts: the share of the parameters that are in experts.
      config: of a model with experts, None for others.
    """

    num_bytes: float = 2.0
    in_experts: float = 0.0
    config: LlamaConfig | None = None

    def used(self, tokens: float) -> tuple[float, float]:
        """Returns the shares of the parameters that `tokens` read, all of them together and one of them.

        The former is an expectation: each token chooses among the experts as if all were as likely.
        """
        if self.config is None:
            return 1.0, 1.0
        rest, read = 1 - self.in_experts, self.config.share_of_experts
        return rest + self.in_experts * read(tokens), rest + self.in_experts * read(1)

    def counted(self, platform: str) -> "Weights":
        """Returns the weights as they count on a platform, where GPUs and TPUs take float32 for bfloat16."""
        return self if platform == "cpu" else self._replace(num_bytes=min(self.num_bytes, 2.0))


BFLOAT16 = Weights()


class Operation(NamedTuple):
    """Work whose arithmetic and memory traffic may overlap: a part of a step, or a kernel."""

    flops: float  # multiplications and additions of matrix products
    num_bytes: float  # read from and written to main memory
    kernels: int = 0  # that it takes at least
    cycles: int = 0  # a compiler's estimate of the arithmetic, used instead of `flops`; 0 for none
    times: float = 1  # that it runs
    is_asynchronous: bool = False  # the next one does not wait for it


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
    device = devices.of_kind(device_kind)
    return Rates(
        flops=ARITHMETIC * 1e12 * device.tflops,
        bytes=BANDWIDTH * 1e12 * device.terabytes,
        cycles=1e9 * device.target.gigahertz if isinstance(device.target, Tpu) else None,
        kernel=KERNEL if platform == "gpu" else 0.0,
    )


def time(rates: Rates, operations: Iterable[Operation]) -> Time:
    """Returns the time of operations, one after the other.

    Each takes as long as its arithmetic or its memory traffic, whichever takes longer; on a device that does one after
    the other it is their sum. Asynchronous ones run beside the others, and share the bandwidth with them.
    """
    total = arithmetic = memory = 0.0
    for flops, num_bytes, kernels, cycles, times, is_asynchronous in operations:
        computing = cycles / rates.cycles if cycles and rates.cycles else flops / rates.flops
        moving = num_bytes / rates.bytes
        each = max(computing, moving) if rates.overlaps else computing + moving
        total += 0.0 if is_asynchronous else times * max(each, kernels * rates.kernel)
        arithmetic += times * computing
        memory += times * moving
    return Time(max(total, memory), arithmetic, memory)


def step_time(rates: Rates, block_size: int, batch_size: int = 1, weights: Weights = BFLOAT16) -> Time:
    """Returns the time of a step, per parameter of the model: of its products with the weights alone.

    Args:
      rates: of the device.
      block_size: tokens of each sequence.
      batch_size: B. The sequences of a batch share one read of the weights.
      weights: of the model.
    """
    tokens = block_size * batch_size
    read, used_by_each = weights.used(tokens)
    several = SEVERAL if not rates.overlaps and tokens > 1 else 1.0
    return time(rates, [Operation(2.0 * tokens * used_by_each, weights.num_bytes * read * several)])


def estimate(
    platform: str, device_kind: str, batch_size: int = 1, weights: Weights = BFLOAT16, lookahead: int = 1
) -> LookaheadConfig:
    """Returns the widest setting of "auto" whose step takes as long as a plain one, or `config.PLAIN`.

    With a mixture of experts no block is free, as more tokens read more experts: it is then the fastest setting, by the
    tokens per step of `jlade.costs.settings`.

    Args:
      platform: "cpu", "gpu" or "tpu". CPUs have no idle arithmetic; they get a block of 8 tokens.
      device_kind: the attribute of a `jax.Device`.
      batch_size: B.
      weights: of the model. On GPUs and TPUs float32 counts as bfloat16: GPUs multiply it, as TF32, at half the rate.
      lookahead: devices that share the tokens of a step. With more than one, wider trees are settings too.
    """
    device, weights = rates(platform, device_kind), weights.counted(platform)
    settings = settings_lib.TREES if lookahead > 1 else settings_lib.AUTO

    def step(setting: LookaheadConfig) -> Time:
        return step_time(device, division.share_size(setting, lookahead)[0], batch_size, weights)

    if weights.config is not None:
        tokens = {PLAIN: 1.0} | settings_lib.measured()
        tried = [PLAIN, *(setting for setting in settings if setting in tokens)]
        return max(tried, key=lambda setting: tokens[setting] / step(setting).total)
    if platform == "cpu":
        return SMALL_BLOCK
    return next((setting for setting in settings if step(setting).arithmetic <= step(setting).memory), PLAIN)


def weights_of(params: Any) -> Weights:
    """Returns the weights of a pytree of parameters, or of their shapes."""
    size = max(1, _num_parameters(params))
    mean = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params) if hasattr(leaf, "dtype")) / size
    config = getattr(params, "config", None)
    if not isinstance(config, LlamaConfig) or not config.num_experts:
        return Weights(mean)
    return Weights(mean, _num_parameters([layer.experts for layer in params.layers]) / size, config)


def _num_parameters(tree: Any) -> int:
    """Returns the number of parameters in a pytree, which those of few bits are too."""
    leaves = jax.tree.leaves(tree, is_leaf=is_quantized)
    return sum(math.prod(dense_shape(leaf)) for leaf in leaves if is_quantized(leaf) or hasattr(leaf, "dtype"))


def step_times(platform: str, device_kind: str, batch_size: int = 1, weights: Weights = BFLOAT16) -> dict[int, float]:
    """Returns the time of a step by block size, in seconds per parameter. Arguments are those of `estimate`."""
    device, weights = rates(platform, device_kind), weights.counted(platform)
    sizes = sorted({1, MAX_BLOCK_SIZE, *(setting.block_size for setting in settings_lib.AUTO)})
    return {size: step_time(device, size, batch_size, weights).total for size in sizes}


def speed_limit(setting: LookaheadConfig, step_times: dict[int, float]) -> float:
    """Returns the speed, relative to plain decoding, of a setting that accepts as many tokens as it can in every step.

    Args:
      setting: the setting.
      step_times: times by block size, in ascending order from 1; interpolated between sizes, constant above the
        largest.
    """
    sizes, times = list(step_times), list(step_times.values())
    return SLACK * setting.max_accepted * times[0] / float(np.interp(setting.block_size, sizes, times))
