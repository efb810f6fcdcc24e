"""The ways to compute the experts of each token, which differ in the order of the tokens and in the weights they read.

Each takes tokens [T, E], their experts [T, K] int32 and weights [T, K], and returns the weighted sums [T, E]. An expert
on another device has the number N, and its weight is 0.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlade.models import nn, products
from jlade.models.grouped import GroupedMatrix, product_of
from jlade.models.quantization import Int8Matrix, Matrix, dense_shape, is_int8

ROWS = 8  # a grouped product on TPUs has a multiple of them
TILE = 32  # rows of an expert that are multiplied at once on CPUs


class Experts(NamedTuple):
    """The MLPs of N experts, [expert, in, out] as grouped products read them, with biases [expert, out]."""

    gate: Matrix | None  # [N, E, F], None for experts without
    up: Matrix  # [N, E, F]
    down: Matrix  # [N, F, E]
    gate_bias: jax.Array | None = None  # [N, F]
    up_bias: jax.Array | None = None  # [N, F]
    down_bias: jax.Array | None = None  # [N, E]

    @property
    def number(self) -> int:
        """N, of the experts on this device."""
        return dense_shape(self.up)[0]


def by_expert(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts, activation: str) -> jax.Array:
    """Sorts the tokens by expert, for grouped products. Tokens of experts on other devices come last."""
    of_pair = chosen.reshape(-1)
    order = jnp.argsort(of_pair)
    of_row = of_pair[order]
    sizes = jnp.sum(jax.nn.one_hot(of_pair, experts.number, dtype=jnp.int32), axis=0)

    def multiply(rows: jax.Array, *matrices: Matrix) -> list[jax.Array]:
        return [_multiply_sorted(rows, each, sizes, of_row) for each in matrices]

    rows = _mlp(x[order // chosen.shape[1]], experts, multiply, lambda bias: bias[of_row], activation)
    rows = rows[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return _sum(jnp.where((chosen < experts.number)[..., None], rows, 0), weights, x)


def by_token(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts, activation: str) -> jax.Array:
    """Multiplies each token by the matrices of its experts."""
    of_row = jnp.minimum(chosen.reshape(-1), experts.number - 1)

    def multiply(rows: jax.Array, *matrices: Matrix) -> list[jax.Array]:
        return [_multiply_each(rows, each, of_row) for each in matrices]

    rows = jnp.repeat(x, chosen.shape[1], axis=0)
    rows = _mlp(rows, experts, multiply, lambda bias: bias[of_row], activation)
    return _sum(rows.reshape(*chosen.shape, -1), weights, x)


def all_with_all(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts, activation: str) -> jax.Array:
    """Multiplies each token by the matrices of all experts."""

    def multiply(rows: jax.Array, *matrices: Matrix) -> list[jax.Array]:
        return [_multiply_all(rows, each) for each in matrices]

    rows = jnp.broadcast_to(x, (experts.number, *x.shape))
    rows = _mlp(rows, experts, multiply, lambda bias: bias[:, None], activation)
    of_expert = jnp.sum(jax.nn.one_hot(chosen, experts.number) * weights[..., None], axis=1)
    return _sum(jnp.moveaxis(rows, 0, 1), of_expert, x)


def tiled(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    experts: Experts,
    activation: str,
    rows: int,
    multiply: Callable[..., list[jax.Array]],
) -> jax.Array:
    """Arranges the tokens in tiles of one expert each, for a kernel. Tokens of other devices are in no tile.

    An expert's tokens keep their order, so they need no sort. The last of its tiles ends with padding.

    Args:
      rows: of a tile.
      multiply: returns the products of tiles [P, rows, in] with each array of matrices [N, in, out], given the experts
        of the tiles [P], N for none.
    """
    of_pair, number = chosen.reshape(-1), experts.number
    in_use = min(of_pair.size, number)
    num_tiles = in_use + (of_pair.size - in_use) // rows  # at most: each follows a full one, or is its expert's first
    is_of = jax.nn.one_hot(of_pair, number, dtype=jnp.int32)  # [pair, expert]
    count = jnp.cumsum(is_of, axis=0)
    tiles = -(-count[-1] // rows)
    ends = jnp.cumsum(tiles)
    row = jnp.sum(is_of * ((ends - tiles)[None] * rows + count - 1), axis=1)
    # Pairs of other devices have rows past the end, all different, which the scatter drops.
    row = jnp.where(of_pair < number, row, num_tiles * rows + jnp.arange(of_pair.size))
    of_tile = jnp.sum(ends[None] <= jnp.arange(num_tiles)[:, None], axis=1)

    def multiply_tiles(rows: jax.Array, *matrices: Any) -> list[jax.Array]:
        return multiply(rows, of_tile, *matrices)

    token = jnp.arange(of_pair.size) // chosen.shape[1]
    token_of_row = jnp.zeros(num_tiles * rows, jnp.int32).at[row].set(token, mode="drop", unique_indices=True)
    arranged = x[token_of_row].reshape(num_tiles, rows, -1)
    arranged = _mlp(arranged, experts, multiply_tiles, lambda bias: bias[of_tile][:, None], activation)
    mixed = arranged.reshape(num_tiles * rows, -1)[row].reshape(*chosen.shape, -1)
    return _sum(jnp.where((chosen < number)[..., None], mixed, 0), weights, x)


def rows_of_tile(load: float, accepted: Sequence[int]) -> int:
    """Returns how many rows tiles should have, of those that a kernel accepts, for an average number of tokens.

    Tokens choose experts unevenly. Few experts have over twice the average, and so more than one tile, for which the
    kernel reads or converts their matrices again.
    """
    return next((rows for rows in accepted if rows >= 2 * load), accepted[-1])


def _mlp(
    rows: jax.Array,
    experts: Experts,
    multiply: Callable[..., list[jax.Array]],
    spread: Callable[[jax.Array], jax.Array],
    activation: str,
) -> jax.Array:
    """Returns the MLPs of rows [..., E].

    Args:
      multiply: returns the products of rows with each array of matrices.
      spread: returns the bias of each row, of biases [N, out].
    """

    def linear(rows: jax.Array, *pairs: tuple[Matrix, jax.Array | None]) -> list[jax.Array]:
        multiplied = multiply(rows, *(matrices for matrices, _ in pairs))
        return [
            product if bias is None else product + spread(bias)
            for product, (_, bias) in zip(multiplied, pairs, strict=True)
        ]

    if experts.gate is None:
        (up,) = linear(rows, (experts.up, experts.up_bias))
        inner = nn.activate(up, activation)
    else:
        gate, up = linear(rows, (experts.gate, experts.gate_bias), (experts.up, experts.up_bias))
        inner = nn.gated(gate, up, activation)
    (result,) = linear(inner, (experts.down, experts.down_bias))
    return result


def _sum(rows: jax.Array, weights: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the sum [T, E] of rows [T, K, E] with weights [T, K], in the dtype of `x`."""
    return jnp.sum(rows.astype(jnp.float32) * weights[..., None], axis=1).astype(x.dtype)


def _multiply_sorted(x: jax.Array, matrices: Matrix, sizes: jax.Array, experts: jax.Array) -> jax.Array:
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


def _multiply_each(x: jax.Array, matrices: Matrix, experts: jax.Array) -> jax.Array:
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


def _multiply_all(x: jax.Array, matrices: Matrix) -> jax.Array:
    """Returns the products [N, T, out] of tokens [N, T, in] with matrices [N, in, out]."""
    if isinstance(matrices, GroupedMatrix):
        return products.multiply_each(x, matrices)
    weight = _weight(matrices).astype(x.dtype)
    product = jnp.einsum("nti,nio->nto", x, weight, preferred_element_type=jnp.float32)
    if is_int8(matrices):
        product *= matrices.scale[:, None]
    return product.astype(x.dtype)


def in_tiles(x: jax.Array, weight: jax.Array | GroupedMatrix, sizes: jax.Array) -> jax.Array:
    """Returns `_multiply_sorted` by a loop over tiles of up to `TILE` rows of an expert.

    A tile reaches into the rows of later experts, whose own tiles come later and overwrite it.
    """
    num_rows = x.shape[0]
    height = min(TILE, num_rows)
    tiles = -(-sizes // height)
    ends, first_rows = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
    x = jnp.pad(x, ((0, height), (0, 0)))

    def add_tile(i: jax.Array, result: jax.Array) -> jax.Array:
        expert = jnp.sum(ends <= i)
        start = first_rows[expert] + (i - ends[expert] + tiles[expert]) * height
        rows = jax.lax.dynamic_slice_in_dim(x, start, height)
        if isinstance(weight, GroupedMatrix):
            product = product_of(weight.expert(expert), rows)
        else:
            matrix = jax.lax.dynamic_index_in_dim(weight, expert, keepdims=False).astype(x.dtype)
            product = jnp.dot(rows, matrix, preferred_element_type=result.dtype)
        return jax.lax.dynamic_update_slice_in_dim(result, product, start, axis=0)

    is_rounded = isinstance(weight, GroupedMatrix) or weight.dtype == jnp.int8
    empty = jnp.zeros((num_rows + height, weight.shape[2]), jnp.float32 if is_rounded else x.dtype)
    return jax.lax.fori_loop(0, ends[-1], add_tile, empty)[:num_rows]


def _ragged(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns `_multiply_sorted`: XLA for TPUs has a kernel that reads the matrices of experts with rows alone.

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
