"""Sampling: from logits to processed logits, and from those to tokens, with noise that belongs to a position.

Everything here is for one sequence; settings are arrays, so another value compiles nothing.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

NEVER = -jnp.inf  # the logit of a token that must not be drawn


@flax.struct.dataclass
class Sampling:
    """`SamplingConfig` as arrays, [B] for a batch, [] for a row.

    A control that no row uses is None and not in the program. Rows without a control that another row uses have a value
    that changes nothing: top_k V, top_p inf, min_p 0, repetition_penalty 1, and 0 for the others.
    """

    temperature: jax.Array | None = None  # float32, 0 for greedy
    top_k: jax.Array | None = None  # int32, at most V
    top_p: jax.Array | None = None  # float32
    min_p: jax.Array | None = None  # float32
    repetition_penalty: jax.Array | None = None  # float32
    presence_penalty: jax.Array | None = None  # float32
    frequency_penalty: jax.Array | None = None  # float32
    logit_bias: jax.Array | None = None  # [..., V] float32

    @property
    def counts_tokens(self) -> bool:
        """Whether a control looks at the tokens before."""
        return any(x is not None for x in (self.repetition_penalty, self.presence_penalty, self.frequency_penalty))


@flax.struct.dataclass
class TokenCounts:
    """How often each token occurs in the history of a row."""

    prompt: jax.Array  # [V] int32
    generated: jax.Array  # [V] int32


def process(logits: jax.Array, sampling: Sampling, prompt: Any, generated: Any) -> jax.Array:
    """Applies penalties, bias, temperature and filters, in the order of transformers.

    Args:
      logits: [R, V] float32, of R positions of one row.
      sampling: the row's settings.
      prompt: [V] how often each token is in the prompt; None when no control asks for it.
      generated: [R, V] how often each token was generated before each position; None likewise.

    Returns:
      [R, V] logits of the distribution to draw from; -inf for tokens that are filtered out.
    """
    s = sampling
    if s.logit_bias is not None:
        logits = logits + s.logit_bias[None, :]
    if s.repetition_penalty is not None:
        penalized = jnp.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
        logits = jnp.where(prompt[None, :] + generated > 0, penalized, logits)
    if s.presence_penalty is not None:
        logits = logits - s.presence_penalty * (generated > 0).astype(jnp.float32)
    if s.frequency_penalty is not None:
        logits = logits - s.frequency_penalty * generated.astype(jnp.float32)
    if s.temperature is not None:
        is_greedy = s.temperature == 0
        logits = logits / jnp.where(is_greedy, 1.0, s.temperature)
        best = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :] == argmax(logits)[:, None]
        logits = jnp.where(is_greedy & ~best, NEVER, logits)  # the limit: only the highest is left
    if s.top_k is not None:
        kth = -jnp.sort(-logits, axis=-1)[:, s.top_k - 1]
        logits = jnp.where(logits < kth[:, None], NEVER, logits)
    if s.top_p is not None:
        highest = -jnp.sort(-logits, axis=-1)
        probabilities = jax.nn.softmax(highest, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        last = jnp.min(jnp.where(before < s.top_p, highest, jnp.inf), axis=-1)
        logits = jnp.where(logits < last[:, None], NEVER, logits)
    if s.min_p is not None:
        probabilities = jax.nn.softmax(logits, axis=-1)
        too_rare = probabilities < s.min_p * jnp.max(probabilities, axis=-1, keepdims=True)
        logits = jnp.where(too_rare, NEVER, logits)
    return logits


def noise_at(key: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Returns the Gumbel noise [M, V] of the tokens at absolute `positions` [M] of the row with `key`.

    The highest sum of processed logits and Gumbel noise is a draw from their softmax. As the noise belongs to the
    position, a position gets the same token however it was reached: in the window, in a candidate, or one by one.
    """
    return jax.vmap(lambda position: jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32))(
        positions
    )


def argmax(logits: jax.Array) -> jax.Array:
    """Returns the first index of the highest of `logits` [..., V], as int32.

    Two plain reductions: on CPUs they become vector code, which `jnp.argmax`, a reduction of pairs, does not.
    """
    vocab_size = logits.shape[-1]
    is_highest = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_highest, jnp.arange(vocab_size, dtype=jnp.int32), vocab_size - 1), axis=-1)
