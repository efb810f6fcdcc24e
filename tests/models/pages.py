"""A layer of a cache in pages."""

import jax.numpy as jnp
import numpy as np


def in_pages(layer, table, size):
    """Returns a layer [B, KH, S, ...] in the pages [P, KH, size, ...] of a table, with large numbers in the others."""
    pages = np.full((np.max(table) + 3, layer.shape[1], size, *layer.shape[3:]), 99, layer.dtype)
    for row, numbers in zip(np.asarray(layer), table, strict=True):
        for place, number in enumerate(numbers):
            pages[number] = row[:, place * size : (place + 1) * size]
    return jnp.asarray(pages)
