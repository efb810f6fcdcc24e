"""Copies of what rows have read, for prompts that begin as their texts."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jlade import mesh as mesh_lib
from jlade.decoding import sharding
from jlade.decoding.state import DecodeConfig, DecodeState, Prefix
from jlade.engine import rows
from jlade.mesh import DATA
from jlade.models.base import KVCache, Params, resize

LEAST = 128  # entries of a layer of a copy; a power of two times as many if it has more tokens


def sizes(capacity: int) -> list[int]:
    """Returns the entries of a layer that kept prefixes may have: few, as each number has programs of its own."""
    doubled = itertools.takewhile(lambda size: size < capacity, (LEAST << power for power in itertools.count()))
    return [*doubled, capacity]


def prefix_of(state: DecodeState, config: DecodeConfig) -> Prefix:
    """Returns what the rows have read of their texts."""
    states = state.memory.drafts.states
    return Prefix(state.memory.cache, {name: states[name] for name in config.sources().readers.specs})


def keep(prefix: Prefix, index: int, size: int, config: DecodeConfig) -> Prefix:
    """Returns a copy of the row `index` of a prefix, of its first `size` entries in each layer that has more of them.

    All groups of devices along `data` have it, as any of them may read the prompt that takes it over.
    """
    return _keep(prefix, np.int32(index), size=size, config=config)


@functools.partial(jax.jit, static_argnames=("size", "config"))
def _keep(prefix: Prefix, index: jax.Array, *, size: int, config: DecodeConfig) -> Prefix:
    groups = mesh_lib.size(config.mesh, DATA)

    def of_device(prefix: Prefix, index: jax.Array) -> Prefix:
        is_here, place = rows.place(index, len(prefix.cache.length), groups)

        def copy(array: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_slice_in_dim(array, place, 1)
            return row if groups == 1 else jax.lax.psum(jnp.where(is_here, row, jnp.zeros_like(row)), DATA)

        cache = prefix.cache
        keys, values = jax.tree.map(lambda layer: layer[:, :, :size], (cache.keys, cache.values))
        kept: Prefix = jax.tree.map(copy, Prefix(KVCache(keys, values, cache.length), prefix.sources))
        return kept

    specs = sharding.prefix_specs(config.sources().readers, prefix.sources)
    kept: Prefix = mesh_lib.shard(of_device, config.mesh, (specs, PartitionSpec()), specs)(prefix, index)
    return kept


def restore(params: Params, kept: Prefix, length: int, config: DecodeConfig, capacity: int) -> Prefix:
    """Returns a copy of a kept prefix, of its first `length` tokens, from which a prompt is read on.

    The states of the sources of drafts stay as they are: they may know of more tokens, which affects no text.
    """
    return _restore(params, kept, np.int32(length), config=config, capacity=capacity)


@functools.partial(jax.jit, static_argnames=("config", "capacity"))
def _restore(params: Params, kept: Prefix, length: jax.Array, *, config: DecodeConfig, capacity: int) -> Prefix:
    def of_device(params: Params, kept: Prefix, length: jax.Array) -> Prefix:
        shapes = jax.eval_shape(lambda params: config.decoder.init_cache(params, 1, capacity), params)
        # Tokens past the length may have left NaN, and 0 * NaN is NaN.
        clear = functools.partial(_clear, length=length)
        keys, values = jax.tree.map(clear, (kept.cache.keys, kept.cache.values))
        cache = resize(KVCache(keys, values, kept.cache.length), length[None], shapes)
        copy: Prefix = jax.tree.map(jnp.copy, Prefix(cache, kept.sources))  # programs that read take over its buffers
        return copy

    specs = sharding.prefix_specs(config.sources().readers, kept.sources)
    in_specs = sharding.param_specs(params, config.mesh), specs, PartitionSpec()
    restored: Prefix = mesh_lib.shard(of_device, config.mesh, in_specs, specs)(params, kept, length)
    return restored


def _clear(layer: jax.Array, length: jax.Array) -> jax.Array:
    """Returns a layer [1, KH, S, D] with zeros for the tokens from `length` on."""
    entry = jax.lax.broadcasted_iota(jnp.int32, layer.shape, 2)
    return jnp.where(entry < length, layer, 0)


def num_bytes(arrays: Any) -> int:
    """Returns the bytes of a pytree of arrays or their shapes."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays))
