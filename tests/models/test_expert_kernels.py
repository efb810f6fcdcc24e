"""Mixtures of experts by each implementation and the kernel, simulated on the CPU, against NumPy; and its lowering."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public from JAX 0.11.2 on

from jlade.models.experts import Experts, hopper, ways
from tests.models.devices import hopper_kernels
from tests.models.mixture import mixture
from tests.tiny import slow


@hopper_kernels
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    ("rows", "size", "width", "number", "dtype"),
    [
        (8, 64, 64, 1, jnp.bfloat16),  # one block
        (16, 192, 128, 2, jnp.bfloat16),  # gate and up
        (32, 448, 256, 1, jnp.float16),  # more blocks than slots, in wide columns
        (64, 128, 192, 3, jnp.bfloat16),
    ],
)
def test_equals_a_product_for_each_tile(rows, size, width, number, dtype, count, monkeypatch):
    monkeypatch.setattr(hopper, "PROGRAMS", 6)
    monkeypatch.setattr(hopper, "SHARED_MEMORY", 3 * 128 * (rows + 128 * number))  # three or more slots
    rng = np.random.default_rng(size)
    experts = np.array([1, 1, 3, 4], np.int32)
    of_tile = jnp.asarray(np.where(np.arange(len(experts)) < count, experts, 5))
    shapes = [(len(experts), rows, size), *[(5, size, width)] * number]
    tiles, *weights = (jnp.asarray(rng.normal(size=shape).astype(np.float32), dtype) for shape in shapes)
    unused = np.setdiff1d(np.arange(5), experts[:count])
    poisoned = [matrices.at[unused].set(jnp.nan) for matrices in weights]

    simulated = InterpretGPUParams(detect_races=True)
    products = hopper.multiply(tiles, of_tile, *poisoned, interpret=simulated)

    assert len(products) == number
    for product, matrices in zip(products, weights, strict=True):
        assert product.dtype == dtype
        got = np.asarray(product, np.float32)
        expected = np.asarray(tiles, np.float32) @ np.asarray(matrices, np.float32)[experts]
        differences = np.linalg.norm(got - expected, axis=(1, 2))[:count]
        assert (differences < jnp.finfo(dtype).eps / 2 * np.linalg.norm(expected, axis=(1, 2))[:count]).all()


@hopper_kernels
@pytest.mark.parametrize("count", [0, 1, 2])
def test_nothing_runs_for_tiles_without_an_expert(count):
    """Simulated memory that no program has written is NaN."""
    tiles, weights = jnp.ones((2, 8, 64), jnp.bfloat16), jnp.ones((1, 64, 64), jnp.bfloat16)
    experts = (jnp.arange(2, dtype=jnp.int32) >= count).astype(jnp.int32)
    (product,) = hopper.multiply(tiles, experts, weights, interpret=InterpretGPUParams())
    expected = np.where(np.arange(2) < count, 64, np.nan)
    np.testing.assert_array_equal(product.astype(jnp.float32), np.broadcast_to(expected[:, None, None], product.shape))


def random_experts(rng, number, size, width, has_biases, dtype):
    def draw(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    gate, up = (draw(number, size, width, scale=size**-0.5) for _ in range(2))
    down = draw(number, width, size, scale=width**-0.5)
    biases = [draw(number, columns) if has_biases else None for columns in (width, width, size)]
    return Experts(gate, up, down, *biases)


def tiled(*arguments, activation):
    """With a tile of 8 rows, which some experts overflow."""
    simulated = functools.partial(hopper.multiply, interpret=InterpretGPUParams(detect_races=True))
    return ways.tiled(*arguments, activation, 8, simulated)


@pytest.mark.parametrize("has_biases", [slow(False), True])
@pytest.mark.parametrize("num_elsewhere", [slow(0), 2])
@pytest.mark.parametrize("num_tokens", [slow(1), 12])
@pytest.mark.parametrize(
    "kind",
    [ways.by_expert, ways.by_token, ways.all_with_all, pytest.param(tiled, marks=hopper_kernels)],
)
def test_each_arrangement_of_tokens_gives_the_weighted_sum(kind, num_tokens, num_elsewhere, has_biases):
    rng, number, k = np.random.default_rng(num_tokens), 5, 3
    experts = random_experts(rng, number, 128, 64, has_biases, jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((num_tokens, 128)), jnp.bfloat16)
    # The first expert has no token, the second has nearly all.
    chance = np.array([0, 9, *np.ones(number + num_elsewhere - 2)])
    chosen = [rng.choice(len(chance), k, replace=False, p=chance / sum(chance)) for _ in range(num_tokens)]
    chosen = np.minimum(np.array(chosen, np.int32), number)
    weights = jnp.asarray(np.where(chosen < number, rng.random(chosen.shape), 0), jnp.float32)
    mixed = kind(x, jnp.asarray(chosen), weights, experts, activation="clipped_silu")
    expected = mixture(x, chosen, weights, experts, "clipped_silu")
    assert mixed.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(mixed, np.float64) - expected)
    assert error < jnp.finfo(jnp.bfloat16).eps * np.linalg.norm(expected)


@pytest.mark.parametrize(("load", "rows"), [(0.1, 8), (3.75, 8), (4, 8), (7.5, 16), (15, 32), (32, 64), (500, 64)])
def test_tiles_hold_twice_the_average_number_of_tokens(load, rows):
    assert ways.rows_of_tile(load, hopper.ROWS) == rows


@pytest.mark.parametrize(
    ("dtype", "rows", "size", "width", "message"),
    [
        (jnp.float32, 8, 64, 64, "needs 16-bit floats, and these are float32"),
        (jnp.bfloat16, 4, 64, 64, "needs tiles of 8, 16, 32 or 64 rows, and these have 4"),
        (jnp.bfloat16, 8, 96, 64, "needs matrices whose sides are multiples of 64, and these are 96 x 64"),
        (jnp.bfloat16, 8, 64, 32, "needs matrices whose sides are multiples of 64, and these are 64 x 32"),
    ],
)
def test_obstacles(dtype, rows, size, width, message):
    assert hopper.obstacle(dtype, rows, size, width) == message
    tiles, weights = jnp.zeros((1, rows, size), dtype), jnp.zeros((1, size, width), dtype)
    with pytest.raises(ValueError, match=re.escape(message)):
        hopper.multiply(tiles, jnp.zeros(1, jnp.int32), weights)


@hopper_kernels
@pytest.mark.parametrize(
    ("rows", "dtype"), [(8, jnp.bfloat16), (16, jnp.bfloat16), (32, jnp.float16), (64, jnp.bfloat16)]
)
@pytest.mark.parametrize(("size", "width"), [(2048, 768), (768, 2048), (2880, 2880)])
@pytest.mark.parametrize(("num_tiles", "number"), [(8, 2), (8, 1), (200, 1)])
def test_lowers(num_tiles, number, size, width, rows, dtype):
    """The compiler passes of Pallas run without the device, and raise for programs that it does not accept."""
    shapes = [(num_tiles, rows, size), *[(128, size, width)] * number]
    tiles, *weights = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    experts = jax.ShapeDtypeStruct((num_tiles,), jnp.int32)
    lowered = jax.export.export(jax.jit(hopper.multiply), platforms=["cuda"])(tiles, experts, *weights)
    assert lowered.mlir_module().count("custom_call @mosaic_gpu") == 1
