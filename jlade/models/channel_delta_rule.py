"""The delta rule with a decay for each channel of keys (Kimi Linear, arXiv 2510.26692), for a block that is a tree.

It is the rule of `jlade.models.delta_rule` with S <- exp(g) S for a vector g [dk], so that exp(c - c') is between the
elements of two keys, or of a query and a key: their product is no longer one number times that of the whole vectors.
No exponent is positive, however fast a channel fades. A chain has products of matrices: of each two halves of it, the
one factor fades from the first half's end, and the other one until there. In a tree the end would be each token's own.
"""

import jax
import jax.numpy as jnp

from jlade.models.delta_rule import solve

STRIP = 16  # tokens of a tree whose products with the others are made at once: [STRIP, T, dk] of each head


def channel_delta_rule(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    beta: jax.Array,
    decay: jax.Array,
    memory: jax.Array,
    sees: jax.Array,
    is_chain: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs [B, T, H, dv] and updates [B, T, H, dv] of a block, in float32.

    Args:
      queries, keys: [B, T, H, dk].
      values: [B, T, H, dv].
      beta: [B, T, H], the strength of each update.
      decay: [B, T, H, dk], logarithms of the factors by which the rows of the state shrink.
      memory: [B, H, dk, dv], the state of the text.
      sees: [1 or B, T, T], see `Ancestry`.
      is_chain: whether `sees` is a triangle.
    """
    keys, values, decay, strength = (jnp.moveaxis(x, 1, 2) for x in (keys, values, decay, beta[..., None]))
    readers = jnp.stack([keys, jnp.moveaxis(queries, 1, 2)], axis=2)  # [B, H, 2, T, dk]
    total, among = _chain(readers, keys, decay) if is_chain else _tree(readers, keys, decay, sees)
    in_text = _product("bhrtd,bhdv->bhrtv", readers * jnp.exp(total)[:, :, None], memory)
    updates = strength * (values - in_text[:, :, 0])
    if (size := keys.shape[2]) > 1:
        is_ancestor = ~jnp.eye(size, dtype=bool)[None, None]  # `among` is zero for tokens that are not seen
        updates = solve(jnp.where(is_ancestor, strength * among[:, :, 0], 0), updates)
    outputs = in_text[:, :, 1] + _product("bhts,bhsv->bhtv", among[:, :, 1], updates)
    return jnp.moveaxis(outputs, 2, 1), jnp.moveaxis(updates, 2, 1)


def _tree(readers: jax.Array, keys: jax.Array, decay: jax.Array, sees: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns summed decays [B, H, T, dk], and the products [B, H, 2, T, T] of readers with the keys that they see."""
    batch_size, size = keys.shape[0], keys.shape[2]
    total = _product("bts,bhsd->bhtd", jnp.broadcast_to(sees, (batch_size, size, size)).astype(jnp.float32), decay)

    def of_token(token: tuple[jax.Array, ...]) -> jax.Array:
        reader, until, own_sees = token
        difference = until[:, :, None] - total
        shrink = jnp.exp(jnp.where(own_sees[:, None, :, None], difference, -jnp.inf))
        return _product("bhrd,bhsd->bhrs", reader, shrink * keys)

    tokens = (jnp.moveaxis(x, axis, 0) for x, axis in ((readers, 3), (total, 2), (sees, 1)))
    return total, jnp.moveaxis(jax.lax.map(of_token, tuple(tokens), batch_size=STRIP), 0, 3)


def _chain(readers: jax.Array, keys: jax.Array, decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the results of `_tree` for a triangle: from those of parts of one token to those of twice the size."""
    size = keys.shape[2]
    missing = (1 << (size - 1).bit_length()) - size
    readers, keys, decay = (
        jnp.pad(x, [(0, missing if axis == x.ndim - 2 else 0) for axis in range(x.ndim)])
        for x in (readers, keys, decay)
    )
    # Decays from the beginning of a part to each token, and from each token to the end
    until, after = decay[..., None, :], jnp.zeros_like(decay)[..., None, :]
    among = jnp.sum(readers * keys[:, :, None], axis=-1)[..., None, None]

    def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the first and the second [..., parts / 2, tokens, D] of each two parts."""
        return x[..., ::2, :, :], x[..., 1::2, :, :]

    for power in range((size - 1).bit_length()):
        (until_first, until_second), (after_first, after_second) = halves(until), halves(after)
        in_parts = (x.reshape(*x.shape[:-2], -1, 1 << power, x.shape[-1]) for x in (readers, keys))
        (_, reader), (key, _) = map(halves, in_parts)
        between = _product(
            "bhrntd,bhnsd->bhrnts", reader * jnp.exp(until_second)[:, :, None], key * jnp.exp(after_first)
        )
        first, second = halves(among)
        upper = jnp.concatenate([first, jnp.zeros_like(between)], axis=-1)
        among = jnp.concatenate([upper, jnp.concatenate([between, second], axis=-1)], axis=-2)
        until = jnp.concatenate([until_first, until_second + until_first[..., -1:, :]], axis=-2)
        after = jnp.concatenate([after_first + until_second[..., -1:, :], after_second], axis=-2)
    return until[:, :, 0, :size], among[:, :, :, 0, :size, :size]


def _product(subscripts: str, *arrays: jax.Array) -> jax.Array:
    # TPUs would round float32 to bfloat16, and GPUs to TF32.
    return jnp.einsum(subscripts, *arrays, precision=jax.lax.Precision.HIGHEST)
