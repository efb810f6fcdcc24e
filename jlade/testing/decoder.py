"""`check_decoder`: all checks of a decoder, in an order that names the first cause."""

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.errors import check_int
from jlade.models.base import Decoder, KVCache, Params, cache_shapes, divisible
from jlade.testing import checks, own_cache
from jlade.testing.checks import BLOCK, CAPACITY, LENGTHS, SIZE, TestedDecoder

OF_A_BLOCK = (
    checks.check_batch,
    checks.check_mask,
    checks.check_mask_per_sequence,
    checks.check_without_a_cache,
)
OF_TEXTS = (
    checks.check_shift_behind_a_cache,
    checks.check_splits,
    checks.check_with_a_cache,
    checks.check_order,
    checks.check_far_positions,
    checks.check_without_jit,
    checks.check_vmap,
)
# Each may assume that those before it have passed.
OF_A_KV_CACHE = (
    checks.check_params,
    checks.check_commit,
    checks.check_rings,
    checks.check_unused_entries,
    *OF_A_BLOCK,
    *OF_TEXTS,
)
OF_ANOTHER_CACHE = (
    checks.check_params,
    *OF_A_BLOCK,
    own_cache.check_commit,
    own_cache.check_capacities,
    own_cache.check_commit_at_the_end,
    own_cache.check_shortened,
    *OF_TEXTS,
)

logger = logging.getLogger("jlade")


def check_decoder(
    decoder: Decoder,
    params: Params,
    *,
    reference: Callable[[np.ndarray], Any] | None = None,
    tolerance: float | None = None,
) -> None:
    """Runs `decoder` on random tokens and checks everything that jlade relies on.

    The entries of a `KVCache` are compared; of another cache, the logits of tokens after it.
    This compiles about a dozen programs for 15 tokens or fewer: seconds for a small model.

    Without a reference the results are compared with each other alone. An error that all of them share cannot be seen
    then, such as positions that count from 1, another rotary base, or a missing norm; a logged warning says so.

    Args:
      decoder: the model.
      params: its parameters, trained or random.
      reference: an ordinary forward pass of the same model with the same parameters, from tokens int32[L] to logits
        float[L, V], for texts of 15 tokens.
      tolerance: largest accepted difference between equal results, in units of their standard deviation. By default
        the square root of the machine epsilon of the coarsest dtype in parameters and cache: 0.0003 for float32, 0.09
        for bfloat16.

    Raises:
      TypeError, ValueError: an attribute, a type, a shape or a dtype is wrong.
      AssertionError: a result is wrong.
      Each message names the error and its remedy. Exceptions of the decoder itself pass through.
    """
    if reference is not None and not callable(reference):
        raise TypeError(f"reference must be a function from tokens [L] to logits [L, V], or None, got {reference!r}")
    _check_attributes(decoder)
    try:
        # Accelerators multiply float32 at lower precision by default, which would hide small errors.
        with jax.default_matmul_precision("highest"):
            _check_shapes(decoder, params)
            model = TestedDecoder(decoder, params, tolerance)
            cache = model.empty_cache()
            is_kv_cache = isinstance(cache, KVCache) and not cache.states
            for check in OF_A_KV_CACHE if is_kv_cache else OF_ANOTHER_CACHE:
                check(model)
            if reference is not None:
                checks.check_reference(model, reference)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        error.add_note(
            "jlade traces a decoder's methods: in them Python's if, while, int() and range() and NumPy can read shapes "
            "and the decoder's attributes, but not the values of arrays. Use jnp.where, jax.lax.cond and jnp for those."
        )
        raise
    if reference is None:
        logger.warning(
            "check_decoder compared the decoder with itself alone: errors that all its results share, such as "
            "positions that count from 1 or another rotary base, cannot be seen. Pass reference=, an ordinary forward "
            "pass from tokens [L] to logits [L, V]."
        )


def _check_attributes(decoder: Decoder) -> None:
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


def _check_shapes(decoder: Decoder, params: Params) -> None:
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
