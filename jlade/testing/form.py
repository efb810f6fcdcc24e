"""The form of a decoder: its attributes, and the types, shapes and dtypes of its results."""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.errors import check_int
from jlade.models.base import Decoder, KVCache, Params, cache_shapes, divisible
from jlade.testing.model import BLOCK, CAPACITY, LENGTHS, SIZE


def check_attributes(decoder: Decoder) -> None:
    """Checks that the decoder can be a static argument of jit, and the values of its attributes."""
    for name in ("init_cache", "forward", "logits", "commit"):
        if not callable(getattr(decoder, name, None)):
            raise TypeError(f"decoder must have the method {name}: see jlade.models.base.Decoder")
    static = (
        "jlade compiles one program per decoder. Make it a @dataclasses.dataclass(frozen=True) of numbers, strings, "
        "tuples, configurations, or a GraphDef of Flax; arrays belong in params"
    )
    try:
        hash(decoder)
    except TypeError as error:
        raise TypeError(f"decoder must be hashable: {error}. {static}") from error
    twin = copy.copy(decoder)
    if not (twin == decoder and hash(twin) == hash(decoder)):
        raise TypeError(f"decoder must be equal by value: its copy differs from it. {static}")
    vocab_size = check_int("decoder.vocab_size", decoder.vocab_size, 2)
    check_int("decoder.max_positions", decoder.max_positions, CAPACITY)
    if not isinstance(decoder.eos_ids, tuple):
        raise TypeError(f"decoder.eos_ids must be a tuple of token ids, () for none, got {decoder.eos_ids!r}")
    outside = [i for i in decoder.eos_ids if check_int("decoder.eos_ids", i, 0) >= vocab_size]
    if outside:
        raise ValueError(f"decoder.eos_ids holds {outside[0]}; accepted are 0 to {vocab_size - 1}")


def check_shapes(decoder: Decoder, params: Params) -> None:
    """Checks the types, shapes and dtypes of all results, without computing them."""
    batch_size, num_chosen = len(LENGTHS), 4

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32)

    cache = cache_shapes(decoder, params, batch_size, CAPACITY)
    if not (dataclasses.is_dataclass(cache) and hasattr(cache, "length")):
        raise TypeError(
            "init_cache must return a jlade.models.base.KVCache or another dataclass with the attribute length, got "
            f"{type(cache).__name__}"
        )
    _check_array("length of init_cache", cache.length, "[B]", (batch_size,), np.int32)
    if isinstance(cache, KVCache):
        for layer in (*cache.keys, *cache.values):
            shape = (batch_size, None, CAPACITY, None)
            _check_array("keys and values of init_cache", layer, "[B, KV heads, S, head_dim]", shape, np.generic)
        for layer in (*cache.key_scales, *cache.value_scales):
            _check_array("scales of init_cache", layer, "[B, KV heads, S]", (batch_size, None, CAPACITY), np.float32)
    else:
        check_int("divisible of the cache", divisible(cache), 0)
        for array in jax.tree.leaves(cache):
            axes = batch_size, *[None] * (len(array.shape) - 1)
            _check_array("arrays of init_cache", array, "[B, ...]", axes, np.generic)

    block = ints(batch_size, SIZE)
    result = jax.eval_shape(decoder.forward, params, block, block, cache, BLOCK.mask)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"forward must return hidden states and block_kv, got {result}")
    hidden, block_kv = result
    _check_array("hidden states of forward", hidden, "[B, T, E]", (batch_size, SIZE, None), np.floating)
    chosen = jax.ShapeDtypeStruct((batch_size, num_chosen, hidden.shape[2]), hidden.dtype)
    logits = jax.eval_shape(decoder.logits, params, chosen)
    _check_array("logits", logits, "[B, R, V]", (batch_size, num_chosen, decoder.vocab_size), np.float32)

    new = jax.eval_shape(decoder.commit, cache, block_kv, ints(batch_size, num_chosen), ints(batch_size))
    before, after = (jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", c) for c in (cache, new))
    if before != after:
        raise TypeError(
            f"commit must return a cache like its argument, {before}, got {after}; cast the new keys and values"
        )


def _check_array(name: str, array: Any, axes: str, shape: tuple[int | None, ...], dtype: Any) -> None:
    """Raises if an array has another shape, where None is any size, or another kind of dtype."""
    if len(array.shape) != len(shape) or any(y not in (None, x) for x, y in zip(array.shape, shape, strict=True)):
        wanted = str(list(shape)).replace("None", "any")
        raise ValueError(f"{name} must have the shape {axes} = {wanted}, got {list(array.shape)}")
    if not jnp.issubdtype(array.dtype, dtype):
        raise TypeError(f"{name} must be {dtype.__name__}, got {array.dtype}: end with .astype(...)")
