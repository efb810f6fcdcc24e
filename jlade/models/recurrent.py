"""Recurrent layers by the gated delta rule (arXiv 2412.06464), for a block whose mask is a tree.

A token changes the state S [dk, dv] of a head, and reads it:

    S <- exp(g) S;   u = beta (v - S' k);   S <- S + k u';   o = S' q

Each token of a block has a state of its own, that of the text and its ancestors in the block. None of these states is
computed: u and o of all tokens follow from the text's state, and from products of keys, queries and updates of
ancestors, as for the chunks of a sequence (arXiv 2406.06484) whose mask is a tree's in the place of a triangle. With
the sum c of the decays g from the text to a token, A = beta exp(c - c') k k' and B = exp(c - c') q k', where a token's
ancestor is the other one, and B also at the token itself:

    (I + A) U = beta (V - exp(c) K S);   O = exp(c) Q S + B U
"""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.models.architecture import DeltaRule
from jlade.models.layers import linear, normalize, sum_linear

BLOCK = 64  # tokens whose updates are found at once: their inverse takes products of as many rows
EPSILON = 1e-6  # of the norms of queries and keys


@flax.struct.dataclass
class State:
    """What a layer keeps of the text: constant in size."""

    memory: jax.Array  # [B, HK, dk, HV / HK * dv] float32, heads with the same key side by side
    inputs: jax.Array  # [B, taps - 1, C], of the convolution, for the last tokens


class Kept(NamedTuple):
    """What a layer keeps of a block's tokens, from which `commit` makes the state of those accepted."""

    inputs: jax.Array  # [B, T, C], of the convolution
    keys: jax.Array  # [B, T, HK, dk] float32
    updates: jax.Array  # [B, T, HV, dv] float32
    decays: jax.Array  # [B, T, HV] float32, sums of logarithms from the text to each token


class Ancestry(NamedTuple):
    """The tree that the mask of a block is."""

    sees: jax.Array  # [1 or B, T, T] bool, ancestors and the token itself
    taps: jax.Array  # [1 or B, T, taps] int32, places of a token's last ancestors and its own, behind the text's last


def ancestry(mask: jax.Array | np.ndarray, taps: int) -> Ancestry:
    """Returns the tree of a mask [T, T] or [B, T, T], in which each token comes after those that it sees."""
    mask = jnp.asarray(mask)
    sees = (mask if mask.ndim == 3 else mask[None]) | jnp.eye(mask.shape[-1], dtype=bool)[None]
    depth = jnp.sum(sees, axis=-1, dtype=jnp.int32)  # from 1, of a token that sees itself alone
    distance = depth[:, :, None] - depth[:, None, :]

    def place(back: int) -> jax.Array:
        """Returns the place [1 or B, T] of the token that is `back` tokens before each."""
        found = jnp.argmax(sees & (distance == back), axis=-1).astype(jnp.int32) + taps - 1
        return jnp.where(depth > back, found, depth + taps - 2 - back)

    return Ancestry(sees, jnp.stack([place(back) for back in range(taps - 1, -1, -1)], axis=-1))


def init_state(sizes: DeltaRule, batch_size: int, shards: int, dtype: jax.typing.DTypeLike) -> State:
    """Returns the state of no text, of the heads on one of several devices."""
    heads, width = sizes.key_heads // shards, sizes.value_heads // sizes.key_heads * sizes.value_size
    return State(
        memory=jnp.zeros((batch_size, heads, sizes.key_size, width), jnp.float32),
        inputs=jnp.zeros((batch_size, sizes.taps - 1, sizes.channels // shards), dtype),
    )


def mix(
    layer: Any, normed: jax.Array, state: State, tree: Ancestry, sizes: DeltaRule, eps: float, axes: tuple[str, ...]
) -> tuple[jax.Array, Kept]:
    """Returns the mixture [B, T, E] of a block, and what `commit` needs of it.

    Args:
      layer: a `jlade.models.llama.LlamaLayer` with the arrays of a recurrent layer.
      normed: [B, T, E].
      state: of the text.
      tree: of the block.
      sizes: of the heads.
      eps: of the norm of each head.
      axes: of the mesh, that divide the heads.
    """
    projected = (linear(normed, w) for w in (layer.recurrent_query, layer.recurrent_key, layer.recurrent_value))
    inputs = jnp.concatenate(list(projected), axis=-1)
    filters = jnp.concatenate([layer.query_filter, layer.key_filter, layer.value_filter])
    mixed = jax.nn.silu(convolve(inputs, filters, state.inputs, tree.taps))
    keys_end = mixed.shape[-1] * 2 * sizes.key_heads * sizes.key_size // sizes.channels

    def heads(x: jax.Array, size: int) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, size).astype(jnp.float32)

    queries, keys = jnp.split(heads(mixed[..., :keys_end], sizes.key_size), 2, axis=2)
    beta = jax.nn.sigmoid(linear(normed, layer.beta)).astype(jnp.float32)
    rate, bias = (x.astype(jnp.float32)[None, None] for x in (layer.decay_rate, layer.decay_bias))
    decay = -jnp.exp(rate) * jax.nn.softplus(linear(normed, layer.decay).astype(jnp.float32) + bias)
    output, updates, decays = delta_rule(
        unit(queries) * sizes.key_size**-0.5,
        unit(keys),
        heads(mixed[..., keys_end:], sizes.value_size),
        beta,
        decay,
        state.memory,
        tree.sees,
    )
    normed_output = normalize(output.astype(normed.dtype), layer.recurrent_norm, "rms", eps)
    gate = jax.nn.silu(heads(linear(normed, layer.recurrent_gate), sizes.value_size))
    gated = (normed_output.astype(jnp.float32) * gate).astype(normed.dtype).reshape(*normed.shape[:2], -1)
    kept = Kept(inputs, unit(keys), updates, decays)
    return sum_linear(gated, layer.recurrent_output, None, axes), kept


def convolve(inputs: jax.Array, filters: jax.Array, before: jax.Array, taps: jax.Array) -> jax.Array:
    """Returns the convolution [B, T, C] over the last tokens of each token's own text.

    Args:
      inputs: [B, T, C], of the block.
      filters: [C, taps], whose last column is of the token itself.
      before: [B, taps - 1, C], the inputs of the text's last tokens.
      taps: see `Ancestry`.
    """
    both = jnp.concatenate([before.astype(inputs.dtype), inputs], axis=1)
    total = jnp.zeros(inputs.shape, jnp.float32)
    for i in range(filters.shape[1]):
        total += take(both, taps[..., i]).astype(jnp.float32) * filters[None, None, :, i].astype(jnp.float32)
    return total.astype(inputs.dtype)


def take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns [B, K, ...], for each sequence the rows of `x` [B, T, ...] with these indices [1 or B, K]."""
    if len(indices) == 1:
        return jnp.take(x, indices[0], axis=1)
    return jnp.take_along_axis(x, indices.reshape(*indices.shape, *[1] * (x.ndim - 2)), axis=1)


def unit(x: jax.Array) -> jax.Array:
    """Returns vectors [..., D] of length one."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPSILON)


def delta_rule(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    beta: jax.Array,
    decay: jax.Array,
    memory: jax.Array,
    sees: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the outputs [B, T, HV, dv], updates [B, T, HV, dv] and summed decays [B, T, HV] of a block, in float32.

    Args:
      queries, keys: [B, T, HK, dk], each of HV / HK consecutive heads of values.
      values: [B, T, HV, dv].
      beta: [B, T, HV], the strength of each update.
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
    total_by_head, beta, values = by_head(total), by_head(beta), by_head(values)
    of_text = jnp.exp(total_by_head)[..., None]
    both = jnp.concatenate([keys, queries], axis=1)  # so that the state is read once
    of_state = product("bxgd,bgdy->bgxy", both, memory).reshape(batch_size, groups, 2 * size, heads // groups, -1)
    keys_in_text, read = jnp.split(jnp.moveaxis(of_state, 3, 2), 2, axis=3)
    updates = beta[..., None] * (values - of_text * keys_in_text)
    read *= of_text
    among_keys, to_queries = jnp.split(product("bxgd,bsgd->bgxs", both, keys), 2, axis=2)
    difference = total_by_head[..., :, None] - total_by_head[..., None, :]
    shrink = jnp.exp(jnp.where(sees[:, None, None], difference, -jnp.inf))  # without the infinities of other tokens
    if size > 1:
        is_ancestor = sees & ~jnp.eye(size, dtype=bool)[None]
        among = beta[..., None] * shrink * among_keys[:, :, None]
        updates = solve(jnp.where(is_ancestor[:, None, None], among, 0), updates)
    outputs = read + product("bgrts,bgrsv->bgrtv", shrink * to_queries[:, :, None], updates)

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
    found: list[jax.Array] = []
    for rows, inverse in zip(bounds, inverses, strict=True):
        rest = right[..., rows, :]
        if found:
            rest -= _multiply(lower[..., rows, : rows.start], jnp.concatenate(found, axis=-2))
        found.append(_multiply(inverse, rest))
    return jnp.concatenate(found, axis=-2)[..., :size, :]


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


@jax.jit
def commit(state: State, kept: Kept, indices: jax.Array, num_accepted: jax.Array) -> State:
    """Returns the state of the text with the first `num_accepted` [B] of the block's tokens `indices` [B, A].

    These are a path of the tree, from the text on. Under `jax.jit`, it is traced once for all layers.
    """
    is_kept = jnp.arange(indices.shape[1], dtype=jnp.int32)[None] < num_accepted[:, None]
    inputs, keys, updates, decays = (take(array, indices) for array in kept)
    last = jnp.maximum(num_accepted - 1, 0)[:, None]
    total = jnp.where(num_accepted[:, None] > 0, take(decays, last)[:, 0], 0)  # [B, HV]
    shrink = jnp.exp(jnp.where(is_kept[..., None], total[:, None] - decays, -jnp.inf))
    # 0 * NaN is NaN: what is not accepted is no number to add.
    keys, updates = (jnp.where(is_kept[..., None, None], x, 0) for x in (keys, updates))
    (batch_size, groups, _, width), heads = state.memory.shape, total.shape[1]
    side_by_side = (shrink[..., None] * updates).reshape(batch_size, -1, groups, width)
    added = jnp.einsum("bagd,bagy->bgdy", keys, side_by_side, precision=jax.lax.Precision.HIGHEST)
    by_column = jnp.repeat(jnp.exp(total).reshape(batch_size, groups, 1, -1), width * groups // heads, axis=-1)
    memory = by_column * state.memory + added
    both = jnp.concatenate([state.inputs, inputs.astype(state.inputs.dtype)], axis=1)
    at = num_accepted[:, None] + jnp.arange(state.inputs.shape[1], dtype=jnp.int32)[None]
    return State(memory, take(both, at))
