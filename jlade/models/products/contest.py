"""A contest of a kernel for products with plain JAX on random matrices, for its trial."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.models import trial
from jlade.models.grouped import GroupedMatrix, MatrixShape
from jlade.models.trial import Contest

NUMBER = 4  # matrices: a single one might stay in the device's cache

Multiply = Callable[[jax.Array, GroupedMatrix], jax.Array]


def prepare(run: Multiply, plain: Multiply, device: jax.Device, shape: MatrixShape) -> Contest:
    """Returns the contest of a kernel with plain JAX, whose results are the expected ones."""
    rng = np.random.default_rng(0)
    matrices = [jax.device_put(_random_matrix(rng, shape), device) for _ in range(NUMBER)]

    def draw(num_tokens: int) -> Any:
        x = rng.standard_normal((num_tokens, shape.inputs), np.float32).astype(jnp.dtype(shape.dtype))
        return jax.device_put(x, device), matrices

    return trial.against_plain(_layers(run), _layers(plain), device, draw)


def _random_matrix(rng: np.random.Generator, shape: MatrixShape) -> GroupedMatrix:
    groups = shape.inputs // shape.group, shape.outputs

    def numbers(is_there: bool, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> Any:
        return rng.random(groups, np.float32).astype(dtype) if is_there else None

    if shape.bits == 4:
        weight = rng.integers(0, 256, (shape.inputs // 2, shape.outputs), np.uint8)
    else:
        weight = rng.integers(-127, 128, (shape.inputs, shape.outputs), np.int8)
    tree: Any = GroupedMatrix
    levels = rng.standard_normal(16, np.float32) if shape.has_levels else None
    matrix: GroupedMatrix = tree(weight, numbers(True), numbers(shape.has_zero), numbers(shape.has_offset), levels)
    return matrix


def _layers(multiply: Multiply) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns a program that multiplies tokens with all matrices in turn, some times."""

    def run(arguments: Any, count: jax.Array) -> jax.Array:
        x, matrices = arguments

        def layer(_: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, product = carry
            for matrix in matrices:
                product = multiply(x, matrix)
                x = x + 0 * product[:, :1]  # the next product waits for this one
            return x, product

        empty = jnp.zeros((len(x), matrices[0].shape[-1]), x.dtype)
        _, product = jax.lax.fori_loop(0, count, layer, (x, empty))
        return product

    return jax.jit(run)
