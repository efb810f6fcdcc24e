"""Matrices in four bits, or eight, whose scales are of groups of inputs: steps read a quarter of bfloat16's bytes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

GROUP = 64  # inputs with one scale
MIN_GROUP = 8
STEPS = 14.0, 14.33, 14.67, 15.0, 15.33, 15.67, 16.0  # of the range of a group; codes have 15
TILE = 2**18  # elements of a matrix converted at once on CPUs; they fit the processor's cache
WIDE = 2**16  # outputs of a tile of one group, at most


@flax.struct.dataclass
class GroupedMatrix:
    """A matrix whose element [i, o] is `(code - zero) * scale + offset`, with those of output o and the group of i.

    It is [in, out], unlike matrices in floating point, so that a group's scales are a row beside its rows of codes.
    Experts are [N, in, out]. A byte has the codes of inputs j and j + group / 2 of a group, -8 to 7, the lower four
    bits first: halves of a group are whole rows.
    """

    weight: jax.Array  # [..., in / 2, out] uint8, or [..., in, out] int8
    scale: jax.Array  # [..., in / group, out]
    zero: jax.Array | None = None  # [..., in / group, out]
    offset: jax.Array | None = None  # [..., in / group, out]
    levels: jax.Array | None = None  # [16] float32, what the codes 0 to 7 and -8 to -1 stand for if not for themselves

    implementation: str = flax.struct.field(pytree_node=False, default="plain")  # see `jlade.models.products`

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., in, out]."""
        *others, rows, outputs = self.weight.shape
        return (*others, rows * (2 if self.weight.dtype == jnp.uint8 else 1), outputs)

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """Its shape in floating point: [out, in], or [N, in, out] of experts."""
        return self.shape if len(self.shape) > 2 else self.shape[::-1]

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.shape[-2] // self.scale.shape[-2]

    def __getitem__(self, outputs: jax.Array) -> jax.Array:
        """Returns the elements of outputs [...], as float32 [..., in]: rows of the matrix [out, in]."""
        # XLA for TPUs would copy the whole matrix into another layout before it gathers columns.
        rows = jax.lax.platform_dependent(self, outputs.reshape(-1), tpu=_columns_in_turn, default=_columns)
        return rows.reshape(*outputs.shape, -1)

    def expert(self, index: jax.Array) -> "GroupedMatrix":
        """Returns the matrix of an expert, or of each expert of `index` [P]."""
        return self.mapped(lambda array: array[index])

    def mapped(self, change: Callable[[jax.Array], Any]) -> "GroupedMatrix":
        """Returns the matrix with a change of each array but `levels`."""
        arrays = jax.tree.map(change, self.replace(levels=None))  # type: ignore[attr-defined]
        return arrays.replace(levels=self.levels)

    def parts(self) -> list[jax.Array]:
        """Returns the elements of each half of the groups, [..., groups, group / 2, out] float32, or of whole ones."""
        *others, _, outputs = self.weight.shape
        stored = self.weight.reshape(*others, self.scale.shape[-2], -1, outputs)
        halves = (stored << 4, stored) if stored.dtype == jnp.uint8 else ()
        codes = [jax.lax.bitcast_convert_type(half, jnp.int8) >> 4 for half in halves] or [stored]
        return [self._values(each) for each in codes]

    def _values(self, codes: jax.Array) -> jax.Array:
        def of_group(array: jax.Array) -> jax.Array:
            return jnp.broadcast_to(array[..., None, :].astype(jnp.float32), codes.shape)

        values = codes.astype(jnp.float32) if self.levels is None else self.levels[codes & 15]
        return rescaled(values, of_group, self.scale, self.zero, self.offset)

    def added(self) -> jax.Array | None:
        """Returns what is added to the product of code and scale, [..., in / group, out] float32; None for nothing."""
        offset = None if self.offset is None else self.offset.astype(jnp.float32)
        if self.zero is None:
            return offset
        of_zero = -self.zero.astype(jnp.float32) * self.scale.astype(jnp.float32)
        return of_zero if offset is None else of_zero + offset

    def values(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """Returns the elements [..., in, out], computed in float32 and rounded once."""
        return jnp.concatenate(self.parts(), axis=-2).astype(dtype).reshape(self.shape)


class MatrixShape(NamedTuple):
    """The shape of a matrix [in, out] in groups, and the dtype of its products: by which kernels are chosen."""

    inputs: int
    outputs: int
    group: int
    bits: int
    has_zero: bool
    has_offset: bool
    has_levels: bool
    dtype: str

    @classmethod
    def of(cls, matrix: GroupedMatrix, dtype: jax.typing.DTypeLike) -> "MatrixShape":
        """Returns the shape of a matrix, or of `jax.ShapeDtypeStruct` in its place."""
        bits = 4 if matrix.weight.dtype == jnp.uint8 else 8
        inputs, outputs = matrix.shape[-2:]
        zero, offset, levels = (array is not None for array in (matrix.zero, matrix.offset, matrix.levels))
        return cls(inputs, outputs, matrix.group, bits, zero, offset, levels, jnp.dtype(dtype).name)

    @property
    def parts(self) -> int:
        """Codes of a byte."""
        return 8 // self.bits

    def __str__(self) -> str:
        return f"{self.inputs} x {self.outputs} in {self.bits} bits with groups of {self.group}, {self.dtype}"


def rescaled(values: jax.Array, of_group: Callable[[Any], jax.Array], scale: Any, zero: Any, offset: Any) -> jax.Array:
    """Returns `(values - zero) * scale + offset` in float32, without what is None.

    Args:
      values: of codes, float32.
      of_group: returns an array of groups, or a reference to one, in float32 and in a shape that fits `values`.
      scale, zero, offset: arrays of groups.
    """
    if zero is not None:
        values -= of_group(zero)
    values *= of_group(scale)
    return values if offset is None else values + of_group(offset)


def _columns(matrix: GroupedMatrix, outputs: jax.Array) -> jax.Array:
    """Returns the elements of outputs [N], float32[N, in]."""
    return matrix.mapped(lambda array: array[:, outputs]).values().T


def _columns_in_turn(matrix: GroupedMatrix, outputs: jax.Array) -> jax.Array:
    """`_columns`, one at a time."""

    def column(output: jax.Array) -> jax.Array:
        return matrix.mapped(lambda array: jax.lax.dynamic_slice_in_dim(array, output, 1, axis=1)).values()[:, 0]

    columns: jax.Array = jax.lax.map(column, outputs)
    return columns


def is_grouped(leaf: object) -> TypeGuard[GroupedMatrix]:
    """Returns whether `leaf` is a `GroupedMatrix`."""
    return isinstance(leaf, GroupedMatrix)


def group_of(num_inputs: int, largest: int = GROUP) -> int:
    """Returns the largest power of two, up to `largest`, that divides the inputs of a matrix; 0 if it is too small."""
    group = int(np.gcd(num_inputs, largest))
    return group if group >= MIN_GROUP else 0


def pack(codes: jax.Array | np.ndarray, group: int) -> Any:
    """Returns bytes [..., in / 2, out] uint8 of codes [..., in, out], integers from -8 to 7."""
    *others, num_inputs, outputs = codes.shape
    halves = codes.reshape(*others, num_inputs // group, 2, group // 2, outputs).astype(np.uint8)
    packed = (halves[..., 0, :, :] & 15) | (halves[..., 1, :, :] << 4)
    return packed.reshape(*others, num_inputs // 2, outputs)


def unpack(weight: Any, group: int) -> Any:
    """Returns the codes [..., groups, group, out] int8 of an array of `GroupedMatrix.weight`, of NumPy."""
    *others, _, outputs = weight.shape
    if weight.dtype != np.uint8:
        return weight.reshape(*others, -1, group, outputs)
    stored = weight.reshape(*others, -1, group // 2, outputs)
    return np.concatenate([(half.view(np.int8) >> 4) for half in (stored << 4, stored)], axis=-2)


@functools.partial(jax.jit, static_argnames=("group",))
def quantize_in_groups(
    matrix: jax.Array, group: int, importance: jax.Array | np.ndarray | None = None
) -> GroupedMatrix:
    """Returns `matrix` [in, out], or experts [N, in, out], in four bits with the scales and offsets of groups.

    Scales that divide the range of a group into one of `STEPS` make codes from its numbers, which the best scale and
    offset for these codes follow, by least squares. Those with the least error are taken. A group of equal numbers has
    the scale 1. One with NaN or infinite elements has a scale of NaN, so that products with it are not finite either.

    Args:
      matrix, group: see above.
      importance: [in], of the squared errors of each input's weights; None for equal ones.
    """
    *others, num_inputs, outputs = matrix.shape
    factors = _factors(importance, num_inputs, group).reshape(*(1,) * len(others), -1, group)
    stored = matrix.reshape(*others, num_inputs // group, group, outputs)
    groups = stored.astype(jnp.float32)
    is_finite = jnp.all(jnp.isfinite(groups), axis=-2)
    least, largest = jnp.min(groups, axis=-2), jnp.max(groups, axis=-2)
    middle, radius = least / 2 + largest / 2, largest / 2 - least / 2
    is_flat = radius < 8 * np.finfo(np.float32).tiny  # processors flush smaller scales to 0
    radius = jnp.where(is_flat, 1.0, radius)

    def fit(steps: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the decrease of the squared error, the scale and the offset, for the codes of a number of steps."""

        def add(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """Adds each group's element i, one at a time: all would take several copies of the matrix."""
            element = jax.lax.dynamic_index_in_dim(stored, i, -2, keepdims=False).astype(jnp.float32)
            element = (element - middle) / radius  # from -1 to 1, so that squares are in range
            code = _nearest((element + 1) * (steps / 2) - 8)
            factor = jax.lax.dynamic_index_in_dim(factors, i, -1)
            new = (factor * each for each in (element, code, code**2, code * element))
            return tuple(total + each for total, each in zip(sums, new, strict=True))

        element, code, square, product = jax.lax.fori_loop(0, group, add, (jnp.zeros_like(radius),) * 4)
        scale = (group * product - code * element) / jnp.maximum(group * square - code**2, 1e-3)
        offset = (element - scale * code) / group
        return scale * product + offset * element, scale, offset

    decreases, *fitted = jax.vmap(fit)(jnp.array(STEPS))
    best = jnp.argmax(decreases, axis=0)[None]
    scale, offset = (jnp.take_along_axis(each, best, axis=0)[0] for each in fitted)
    scale = jnp.where(is_flat, 1.0, scale * radius).astype(jnp.bfloat16)
    scale = jnp.where(is_finite, scale, jnp.nan)
    offset = jnp.where(is_flat, middle, offset * radius + middle).astype(jnp.bfloat16)
    above, unit = (each.astype(jnp.float32)[..., None, :] for each in (offset, scale))
    codes = _nearest((groups - above) / unit)
    packed: jax.Array = pack(codes.astype(jnp.int8).reshape(matrix.shape), group)
    return GroupedMatrix(packed, scale, offset=offset)


def _factors(importance: jax.Array | np.ndarray | None, num_inputs: int, group: int) -> jax.Array:
    """Returns the factors [groups, group] of squared errors, with a mean of 1 in each group."""
    if importance is None:
        return jnp.ones((num_inputs // group, group))
    factors = jnp.asarray(importance, jnp.float32).reshape(-1, group)
    mean = jnp.mean(factors, axis=-1, keepdims=True)
    least = 1e-3  # so that a group has more than one number that counts
    return (jnp.where(mean > 0, factors / jnp.where(mean > 0, mean, 1.0), 1.0) + least) / (1 + least)


def _nearest(values: jax.Array) -> jax.Array:
    """Returns the nearest codes, in float32."""
    return jnp.clip(jnp.round(values), -8, 7)


def multiply(x: jax.Array, matrix: GroupedMatrix) -> jax.Array:
    """Returns `x` [..., in] times `matrix` [in, out]: [..., out] in the dtype of `x`.

    The weights are rounded to the dtype of `x`. The sum is float32.
    """
    # The barrier makes the weights depend on x. Otherwise the compiler converts them once, before the loop over steps.
    matrix, rows = jax.lax.optimization_barrier((matrix, x.reshape(-1, x.shape[-1])))
    product: jax.Array = jax.lax.platform_dependent(matrix, rows, cpu=_multiply_in_tiles, default=product_of)
    return product.astype(x.dtype).reshape(*x.shape[:-1], -1)


def product_of(matrix: GroupedMatrix, x: jax.Array) -> jax.Array:
    """Returns the product [T, out] in float32, of `x` [T, in]."""
    parts = matrix.parts()
    pieces = x.reshape(len(x), matrix.scale.shape[0], len(parts), -1)
    dimensions = (((1, 2), (0, 1)), ((), ()))
    products = [
        jax.lax.dot_general(pieces[:, :, i], part.astype(x.dtype), dimensions, preferred_element_type=jnp.float32)
        for i, part in enumerate(parts)
    ]
    return functools.reduce(jnp.add, products)


def _multiply_in_tiles(matrix: GroupedMatrix, x: jax.Array) -> jax.Array:
    """`product_of`, some groups at a time: XLA for CPUs does not fuse, and would write out the whole matrix."""
    num_groups, outputs = matrix.scale.shape
    if len(x) * outputs > 4 * TILE:
        return _multiply_in_columns(matrix, x)
    # What is added to the numbers of a group is added to the product instead, once for the group.
    begin = jnp.zeros((len(x), outputs), jnp.float32)
    if (added := matrix.added()) is not None:
        sums = jnp.sum(x.reshape(len(x), num_groups, -1), axis=-1, dtype=jnp.float32)
        begin = jnp.dot(sums, added)
    matrix = matrix.replace(zero=None, offset=None)  # type: ignore[attr-defined]
    groups = max(1, min(num_groups, TILE // (matrix.group * outputs)))
    groups = next(size for size in range(groups, 0, -1) if num_groups % size == 0)

    parts = next((n for n in range(1, 64) if outputs % n == 0 and outputs <= n * WIDE), 1) if groups == 1 else 1

    def add_tile(place: jax.Array, product: jax.Array) -> jax.Array:
        i, start = place // parts, place % parts * (outputs // parts)

        def tile(array: jax.Array, axis: int = 0) -> jax.Array:
            size = groups * (array.shape[axis] // num_groups)
            rows = jax.lax.dynamic_slice_in_dim(array, i * size, size, axis)
            return rows if axis or parts == 1 else jax.lax.dynamic_slice_in_dim(rows, start, outputs // parts, 1)

        part, inputs = matrix.mapped(tile), tile(x, 1)
        if groups > 1:
            return product + product_of(part, inputs)
        # The scales of a single group multiply its product, which has fewer numbers than the group has weights.
        unscaled = part.replace(scale=jnp.ones_like(part.scale))  # type: ignore[attr-defined]
        added = product_of(unscaled, inputs) * part.scale.astype(jnp.float32)
        if parts == 1:
            return product + added
        before = jax.lax.dynamic_slice_in_dim(product, start, outputs // parts, 1)
        return jax.lax.dynamic_update_slice_in_dim(product, before + added, start, 1)

    product: jax.Array = jax.lax.fori_loop(0, num_groups // groups * parts, add_tile, begin)
    return product


def _multiply_in_columns(matrix: GroupedMatrix, x: jax.Array) -> jax.Array:
    """`product_of`, some outputs at a time: sums beyond the cache would be read and written for each tile."""
    inputs, outputs = matrix.shape
    columns = min(outputs, max(16, TILE // inputs // 16 * 16))

    def add_columns(i: jax.Array, product: jax.Array) -> jax.Array:
        start = jnp.minimum(i * columns, outputs - columns)  # the last columns may overlap those before
        part = matrix.mapped(lambda array: jax.lax.dynamic_slice_in_dim(array, start, columns, 1))
        return jax.lax.dynamic_update_slice_in_dim(product, product_of(part, x), start, axis=1)

    empty = jnp.zeros((len(x), outputs), jnp.float32)
    product: jax.Array = jax.lax.fori_loop(0, -(-outputs // columns), add_columns, empty)
    return product
