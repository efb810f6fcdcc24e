"""The pages of an engine on the device: which are there, and copies of them.

Each group of devices along `data` has pages of its own, with the same numbers. A program that is about one group's gets
page 0, which belongs to no text, for the others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jlade import mesh as mesh_lib
from jlade.decoding import ahead
from jlade.decoding.sharding import BATCH, param_specs
from jlade.decoding.state import DecodeConfig
from jlade.mesh import DATA, HEADS
from jlade.models.base import Params

Layers = tuple[tuple[jax.Array, ...], ...]  # [P, KH, S, ...] in every array, of each layer in pages

SPECS = PartitionSpec(DATA, HEADS)


@ahead.jit(static_argnames=("config", "capacity", "number", "size"))
def empty(params: Params, *, config: DecodeConfig, capacity: int, number: int, size: int) -> Layers:
    """Returns pages of zeros: page 0 and `number` others in each group, of `size` tokens."""

    def of_device(params: Params) -> Layers:
        layers: Layers = config.decoder.init_pages(params, 1, capacity, number + 1, size).pages.layers  # type: ignore[attr-defined]
        return layers

    return mesh_lib.shard(of_device, config.mesh, (param_specs(params, config.mesh),), SPECS)(params)


def copy(layers: Layers, source: int, target: int, count: int, group: int, config: DecodeConfig) -> Layers:
    """Copies the first `count` tokens of a page of a group to another page, in place, and clears the rest of that.

    What a text leaves behind may be NaN, and 0 * NaN is NaN.
    """
    pages = _of_group([[source], [target]], group, config)
    return _copy(layers, *pages, np.int32(count), config=config)


@ahead.jit(static_argnames="config", donate_argnames="layers")
def _copy(layers: Layers, source: jax.Array, target: jax.Array, count: jax.Array, *, config: DecodeConfig) -> Layers:
    def of_device(layers: Layers, source: jax.Array, target: jax.Array, count: jax.Array) -> Layers:
        def of_array(pages: jax.Array) -> jax.Array:
            page = jax.lax.dynamic_slice_in_dim(pages, source[0, 0], 1)
            entry = jax.lax.broadcasted_iota(jnp.int32, page.shape, 2)
            return jax.lax.dynamic_update_slice_in_dim(pages, jnp.where(entry < count, page, 0), target[0, 0], axis=0)

        copied: Layers = jax.tree.map(of_array, layers)
        return copied

    return _shard(of_device, config, BATCH, BATCH, PartitionSpec())(layers, source, target, count)


def take(layers: Layers, pages: Sequence[int], group: int, config: DecodeConfig) -> Any:
    """Returns the pages of a group, [N, KH, S, ...] in every array, in NumPy."""
    return mesh_lib.fetch(_take(layers, *_of_group([pages], group, config), np.int32(group), config=config))


@ahead.jit(static_argnames="config")
def _take(layers: Layers, pages: jax.Array, group: jax.Array, *, config: DecodeConfig) -> Layers:
    groups = mesh_lib.size(config.mesh, DATA)

    def of_device(layers: Layers, pages: jax.Array, group: jax.Array) -> Layers:
        def of_array(array: jax.Array) -> jax.Array:
            taken = array[pages[0]]
            if groups == 1:
                return taken
            return jax.lax.psum(jnp.where(jax.lax.axis_index(DATA) == group, taken, jnp.zeros_like(taken)), DATA)

        taken: Layers = jax.tree.map(of_array, layers)
        return taken

    return _shard(of_device, config, BATCH, PartitionSpec(), out=PartitionSpec(None, HEADS))(layers, pages, group)


def put(layers: Layers, pages: Sequence[int], contents: Any, group: int, config: DecodeConfig) -> Layers:
    """Writes what `take` has returned to pages of a group, in place."""
    return _put(layers, *_of_group([pages], group, config), contents, config=config)


@ahead.jit(static_argnames="config", donate_argnames="layers")
def _put(layers: Layers, pages: jax.Array, contents: Any, *, config: DecodeConfig) -> Layers:
    def of_device(layers: Layers, pages: jax.Array, contents: Any) -> Layers:
        written: Layers = jax.tree.map(lambda array, given: array.at[pages[0]].set(given), layers, contents)
        return written

    return _shard(of_device, config, BATCH, PartitionSpec(None, HEADS))(layers, pages, contents)


def _of_group(numbers: Sequence[Sequence[int]], group: int, config: DecodeConfig) -> list[np.ndarray]:
    """Returns numbers of pages as arrays [groups, N], with page 0 for all groups but one."""
    arrays = []
    for each in numbers:
        array = np.zeros((mesh_lib.size(config.mesh, DATA), len(each)), np.int32)
        array[group] = each
        arrays.append(array)
    return arrays


def _shard(
    of_device: Callable[..., Layers], config: DecodeConfig, *specs: Any, out: PartitionSpec = SPECS
) -> Callable[..., Layers]:
    """Returns a function of pages and other arrays that each device runs on its part."""
    return mesh_lib.shard(of_device, config.mesh, (SPECS, *specs), out)
