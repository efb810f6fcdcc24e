"""The ways to compute the experts of each token, which differ in the order of the tokens and in the weights they read.

Each takes tokens [T, E], their experts [T, K] int32 and weights [T, K], and returns the weighted sums [T, E]. An expert
on another device has the number N, and its weight is 0.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlade.models import layers
from jlade.models.experts import products
from jlade.models.quantization import Matrix, dense_shape


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
        return [products.grouped(rows, each, sizes, of_row) for each in matrices]

    rows = _mlp(x[order // chosen.shape[1]], experts, multiply, lambda bias: bias[of_row], activation)
    rows = rows[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return _sum(jnp.where((chosen < experts.number)[..., None], rows, 0), weights, x)


def by_token(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts, activation: str) -> jax.Array:
    """Multiplies each token by the matrices of its experts."""
    of_row = jnp.minimum(chosen.reshape(-1), experts.number - 1)

    def multiply(rows: jax.Array, *matrices: Matrix) -> list[jax.Array]:
        return [products.each(rows, each, of_row) for each in matrices]

    rows = jnp.repeat(x, chosen.shape[1], axis=0)
    rows = _mlp(rows, experts, multiply, lambda bias: bias[of_row], activation)
    return _sum(rows.reshape(*chosen.shape, -1), weights, x)


def all_with_all(x: jax.Array, chosen: jax.Array, weights: jax.Array, experts: Experts, activation: str) -> jax.Array:
    """Multiplies each token by the matrices of all experts."""

    def multiply(rows: jax.Array, *matrices: Matrix) -> list[jax.Array]:
        return [products.all_with_all(rows, each) for each in matrices]

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
        found = multiply(rows, *(matrices for matrices, _ in pairs))
        return [
            product if bias is None else product + spread(bias) for product, (_, bias) in zip(found, pairs, strict=True)
        ]

    if experts.gate is None:
        (up,) = linear(rows, (experts.up, experts.up_bias))
        inner = layers.activate(up, activation)
    else:
        gate, up = linear(rows, (experts.gate, experts.gate_bias), (experts.up, experts.up_bias))
        inner = layers.gated(gate, up, activation)
    (result,) = linear(inner, (experts.down, experts.down_bias))
    return result


def _sum(rows: jax.Array, weights: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the sum [T, E] of rows [T, K, E] with weights [T, K], in the dtype of `x`."""
    return jnp.sum(rows.astype(jnp.float32) * weights[..., None], axis=1).astype(x.dtype)
