"""Copies of what rows have read and does not lie in pages, for prompts that begin as their texts."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jlade import mesh as mesh_lib
from jlade.decoding import ahead, sharding
from jlade.decoding.state import DecodeConfig, DecodeState, Prefix
from jlade.engine import pages, rows
from jlade.mesh import DATA
from jlade.models.base import KVCache, Params, resize

LEAST = 128  # tokens that a copy has room for; a power of two times as many if it has more


def sizes(capacity: int) -> list[int]:
    """Returns the capacities that kept prefixes may have: few, as each has programs of its own."""
    doubled = itertools.takewhile(lambda size: size < capacity, (LEAST << power for power in itertools.count()))
    return [*doubled, capacity]


def prefix_of(state: DecodeState, config: DecodeConfig) -> Prefix:
    """Returns what the rows have read of their texts."""
    return Prefix(state.cache, {name: state.sources[name] for name in config.sources.readers.specs})


def keep(params: Params, prefix: Prefix, index: int, size: int, config: DecodeConfig) -> Prefix:
    """Returns a copy of the row `index` of a prefix, with a capacity of `size` tokens, which its text fits in.

    All groups of devices along `data` have it, as any of them may read the prompt that takes it over.
    """
    return _keep(params, prefix, np.int32(index), size=size, config=config)


@ahead.jit(static_argnames=("size", "config"))
def _keep(params: Params, prefix: Prefix, index: jax.Array, *, size: int, config: DecodeConfig) -> Prefix:
    groups = mesh_lib.size(config.mesh, DATA)

    def of_device(params: Params, prefix: Prefix, index: jax.Array) -> Prefix:
        number = len(prefix.cache.length)
        is_here, place = rows.place(index, number, groups)

        def copy(array: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_slice_in_dim(array, place, 1)
            return row if groups == 1 else jax.lax.psum(jnp.where(is_here, row, jnp.zeros_like(row)), DATA)

        cache = resize(prefix.cache, prefix.cache.length, pages.rest_shapes(params, config, number, size))
        kept: Prefix = jax.tree.map(copy, Prefix(cache, prefix.sources))
        return kept

    return _shard(of_device, params, prefix, index, config)


def restore(params: Params, kept: Prefix, length: int, config: DecodeConfig, capacity: int) -> Prefix:
    """Returns a copy of a kept prefix, of its first `length` tokens, from which a prompt is read on.

    The states of the sources of drafts stay as they are: they may know of more tokens, which affects no text.
    """
    return _restore(params, kept, np.int32(length), config=config, capacity=capacity)


@ahead.jit(static_argnames=("config", "capacity"))
def _restore(params: Params, kept: Prefix, length: jax.Array, *, config: DecodeConfig, capacity: int) -> Prefix:
    def of_device(params: Params, kept: Prefix, length: jax.Array) -> Prefix:
        cache = resize(kept.cache, length[None], pages.rest_shapes(params, config, 1, capacity))
        if isinstance(cache, KVCache):  # tokens past the length may have left NaN, and 0 * NaN is NaN
            cache = dataclasses.replace(cache, **jax.tree.map(functools.partial(_clear, length=length), cache.arrays))
        copy: Prefix = jax.tree.map(jnp.copy, Prefix(cache, kept.sources))  # programs that read take over its buffers
        return copy

    return _shard(of_device, params, kept, length, config)


def _shard(
    of_device: Callable[[Params, Prefix, jax.Array], Prefix],
    params: Params,
    prefix: Prefix,
    number: jax.Array,
    config: DecodeConfig,
) -> Prefix:
    """Returns `of_device(params, prefix, number)`, which each device computes for its parts of prefixes."""
    specs = sharding.prefix_specs(config.decoder, config.sources.readers, prefix)
    in_specs = sharding.param_specs(params, config.mesh), specs, PartitionSpec()
    copied: Prefix = mesh_lib.shard(of_device, config.mesh, in_specs, specs)(params, prefix, number)
    return copied


def _clear(layer: jax.Array, length: jax.Array) -> jax.Array:
    """Returns a layer [1, KH, S, D], or its scales [1, KH, S], with zeros for the tokens from `length` on."""
    entry = jax.lax.broadcasted_iota(jnp.int32, layer.shape, 2)
    return jnp.where(entry < length, layer, 0)


def num_bytes(arrays: Any) -> int:
    """Returns the bytes of a pytree of arrays or their shapes."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))
