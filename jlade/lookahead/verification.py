"""The verification branch: the longest candidate prefix that the model itself would have produced.

(arXiv 2402.02057, section 3.2, Algorithms 3 and 4.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Verdict(NamedTuple):
    """The tokens that a step accepts, and the candidate that they follow."""

    tokens: jax.Array  # [N] int32, the model's own tokens along the best candidate
    num_accepted: jax.Array  # [] int32, 1 to N; later tokens follow from a rejected one
    candidate: jax.Array  # [] int32, index of the best candidate


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
        return Verdict(next_token[None], jnp.int32(1), jnp.int32(0))
    expected = jnp.concatenate([jnp.broadcast_to(next_token, (len(candidates), 1)), predicted], axis=1)  # [G, N]
    matches = jnp.cumprod(candidates == expected[:, :-1], axis=1, dtype=jnp.int32)
    num_matching = jnp.sum(matches, axis=1, dtype=jnp.int32)
    best = jnp.argmax(num_matching).astype(jnp.int32)
    return Verdict(expected[best], num_matching[best] + 1, best)


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
    return Verdict(jnp.stack([*tokens, last]), num_accepted, best)
