"""A contest of a kernel for experts with plain JAX on tokens of random experts, for its trial."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlade.models import trial
from jlade.models.trial import Contest

# Of tokens [T, E], their experts and weights [T, K], and the matrices gate, up and down of the experts, gate None for
# experts without
Mix = Callable[..., jax.Array]


class ExpertShape(NamedTuple):
    """The experts on a device, and the dtype of their weights."""

    number: int
    per_token: int
    size: int
    width: int
    dtype: str
    has_gates: bool = True

    def __str__(self) -> str:
        sizes = f"{self.number} experts of {self.size} x {self.width}"
        return f"{sizes}{'' if self.has_gates else ' without gates'}, {self.per_token} for a token, {self.dtype}"


def prepare(run: Mix, plain: Mix, device: jax.Device, shape: ExpertShape) -> Contest:
    """Returns the contest of a kernel with plain JAX, whose results are the expected ones.

    Exact ones would take copies of the weights in float32, which may be several gigabytes.
    """
    matrices = _random_matrices(jax.device_put(jax.random.key(0), device), shape)

    def draw(num_tokens: int) -> Any:
        return _random_tokens(device, shape, num_tokens), matrices

    return trial.against_plain(_layers(run), _layers(plain), device, draw)


@functools.partial(jax.jit, static_argnames="shape")
def _random_matrices(key: jax.Array, shape: ExpertShape) -> list[jax.Array | None]:
    """Returns gate, up and down. They are drawn one at a time: the random bits take more memory than a matrix."""
    inner = shape.size, shape.width

    def draw(key: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
        one = functools.partial(jax.random.normal, shape=sizes, dtype=shape.dtype)
        return jax.lax.map(lambda key: one(key) * sizes[0] ** -0.5, jax.random.split(key, shape.number))

    gate, up, down = jax.random.split(key, 3)
    return [draw(gate, inner) if shape.has_gates else None, draw(up, inner), draw(down, inner[::-1])]


def _random_tokens(device: jax.Device, shape: ExpertShape, num_tokens: int) -> tuple[jax.Array, ...]:
    """Returns tokens [T, E], their experts and weights [T, K]."""
    rng = np.random.default_rng(num_tokens)
    x = rng.standard_normal((num_tokens, shape.size), np.float32).astype(jnp.dtype(shape.dtype))
    chosen = rng.permuted(np.tile(np.arange(shape.number, dtype=np.int32), (num_tokens, 1)), axis=1)
    weights = rng.dirichlet(np.ones(shape.per_token), num_tokens).astype(np.float32)
    return tuple(jax.device_put(array, device) for array in (x, chosen[:, : shape.per_token], weights))


def _layers(mix: Mix) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns a program for consecutive layers, whose results are added up.

    Each token has other experts in each layer. Otherwise XLA would read or arrange them once, before the first.
    """

    def run(arguments: Any, count: jax.Array) -> jax.Array:
        (x, chosen, weights), matrices = arguments

        def layer(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, _ = carry
            mixed = mix(x, (chosen + i) % len(matrices[1]), weights, matrices)
            return x + mixed, mixed

        _, mixed = jax.lax.fori_loop(0, count, layer, (x, jnp.zeros_like(x)))
        return mixed

    return jax.jit(run)
