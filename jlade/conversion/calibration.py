"""How large the inputs of each matrix are on some text, to round weights so that errors of large inputs are small."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.models import layers
from jlade.models.layers import Layer
from jlade.models.layers.arrays import Array
from jlade.models.llama import LlamaParams
from jlade.models.nn import Observed

WINDOW = 512  # tokens that are read at once


def mean_squares(params: LlamaParams, tokens: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Returns the mean square [in] float32 of each input of the matrices of each layer, by path; not of experts.

    The parameters are on one device. Matrices in few bits are passed over. The tokens are read in windows of 512.
    """
    if not len(tokens):
        raise ValueError("the text to calibrate with has no tokens")
    names: list[tuple[int, str]] = []
    sums: dict[int, np.ndarray] = collections.defaultdict(lambda: np.zeros((), np.float32))

    def record(number: jax.Array, squares: jax.Array) -> None:
        sums[int(number)] = sums[int(number)] + np.asarray(squares)

    def observed(i: int, layer: Layer) -> Layer:
        def change(path: str, array: Array, value: Any) -> Any:
            if not (array.may_round and isinstance(value, jax.Array) and value.ndim == 2):
                return value
            names.append((i, path))
            return Observed(value, jnp.int32(len(names) - 1), record)

        return layers.changed(params.config, i, layer, change)

    decoder = params.decoder
    watched = dataclasses.replace(params, layers=tuple(observed(i, layer) for i, layer in enumerate(params.layers)))

    @jax.jit
    def read(params: LlamaParams, window: jax.Array) -> jax.Array:
        length = window.shape[1]
        positions = jnp.arange(length, dtype=jnp.int32)[None]
        hidden, _ = decoder.forward(
            params, window, positions, decoder.init_cache(params, 1, length), np.tri(length, dtype=bool)
        )
        return hidden

    length = min(WINDOW, len(tokens), params.config.max_positions)
    for begin in range(0, len(tokens) - length + 1, length):
        read(watched, jnp.asarray(tokens[begin : begin + length], jnp.int32)[None]).block_until_ready()
    jax.effects_barrier()
    means: list[dict[str, np.ndarray]] = [{} for _ in params.layers]
    for number, (i, path) in enumerate(names):
        if number in sums:
            means[i][path] = sums[number] / (len(tokens) // length * length)
    return means
