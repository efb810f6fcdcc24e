"""Products of tokens with the matrices of their experts."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jlade.models import products
from jlade.models.grouped import GroupedMatrix, product_of
from jlade.models.quantization import Int8Matrix, Matrix, is_int8

ROWS = 8  # a grouped product on TPUs has a multiple of them
TILES = (16, 32, 64, 128)  # rows of a tile for kernels of products
TILE = 32  # rows of an expert that are multiplied at once on CPUs


def grouped(x: jax.Array, matrices: Matrix, sizes: jax.Array, experts: jax.Array) -> jax.Array:
    """Returns the product [P, out] of each row with the matrix of its expert, for rows that are sorted by expert.

    The rows that come after those of the last expert have unspecified products.

    Args:
      x: [P, in].
      matrices: [N, in, out].
      sizes: [N] int32, rows of each expert.
      experts: [P] int32, the expert of each row.
    """
    if isinstance(matrices, GroupedMatrix):  # no kernel of XLA's reads them
        return in_tiles(x, matrices, sizes)
    product: jax.Array = jax.lax.platform_dependent(x, _weight(matrices), sizes, tpu=_ragged, default=in_tiles)
    return _rescale(product, matrices, experts, x.dtype)


def each(x: jax.Array, matrices: Matrix, experts: jax.Array) -> jax.Array:
    """Returns the product [P, out] of each row [P, in] with the matrix [in, out] of its expert [P].

    A sum of products, and no matrix product: XLA for GPUs reads the matrices inside it, where it would copy them.
    """
    if isinstance(matrices, GroupedMatrix):
        return _each_grouped(x, matrices.expert(experts)).astype(x.dtype)
    chosen = _weight(matrices)[experts].astype(jnp.float32)
    return _rescale(jnp.sum(x[:, :, None].astype(jnp.float32) * chosen, axis=1), matrices, experts, x.dtype)


def _each_grouped(x: jax.Array, chosen: GroupedMatrix) -> jax.Array:
    """Returns the product [P, out] float32 of each row [P, in] with its matrix [P, in, out]."""
    parts = chosen.parts()
    pieces = x.astype(jnp.float32).reshape(len(x), -1, len(parts), parts[0].shape[2], 1)
    return functools.reduce(jnp.add, [jnp.sum(pieces[:, :, i] * part, axis=(1, 2)) for i, part in enumerate(parts)])


def all_with_all(x: jax.Array, matrices: Matrix) -> jax.Array:
    """Returns the products [N, T, out] of tokens [N, T, in] with matrices [N, in, out]."""
    if isinstance(matrices, GroupedMatrix):
        return products.multiply_each(x, matrices)
    weight = _weight(matrices).astype(x.dtype)
    product = jnp.einsum("nti,nio->nto", x, weight, preferred_element_type=jnp.float32)
    if is_int8(matrices):
        product *= matrices.scale[:, None]
    return product.astype(x.dtype)


def takes_tiles(arrays: Sequence[Matrix | None], dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether `of_tiles` takes all these matrices."""
    return all(products.takes_tiles(each, dtype) for each in arrays if each is not None)


def of_tiles(tiles: jax.Array, experts: jax.Array, *arrays: GroupedMatrix) -> list[jax.Array]:
    """Returns the products of tiles with each array of matrices, by `products.multiply_tiles`."""
    return [products.multiply_tiles(tiles, experts, each) for each in arrays]


def rows_of_tile(load: float) -> int:
    """Returns how many rows `of_tiles` should get in a tile, for an average number of tokens of an expert.

    Tokens choose experts unevenly. Few experts have over twice the average, and so more than one tile, for which their
    matrices are converted again.
    """
    return next((rows for rows in TILES if rows >= 2 * load), TILES[-1])


def in_tiles(x: jax.Array, weight: jax.Array | GroupedMatrix, sizes: jax.Array) -> jax.Array:
    """Returns `grouped` by a loop over tiles of up to `TILE` rows of an expert.

    A tile reaches into the rows of later experts, whose own tiles come later and overwrite it.
    """
    num_rows = x.shape[0]
    height = min(TILE, num_rows)
    tiles = -(-sizes // height)
    ends, first_rows = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
    x = jnp.pad(x, ((0, height), (0, 0)))

    def add_tile(i: jax.Array, products: jax.Array) -> jax.Array:
        expert = jnp.sum(ends <= i)
        start = first_rows[expert] + (i - ends[expert] + tiles[expert]) * height
        rows = jax.lax.dynamic_slice_in_dim(x, start, height)
        if isinstance(weight, GroupedMatrix):
            product = product_of(weight.expert(expert), rows)
        else:
            matrix = jax.lax.dynamic_index_in_dim(weight, expert, keepdims=False).astype(x.dtype)
            product = jnp.dot(rows, matrix, preferred_element_type=products.dtype)
        return jax.lax.dynamic_update_slice_in_dim(products, product, start, axis=0)

    is_rounded = isinstance(weight, GroupedMatrix) or weight.dtype == jnp.int8
    empty = jnp.zeros((num_rows + height, weight.shape[2]), jnp.float32 if is_rounded else x.dtype)
    return jax.lax.fori_loop(0, ends[-1], add_tile, empty)[:num_rows]


def _ragged(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns `grouped`: XLA for TPUs has a kernel that reads the matrices of experts with rows alone.

    It takes this kernel for a multiple of `ROWS` rows, and may read all matrices for other numbers.
    """
    num_rows, result = x.shape[0], jnp.float32 if weight.dtype == jnp.int8 else x.dtype
    x = jnp.pad(x, ((0, -num_rows % ROWS), (0, 0)))
    return jax.lax.ragged_dot(x, weight, sizes, preferred_element_type=result)[:num_rows]


def _weight(matrices: jax.Array | Int8Matrix) -> jax.Array:
    return matrices.weight if isinstance(matrices, Int8Matrix) else matrices


def _rescale(
    product: jax.Array, matrices: jax.Array | Int8Matrix, experts: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Returns a product of rows [P, out] with int8 weights, if they are that, times the scales of their experts."""
    return (product * matrices.scale[experts] if is_int8(matrices) else product).astype(dtype)
