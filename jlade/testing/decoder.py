"""`check_decoder`: all checks of a decoder, in an order that names the first cause."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jlade.models.base import Decoder, KVCache, Params
from jlade.testing import form, own_cache, positions, results
from jlade.testing.model import TestedDecoder

OF_A_BLOCK = (
    results.check_batch,
    results.check_mask,
    results.check_mask_per_sequence,
    positions.check_without_a_cache,
)
OF_TEXTS = (
    positions.check_shift_behind_a_cache,
    positions.check_splits,
    positions.check_with_a_cache,
    positions.check_order,
    positions.check_far_positions,
    results.check_without_jit,
    results.check_vmap,
)
# Each may assume that those before it have passed.
OF_A_KV_CACHE = (
    results.check_params,
    results.check_commit,
    results.check_rings,
    results.check_unused_entries,
    *OF_A_BLOCK,
    *OF_TEXTS,
)
OF_ANOTHER_CACHE = (
    results.check_params,
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
    form.check_attributes(decoder)
    try:
        # Accelerators multiply float32 at lower precision by default, which would hide small errors.
        with jax.default_matmul_precision("highest"):
            form.check_shapes(decoder, params)
            model = TestedDecoder(decoder, params, tolerance)
            cache = model.empty_cache()
            is_kv_cache = isinstance(cache, KVCache) and not cache.states
            for check in OF_A_KV_CACHE if is_kv_cache else OF_ANOTHER_CACHE:
                check(model)
            if reference is not None:
                positions.check_reference(model, reference)
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
