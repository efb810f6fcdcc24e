"""The gated delta rule (arXiv 2412.06464), and that of Mamba-2 (arXiv 2405.21060), for a block whose mask is a tree.

A token changes the state S [dk, dv] of a head, and reads it:

    S <- exp(g) S;   u = beta (v - S' k);   S <- S + k u';   o = S' q

Each token of a block has a state of its own, that of the text and its ancestors in the block. None of these states is
computed: u and o of all tokens follow from the text's state, and from products of keys, queries and updates of
ancestors, as for the chunks of a sequence (arXiv 2406.06484) whose mask is a tree's in the place of a triangle. With
the sum c of the decays g from the text to a token, A = beta exp(c - c') k k' and B = exp(c - c') q k', where a token's
ancestor is the other one, and B also at the token itself:

    (I + A) U = beta (V - exp(c) K S);   O = exp(c) Q S + B U

Mamba-2 does not correct what the state has: u = v, so that there is nothing to solve.
"""

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 64  # tokens whose updates are found at once: their inverse takes products of as many rows


def delta_rule(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    beta: jax.Array | None,
    decay: jax.Array,
    memory: jax.Array,
    sees: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the outputs [B, T, HV, dv], updates [B, T, HV, dv] and summed decays [B, T, HV] of a block, in float32.

    Args:
      queries, keys: [B, T, HK, dk], each of HV / HK consecutive heads of values.
      values: [B, T, HV, dv].
      beta: [B, T, HV], the strength of each update, None for updates that are the values (Mamba-2).
      decay: [B, T, HV], logarithms of the factors by which the state shrinks.
      memory: [B, HK, dk, HV / HK * dv], the state of the text.
      sees: [1 or B, T, T], see `Ancestry`.
    """
    (batch_size, size, groups, _), heads = keys.shape, values.shape[2]

    def by_head(x: jax.Array) -> jax.Array:
        """Returns [B, HK, HV / HK, T, ...] of [B, T, HV, ...]."""
        return jnp.moveaxis(x, 1, 2).reshape(batch_size, groups, heads // groups, size, *x.shape[3:])

    def product(subscripts: str, *arrays: jax.Array) -> jax.Array:
        # TPUs would round float32 to bfloat16, and GPUs to TF32.
        return jnp.einsum(subscripts, *arrays, precision=jax.lax.Precision.HIGHEST)

    total = product("bts,bsh->bth", jnp.broadcast_to(sees, (batch_size, size, size)).astype(jnp.float32), decay)
    total_by_head, values = by_head(total), by_head(values)
    of_text = jnp.exp(total_by_head)[..., None]
    readers = queries if beta is None else jnp.concatenate([keys, queries], axis=1)  # so that the state is read once
    in_text = product("bxgd,bgdy->bgxy", readers, memory).reshape(
        *readers.shape[:1], groups, readers.shape[1], heads // groups, -1
    )
    in_text = jnp.moveaxis(in_text, 3, 2)
    among = product("bxgd,bsgd->bgxs", readers, keys)
    difference = total_by_head[..., :, None] - total_by_head[..., None, :]
    shrink = jnp.exp(jnp.where(sees[:, None, None], difference, -jnp.inf))  # without the infinities of other tokens
    if beta is None:
        updates, read, to_queries = values, in_text, among
    else:
        (keys_in_text, read), (among_keys, to_queries) = jnp.split(in_text, 2, axis=3), jnp.split(among, 2, axis=2)
        strength = by_head(beta)[..., None]
        updates = strength * (values - of_text * keys_in_text)
        if size > 1:
            is_ancestor = sees & ~jnp.eye(size, dtype=bool)[None]
            between = strength * shrink * among_keys[:, :, None]
            updates = solve(jnp.where(is_ancestor[:, None, None], between, 0), updates)
    outputs = of_text * read + product("bgrts,bgrsv->bgrtv", shrink * to_queries[:, :, None], updates)

    def by_token(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(batch_size, heads, size, -1), 1, 2)

    return by_token(outputs), by_token(updates), total


def solve(lower: jax.Array, right: jax.Array) -> jax.Array:
    """Returns X [..., T, D] with (I + lower) X = right, for `lower` [..., T, T] that is zero on and above its diagonal.

    Blocks of the diagonal are inverted by halves, in as many products as their size has bits. Substitution goes from
    block to block.
    """
    size, block = right.shape[-2], min(BLOCK, right.shape[-2])
    number = -(-size // block)
    missing, before = number * block - size, [(0, 0)] * (lower.ndim - 2)
    lower = jnp.pad(lower, [*before, (0, missing), (0, missing)])
    right = jnp.pad(right, [*before, (0, missing), (0, 0)])
    bounds = [slice(i * block, (i + 1) * block) for i in range(number)]
    inverses = _inverse(jnp.stack([lower[..., rows, rows] for rows in bounds]))
    solved: list[jax.Array] = []
    for rows, inverse in zip(bounds, inverses, strict=True):
        rest = right[..., rows, :]
        if solved:
            rest -= _multiply(lower[..., rows, : rows.start], jnp.concatenate(solved, axis=-2))
        solved.append(_multiply(inverse, rest))
    return jnp.concatenate(solved, axis=-2)[..., :size, :]


def _inverse(lower: jax.Array) -> jax.Array:
    """Returns the inverse of I + lower [..., n, n], which is zero on and above its diagonal."""
    size = lower.shape[-1]
    index, inverse = np.arange(size), jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    for power in range((size - 1).bit_length()):
        # From the inverses of blocks of 2 ** power on the diagonal to those of twice the size.
        is_below = (index[:, None] >> power == (index[None, :] >> power) + 1) & ((index[:, None] >> power) % 2 == 1)
        between = jnp.where(jnp.broadcast_to(is_below, lower.shape), lower, 0)
        inverse = inverse - (between if power == 0 else _multiply(_multiply(inverse, between), inverse))
    return inverse


def _multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
