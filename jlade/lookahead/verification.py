"""The verification branch: the longest draft that the model itself would have produced.

Drafts are candidates, separate n-grams, or a tree. (arXiv 2402.02057, section 3.2, Algorithms 3 and 4.)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jlade.drafts.tree import Tree


class Verdict(NamedTuple):
    """The tokens that a step accepts, up to A, and the drafted tokens that they equal."""

    tokens: jax.Array  # [A] int32, the model's own tokens along the best draft
    num_accepted: jax.Array  # [] int32, 1 to A; later tokens follow from a rejected one
    drafted: jax.Array  # int32, places of the best draft among the drafted tokens


def verify_by_matching(candidates: jax.Array, next_token: jax.Array, predicted: jax.Array) -> Verdict:
    """Accepts the longest candidate prefix that equals the model's tokens, and the model's token after it.

    The result is that of Algorithm 3 of arXiv 2402.02057, which walks the depth: a candidate's token is accepted when
    it and all tokens before it equal the model's tokens. Ties go to the first candidate. The model's tokens are greedy,
    or samples whose noise belongs to their position (`jlade.decoding.sampling.noise_at`).

    Args:
      candidates: [G, N-1] int32, negative where empty.
      next_token: [] int32, the model's token after the current one.
      predicted: [G, N-1] int32, the model's token after each token of each candidate.
    """
    if candidates.shape[0] == 0:
        return Verdict(next_token[None], jnp.int32(1), jnp.zeros(0, jnp.int32))
    expected = jnp.concatenate([jnp.broadcast_to(next_token, (len(candidates), 1)), predicted], axis=1)  # [G, N]
    matches = jnp.cumprod(candidates == expected[:, :-1], axis=1, dtype=jnp.int32)
    num_matching = jnp.sum(matches, axis=1, dtype=jnp.int32)
    best = jnp.argmax(num_matching).astype(jnp.int32)
    return Verdict(expected[best], num_matching[best] + 1, _places(best, candidates.shape[1]))


def _places(candidate: jax.Array, length: int) -> jax.Array:
    """Returns the places of a candidate's tokens among those of all candidates."""
    return candidate * length + jnp.arange(length, dtype=jnp.int32)


def verify_by_rejection(
    key: jax.Array, candidates: jax.Array, next_logits: jax.Array, candidate_logits: jax.Array
) -> Verdict:
    """Accepts sampled candidates one depth at a time: Algorithm 4 of arXiv 2402.02057.

    At each depth the surviving candidates are tried in turn. A token is accepted with its share of the remaining
    probability mass; otherwise its mass is removed. If no candidate is accepted, the token is drawn from the remaining
    mass and the walk ends. After the last depth one more token is drawn. The tokens follow the model's distribution for
    any candidates.

    Args:
      key: a `jax.random` key used by this step alone.
      candidates: [G, N-1] int32, G at least 1, negative where empty.
      next_logits: [V] float32, processed logits of the token after the current one.
      candidate_logits: [G, N-1, V] float32, processed logits of the token after each token of each candidate.
    """
    num_candidates, depths = candidates.shape
    index = jnp.arange(num_candidates, dtype=jnp.int32)
    is_earlier = index[None, :] < index[:, None]
    survives, walking = candidates[:, 0] >= 0, jnp.bool_(True)
    num_accepted, best, logits = jnp.int32(1), jnp.int32(0), next_logits
    tokens = []
    *depth_keys, last_key = jax.random.split(key, depths + 1)
    for depth, depth_key in enumerate(depth_keys):
        accept_key, draw_key = jax.random.split(depth_key)
        drafted = candidates[:, depth]
        is_repeated = jnp.any((drafted[:, None] == drafted[None, :]) & survives[None, :] & is_earlier, axis=1)
        tried = survives & ~is_repeated
        mass = jnp.where(tried, jax.nn.softmax(logits)[drafted], 0.0)
        left = 1 - (jnp.cumsum(mass) - mass)  # before each candidate is tried
        accepts = jax.random.uniform(accept_key, (num_candidates,)) * left < mass
        accepted = jnp.any(accepts)
        rest = logits.at[jnp.where(tried, drafted, len(logits))].set(-jnp.inf, mode="drop")
        rest = jnp.where(jnp.any(rest > -jnp.inf), rest, logits)  # rounding can leave no mass
        drawn = jax.random.categorical(draw_key, rest).astype(jnp.int32)
        first = jnp.argmax(accepts).astype(jnp.int32)
        token = jnp.where(accepted, drafted[first], drawn)
        tokens.append(token)

        walking &= accepted
        best = jnp.where(walking, first, best)
        num_accepted += walking.astype(jnp.int32)
        survives &= drafted == token
        logits = candidate_logits[first, depth]
    last = jax.random.categorical(last_key, logits).astype(jnp.int32)
    return Verdict(jnp.stack([*tokens, last]), num_accepted, _places(best, depths))


def verify_tree_by_matching(tree: Tree, next_token: jax.Array, predicted: jax.Array, most: int) -> Verdict:
    """Accepts the longest path of the tree that equals the model's tokens, and the model's token after it.

    Args:
      tree: M drafted tokens, siblings of which differ.
      next_token: [] int32, the model's token after the current one.
      predicted: [M] int32, the model's token after each token of the tree.
      most: A, the depth of the tree and 1.
    """
    if most == 1:
        return Verdict(next_token[None], jnp.int32(1), jnp.zeros(0, jnp.int32))
    expected = jnp.where(tree.parents < 0, next_token, predicted[jnp.maximum(tree.parents, 0)])
    agrees = tree.tokens == expected
    is_accepted = ~jnp.any(tree.mask & ~agrees[None, :], axis=1)
    depth = jnp.arange(1, most, dtype=jnp.int32)
    is_at = is_accepted[None, :] & (tree.depths[None, :] == depth[:, None])  # one at each depth, at most
    path = jnp.argmax(is_at, axis=1).astype(jnp.int32)
    tokens = jnp.concatenate([next_token[None], predicted[path]])
    return Verdict(tokens, 1 + jnp.sum(is_accepted, dtype=jnp.int32), path)


def verify_tree_by_rejection(
    key: jax.Array, tree: Tree, next_logits: jax.Array, logits: jax.Array, most: int
) -> Verdict:
    """Accepts sampled tokens of a tree one depth at a time: Algorithm 4 of arXiv 2402.02057.

    It is `verify_by_rejection`, with the children of the last accepted token for the surviving candidates.

    Args:
      key: a `jax.random` key used by this step alone.
      tree: M drafted tokens, siblings of which differ.
      next_logits: [V] float32, processed logits of the token after the current one.
      logits: [M, V] float32, processed logits of the token after each token of the tree.
      most: A, the depth of the tree and 1.
    """
    size = len(tree.tokens)

    def walk(carry: Any, key: jax.Array) -> tuple[Any, Any]:
        at, walking, logits_here = carry
        accept_key, draw_key = jax.random.split(key)
        tried = (tree.parents == at) & (tree.tokens >= 0) & walking
        mass = jnp.where(tried, jax.nn.softmax(logits_here)[tree.tokens], 0.0)
        left = 1 - (jnp.cumsum(mass) - mass)  # before each child is tried
        accepts = jax.random.uniform(accept_key, (size,)) * left < mass
        rest = logits_here.at[jnp.where(tried, tree.tokens, len(logits_here))].set(-jnp.inf, mode="drop")
        rest = jnp.where(jnp.any(rest > -jnp.inf), rest, logits_here)  # rounding can leave no mass
        drawn = jax.random.categorical(draw_key, rest).astype(jnp.int32)
        first = jnp.argmax(accepts).astype(jnp.int32)
        walks = jnp.any(accepts)
        token = jnp.where(walks, tree.tokens[first], drawn)
        return (first, walks, logits[first]), (token, first, walks)

    start = jnp.int32(Tree.CURRENT), jnp.bool_(True), next_logits
    # The last token is never in the tree: at its depth there is nothing to try.
    _, (tokens, path, walks) = jax.lax.scan(walk, start, jax.random.split(key, most))
    return Verdict(tokens, 1 + jnp.sum(walks, dtype=jnp.int32), path[:-1])
