"""Recycled logits: the most probable tokens after each token, as the model last saw it (arXiv 2408.08696).

Every token of a block yields logits, also those of rejected drafts. The table keeps the best tokens of each row, by the
token that the row read. Drafts follow the table from the current token on, in a tree that narrows with rank and depth.
"""

import functools
import heapq
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jlade.candidates.tree import NONE, Shape

RANKS = 8  # k, tokens kept for each token
# Share of the tokens that the model chose, by rank in the table; measured with SmolLM2.
ODDS = (0.47, 0.11, 0.055, 0.042, 0.027, 0.02, 0.013, 0.01)


class Template(NamedTuple):
    """The shape of the drafts: each takes the token of a rank after its parent."""

    shape: Shape
    ranks: tuple[int, ...]


@functools.cache
def template(size: int, depth: int) -> Template:
    """Returns the tree of the `size` most promising drafts by `ODDS`, up to `depth` tokens deep."""
    ends: list[tuple[float, tuple[int, ...]]] = [(-odds, (rank,)) for rank, odds in enumerate(ODDS)]  # a heap
    places: dict[tuple[int, ...], int] = {(): -1}
    parents: list[int] = []
    ranks: list[int] = []
    while ends and len(parents) < size:
        score, path = heapq.heappop(ends)
        places[path] = len(parents)
        parents.append(places[path[:-1]])
        ranks.append(path[-1])
        if len(path) < depth:
            for rank, odds in enumerate(ODDS):
                heapq.heappush(ends, (score * odds, (*path, rank)))
    return Template(Shape(tuple(parents)), tuple(ranks))


def empty(vocab_size: int) -> jax.Array:
    """Returns an empty table [V, k]."""
    return jnp.full((vocab_size, RANKS), NONE, jnp.int32)


def draft(table: jax.Array, current: jax.Array, template: Template) -> jax.Array:
    """Returns the drafts [Q] of a template after the token `current` [], `NONE` where the table [V, k] has none."""
    depths, ranks = template.shape.depths, np.array(template.ranks)
    parents = np.array(template.shape.parents)
    drafted = jnp.full(len(ranks), NONE, jnp.int32)
    for depth in range(1, depths.max(initial=0) + 1):
        (at,) = np.nonzero(depths == depth)
        before = jnp.broadcast_to(current, at.shape) if depth == 1 else drafted[parents[at]]
        after = table[jnp.maximum(before, 0), ranks[at]]
        drafted = drafted.at[at].set(jnp.where(before == NONE, NONE, after), unique_indices=True)
    return drafted


def update(table: jax.Array, keys: jax.Array, best: jax.Array, order: jax.Array) -> jax.Array:
    """Returns the table with the best tokens of a block's rows.

    Args:
      table: [V, k] int32.
      keys: [R] int32, the token that each row read.
      best: [R, k] int32, the tokens of the row's highest logits.
      order: [R] int32, different numbers: of several rows with a key the last one by `order` counts. Negative for rows
        to leave out.
    """
    place = jnp.arange(len(keys), dtype=jnp.int32)
    is_later = order[None, :] > order[:, None]
    is_last = (order >= 0) & ~jnp.any((keys[:, None] == keys[None, :]) & is_later, axis=1)
    target = jnp.where(is_last, keys, len(table) + place)  # indices out of range are dropped; no index occurs twice
    return table.at[target].set(best, mode="drop", unique_indices=True)
