"""Memory: what devices have, and what a model and its programs need of it."""

import functools
import os
import pathlib
from typing import Any, NamedTuple

import jax

from jlade.config import LookaheadConfig
from jlade.costs.devices import DEVICES
from jlade.costs.work import MeshShape, Shard, cache_bytes
from jlade.drafts.sources import Sources
from jlade.lookahead.division import share_size
from jlade.vocabulary import VocabularyShard

CHUNK = 512  # tokens of a prompt that are read at once
PROGRAM = 500_000_000  # bytes of temporary memory of any program, an allowance: tests/accelerators compares it


class MemoryEstimate(NamedTuple):
    """Bytes of a device's memory. `temporary` is an allowance: compilers decide it."""

    weights: int
    cache: int
    pool: int  # and the states of other sources of drafts
    temporary: int

    @property
    def total(self) -> int:
        return sum(self)


class Needs(NamedTuple):
    """Bytes that a compiled program needs. Outputs in an argument's memory are not counted."""

    arguments: int
    outputs: int
    temporary: int

    @classmethod
    def of(cls, program: Any) -> "Needs":
        """Returns those of a `jax.stages.Compiled`."""
        stats = program.memory_analysis()
        outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
        return cls(stats.argument_size_in_bytes, outputs, stats.temp_size_in_bytes)


def of_step(
    shard: Shard, layout: MeshShape, setting: LookaheadConfig, batch_size: int, capacity: int
) -> MemoryEstimate:
    """Returns the memory of a device. Arguments are those of `jlade.costs.work.work`."""
    c, sequences = shard.config, batch_size // layout.data
    _, outputs = share_size(setting, layout.lookahead)
    inner = max(c.intermediate_size, c.dense_size) // layout.model
    if c.num_experts:  # the tokens of each expert, in and out
        inner += 2 * c.experts_per_token * (c.expert_width + c.expert_size)
    chunk = CHUNK * (6 * c.hidden_size + 3 * inner) * shard.item
    if c.recurrence is not None and c.recurrence.has_memory:  # products of each two tokens of a chunk
        chunk += round(4 * 4 * CHUNK**2 * c.recurrence.value_heads * shard.recurrent_share)
    return MemoryEstimate(
        weights=shard.num_bytes,
        cache=sequences * cache_bytes(shard, capacity),
        pool=sequences * _source_bytes(setting, c.vocab_size),
        temporary=PROGRAM + sequences * (chunk + 4 * outputs * shard.vocab_size),
    )


@functools.cache
def _source_bytes(setting: LookaheadConfig, vocab_size: int) -> int:
    """Returns the bytes of the states of the sources of drafts of a sequence. They are whole on each device."""
    states = jax.eval_shape(Sources.of(setting, VocabularyShard(vocab_size)).empty)
    return sum(state.size * state.dtype.itemsize for state in jax.tree.leaves(states))


def of_device(name: str) -> int:
    """Returns the bytes of a device's memory. `name` is a key of `DEVICES`, or "cpu"."""
    return DEVICES[name].memory if name in DEVICES else _of_host()


def of_attached(device: jax.Device) -> int:
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
