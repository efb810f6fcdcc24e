"""Verification: how much of which candidate the model itself would have produced."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Verdict(NamedTuple):
    """What a step accepts. The KV rows behind it are those of the current token and of `candidate`, in order."""

    tokens: jax.Array  # [N], the model's own tokens along the best candidate
    num_accepted: jax.Array  # 1 to N: only so many of `tokens` follow from accepted ones
    candidate: jax.Array  # index of the best candidate


def verify_greedy(candidates: jax.Array, next_token: jax.Array, predicted: jax.Array) -> Verdict:
    """Accepts the longest candidate prefix that the model predicts, and the token it predicts after that.

    This finds what Algorithm 3 of arXiv 2402.02057 finds by walking the depth: a candidate's token is accepted when it
    and all before it equal the prediction made one place earlier. Ties go to the first candidate.

    Args:
      candidates: [G, N-1] tokens.
      next_token: the model's prediction after the current token.
      predicted: [G, N-1] the model's prediction after each token of each candidate.
    """
    if candidates.shape[0] == 0:
        return Verdict(next_token[None], jnp.int32(1), jnp.int32(0))
    expected = jnp.concatenate([jnp.broadcast_to(next_token, (len(candidates), 1)), predicted], axis=1)  # [G, N]
    matches = jnp.cumprod(candidates == expected[:, :-1], axis=1, dtype=jnp.int32)
    num_matching = jnp.sum(matches, axis=1, dtype=jnp.int32)
    best = jnp.argmax(num_matching).astype(jnp.int32)
    return Verdict(expected[best], num_matching[best] + 1, best)
