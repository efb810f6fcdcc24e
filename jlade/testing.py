"""A check that a decoder of your own follows `jlade.models.base.Decoder`."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.config import check_int
from jlade.lookahead import block as blocks
from jlade.models.base import BlockKV, Decoder, KVCache, Params

BLOCK = blocks.build(3, 4, 2)  # a lookahead block
SIZE = len(BLOCK.positions)  # T = 15, its tokens
LENGTHS = np.array([6, 3, 0], np.int32)  # tokens before it, for a batch of three
CAPACITY = 16  # tokens; longer than every text here
IN_ORDER = np.tile(np.arange(SIZE, dtype=np.int32), (3, 1))  # the indices of a block; also the positions of a text
CAUSAL = np.tri(SIZE, dtype=bool)


def check_decoder(decoder: Decoder, params: Params, *, tolerance: float | None = None) -> None:
    """Runs `decoder` on random tokens and checks everything that jlade relies on.

    This compiles about a dozen programs for 15 tokens or fewer: seconds for a small model.

    Args:
      decoder: the model.
      params: its parameters, trained or random.
      tolerance: largest accepted difference between equal results, in units of their standard deviation. By default
        the square root of the machine epsilon of the coarsest dtype in parameters and cache: 0.0003 for float32, 0.09
        for bfloat16.

    Raises:
      TypeError, ValueError: an attribute, a type, a shape or a dtype is wrong.
      AssertionError: a result is wrong.
      Each message names the error and its remedy. Exceptions of the decoder itself pass through.
    """
    _check_attributes(decoder)
    try:
        # Accelerators multiply float32 at lower precision by default, which would hide small errors.
        with jax.default_matmul_precision("highest"):
            _check_shapes(decoder, params)
            model = _Model(decoder, params, tolerance)
            _check_params(model)
            _check_commit(model)
            _check_unused_entries(model)
            _check_batch(model)
            _check_mask(model)
            _check_mask_per_sequence(model)
            _check_splits(model)
            _check_positions(model)
            _check_order(model)
            _check_far_positions(model)
            _check_without_jit(model)
            _check_vmap(model)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        error.add_note(
            "jlade traces a decoder's methods: in them Python's if, while, int() and range() and NumPy can read shapes "
            "and the decoder's attributes, but not the values of arrays. Use jnp.where, jax.lax.cond and jnp for those."
        )
        raise


class _Model:
    """A decoder with its parameters, compiled, and the inputs that several checks share."""

    def __init__(self, decoder: Decoder, params: Params, tolerance: float | None) -> None:
        self.decoder, self.params = decoder, params
        self.jitted_run = jax.jit(self.run_without_jit)
        self.commit: Callable[..., KVCache] = jax.jit(decoder.commit)
        if tolerance is None:
            dtypes = {x.dtype for x in jax.tree.leaves((params, self.empty_cache()))}
            coarsest = max(jnp.finfo(x).eps for x in dtypes | {np.dtype(np.float32)} if jnp.issubdtype(x, np.floating))
            tolerance = float(coarsest) ** 0.5
        self.tolerance = tolerance
        self.texts, self.tokens = np.random.default_rng(0).integers(0, decoder.vocab_size, (2, 3, SIZE), dtype=np.int32)
        self.positions = LENGTHS[:, None] + BLOCK.positions

    def empty_cache(self) -> KVCache:
        return self.decoder.init_cache(self.params, len(LENGTHS), CAPACITY)

    def run_without_jit(
        self, params: Params, tokens: Any, positions: Any, cache: KVCache, mask: Any
    ) -> tuple[jax.Array, BlockKV]:
        """Returns the logits [B, T, V] of a block, and its keys and values."""
        hidden, block_kv = self.decoder.forward(params, tokens, positions, cache, mask)
        return self.decoder.logits(params, hidden), block_kv

    def run(self, tokens: Any, positions: Any, cache: KVCache, mask: Any = BLOCK.mask) -> tuple[np.ndarray, BlockKV]:
        """Returns `run_without_jit`, compiled, with the logits in NumPy."""
        logits, block_kv = self.jitted_run(self.params, tokens, positions, cache, mask)
        return np.asarray(logits), block_kv

    def read(self, texts: np.ndarray) -> tuple[np.ndarray, BlockKV]:
        """Returns `run` of `texts` [3, SIZE] from the beginning, as one causal block."""
        return self.run(texts, IN_ORDER, self.empty_cache(), CAUSAL)

    @functools.cached_property
    def prefix(self) -> KVCache:
        """The cache of the first `LENGTHS` tokens of `texts`."""
        return self.commit(self.empty_cache(), self.read(self.texts)[1], IN_ORDER, LENGTHS)

    def require_equal(self, got: Any, expected: Any, message: str) -> None:
        """Raises an AssertionError with `message` if two arrays differ by more than the tolerance, or hold NaN."""
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        difference, most = np.max(np.abs(got - expected)), self.tolerance * np.std(expected)
        if not difference <= most:
            raise AssertionError(f"{message} (The difference is {difference:.3g}, accepted is {most:.3g}.)")


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

    cache = jax.eval_shape(lambda params: decoder.init_cache(params, batch_size, CAPACITY), params)
    if not isinstance(cache, KVCache):
        raise TypeError(f"init_cache must return a jlade.models.base.KVCache, got {type(cache).__name__}")
    _check_array("length of init_cache", cache.length, "[B]", (batch_size,), np.int32)
    for layer in (*cache.keys, *cache.values):
        shape = (batch_size, None, CAPACITY, None)
        _check_array("keys and values of init_cache", layer, "[B, KV heads, S, head_dim]", shape, np.generic)

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


def _check_params(model: _Model) -> None:
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


def _check_commit(model: _Model) -> None:
    """Checks that accepted tokens are appended in order and rejected ones dropped, also at the end of the cache."""
    indices, num_accepted = np.array([[0, 9, 2], [4, 3, 14], [1, 5, 8]], np.int32), np.array([1, 3, 0], np.int32)
    _, block_kv = model.read(model.texts)
    whole = model.commit(model.empty_cache(), block_kv, IN_ORDER, np.full(3, SIZE, np.int32))
    prefix = model.prefix
    keys, values = jax.tree.map(lambda layer: layer[:, :, : max(LENGTHS) + 1], (prefix.keys, prefix.values))
    new = model.commit(KVCache(keys=keys, values=values, length=prefix.length), block_kv, indices, num_accepted)

    lengths = [cache.length.tolist() for cache in (whole, prefix, new)]
    if lengths != [[SIZE] * 3, LENGTHS.tolist(), (LENGTHS + num_accepted).tolist()]:
        raise AssertionError(
            f"commit must add num_accepted {num_accepted.tolist()} to the lengths {LENGTHS.tolist()} of the cache, got "
            f"{lengths[2]}: only the first num_accepted tokens of each sequence are accepted, the others are rejected."
        )
    for written, old, got in zip(*(jax.device_get((*c.keys, *c.values)) for c in (whole, prefix, new)), strict=True):
        for i, length in enumerate(LENGTHS):
            if not np.array_equal(got[i, :, :length], old[i, :, :length]):
                raise AssertionError(
                    "commit must not change entries below cache.length, even where fewer than A entries are free: "
                    "jax.lax.dynamic_update_slice moves an update that does not fit. Use jlade.models.base.commit."
                )
            committed = [*range(length), *indices[i, : num_accepted[i]]]
            if not np.array_equal(got[i, :, : len(committed)], written[i][:, committed]):
                raise AssertionError(
                    "commit must append block_kv of the tokens indices[:, :num_accepted], in this order, from entry "
                    "cache.length on. Use jlade.models.base.commit."
                )


def _check_unused_entries(model: _Model) -> None:
    """Checks that cache entries beyond the length are not seen."""
    cache = model.prefix
    in_use = np.arange(CAPACITY) < LENGTHS[:, None]

    def fill(layer: jax.Array) -> jax.Array:
        garbage = np.random.default_rng(1).normal(scale=9.0, size=layer.shape)
        return jnp.where(in_use[:, None, :, None], layer, jnp.asarray(garbage).astype(layer.dtype))

    keys, values = jax.tree.map(fill, (cache.keys, cache.values))
    filled = KVCache(keys=keys, values=values, length=cache.length)
    model.require_equal(
        model.run(model.tokens, model.positions, filled)[0],
        model.run(model.tokens, model.positions, cache)[0],
        "forward must see only the cache entries below cache.length, but entries beyond it change the logits. Mask "
        "each sequence by its own length.",
    )


def _check_batch(model: _Model) -> None:
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


def _check_mask(model: _Model) -> None:
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


def _check_mask_per_sequence(model: _Model) -> None:
    """Checks that with a mask [B, T, T] a sequence has the same logits as alone with its own mask [T, T]."""
    masks = (np.random.default_rng(3).random((3, SIZE, SIZE)) < 0.5) | np.eye(SIZE, dtype=bool)[None]
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


def _check_splits(model: _Model) -> None:
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


def _check_positions(model: _Model) -> None:
    """Checks that a token of a lookahead block has the same logits as at the end of its own text, read in order."""
    got, _ = model.run(model.tokens, model.positions, model.prefix)
    for q, visible in enumerate(BLOCK.mask):
        texts, ends = model.texts.copy(), LENGTHS + np.sum(visible)
        for text, start, end, tokens in zip(texts, LENGTHS, ends, model.tokens, strict=True):
            text[start:end] = tokens[visible]  # these are in the order of their positions
        model.require_equal(
            got[:, q],
            model.read(texts)[0][np.arange(3), ends - 1],
            "forward must take a token's position from positions, but in a block where tokens share positions, the "
            "logits differ from those of each token's own text, read in order. Compute rotations or position "
            "embeddings from the argument positions, neither from the order in the block nor from cache.length.",
        )


def _check_order(model: _Model) -> None:
    """Checks that the order of the tokens in a block does not matter."""
    order = np.random.default_rng(2).permutation(SIZE)
    cache = model.prefix
    model.require_equal(
        model.run(model.tokens[:, order], model.positions[:, order], cache, BLOCK.mask[np.ix_(order, order)])[0],
        model.run(model.tokens, model.positions, cache)[0][:, order],
        "forward must depend on block_mask and positions alone, but the same tokens in another order have other "
        "logits. Use no mask but block_mask: a token may see one that comes after it in the block.",
    )


def _check_far_positions(model: _Model) -> None:
    """Checks that guesses past the last position do not affect the tokens that do not see them."""
    cache = model.prefix
    seen = slice(0, BLOCK.candidates[0, 0])
    far = model.positions.copy()
    far[:, seen.stop :] += model.decoder.max_positions
    model.require_equal(
        model.run(model.tokens, far, cache)[0][:, seen],
        model.run(model.tokens, model.positions, cache)[0][:, seen],
        "forward must accept positions of max_positions and more, for guesses beyond the end of a text, but they "
        "change the logits of tokens that do not see them. One cause is the NaN of jnp.take; use "
        "jnp.minimum(positions, max_positions - 1).",
    )


def _check_without_jit(model: _Model) -> None:
    """Checks that the logits are the same without jit, and that forward does not change the cache."""
    cache = model.prefix
    before = jax.device_get(cache)
    tokens, positions = jnp.asarray(model.tokens), jnp.asarray(model.positions)
    logits, _ = model.run_without_jit(model.params, tokens, positions, cache, BLOCK.mask)
    leaves = jax.tree.leaves(cache)
    if any(x.is_deleted() for x in leaves) or not all(map(np.array_equal, leaves, jax.tree.leaves(before))):
        raise AssertionError(
            "forward must not write the cache or donate it; return keys and values, which commit writes."
        )
    model.require_equal(
        logits,
        model.run(model.tokens, model.positions, cache)[0],
        "forward gives other logits without jit. Its result must depend on its arguments alone, and on nothing that "
        "changes between calls.",
    )


def _check_vmap(model: _Model) -> None:
    """Checks that vmap over batches of one gives the results of a batch of three."""

    def run_and_commit(tokens: Any, positions: Any, cache: KVCache, indices: Any, num_accepted: Any) -> Any:
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
