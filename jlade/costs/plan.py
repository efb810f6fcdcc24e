"""`jlade.plan`: the meshes for a model, with their memory, estimated speed and setting. Nothing is compiled."""

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from jlade.config import PLAIN, LookaheadConfig
from jlade.conversion import location
from jlade.conversion.formats import read_config
from jlade.conversion.tensors import param_shapes
from jlade.costs import devices, estimate
from jlade.costs import settings as settings_lib
from jlade.costs import work as work_lib
from jlade.costs.devices import MACHINE, NETWORK, Device
from jlade.costs.settings import Source
from jlade.costs.work import Collective, MemoryEstimate, MeshShape, Shard, Work
from jlade.errors import check_int
from jlade.lookahead import names
from jlade.models import kv_rounding, quantization, sharding
from jlade.models.llama import LlamaConfig

DTYPES = ("bfloat16", "float16", "float32")
SIMILAR = 0.98  # of the highest speed: then the narrower block, or fewer devices, are better

# Assumptions. None of these has been measured here.
LINK = 0.8  # share of the data sheet's rate that a collective reaches
SMALL = 15  # operations of a layer besides its products: norms, rotation, the cache
OPERATION = {"gpu": estimate.KERNEL, "tpu": 1e-6}  # seconds of a small operation
MESSAGE = {"gpu": 2e-6, "tpu": 1e-6}  # seconds of a message to a linked device
NETWORK_MESSAGE = 5e-6  # seconds of a message between machines

# The share of a step that a window and drafts take besides, by the paper (arXiv 2402.02057, Tables 2 and 3, an A100):
# its steps take S / speedup = 1.07 to 1.12 plain ones, whatever their width, and 1.00 by the estimate of their parts.
DRAFTING = 0.096


class StepTime(NamedTuple):
    """Estimated seconds of a step.

    Attributes:
      total: of the parts one after the other.
      floor: to read weights and cache once.
      arithmetic: of the matrix products alone.
      memory: to read weights, cache and logits.
      small: of the many short operations.
      collective: between devices.
      drafting: of a window and drafts, besides the model.
    """

    total: float
    floor: float
    arithmetic: float
    memory: float
    small: float
    collective: float
    drafting: float = 0.0


class Option(NamedTuple):
    """A mesh with the setting that is fastest on it.

    Attributes:
      layout: sizes of the mesh.
      lookahead: the setting.
      compression: tokens per step.
      memory: of a device.
      fits: whether the device has as much.
      step: estimated.
      collectives: in a step.
      tokens_per_second: of all sequences together.
    """

    layout: MeshShape
    lookahead: LookaheadConfig
    compression: float
    memory: MemoryEstimate
    fits: bool
    step: StepTime
    collectives: tuple[Collective, ...]
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """Meshes of up to `count` devices for a model.

    Attributes:
      memory: bytes of a device.
      compression: the source of the tokens per step, or their number.
      options: those that fit, the fastest first, then those that do not.
    """

    device: str
    count: int
    batch_size: int
    capacity: int
    dtype: str
    bits: int | None
    kv_dtype: str | None
    compression: Source | float
    memory: int
    options: tuple[Option, ...]

    @property
    def recommended(self) -> Option | None:
        """The option with the fewest devices among the fastest, None if none fits."""
        fitting = [option for option in self.options if option.fits]
        fastest = [x for x in fitting if x.tokens_per_second >= SIMILAR * fitting[0].tokens_per_second]
        return min(fastest, key=lambda option: option.layout.num_devices, default=None)

    def facts(self) -> dict[str, Any]:
        """Returns JSON-like values."""
        fields = ("device", "count", "batch_size", "capacity", "dtype", "bits", "kv_dtype", "compression")
        return {name: getattr(self, name) for name in fields} | {
            "memory_bytes": self.memory,
            "recommended": self.recommended and _facts(self.recommended),
            "options": [_facts(option) for option in self.options],
        }


def plan(
    model: LlamaConfig | str | os.PathLike[str],
    device: str,
    count: int = 1,
    *,
    dtype: str = "bfloat16",
    bits: int | None = None,
    kv_dtype: Literal["int8", "float8_e4m3fn"] | None = None,
    lookahead: LookaheadConfig | Literal["auto"] | None = "auto",
    batch_size: int = 1,
    capacity: int = 1024,
    compression: Source | float = "smollm2",
) -> Plan:
    """Estimates greedy decoding on every mesh of up to `count` devices that the model can be divided among.

    The estimates come from shapes and data sheets. Nothing is compiled, no weight is read, no device is needed.

    Args:
      model: a directory with a `config.json`, a GGUF file, an id of the Hugging Face Hub, of which no weights are
        fetched, or the configuration.
      device: the name of a kind of TPU or GPU, like "v5e" or "h100": a key of `jlade.costs.devices.DEVICES`.
      count: number of devices. Meshes of a divisor of it are considered too.
      dtype: of weights and cache: "bfloat16", "float16" or "float32".
      bits: 8 or 4 for matrices of so many bits, None for `dtype`.
      kv_dtype: of keys and values, as in `jlade.generate`.
      lookahead: the setting, None for plain decoding, or "auto" for the fastest that has a known compression.
      batch_size: number of sequences B.
      capacity: tokens of prompt and text in the cache, which is taken to be full.
      compression: tokens per step: "smollm2" for those measured with SmolLM2-135M-Instruct; "paper" for the formula
        fitted to LLaMA-2-7B-Chat on MT-Bench, for settings without a tree; or the number for `lookahead`.

    Raises:
      TypeError, ValueError: an argument is out of range; the message names it and what is accepted.
    """
    check_int("count", count, 1)
    check_int("batch_size", batch_size, 1)
    sheet = devices.named(device)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(repr, DTYPES))}; got {dtype!r}")
    kv_rounding.check(kv_dtype)
    config = model if isinstance(model, LlamaConfig) else read_config(location.find(model, argument="model"))
    if check_int("capacity", capacity, 2) > config.max_positions:
        raise ValueError(f"capacity must be at most {config.max_positions}, the model's positions, got {capacity}")
    settings = _settings(lookahead, compression)
    quantization.check_bits(bits)
    shards = {
        n: work_lib.shard(param_shapes(config, dtype, bits, n), n, kv_dtype)
        for n in _divisors(count)
        if sharding.can_divide(config, n)
    }
    options = [
        _best([_option(*each, shards[layout.model], layout, batch_size, capacity, sheet) for each in settings.items()])
        for layout in _layouts(count, batch_size, shards)
    ]
    options.sort(key=lambda option: (not option.fits, -option.tokens_per_second, option.layout.num_devices))
    return Plan(device, count, batch_size, capacity, dtype, bits, kv_dtype, compression, sheet.memory, tuple(options))


def step_time(work: Work, num_layers: float, device: Device) -> StepTime:
    """Returns the estimated time of the model in a step: its parts, small operations and collectives, one by one.

    Args:
      work: of each device.
      num_layers: of the model, a half for each that is a mixer or an MLP alone.
      device: of this kind.
    """
    rates = estimate.rates(device.platform, device.kind)
    parts = estimate.time(rates, work.parts)
    small = SMALL * num_layers * OPERATION[device.platform]
    collective = sum(collective_time(each, device) for each in work.collectives)
    read = work.num_bytes - work.logits_bytes
    return StepTime(
        total=parts.total + small + collective,
        floor=read / rates.bytes,
        arithmetic=parts.arithmetic,
        memory=parts.memory,
        small=small,
        collective=collective,
    )


def collective_time(collective: Collective, device: Device) -> float:
    """Returns the estimated seconds of a collective.

    k devices send 2 log2(k) messages one after the other, and 2 (k-1) / k of their bytes.
    """
    k, (message, rate) = collective.devices, _link(device, collective.span)
    sent = 2 * (k - 1) / k * collective.num_bytes
    return collective.times * 2 * math.ceil(math.log2(k)) * message + sent / rate


def pipeline_time(step: StepTime, num_bytes: int, stages: int, device: Device) -> float:
    """Returns the estimated seconds of a step of one text with the layers divided into stages, a device each.

    No stage can begin before the one in front of it has ended, so that all of them take the time of `step`, and each
    but the last one sends a message of `num_bytes`, the hidden states of the step's tokens. `jlade` has no such axis:
    the estimate is for comparisons.
    """
    message, rate = _link(device, stages)
    return step.total + (stages - 1) * (message + num_bytes / rate)


def _link(device: Device, span: int) -> tuple[float, float]:
    """Returns the seconds of a message among `span` consecutive devices, and the bytes per second of their links."""
    rate, message = device.link, MESSAGE[device.platform]
    if device.platform == "gpu" and span > MACHINE:
        rate, message = min(rate, NETWORK), NETWORK_MESSAGE
    return message, LINK * 1e9 * rate


def _settings(lookahead: Any, compression: Any) -> dict[LookaheadConfig, float]:
    """Returns the tokens per step of the settings to try."""
    if lookahead != "auto" and not isinstance(lookahead, LookaheadConfig | None):
        raise TypeError(f'lookahead must be a LookaheadConfig, "auto", or None for plain decoding, got {lookahead!r}')
    if compression not in settings_lib.SOURCES:
        if isinstance(compression, bool) or not isinstance(compression, int | float):
            accepted = ", ".join(f'"{source}"' for source in settings_lib.SOURCES)
            raise TypeError(f"compression must be {accepted} or a number, got {compression!r}")
        if lookahead == "auto":
            raise ValueError(f"compression={compression} is that of one setting: name it with lookahead")
        setting = lookahead or PLAIN
        if not 1 <= compression <= setting.max_accepted:
            raise ValueError(f"compression must be 1 to {setting.max_accepted} tokens per step, got {compression}")
        return {setting: float(compression)}
    known = settings_lib.OF_PAPER if compression == "paper" else settings_lib.measured()
    settings = [PLAIN, *known] if lookahead == "auto" else [lookahead or PLAIN]
    return {setting: settings_lib.tokens_per_step(setting, compression) for setting in settings}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _layouts(count: int, batch_size: int, shards: dict[int, Shard]) -> Iterator[MeshShape]:
    """Yields the meshes whose sizes' product divides `count`."""
    for model in shards:
        for lookahead in _divisors(count // model):
            for data in _divisors(count // model // lookahead):
                if batch_size % data == 0:
                    yield MeshShape(data, lookahead, model)


def _option(
    setting: LookaheadConfig,
    compression: float,
    shard: Shard,
    layout: MeshShape,
    batch_size: int,
    capacity: int,
    device: Device,
) -> Option:
    work = work_lib.work(shard, layout, setting, batch_size, capacity)
    memory = work_lib.memory(shard, layout, setting, batch_size, capacity)
    step = step_time(work, shard.config.num_parts / 2, device)
    if setting != PLAIN:
        drafting = DRAFTING * step.total
        step = step._replace(total=step.total + drafting, drafting=drafting)
    speed = batch_size * compression / step.total
    return Option(layout, setting, compression, memory, memory.total <= device.memory, step, work.collectives, speed)


def _best(options: Sequence[Option]) -> Option:
    """Returns the option with the narrowest block among the fastest that fit, or the smallest one if none fits."""
    fitting = [option for option in options if option.fits]
    if not fitting:
        return min(options, key=lambda option: option.memory.total)
    highest = max(option.tokens_per_second for option in fitting)
    fastest = [option for option in fitting if option.tokens_per_second >= SIMILAR * highest]
    return min(fastest, key=lambda option: option.lookahead.block_size)


def _facts(option: Option) -> dict[str, Any]:
    times = {f"{name}_ms": 1e3 * seconds for name, seconds in option.step._asdict().items() if name != "total"}
    return {
        "mesh": option.layout._asdict(),
        "devices": option.layout.num_devices,
        "lookahead": names.name(option.lookahead),
        "compression": option.compression,
        "fits": option.fits,
        "memory_bytes": option.memory._asdict() | {"total": option.memory.total},
        "step_ms": 1e3 * option.step.total,
        **times,
        "collectives": sum(each.times for each in option.collectives),
        "collective_bytes": sum(each.num_bytes for each in option.collectives),
        "tokens_per_second": option.tokens_per_second,
    }
