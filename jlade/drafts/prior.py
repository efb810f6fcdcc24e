"""A prior: the most probable tokens after pairs of tokens, and after single ones, as the model saw them in other texts.

It is the floor under recycled logits, which begin each text with an empty table: what that table does not know is
looked up here (arXiv 2411.03786 has such tables of bigrams of a model). No step writes to it, and all sequences share
it. A pair has one place by its hash; of several pairs the most frequent one has it.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts.tree import NONE


@flax.struct.dataclass
class PriorTable:
    """The most probable next tokens, graded, the K best first, -1 where none are known.

    Attributes:
      pairs: int32[P, 2], the pairs that have a place; P is a power of two.
      after_pair: int32[P, K], the tokens after each of them.
      after_token: int32[V, K], those after each token.
    """

    pairs: jax.Array
    after_pair: jax.Array
    after_token: jax.Array


def place(pairs: Any, num_places: int) -> Any:
    """Returns the places [...] uint32 of pairs of tokens [..., 2] int32, of JAX or NumPy."""
    first, second = pairs[..., 0].astype(np.uint32), pairs[..., 1].astype(np.uint32)
    mixed = first * np.uint32(0x9E3779B1) ^ second * np.uint32(0x85EBCA77)  # odd constants of xxHash
    mixed = (mixed ^ mixed >> np.uint32(15)) * np.uint32(0xC2B2AE3D)
    return (mixed ^ mixed >> np.uint32(13)) & np.uint32(num_places - 1)


def find(table: PriorTable, pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the best tokens, graded [Q, k], after pairs [Q, 2], and whether the table has these [Q].

    Those after the second token take the place of those after an unknown pair.
    """
    at = place(pairs, len(table.pairs))
    is_pair = jnp.all(table.pairs[at] == pairs, axis=1) & (pairs[:, 1] != NONE)
    return jnp.where(is_pair[:, None], table.after_pair[at], table.after_token[jnp.maximum(pairs[:, 1], 0)]), is_pair
