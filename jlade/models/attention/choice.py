"""The tokens that each token sees where an index chooses them: see `jlade.models.layers.index`."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jlade.models import kv_rounding
from jlade.models.attention import plain
from jlade.models.attention.operands import Operands


class Choice(NamedTuple):
    """The tokens that each token of a block sees.

    Attributes:
      cached: [B, T, S] bool, in the cache.
      block: [B, T, T] bool, in the block.
    """

    cached: jax.Array
    block: jax.Array


def choose(operands: Operands, queries: jax.Array, weights: jax.Array, number: int) -> Choice:
    """Returns the `number` best of the tokens that each token could see, or all where these are fewer.

    The score of a key is the sum over the heads of the index of their weights times the ReLU of query times key. Of
    equal scores that of the earlier token is better, so that no choice depends on the division of a text into blocks.

    Args:
      operands: those of attention. The last elements of keys are those of the index, whose scale is the last one.
      queries: [B, T, H, D] of the index.
      weights: [B, T, H] float32.
      number: of tokens.
    """
    score = functools.partial(_scores, queries, weights)
    keys, scales = operands.keys[:, :, 0], operands.key_scales
    of_block = score(keys, None if scales is None else scales[..., -1])
    loop, unrolled = (functools.partial(score_cache, unrolled=way) for way in (False, True))
    platforms = {"cuda": unrolled, "rocm": unrolled, "default": loop}
    of_cache = jax.lax.platform_dependent(operands, queries, weights, **platforms)

    batch_size, block_size = queries.shape[:2]
    mask = jnp.broadcast_to(operands.block_mask, (batch_size, block_size, block_size))
    entries = jnp.arange(operands.capacity, dtype=jnp.int32)[None, None]
    in_use = jnp.broadcast_to(entries < operands.cached_length[:, None, None], of_cache.shape)
    scores, visible = (jnp.concatenate(x, axis=-1) for x in ((of_cache, of_block), (in_use, mask)))
    chosen = best(scores, visible, number)
    return Choice(chosen[..., : operands.capacity], chosen[..., operands.capacity :])


def best(scores: jax.Array, visible: jax.Array, number: int) -> jax.Array:
    """Returns which of the `visible` tokens [..., N] have the `number` best scores [..., N], of equal ones the first.

    NaN is better than all numbers: it reaches the tokens that could see it.
    """
    scores = jnp.where(visible, jnp.where(jnp.isnan(scores), jnp.inf, scores), -jnp.inf)
    last = jax.lax.top_k(scores, number)[0][..., -1:]
    better, equal = scores > last, visible & (scores == last)
    room = number - jnp.sum(better, axis=-1, keepdims=True, dtype=jnp.int32)
    return better | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room))


def _scores(queries: jax.Array, weights: jax.Array, keys: jax.Array, scales: jax.Array | None) -> jax.Array:
    """Returns the scores [B, T, K] of keys [B, K, ...], and of their scales [B, K] in 8 bits."""
    keys = keys[..., -queries.shape[-1] :]
    if scales is not None:
        keys = kv_rounding.numbers(keys, queries.dtype)
    products = jnp.einsum("bthd,bkd->bthk", queries, keys, preferred_element_type=jnp.float32)
    if scales is not None:
        products *= scales[:, None, None]
    return jnp.sum(weights[..., None] * jax.nn.relu(products), axis=2)


def score_cache(
    operands: Operands, queries: jax.Array, weights: jax.Array, *, unrolled: bool, chunk: int = plain.CHUNK
) -> jax.Array:
    """Returns the scores [B, T, S] of the keys in the cache, in chunks as `jlade.models.attention.plain` reads them."""
    (batch_size, block_size, heads, _), capacity, take = queries.shape, operands.capacity, plain.taker(operands)
    chunk = plain.chunk_size(operands, batch_size * heads * block_size, chunk, unrolled)

    def score_chunk(i: jax.Array | int, scores: jax.Array) -> jax.Array:
        start = jnp.minimum(i * chunk, capacity - chunk)  # the last chunk may overlap the one before
        keys, scales = take(operands.cached_keys, start, chunk)[:, 0], operands.cached_key_scales
        of_chunk = _scores(queries, weights, keys, None if scales is None else take(scales, start, chunk)[:, -1])
        return jax.lax.dynamic_update_slice_in_dim(scores, of_chunk, start, axis=2)

    scores = jnp.zeros((batch_size, block_size, capacity))
    if not unrolled:
        return jax.lax.fori_loop(0, -(-jnp.max(operands.cached_length) // chunk), score_chunk, scores)
    for i in range(-(-capacity // chunk)):
        scores = score_chunk(i, scores)
    return scores
