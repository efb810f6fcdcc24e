"""How tokens are drawn, checked: the settings of sampling, the keys, and whether a token is left to draw."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.config import SamplingConfig
from jlade.decoding import sampling as sampling_lib
from jlade.decoding.sampling import Sampling
from jlade.decoding.stopping import Stopping


def check_key(key: Any, batch_size: int) -> jax.Array:
    """Returns the key of all sequences, or those of each [B]."""
    if key is None:
        return make_key(0)
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.ndim > 0:
        return check_key(_wrap(key), batch_size)
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape in ((), (batch_size,)):
            return key
        raise ValueError(f"key must be one key or one for each of {batch_size} prompts, got keys of shape {key.shape}")
    raise TypeError(f"key must be a key made by jax.random.key, or an array of them, got {key!r}")


def make_key(seed: int) -> jax.Array:
    """Returns `jax.random.key(seed)`. JAX traces and compiles a program for that, which takes longer than a first step.

    Args:
      seed: below 2**32, 0 or more.
    """
    if jax.config.values["jax_default_prng_impl"] != "threefry2x32" or jax.config.values["jax_random_seed_offset"]:
        return jax.random.key(seed)
    words = jax.device_put(np.array([0, seed], np.uint32))
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def check_sampling(sampling: Any, batch_size: int, vocab_size: int) -> Sampling:
    """Returns the settings of B sequences as arrays, given one for all or one for each."""
    configs = [sampling] * batch_size if isinstance(sampling, SamplingConfig) else sampling
    if not isinstance(configs, Sequence) or not all(isinstance(config, SamplingConfig) for config in configs):
        raise TypeError(f"sampling must be a SamplingConfig, or a sequence of one for each prompt, got {sampling!r}")
    if len(configs) != batch_size:
        raise ValueError(f"sampling must be one or {batch_size}, one for each prompt, got {len(configs)} configs")
    outside = [token for config in configs for token in dict(config.logit_bias or ()) if token >= vocab_size]
    if outside:
        raise ValueError(f"logit_bias names token id {outside[0]}; accepted are 0 to {vocab_size - 1}")
    return sampling_lib.to_arrays(configs, vocab_size)


def check_bans(sampling: Sampling, stopping: Stopping, vocab_size: int) -> None:
    """Raises a ValueError if no token is left for the text of a sequence."""
    if sampling.logit_bias is None and stopping.min_new_tokens is None:
        return
    banned = np.zeros((len(stopping.eos_ids), vocab_size), bool)
    if sampling.logit_bias is not None:
        banned |= sampling.logit_bias == -np.inf
    if stopping.min_new_tokens is not None:
        for row, ids, fewest in zip(banned, stopping.eos_ids, stopping.min_new_tokens, strict=True):
            row[ids[(ids >= 0) & (fewest > 0)]] = True
    if banned.all(axis=1).any():
        raise ValueError(
            f"logit_bias, with the end tokens that min_new_tokens bans, leaves none of {vocab_size} tokens to draw"
        )


def _wrap(words: jax.Array) -> jax.Array:
    """Returns the keys of the form that `jax.random.PRNGKey` makes."""
    try:
        return jax.random.wrap_key_data(words)
    except TypeError as error:
        size = jax.random.key_data(jax.random.key(0)).size
        raise ValueError(f"key must hold {size} words, as those of jax.random.PRNGKey, got {words!r}") from error
