"""The 2D window: W columns of future positions by N-1 rows of past Jacobi iterations.

Column `i` of row `k` guesses the token `k + i` positions after the current one. Column 0 of row 0 is the current token
itself: it is passed in, and what the array holds there is never read. (arXiv 2402.02057, section 3.1.)
"""

import jax
import jax.numpy as jnp


def start(key: jax.Array, tokens: jax.Array, length: jax.Array, window_size: int, ngram_size: int) -> jax.Array:
    """Returns a window [N-1, W] of tokens drawn from the first `length` of `tokens` [C].

    Only what the model makes of them is worth keeping: harvest n-grams once N-2 steps have passed, when just row 0 is
    left of the draw.
    """
    return tokens[jax.random.randint(key, (ngram_size - 1, window_size), 0, length, jnp.int32)]


def ngrams(window: jax.Array, current: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the W n-grams that the tokens `new` [W], predicted at the newest row, close: keys [W], rest [W, N-1]."""
    keys = window[0].at[:1].set(current)
    return keys, advance(window, new).T


def advance(window: jax.Array, new: jax.Array) -> jax.Array:
    """Drops the oldest row and appends the tokens `new` [W] as the newest."""
    return jnp.concatenate([window[1:], new[None]])
