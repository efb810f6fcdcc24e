"""A decoder under test, and the checks of what commit, cache, mask, batch and positions mean."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts.tree import TreeShape
from jlade.lookahead import block as blocks
from jlade.models.base import Cache, Decoder, KVCache, Params, cache_shapes

BLOCK = blocks.build(3, 4, TreeShape.chains(2, 3))  # a lookahead block
SIZE = len(BLOCK.positions)  # T = 15, its tokens
LENGTHS = np.array([6, 3, 0], np.int32)  # tokens before it, for a batch of three
ALL = np.full(3, SIZE, np.int32)
CAPACITY = 16  # tokens; longer than every text here
IN_ORDER = np.tile(np.arange(SIZE, dtype=np.int32), (3, 1))  # the indices of a block; also the positions of a text
CAUSAL = np.tri(SIZE, dtype=bool)
CHOSEN = np.array([[0, 2, 9], [3, 4, 14], [1, 5, 8]], np.int32)  # tokens of a block, of which the first are accepted
NUM_ACCEPTED = np.array([1, 3, 0], np.int32)


class TestedDecoder:
    """A decoder with its parameters, compiled, and the inputs that several checks share."""

    def __init__(self, decoder: Decoder, params: Params, tolerance: float | None) -> None:
        self.decoder, self.params = decoder, params
        self.jitted_run = jax.jit(self.run_without_jit)
        self.commit: Callable[..., Cache] = jax.jit(decoder.commit)
        if tolerance is None:
            dtypes = {x.dtype for x in jax.tree.leaves((params, self.empty_cache()))}
            coarsest = max(jnp.finfo(x).eps for x in dtypes | {np.dtype(np.float32)} if jnp.issubdtype(x, np.floating))
            tolerance = float(coarsest) ** 0.5
        self.tolerance = tolerance
        self.texts, self.tokens = np.random.default_rng(0).integers(0, decoder.vocab_size, (2, 3, SIZE), dtype=np.int32)
        self.positions = LENGTHS[:, None] + BLOCK.positions

    def empty_cache(self) -> Cache:
        return self.decoder.init_cache(self.params, len(LENGTHS), CAPACITY)

    def run_without_jit(
        self, params: Params, tokens: Any, positions: Any, cache: Cache, mask: Any
    ) -> tuple[jax.Array, Any]:
        """Returns the logits [B, T, V] of a block, and its keys and values."""
        hidden, block_kv = self.decoder.forward(params, tokens, positions, cache, mask)
        return self.decoder.logits(params, hidden), block_kv

    def run(self, tokens: Any, positions: Any, cache: Cache, mask: Any = BLOCK.mask) -> tuple[np.ndarray, Any]:
        """Returns `run_without_jit`, compiled, with the logits in NumPy."""
        logits, block_kv = self.jitted_run(self.params, tokens, positions, cache, mask)
        return np.asarray(logits), block_kv

    def read(self, texts: np.ndarray) -> tuple[np.ndarray, Any]:
        """Returns `run` of `texts` [3, SIZE] from the beginning, as one causal block."""
        return self.run(texts, IN_ORDER, self.empty_cache(), CAUSAL)

    @functools.cached_property
    def block_kv(self) -> Any:
        """The keys and values of `texts`, read as one block."""
        return self.read(self.texts)[1]

    @functools.cached_property
    def whole(self) -> Cache:
        """The cache of `texts`."""
        return self.commit(self.empty_cache(), self.block_kv, IN_ORDER, ALL)

    @functools.cached_property
    def prefix(self) -> Cache:
        """The cache of the first `LENGTHS` tokens of `texts`."""
        return self.commit(self.empty_cache(), self.block_kv, IN_ORDER, LENGTHS)

    @functools.cached_property
    def expected(self) -> np.ndarray:
        """The logits [B, T, V] of the lookahead block `tokens` after `prefix`."""
        return self.run(self.tokens, self.positions, self.prefix)[0]

    def run_alone(self, i: int, mask: Any = BLOCK.mask) -> np.ndarray:
        """Returns the logits [1, T, V] of the block of sequence `i` in a batch of one."""
        cache = jax.tree.map(lambda x: x[i : i + 1], self.prefix)
        return self.run(self.tokens[i : i + 1], self.positions[i : i + 1], cache, mask)[0]

    def is_equal(self, got: Any, expected: Any) -> bool:
        """Whether two arrays differ by no more than the tolerance, without NaN."""
        difference, accepted = self._difference(got, expected)
        return difference <= accepted

    def require_equal(self, got: Any, expected: Any, message: str) -> None:
        """Raises an AssertionError with `message` unless `is_equal`."""
        difference, accepted = self._difference(got, expected)
        if not difference <= accepted:
            raise AssertionError(f"{message} (The difference is {difference:.3g}, accepted is {accepted:.3g}.)")

    def require_lengths(self, cache: Cache, before: np.ndarray = LENGTHS, added: np.ndarray = NUM_ACCEPTED) -> None:
        """Raises an AssertionError unless a commit of `added` tokens has made `cache` of one with `before` tokens."""
        if cache.length.tolist() != (before + added).tolist():
            raise AssertionError(
                f"commit must add num_accepted {added.tolist()} to the lengths {before.tolist()} of the cache, got "
                f"{cache.length.tolist()}: only the first num_accepted tokens of each sequence are accepted, the "
                "others are rejected."
            )

    def _difference(self, got: Any, expected: Any) -> tuple[float, float]:
        """Returns the largest difference of two arrays, and the largest that is accepted."""
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        return float(np.max(np.abs(got - expected))), self.tolerance * float(np.std(expected))


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
    shorter = jax.tree.map(lambda layer: layer[:, :, : max(LENGTHS) + 1], model.prefix.arrays)
    new = model.commit(dataclasses.replace(model.prefix, **shorter), model.block_kv, CHOSEN, NUM_ACCEPTED)
    for cache, before, added in ((model.whole, 0 * ALL, ALL), (model.prefix, 0 * ALL, LENGTHS)):
        model.require_lengths(cache, before, added)
    model.require_lengths(new)
    caches = model.whole, model.prefix, new
    for written, old, got in zip(*(jax.device_get(_layers(cache)) for cache in caches), strict=True):
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
    shorter = {
        name: tuple(layer[:, :, :size] if of_ring else layer for layer, of_ring in zip(layers, is_ring, strict=True))
        for name, layers in model.prefix.arrays.items()
    }
    cache = dataclasses.replace(model.prefix, **shorter)
    new = model.commit(cache, model.block_kv, np.minimum(LENGTHS[:, None] + IN_ORDER, SIZE - 1), num_accepted)
    of_arrays = len(new.arrays) * is_ring
    for got, texts, of_ring in zip(_layers(new), _layers(model.whole), of_arrays, strict=True):
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
        model.expected,
        "forward must see only the cache entries below cache.length, but entries beyond it change the logits. Mask "
        "each sequence by its own length.",
    )


def check_batch(model: TestedDecoder) -> None:
    """Checks that a sequence has the same logits in a batch and alone."""
    for i in range(3):
        model.require_equal(
            model.expected[i : i + 1],
            model.run_alone(i),
            f"forward must give a sequence the same logits in a batch and alone, but sequence {i} of a batch of the "
            f"lengths {LENGTHS.tolist()} has other logits. Use nothing of other sequences: neither cache.length nor "
            "positions nor statistics.",
        )


def check_mask(model: TestedDecoder) -> None:
    """Checks that a token does not affect the tokens that do not see it."""
    for k in range(1, SIZE):  # all tokens see the first
        hidden, tokens = ~BLOCK.mask[:, k], model.tokens.copy()
        tokens[:, k] = (tokens[:, k] + 1) % model.decoder.vocab_size
        model.require_equal(
            model.run(tokens, model.positions, model.prefix)[0][:, hidden],
            model.expected[:, hidden],
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
        model.require_equal(
            together[i : i + 1],
            model.run_alone(i, masks[i]),
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
        model.expected,
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


def check_without_a_cache(model: TestedDecoder) -> None:
    """Checks the positions of a lookahead block that begins the text."""
    _check_positions(model, model.empty_cache(), np.zeros_like(LENGTHS))


def check_shift_behind_a_cache(model: TestedDecoder) -> None:
    """Checks that the positions of tokens behind a cache are not shifted.

    Other differences behind a cache are left to the checks that follow.
    """
    expected, _ = model.read(model.texts)
    has_cache = LENGTHS > 0
    positions = LENGTHS[:, None] + IN_ORDER
    rests = np.stack([np.roll(text, -length) for text, length in zip(model.texts, LENGTHS, strict=True)])

    def is_right(shift: int | np.ndarray) -> bool:
        """Whether the rests of the texts have the right logits at positions that make up for a `shift`."""
        shifts = np.where(has_cache, shift, 0).astype(np.int32)
        logits, _ = model.run(rests, positions - shifts[:, None], model.prefix, CAUSAL)
        return all(
            model.is_equal(logits[i, : SIZE - length], expected[i, length:])
            for i, length in enumerate(LENGTHS)
            if has_cache[i]
        )

    if is_right(0):
        return
    for shift, name in ((1, "1"), (-1, "-1"), (2, "2"), (-2, "-2"), (LENGTHS, "length"), (-LENGTHS, "-length")):
        if is_right(shift):
            raise AssertionError(
                "forward must use the same positions with a cache as without, but the positions of tokens behind a "
                f"cache are off by {name.replace('length', 'cache.length')}. Take them from the argument positions, "
                "which counts from the beginning of the text, for the queries and for the keys that enter the cache."
            )


def check_splits(model: TestedDecoder) -> None:
    """Checks that the logits of a text do not depend on the sizes of the blocks that read it."""

    def read(size: int) -> np.ndarray:
        cache, logits = model.empty_cache(), []
        for start in range(0, SIZE, size):
            tokens, indices = model.texts[:, start : start + size], IN_ORDER[:, :size]
            new, block_kv = model.run(tokens, start + indices, cache, CAUSAL[:size, :size])
            cache = model.commit(cache, block_kv, indices, np.full(3, size, np.int32))
            logits.append(new)
        return np.concatenate(logits, axis=1)

    one_by_one = read(1)
    for size in (5, SIZE):
        model.require_equal(
            read(size),
            one_by_one,
            f"forward must give a text the same logits for all sizes of blocks, but causal blocks of {size} tokens "
            "differ from one token at a time. A token sees all cache entries below cache.length and the tokens of the "
            "block that block_mask allows, itself included, under one softmax.",
        )


def check_with_a_cache(model: TestedDecoder) -> None:
    """Checks the positions of a lookahead block after a text."""
    _check_positions(model, model.prefix, LENGTHS)


def _check_positions(model: TestedDecoder, cache: Cache, lengths: np.ndarray) -> None:
    """Checks that a token of a lookahead block has the same logits as at the end of its own text, read in order."""
    got, _ = model.run(model.tokens, lengths[:, None] + BLOCK.positions, cache)
    for q, visible in enumerate(BLOCK.mask):
        texts, ends = model.texts.copy(), lengths + np.sum(visible)
        for text, start, end, tokens in zip(texts, lengths, ends, model.tokens, strict=True):
            text[start:end] = tokens[visible]  # these are in the order of their positions
        model.require_equal(
            got[:, q],
            model.read(texts)[0][np.arange(3), ends - 1],
            "forward must take a token's position from positions, but in a block where tokens share positions, the "
            "logits differ from those of each token's own text, read in order. Compute rotations or position "
            "embeddings from the argument positions, neither from the order in the block nor from cache.length.",
        )


def check_order(model: TestedDecoder) -> None:
    """Checks that the order of the tokens in a block does not matter, if each comes after those that it sees."""
    order = np.argsort(np.arange(SIZE) % BLOCK.first_draft, kind="stable")  # drafts between the rows of the window
    mask = BLOCK.mask[np.ix_(order, order)]
    model.require_equal(
        model.run(model.tokens[:, order], model.positions[:, order], model.prefix, mask)[0],
        model.expected[:, order],
        "forward must depend on block_mask and positions alone, but the same tokens in another order have other "
        "logits. Take from block_mask which tokens a token sees: it may not see the one before it in the block.",
    )


def check_far_positions(model: TestedDecoder) -> None:
    """Checks that guesses past the last position do not affect the tokens that do not see them."""
    seen = slice(0, BLOCK.first_draft)
    far = model.positions.copy()
    far[:, seen.stop :] += model.decoder.max_positions
    model.require_equal(
        model.run(model.tokens, far, model.prefix)[0][:, seen],
        model.expected[:, seen],
        "forward must accept positions of max_positions and more, for guesses beyond the end of a text, but they "
        "change the logits of tokens that do not see them. One cause is the NaN of jnp.take; use "
        "jnp.minimum(positions, max_positions - 1).",
    )


def check_reference(model: TestedDecoder, reference: Callable[[np.ndarray], Any]) -> None:
    """Checks that a text read from the beginning has the logits of an ordinary forward pass."""
    got, _ = model.read(model.texts)
    for i, text in enumerate(model.texts):
        expected = np.asarray(reference(text))
        if expected.shape != got[i].shape:
            raise ValueError(
                f"reference must return logits [L, V] = {list(got[i].shape)} for tokens [L] = {[SIZE]}, got "
                f"{list(expected.shape)}"
            )
        model.require_equal(
            got[i],
            expected,
            "the decoder agrees with itself, but it gives a text other logits than reference. Compare its positions "
            "(the first is 0; rotary base and scaling), weights, norms and scale of the scores with those of the "
            "reference.",
        )
