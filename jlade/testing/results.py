"""Checks that commit, cache, mask and batch mean what jlade takes them for."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.models.base import Cache, KVCache, cache_shapes
from jlade.testing.model import BLOCK, CAPACITY, CHOSEN, IN_ORDER, LENGTHS, NUM_ACCEPTED, SIZE, TestedDecoder


def check_params(model: TestedDecoder) -> None:
    """Checks that the logits depend on the text: otherwise the other checks would show nothing."""
    if np.any(model.empty_cache().length):
        raise AssertionError("init_cache must return an empty cache: set length to jnp.zeros(batch_size, jnp.int32).")
    texts = model.texts.copy()
    texts[:, ::2] = (texts[:, ::2] + 1) % model.decoder.vocab_size
    logits, other_logits = (model.read(x)[0][:, 1::2] for x in (model.texts, texts))  # of the same tokens
    if not np.isfinite([logits, other_logits]).all():
        raise ValueError("params give logits that are not finite; pass trained parameters, or other random ones")
    if np.array_equal(logits, other_logits):
        raise ValueError(
            "params give logits that do not depend on the tokens before, which some parameters initialised to zero "
            "cause: nothing can be checked with them; pass trained parameters, or other random ones"
        )


def check_commit(model: TestedDecoder) -> None:
    """Checks that accepted tokens are appended in order and rejected ones dropped, also at the end of the cache."""
    _, block_kv = model.read(model.texts)
    whole = model.commit(model.empty_cache(), block_kv, IN_ORDER, np.full(3, SIZE, np.int32))
    prefix = model.prefix
    shorter = jax.tree.map(lambda layer: layer[:, :, : max(LENGTHS) + 1], prefix.arrays)
    new = model.commit(dataclasses.replace(prefix, **shorter), block_kv, CHOSEN, NUM_ACCEPTED)

    lengths = [cache.length.tolist() for cache in (whole, prefix, new)]
    if lengths != [[SIZE] * 3, LENGTHS.tolist(), (LENGTHS + NUM_ACCEPTED).tolist()]:
        raise AssertionError(
            f"commit must add num_accepted {NUM_ACCEPTED.tolist()} to the lengths {LENGTHS.tolist()} of the cache, got "
            f"{lengths[2]}: only the first num_accepted tokens of each sequence are accepted, the others are rejected."
        )
    for written, old, got in zip(*(jax.device_get(_layers(c)) for c in (whole, prefix, new)), strict=True):
        for i, length in enumerate(LENGTHS):
            if not np.array_equal(got[i, :, :length], old[i, :, :length]):
                raise AssertionError(
                    "commit must not change entries below cache.length, even where fewer than A entries are free: "
                    "jax.lax.dynamic_update_slice moves an update that does not fit. Use jlade.models.base.commit."
                )
            committed = [*range(length), *CHOSEN[i, : NUM_ACCEPTED[i]]]
            if not np.array_equal(got[i, :, : len(committed)], written[i][:, committed]):
                raise AssertionError(
                    "commit must append block_kv of the tokens indices[:, :num_accepted], in this order, from entry "
                    "cache.length on. Use jlade.models.base.commit."
                )


def _layers(cache: KVCache) -> list[jax.Array]:
    """Returns all arrays of a cache that have entries."""
    return [layer for layers in cache.arrays.values() for layer in layers]


def check_rings(model: TestedDecoder) -> None:
    """Checks that layers with fewer entries than a long text has tokens keep the last ones, as rings of 7 entries."""
    size, num_accepted = max(LENGTHS) + 1, np.array([9, 2, 15], np.int32)
    longest = model.decoder.max_positions
    long = cache_shapes(model.decoder, model.params, 1, longest)
    is_ring = [layer.shape[2] < longest for layer in long.keys]
    _, block_kv = model.read(model.texts)
    whole = model.commit(model.empty_cache(), block_kv, IN_ORDER, np.full(3, SIZE, np.int32))
    shorter = {
        name: tuple(layer[:, :, :size] if of_ring else layer for layer, of_ring in zip(layers, is_ring, strict=True))
        for name, layers in model.prefix.arrays.items()
    }
    cache = dataclasses.replace(model.prefix, **shorter)
    new = model.commit(cache, block_kv, np.minimum(LENGTHS[:, None] + IN_ORDER, SIZE - 1), num_accepted)
    of_arrays = len(new.arrays) * is_ring
    for got, texts, of_ring in zip(_layers(new), _layers(whole), of_arrays, strict=True):
        for i, length in enumerate(LENGTHS + num_accepted):
            positions = np.arange(max(0, length - size), length) if of_ring else np.arange(length)
            if not np.array_equal(got[i][:, positions % got.shape[2]], texts[i][:, positions]):
                raise AssertionError(
                    "commit must keep the last S tokens in a layer with S entries, fewer than the capacity: that at "
                    "position p in entry p % S. Pass the windows of the layers to jlade.models.base.commit."
                )


def check_unused_entries(model: TestedDecoder) -> None:
    """Checks that cache entries beyond the length are not seen."""
    cache = model.prefix
    in_use = np.arange(CAPACITY) < LENGTHS[:, None]

    def fill(layer: jax.Array) -> jax.Array:
        garbage = np.random.default_rng(1).normal(scale=9.0, size=layer.shape)
        seen = np.expand_dims(in_use, (1, 3)[: layer.ndim - 2])
        return jnp.where(seen, layer, jnp.asarray(garbage).astype(layer.dtype))

    filled = dataclasses.replace(cache, **jax.tree.map(fill, cache.arrays))
    model.require_equal(
        model.run(model.tokens, model.positions, filled)[0],
        model.run(model.tokens, model.positions, cache)[0],
        "forward must see only the cache entries below cache.length, but entries beyond it change the logits. Mask "
        "each sequence by its own length.",
    )


def check_batch(model: TestedDecoder) -> None:
    """Checks that a sequence has the same logits in a batch and alone."""
    cache = model.prefix
    together, _ = model.run(model.tokens, model.positions, cache)
    for i in range(3):
        alone = jax.tree.map(lambda x, i=i: x[i : i + 1], cache)
        model.require_equal(
            together[i : i + 1],
            model.run(model.tokens[i : i + 1], model.positions[i : i + 1], alone)[0],
            f"forward must give a sequence the same logits in a batch and alone, but sequence {i} of a batch of the "
            f"lengths {LENGTHS.tolist()} has other logits. Use nothing of other sequences: neither cache.length nor "
            "positions nor statistics.",
        )


def check_mask(model: TestedDecoder) -> None:
    """Checks that a token does not affect the tokens that do not see it."""
    expected, _ = model.run(model.tokens, model.positions, model.prefix)
    for k in range(1, SIZE):  # all tokens see the first
        hidden, tokens = ~BLOCK.mask[:, k], model.tokens.copy()
        tokens[:, k] = (tokens[:, k] + 1) % model.decoder.vocab_size
        model.require_equal(
            model.run(tokens, model.positions, model.prefix)[0][:, hidden],
            expected[:, hidden],
            f"forward must let token q of a block see token k only where block_mask[q, k], but token {k} changes the "
            "logits of tokens that do not see it. Apply block_mask to the scores of the block, in every layer.",
        )


def check_mask_per_sequence(model: TestedDecoder) -> None:
    """Checks that with a mask [B, T, T] a sequence has the same logits as alone with its own mask [T, T]."""
    masks = np.stack([_random_tree(seed) for seed in range(3)])
    remedy = "[B, T, T] has a mask for each sequence: apply mask[b] to the scores of sequence b, for every head."
    try:
        together, _ = model.run(model.tokens, model.positions, model.prefix, masks)
    except (TypeError, ValueError) as error:
        error.add_note(f"block_mask is [T, T] or [B, T, T], and forward raises with [B, T, T]. {remedy}")
        raise
    for i in range(3):
        cache = jax.tree.map(lambda x, i=i: x[i : i + 1], model.prefix)
        model.require_equal(
            together[i : i + 1],
            model.run(model.tokens[i : i + 1], model.positions[i : i + 1], cache, masks[i])[0],
            f"forward must take a block_mask [B, T, T], but sequence {i} has other logits than alone with its own mask "
            f"[T, T]. {remedy}",
        )


def _random_tree(seed: int) -> np.ndarray:
    """Returns a mask [T, T] of a tree: each token sees itself and all that an earlier one sees."""
    rng, mask = np.random.default_rng(seed), np.eye(SIZE, dtype=bool)
    for i in range(1, SIZE):
        mask[i] |= mask[rng.integers(i)]
    return mask


def check_without_jit(model: TestedDecoder) -> None:
    """Checks that the logits are the same without jit, and that forward does not change the cache."""
    cache = model.prefix
    before = jax.device_get(cache)
    tokens, positions = jnp.asarray(model.tokens), jnp.asarray(model.positions)
    logits, _ = model.run_without_jit(model.params, tokens, positions, cache, BLOCK.mask)
    leaves = jax.tree.leaves(cache)
    if any(x.is_deleted() for x in leaves) or not all(map(np.array_equal, leaves, jax.tree.leaves(before))):
        raise AssertionError(
            "forward must not write the cache or donate it; return arrays from which commit makes the new one."
        )
    model.require_equal(
        logits,
        model.run(model.tokens, model.positions, cache)[0],
        "forward gives other logits without jit. Its result must depend on its arguments alone, and on nothing that "
        "changes between calls.",
    )


def check_vmap(model: TestedDecoder) -> None:
    """Checks that vmap over batches of one gives the results of a batch of three."""

    def run_and_commit(tokens: Any, positions: Any, cache: Cache, indices: Any, num_accepted: Any) -> Any:
        logits, block_kv = model.run_without_jit(model.params, tokens, positions, cache, BLOCK.mask)
        return logits, model.decoder.commit(cache, block_kv, indices, num_accepted)

    cache = model.prefix
    logits, block_kv = model.run(model.tokens, model.positions, cache)
    in_threes = logits, model.commit(cache, block_kv, IN_ORDER, LENGTHS)
    arrays = (model.tokens, model.positions, cache, IN_ORDER, LENGTHS)
    in_ones = jax.jit(jax.vmap(run_and_commit))(*jax.tree.map(lambda x: x[:, None], arrays))
    for got, expected in zip(jax.tree.leaves(in_ones), jax.tree.leaves(in_threes), strict=True):
        model.require_equal(
            got[:, 0], expected, "under jax.vmap, the methods must give the same results as without it."
        )
