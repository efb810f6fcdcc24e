"""The pages of an engine: their arrays on the device, and which texts hold them.

Each group of devices along `data` has pages of its own, with the same numbers. A program that is about one group's gets
page 0, which belongs to no text, for the others.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jlade import mesh as mesh_lib
from jlade.decoding import ahead
from jlade.decoding.sharding import BATCH, param_specs
from jlade.decoding.state import DecodeConfig, DecodeState
from jlade.errors import check_int
from jlade.generation.prompts import HostArray
from jlade.mesh import DATA, HEADS
from jlade.models.base import Cache, Decoder, KVCache, Params

Layers = tuple[tuple[jax.Array, ...], ...]  # [P, KH, S, ...] in every array, of each layer in pages

SPECS = PartitionSpec(DATA, HEADS)
SIZE = 128  # tokens of a page


class PagePool:
    """The pages of an engine. A model whose cache has none, such as one with windows in all layers, needs none.

    Args:
      params: of the engine, or their shapes.
      config: of the engine, which says whether there are pages.
      num_rows: B.
      capacity: C, tokens of a row.
      num_tokens: that the pages of all groups hold together, at least `capacity` in each. There is one page more for
        each row, for the copy of the last page of a text that it continues.

    Attributes:
      is_used: whether there are any.
      num_groups: of devices along `data`.
      page_size: tokens of a page.
      num_pages: of all groups.
    """

    def __init__(self, params: Params, config: DecodeConfig, num_rows: int, capacity: int, num_tokens: int):
        self._params, self._config, self._capacity = params, config, capacity
        self.is_used: bool = config.paged
        self.page_size: int = min(SIZE, capacity)
        self.num_groups: int = mesh_lib.size(config.mesh, DATA)
        groups, size = self.num_groups, self.page_size
        self._num_places = number_for(capacity, size)
        number = max(number_for(num_tokens, size * groups), self._num_places) + num_rows // groups
        self.num_pages: int = number * groups
        self._allocators = [Allocator(number, size) for _ in range(groups)]
        self._spoiled: list[set[int]] = [set() for _ in range(groups)]  # pages with numbers that may not be finite
        self._layers: Layers | None = None
        self.make_room: Callable[[int], bool] = lambda group: False  # drops what is kept of a group, if there is any

    @property
    def layers(self) -> Layers:
        """The arrays of the pages, made when they are first asked for; shapes for shapes of parameters."""
        if self._layers is None:
            sizes = {"number": self._allocators[0].number, "size": self.page_size}
            self._layers = empty(self._params, config=self._config, **sizes) if self.is_used else ()
        return self._layers

    def clear(self) -> None:
        """Drops the arrays, which a failed program may have taken with it, and forgets the texts that hold pages."""
        self._layers = None
        self._allocators = [Allocator(old.number, old.size) for old in self._allocators]
        self._spoiled = [set() for _ in self._allocators]

    @property
    def is_lost(self) -> bool:
        """Whether a failed program has taken the arrays with it."""
        return any(x.is_deleted() for x in jax.tree.leaves(self._layers))

    @property
    def row_bytes(self) -> int:
        """The bytes of the pages of C tokens."""
        return self._num_places * self.page_bytes

    @functools.cached_property
    def page_bytes(self) -> int:
        """The bytes of a page."""
        if not self.is_used:
            return 0
        first = functools.partial(empty, config=self._config, number=0, size=self.page_size)  # page 0 of each group
        return mesh_lib.num_bytes(jax.eval_shape(first, ahead.shapes(self._params))) // self.num_groups

    def num_free(self, group: int) -> int:
        """Returns the pages of a group that no text holds."""
        return self._allocators[group].num_free

    def attach(self, cache: Cache, held: Mapping[int, Sequence[int]]) -> Cache:
        """Returns a cache of B rows with the pages that some of them hold, for a program that takes them over."""
        if not self.is_used:
            return cache
        table: HostArray = np.zeros((len(cache.length), self._num_places), np.int32)
        for row, numbers in held.items():
            table[row, : len(numbers)] = numbers
        return dataclasses.replace(cache, pages=self.layers, table=table)

    def detach(self, cache: Cache) -> Cache:
        """Returns the cache without pages, given that of a program, and keeps these."""
        if not self.is_used:
            return cache
        if not isinstance(cache.length, jax.ShapeDtypeStruct):
            self._layers = cache.pages
        return dataclasses.replace(cache, pages=(), table=None)

    def attach_to(self, state: DecodeState, held: Mapping[int, Sequence[int]]) -> DecodeState:
        """Returns a state with the pages; see `attach`."""
        return state.with_cache(self.attach(state.cache, held))

    def detach_from(self, state: DecodeState) -> DecodeState:
        """Returns a state without the pages; see `detach`."""
        return state.with_cache(self.detach(state.cache))

    def grow(self, held: list[int], num_tokens: int, group: int) -> bool:
        """Gives a text the pages for so many tokens; returns whether there were enough. `make_room` may free some."""
        allocator = self._allocators[group]
        missing = allocator.missing(held, min(num_tokens, self._capacity)) if self.is_used else 0
        while allocator.num_free < missing:
            if not self.make_room(group):
                return False
        held += allocator.take(missing)
        return True

    def share(self, held: Sequence[int], num_tokens: int, group: int) -> list[int] | None:
        """Returns the pages of a text that begins with so many tokens of another, None if there is no page for it.

        Full pages belong to both texts. Of the last page, to which each of them will write, it gets a copy.
        """
        if not self.is_used:
            return []
        full, rest = divmod(num_tokens, self.page_size)
        shared = list(held[: full + (rest > 0)])
        self._allocators[group].share(shared)
        if rest:
            last = shared.pop()
            if not self.grow(shared, num_tokens, group):
                self.drop([*shared, last], group)
                return None
            self._copy(last, shared[-1], rest, group)
            self.drop([last], group)
        return shared

    def keep(self, held: Sequence[int], num_tokens: int, group: int) -> list[int]:
        """Returns the pages of the first tokens of a text, which are kept: the text may grow in the last of them."""
        kept = list(held[: number_for(num_tokens, self.page_size)]) if self.is_used else []
        self._allocators[group].share(kept)
        return kept

    def drop(self, held: Sequence[int], group: int, is_spoiled: bool = False) -> None:
        """Takes its pages from a text. If its numbers may not be finite, they are cleared before others get them."""
        spoiled = self._spoiled[group]
        if is_spoiled:
            spoiled.update(held)
        for page in spoiled.intersection(self._allocators[group].drop(held)):
            self._copy(0, page, 0, group)
            spoiled.remove(page)

    def take_out(self, held: Sequence[int], group: int) -> Any:
        """Returns the contents of the pages of a text, in NumPy."""
        if not self.is_used:
            return ()
        return mesh_lib.fetch(_take(self.layers, self._padded(held, group), np.int32(group), config=self._config))

    def put_in(self, contents: Any, held: Sequence[int], group: int) -> None:
        """Writes what `take_out` has returned to the pages of a text, of which there are as many."""
        if self.is_used:
            self._layers = _put(self.layers, self._padded(held, group), contents, config=self._config)

    def compile(self) -> None:
        """Compiles the programs of pages, for shapes of parameters."""
        if self.is_used:
            layers = self.layers
            self._copy(0, 0, 0, 0)
            self._layers = layers  # not those of `_copy`, whose places may be others to JAX
            self.put_in(self.take_out([], 0), [], 0)
            self._layers = layers

    def _copy(self, source: int, target: int, count: int, group: int) -> None:
        """Copies the first `count` tokens of a page of a group to another page, and clears the rest of that.

        What a text leaves behind may be NaN, and 0 * NaN is NaN.
        """
        pages = (self._of_group([page], group) for page in (source, target))
        self._layers = _copy(self.layers, *pages, np.int32(count), config=self._config)

    def _padded(self, held: Sequence[int], group: int) -> HostArray:
        return self._of_group([*held, *[0] * (self._num_places - len(held))], group)

    def _of_group(self, numbers: Sequence[int], group: int) -> HostArray:
        """Returns numbers of pages as an array [groups, N], with page 0 for all groups but one."""
        array: HostArray = np.zeros((self.num_groups, len(numbers)), np.int32)
        array[group] = numbers
        return array


class Allocator:
    """Pages 1 to P, each of `size` tokens, and how many texts hold each. A page without one is free.

    Page 0 is never given to a text.
    """

    def __init__(self, number: int, size: int):
        self.number, self.size = number, size
        self._free = list(range(number, 0, -1))
        self._num_holders = [0] * (number + 1)

    @property
    def num_free(self) -> int:
        """Pages that no text holds."""
        return len(self._free)

    def missing(self, pages: list[int], num_tokens: int) -> int:
        """Returns how many pages a text lacks for so many tokens."""
        return max(0, number_for(num_tokens, self.size) - len(pages))

    def take(self, number: int) -> list[int]:
        """Returns free pages, which a text holds from now on.

        Raises:
          ValueError: fewer are free.
        """
        if number > self.num_free:
            raise ValueError(f"{number} pages were asked for, and {self.num_free} are free")
        taken = [self._free.pop() for _ in range(number)]
        self.share(taken)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Lets one more text hold pages."""
        for page in pages:
            self._num_holders[page] += 1

    def drop(self, pages: Iterable[int]) -> list[int]:
        """Lets one text less hold pages, and returns those that are free now: no text holds them."""
        freed = []
        for page in pages:
            self._num_holders[page] -= 1
            if not self._num_holders[page]:
                freed.append(page)
        self._free += freed
        return freed


def number_for(num_tokens: int, size: int) -> int:
    """Returns the pages that hold so many tokens."""
    return -(-num_tokens // size)


def check_tokens(cache_tokens: Any, num_rows: int, capacity: int, config: DecodeConfig) -> int:
    """Returns the tokens that the pages of an engine hold, checked, and the default ones for None."""
    if cache_tokens is None:
        return num_rows * capacity
    least = capacity * mesh_lib.size(config.mesh, DATA)
    if check_int("cache_tokens", cache_tokens, 1) < least:
        raise ValueError(
            f"cache_tokens must be at least {least}, one row of capacity={capacity} in each group of devices along "
            f"data, got {cache_tokens}"
        )
    return int(cache_tokens)


def is_paged(params: Params, decoder: Decoder, device: jax.Device, cache_tokens: Any) -> bool:
    """Returns whether an engine holds texts in pages: if it pays, and always for a number of tokens of its own.

    Raises:
      ValueError: there is such a number, and the model has no layers that may lie in pages.
    """
    make = getattr(decoder, "init_pages", None)
    has_pages = make is not None and bool(jax.eval_shape(lambda params: make(params, 1, 1, 1, 1), params).pages)
    if cache_tokens is not None and not has_pages:
        raise ValueError(
            f"cache_tokens must be None for a model without layers of whole texts in pages, got {cache_tokens}"
        )
    return has_pages and (cache_tokens is not None or reads_in_place(decoder, device))


def reads_in_place(decoder: Decoder, device: jax.Device) -> bool:
    """Returns whether attention reads pages where they are. Plain attention on GPUs copies them in every step."""
    return device.platform != "gpu" or getattr(decoder, "attention", None) != "plain"


def init_rest(params: Params, config: DecodeConfig, batch_size: int, capacity: int) -> Cache:
    """Returns an empty cache of what does not lie in pages."""
    if not config.paged:
        return config.decoder.init_cache(params, batch_size, capacity)
    cache = config.decoder.init_pages(params, batch_size, capacity, 1, 1)  # type: ignore[attr-defined]
    return dataclasses.replace(cache, pages=(), table=None)


def rest_shapes(params: Params, config: DecodeConfig, batch_size: int, capacity: int) -> Cache:
    """Returns the shapes of `init_rest`."""
    return jax.eval_shape(lambda params: init_rest(params, config, batch_size, capacity), params)


@ahead.jit(static_argnames=("config", "number", "size"))
def empty(params: Params, *, config: DecodeConfig, number: int, size: int) -> Layers:
    """Returns pages of zeros: page 0 and `number` others in each group, of `size` tokens."""

    def of_device(params: Params) -> Layers:
        cache: KVCache = config.decoder.init_pages(params, 1, size, number + 1, size)  # type: ignore[attr-defined]
        # A program that needs no argument has its results on any device, and takes shapes for arrays.
        first = jax.tree.leaves(params)[0]
        layers, _ = jax.lax.optimization_barrier((cache.pages, first[(0,) * first.ndim]))
        return layers

    return mesh_lib.shard(of_device, config.mesh, (param_specs(params, config.mesh),), SPECS)(params)


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


@ahead.jit(static_argnames="config", donate_argnames="layers")
def _put(layers: Layers, pages: jax.Array, contents: Any, *, config: DecodeConfig) -> Layers:
    def of_device(layers: Layers, pages: jax.Array, contents: Any) -> Layers:
        written: Layers = jax.tree.map(lambda array, given: array.at[pages[0]].set(given), layers, contents)
        return written

    return _shard(of_device, config, BATCH, PartitionSpec(None, HEADS))(layers, pages, contents)


def _shard(
    of_device: Callable[..., Layers], config: DecodeConfig, *specs: Any, out: PartitionSpec = SPECS
) -> Callable[..., Layers]:
    """Returns a function of pages and other arrays that each device runs on its part."""
    return mesh_lib.shard(of_device, config.mesh, (SPECS, *specs), out)
