"""The verification branch: the longest draft that the model itself would have produced.

Drafts are a tree (`jlade.drafts.tree`); the paper's candidates are one of G chains. (arXiv 2402.02057, section 3.2,
Algorithms 3 and 4.)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlade.drafts.tree import Form, Tree, TreeShape


class Agreement(NamedTuple):
    """The tokens in which drafts and model agree, up to A, and the drafts that they equal."""

    tokens: jax.Array  # [A] int32, the model's own tokens along the best draft
    num_accepted: jax.Array  # [] int32, 1 to A; later tokens follow from a rejected one
    path: jax.Array  # int32, places of the best draft's tokens in the tree


def verify_by_matching(tree: Tree, next_token: jax.Array, predicted: jax.Array, max_accepted: int) -> Agreement:
    """Accepts the longest draft that equals the model's tokens, and the model's token after it.

    The result is that of Algorithm 3 of arXiv 2402.02057, which walks the depth: a token is accepted when it and all
    tokens before it equal the model's tokens. Ties go to the first draft. The model's tokens are greedy, or samples
    whose noise belongs to their position (`jlade.decoding.sampling.noise_at`).

    Args:
      tree: M drafted tokens.
      next_token: [] int32, the model's token after the current one.
      predicted: [M] int32, the model's token after each token of the tree.
      max_accepted: A, the depth of the tree plus one.
    """
    if max_accepted == 1:
        return Agreement(next_token[None], jnp.int32(1), jnp.zeros(0, jnp.int32))
    parents, mask = jnp.asarray(tree.form.parents), tree.form.mask
    expected = jnp.where(parents == Tree.CURRENT, next_token, predicted[jnp.maximum(parents, 0)])
    agrees = tree.tokens == expected
    depth = jnp.where(jnp.any(mask & ~agrees[None, :], axis=1), 0, tree.form.depths)  # 0 for rejected ones
    best = jnp.argmax(depth).astype(jnp.int32)
    path = _path(tree, best, max_accepted)
    return Agreement(jnp.append(next_token, predicted[path]), 1 + depth[best], path)


def verify_by_rejection(
    key: jax.Array, tree: Tree, next_logits: jax.Array, logits: jax.Array, max_accepted: int
) -> Agreement:
    """Accepts sampled drafts one depth at a time: Algorithm 4 of arXiv 2402.02057.

    At each depth the tokens after the last accepted one are tried in turn. A token is accepted with its share of the
    remaining probability mass; otherwise its mass is removed. If none is accepted, the token is drawn from the
    remaining mass and the walk ends. After the last depth one more token is drawn. The tokens follow the model's
    distribution for any drafts.

    Args:
      key: a `jax.random` key used by this step alone.
      tree: M drafted tokens, M at least 1.
      next_logits: [V] float32, processed logits of the token after the current one.
      logits: [M, V] float32, processed logits of the token after each token of the tree.
      max_accepted: A, the depth of the tree plus one.
    """
    # Drafts with equal prefixes count as one, which is tried once.
    first = _first_equal(tree)
    index, parents = jnp.arange(len(first), dtype=jnp.int32), jnp.asarray(tree.form.parents)
    parents = jnp.where(parents == Tree.CURRENT, Tree.CURRENT, first[jnp.maximum(parents, 0)])
    exists = (tree.tokens >= 0) & (first == index)

    def walk(carry: Any, key: jax.Array) -> tuple[Any, Any]:
        last, goes_on, last_logits = carry
        accept_key, draw_key = jax.random.split(key)
        is_tried = exists & (parents == last) & goes_on
        mass = jnp.where(is_tried, jax.nn.softmax(last_logits)[tree.tokens], 0.0)
        mass_left = 1 - (jnp.cumsum(mass) - mass)  # before each token is tried
        is_accepted = jax.random.uniform(accept_key, mass.shape) * mass_left < mass
        rest = last_logits.at[jnp.where(is_tried, tree.tokens, len(last_logits))].set(-jnp.inf, mode="drop")
        rest = jnp.where(jnp.any(rest > -jnp.inf), rest, last_logits)  # rounding can leave no mass
        drawn = jax.random.categorical(draw_key, rest).astype(jnp.int32)
        accepted, goes_on = jnp.argmax(is_accepted).astype(jnp.int32), jnp.any(is_accepted)
        token = jnp.where(goes_on, tree.tokens[accepted], drawn)
        return (jnp.where(goes_on, accepted, last), goes_on, logits[accepted]), (token, goes_on)

    start = jnp.int32(Tree.CURRENT), jnp.bool_(True), next_logits
    # The last token is never in the tree: at its depth there is nothing to try.
    (last, _, _), (tokens, goes_on) = jax.lax.scan(walk, start, jax.random.split(key, max_accepted))
    return Agreement(tokens, 1 + jnp.sum(goes_on, dtype=jnp.int32), _path(tree, last, max_accepted))


def _path(tree: Tree, last: jax.Array, max_accepted: int) -> jax.Array:
    """Returns the places of a token and its predecessors by depth [A-1], arbitrary ones past it."""
    if isinstance(tree.form, TreeShape):
        return jnp.minimum(jnp.asarray(tree.form.lineage)[last, : max_accepted - 1], len(tree.tokens) - 1)
    depth = jnp.arange(1, max_accepted, dtype=jnp.int32)
    is_at = tree.form.mask[last][None, :] & (tree.form.depths[None, :] == depth[:, None])
    return jnp.argmax(is_at, axis=1).astype(jnp.int32)


def _first_equal(tree: Tree) -> jax.Array:
    """Returns the first token [M] with the same tokens on its path. In a merged tree that is the token itself."""
    size = len(tree.tokens)
    if isinstance(tree.form, Form):
        return jnp.arange(size, dtype=jnp.int32)
    paths = tree.tokens.at[tree.form.lineage].get(mode="fill", fill_value=Tree.CURRENT)
    return jnp.argmax(jnp.all(paths[:, None] == paths[None, :], axis=-1), axis=1).astype(jnp.int32)
