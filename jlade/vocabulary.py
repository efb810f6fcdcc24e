"""The tokens whose logits a device has: the whole vocabulary, or a slice where a mesh divides the model."""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.mesh import MODEL

PART, LANES = 64, 128  # tokens of a part: TPUs copy all logits to divide rows of 128 lanes into smaller parts


class VocabularyShard(NamedTuple):
    """The vocabulary of a device: all tokens, or one of equal slices along axes of the mesh."""

    size: int  # V
    axes: tuple[str, ...] = ()

    @classmethod
    def of(cls, vocab_size: int, mesh: Mesh | None) -> Self:
        """Returns the slices along the axes of `MODEL`, or all tokens where they do not divide among its devices."""
        number = mesh_lib.size(mesh, *MODEL)
        return cls(vocab_size, MODEL if number > 1 and vocab_size % number == 0 else ())

    @property
    def slice_size(self) -> int:
        """V', the number of tokens in a slice."""
        return self.size // jax.lax.axis_size(self.axes) if self.axes else self.size

    @property
    def first(self) -> jax.Array:
        """[] int32, the first token of this device's slice."""
        return jax.lax.axis_index(self.axes) * self.slice_size if self.axes else jnp.int32(0)

    def tokens(self) -> jax.Array:
        """Returns the tokens of this device's slice [V'] int32."""
        index = jnp.arange(self.slice_size, dtype=jnp.int32)
        return self.first + index if self.axes else index

    def take(self, x: jax.Array) -> jax.Array:
        """Returns this device's slice [..., V'] of `x` [..., V]."""
        if not self.axes:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.first, self.slice_size, x.ndim - 1)

    def whole(self, x: jax.Array) -> jax.Array:
        """Returns `x` [..., V], given this device's slice [..., V']."""
        return jax.lax.all_gather(x, self.axes, axis=x.ndim - 1, tiled=True) if self.axes else x

    def argmax(self, logits: jax.Array) -> jax.Array:
        """Returns the first index of the highest of logits [..., V], given this device's slice, as int32 [...]."""
        return self.highest(logits)[1]

    def highest(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the highest of logits [..., V] and its first index, given this device's slice, both [...].

        NaN counts as infinity.
        """
        logits = _without_nan(logits)
        index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        highest, place = jax.lax.platform_dependent(
            logits,
            cpu=lambda logits: _first_highest(*_highest_parts_on_cpu(logits, 1)),
            default=lambda logits: _first_highest(logits, index),
        )
        token = self.first + place
        if not self.axes:
            return highest, token
        of_all = jax.lax.pmax(highest, self.axes)
        return of_all, jax.lax.pmin(jnp.where(highest == of_all, token, self.size - 1), self.axes)

    def top(self, logits: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
        """Returns the indices of the highest of logits [..., V], given this device's slice, and these logits.

        Both are [..., number]. -1 and -inf stand for those that a small vocabulary lacks. If there is NaN, any are.
        """
        kept = min(number, logits.shape[-1])
        values, places = jax.lax.platform_dependent(
            logits,
            cpu=lambda logits: _highest(*_highest_parts_on_cpu(logits, kept), kept),
            tpu=lambda logits: _highest(*_highest_parts(logits, kept, LANES), kept),
            default=lambda logits: _highest(*_highest_parts(logits, kept, PART), kept),
        )
        tokens = self.first + places
        if self.axes:
            values, tokens = (jax.lax.all_gather(x, self.axes, axis=x.ndim - 1, tiled=True) for x in (values, tokens))
            values, tokens = _highest(values, tokens, min(number, values.shape[-1]))
        missing = [(0, 0)] * (logits.ndim - 1) + [(0, number - tokens.shape[-1])]
        return jnp.pad(tokens, missing, constant_values=-1), jnp.pad(values, missing, constant_values=-jnp.inf)


def _without_nan(logits: jax.Array) -> jax.Array:
    """Returns the logits with infinity for NaN, which XLA's maximum for CPUs drops."""
    return jnp.where(logits < jnp.inf, logits, jnp.inf)


def _first_highest(values: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the highest of values [..., K], and the first of its places [..., K], as [...].

    Two plain reductions become vector code on CPUs; `jnp.argmax`, a reduction of pairs, does not.
    """
    highest = jnp.max(values, axis=-1)
    return highest, jnp.min(jnp.where(values == highest[..., None], places, places[..., -1:]), axis=-1)


def _highest(values: jax.Array, places: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """Returns the highest of values [..., K] and their places, both [..., number]."""
    values, best = jax.lax.top_k(values, number)
    return values, jnp.take_along_axis(places, best, axis=-1)


def _highest_parts(logits: jax.Array, number: int, largest: int) -> tuple[jax.Array, jax.Array]:
    """Returns the parts of the vocabulary that hold the highest of logits [..., V], and their places.

    To search these parts takes less time than to sort all logits.

    Args:
      logits: of all tokens, or of a slice.
      number: of the logits, and of the parts.
      largest: size of a part.

    Returns:
      Logits and indices [..., K] of the `number` parts with the highest maxima.
    """
    *rows, size = logits.shape
    part = _part_size(size, number, largest)
    parts = logits.reshape(*rows, size // part, part)
    _, highest = jax.lax.top_k(jnp.max(parts, axis=-1), number)
    values = jnp.take_along_axis(parts, highest[..., None], axis=-2)
    places = highest[..., None] * part + jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return values.reshape(*rows, -1), places.reshape(*rows, -1)


def _highest_parts_on_cpu(logits: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """`_highest_parts` without a transposition on CPUs, whose products with the output matrix have V first."""
    *rows, size = logits.shape
    part = _part_size(size, number, PART)
    parts = jnp.moveaxis(logits, -1, 0).reshape(size // part, part, *rows)
    _, highest = jax.lax.top_k(jnp.moveaxis(jnp.max(parts, axis=1), 0, -1), number)
    first = jnp.moveaxis(highest, -1, 0)[:, None]  # [number, 1, ...]
    values = jnp.take_along_axis(parts, first, axis=0)  # [number, part, ...]
    places = first * part + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    values, places = (jnp.moveaxis(x.reshape(number * part, *rows), 0, -1) for x in (values, places))
    return values, places


def _part_size(size: int, number: int, largest: int) -> int:
    """Returns the size of the parts of a vocabulary of `size` tokens, of which there are at least `number`."""
    while largest > 1 and (size % largest or size // largest < number):
        largest //= 2
    return largest
