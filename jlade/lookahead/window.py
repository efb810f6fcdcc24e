"""The lookahead branch: a 2D window of W columns, future positions, and N-1 rows, past Jacobi iterations.

Column `i` of row `k` guesses the token `k + i` positions after the current one. Column 0 of row 0 stands for the
current token, which is passed separately; the array's value there is never read. (arXiv 2402.02057,
section 3.1 and Algorithm 2.)
"""

import jax
import jax.numpy as jnp


def draw(key: jax.Array, tokens: jax.Array, length: jax.Array, number: int) -> jax.Array:
    """Returns `number` tokens drawn uniformly from the first `length` of `tokens` [C]."""
    return tokens[jax.random.randint(key, (number,), 0, length, jnp.int32)]


def start(drawn: jax.Array, window_size: int, ngram_size: int) -> jax.Array:
    """Returns the first window [N-1, W], made of the first of the `drawn` tokens [M].

    N-grams should be harvested only after N-2 steps, when the model has predicted every row but row 0.
    """
    rows = ngram_size - 1
    return drawn[: rows * window_size].reshape(rows, window_size)


def ngrams(window: jax.Array, current: jax.Array, predicted: jax.Array) -> jax.Array:
    """Returns the n-grams [W, N] that the tokens `predicted` [W] after the newest row complete."""
    return jnp.concatenate([window.at[0, :1].set(current), predicted[None]]).T


def advance(window: jax.Array, predicted: jax.Array) -> jax.Array:
    """Drops the oldest row and appends the tokens `predicted` [W] as the newest."""
    return jnp.concatenate([window[1:], predicted[None]])


def advance_by_token(window: jax.Array, predicted: jax.Array, drawn: jax.Array, num_accepted: jax.Array) -> jax.Array:
    """Moves on by `num_accepted` [] rows, 1 or more: first `predicted` [W], then `drawn` ones [A-1, W]."""
    rows = jnp.concatenate([window[1:], predicted[None], drawn])
    return jax.lax.dynamic_slice_in_dim(rows, num_accepted - 1, len(window))
