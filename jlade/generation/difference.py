"""Where two texts of one prompt part, and how close the model's choice was there."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jlade import mesh
from jlade.decoding import prefill, sharding
from jlade.decoding.state import DecodeConfig
from jlade.generation import prompts
from jlade.generation.request import prepare
from jlade.models.base import Cache, Params
from jlade.vocabulary import VocabularyShard


class Difference(NamedTuple):
    """The first token in which two texts differ."""

    position: int  # of the token among the generated ones, from 0
    # Difference of the two largest logits there, given the text before. In exact arithmetic greedy texts never differ;
    # rounding can swap two tokens whose logits are this close.
    logit_gap: float


def find(
    params: Params, prompt: Sequence[int], one: Sequence[int], other: Sequence[int], kv_dtype: Any = None
) -> Difference | None:
    """Returns the first difference of two texts [L] after the same prompt [P], or None for equal ones.

    `kv_dtype` is that of `jlade.generate`.
    """
    if list(one) == list(other):
        return None
    position = prompts.num_shared(np.asarray(one), np.asarray(other))
    text = prompts.whole([[*prompt, *one[:position]]])
    inputs, config = prepare(params, text, max_new_tokens=1, stop=(), lookahead=None, kv_dtype=kv_dtype)
    cache = prefill.prefill(params, inputs, config).cache
    token = np.array([text["input_ids"][0][-1:]], np.int32)
    first, second = mesh.fetch(_largest_two(params, cache, token, config))
    return Difference(position, float(first - second))


@functools.partial(jax.jit, static_argnames="config")
def _largest_two(params: Params, cache: Cache, token: jax.Array, config: DecodeConfig) -> jax.Array:
    """Returns the two largest logits [2] after `token` [1, 1], which follows the tokens of the cache."""
    largest = functools.partial(_largest_two_part, config=config)
    specs = sharding.param_specs(params, config.mesh), sharding.cache_specs(config.decoder), PartitionSpec()
    return mesh.shard(largest, config.mesh, specs, PartitionSpec())(params, cache, token)


def _largest_two_part(params: Params, cache: Cache, token: jax.Array, config: DecodeConfig) -> jax.Array:
    """`_largest_two` for a device."""
    decoder = config.decoder
    hidden, _ = decoder.forward(params, token, cache.length[:, None], cache, np.ones((1, 1), bool))
    logits = VocabularyShard.of(decoder.vocab_size, config.mesh).whole(decoder.logits(params, hidden))
    return jax.lax.top_k(logits[0, 0].astype(jnp.float32), 2)[0]
