"""How large the inputs of each matrix are on some text, to round weights so that errors of large inputs are small."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.models.architecture import is_matrix
from jlade.models.layers import Observed
from jlade.models.llama import LlamaLayer, LlamaParams

WINDOW = 512  # tokens that are read at once


def mean_squares(params: LlamaParams, tokens: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Returns the mean square [in] float32 of each input of the matrices of each layer, by field; not of experts.

    The parameters are on one device. Matrices in few bits are passed over. The tokens are read in windows of 512.
    """
    if not len(tokens):
        raise ValueError("the text to calibrate with has no tokens")
    names: list[tuple[int, str]] = []
    sums: dict[int, np.ndarray] = collections.defaultdict(lambda: np.zeros((), np.float32))

    def record(number: jax.Array, squares: jax.Array) -> None:
        sums[int(number)] = sums[int(number)] + np.asarray(squares)

    def observed(i: int, layer: LlamaLayer) -> LlamaLayer:
        matrices: dict[str, Any] = {}
        for field, array in vars(layer).items():
            if is_matrix(field) and isinstance(array, jax.Array) and array.ndim == 2:
                matrices[field] = Observed(array, jnp.int32(len(names)), record)
                names.append((i, field))
        return dataclasses.replace(layer, **matrices)

    decoder = params.decoder
    layers = tuple(observed(i, layer) for i, layer in enumerate(params.layers))
    watched = dataclasses.replace(params, layers=layers)

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
    for number, (i, field) in enumerate(names):
        if number in sums:
            means[i][field] = sums[number] / (len(tokens) // length * length)
    return means
