"""Whether a decoder of one's own does what `jlade.models.base.Decoder` asks for."""

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.config import check_int
from jlade.lookahead import block as blocks
from jlade.models.base import BlockKV, Decoder, KVCache, Params

BLOCK = blocks.build(3, 4, 2)  # the lookahead block that is tried
SIZE = len(BLOCK.positions)  # its tokens, 15
LENGTHS = np.array([6, 3, 0], np.int32)  # tokens before it, for a batch of three
CAPACITY = 16  # tokens; no text that is tried is longer
EVERY_ROW = np.tile(np.arange(SIZE, dtype=np.int32), (3, 1))  # of a block, in order; also the positions of a text


def check_decoder(decoder: Decoder, params: Params, *, tolerance: float | None = None) -> None:
    """Runs `decoder` on random tokens and checks all that jlade relies on.

    It compiles about a dozen programs for 15 tokens or less: seconds for a small model.

    Args:
      decoder: the model.
      params: its parameters, trained or random.
      tolerance: the largest difference between numbers that ought to be equal, in their standard deviations. By default
        the square root of the machine epsilon of the coarsest dtype in parameters and cache: 0.0003 for float32, 0.09
        for bfloat16.

    Raises:
      TypeError, ValueError: an attribute, a type, a shape or a dtype is wrong.
      AssertionError: what is computed is wrong.
      All say what is wrong and how to mend it. Errors of the decoder's own pass through.
    """
    _check_attributes(decoder)
    try:
        # By default accelerators multiply float32 in less precision, and small mistakes would not show.
        with jax.default_matmul_precision("highest"):
            _check_shapes(decoder, params)
            model = _Model(decoder, params, tolerance)
            _check_params(model)
            _check_commit(model)
            _check_unused_rows(model)
            _check_batch(model)
            _check_mask(model)
            _check_splits(model)
            _check_positions(model)
            _check_order(model)
            _check_far_positions(model)
            _check_without_jit(model)
            _check_vmap(model)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        error.add_note(
            "jlade traces a decoder's methods: Python's if, while, int() and range() and NumPy can read shapes and the "
            "decoder's attributes there, but not what arrays hold. Use jnp.where, jax.lax.cond and jnp for that."
        )
        raise


class _Model:
    """A decoder with its parameters, compiled, and what several checks start from."""

    def __init__(self, decoder: Decoder, params: Params, tolerance: float | None) -> None:
        self.decoder, self.params = decoder, params
        self.jitted_run = jax.jit(self.run_without_jit)
        self.commit = jax.jit(decoder.commit)
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
        hidden, block_kv = self.decoder.forward(params, tokens, positions, cache, mask)
        return self.decoder.logits(params, hidden), block_kv

    def run(self, tokens: Any, positions: Any, cache: KVCache, mask: Any = BLOCK.mask) -> tuple[np.ndarray, BlockKV]:
        """Returns the logits [B, T, V] of a block, and its keys and values."""
        logits, block_kv = self.jitted_run(self.params, tokens, positions, cache, mask)
        return np.asarray(logits), block_kv

    def read(self, texts: np.ndarray) -> tuple[np.ndarray, BlockKV]:
        """Runs `texts` [3, SIZE] from the beginning, as one causal block."""
        return self.run(texts, EVERY_ROW, self.empty_cache(), np.tri(SIZE, dtype=bool))

    @functools.cached_property
    def prefix(self) -> KVCache:
        """Returns the cache of the first `LENGTHS` tokens of `texts`."""
        return self.commit(self.empty_cache(), self.read(self.texts)[1], EVERY_ROW, LENGTHS)

    def require_equal(self, got: Any, expected: Any, message: str) -> None:
        """Raises `message` where two arrays differ by more than the tolerance, or hold NaN."""
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        difference, most = np.max(np.abs(got - expected)), self.tolerance * np.std(expected)
        if not difference <= most:
            raise AssertionError(f"{message} (The difference is {difference:.3g}, accepted is {most:.3g}.)")


def _check_attributes(decoder: Decoder) -> None:
    """The decoder can be a static argument of jit, and its numbers make sense."""
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
    """Every method returns what it should, as far as types, shapes and dtypes go. Nothing is computed for this."""
    batch_size, num_rows = len(LENGTHS), 4

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
    chosen = jax.ShapeDtypeStruct((batch_size, num_rows, hidden.shape[2]), hidden.dtype)
    logits = jax.eval_shape(decoder.logits, params, chosen)
    _check_array("logits", logits, "[B, R, V]", (batch_size, num_rows, decoder.vocab_size), np.float32)

    new = jax.eval_shape(decoder.commit, cache, block_kv, ints(batch_size, num_rows), ints(batch_size))
    before, after = (jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", c) for c in (cache, new))
    if before != after:
        raise TypeError(
            f"commit must return a cache like the one it was given, {before}, got {after}; cast the new rows"
        )


def _check_array(name: str, array: Any, axes: str, shape: tuple[int | None, ...], dtype: Any) -> None:
    """Refuses an array of another shape, where None stands for any size, or another kind of dtype."""
    if len(array.shape) != len(shape) or any(y not in (None, x) for x, y in zip(array.shape, shape, strict=True)):
        wanted = str(list(shape)).replace("None", "any")
        raise ValueError(f"{name} must have the shape {axes} = {wanted}, got {list(array.shape)}")
    if not jnp.issubdtype(array.dtype, dtype):
        raise TypeError(f"{name} must be {dtype.__name__}, got {array.dtype}: end with .astype(...)")


def _check_params(model: _Model) -> None:
    """The logits depend on the text. Otherwise the other checks would show nothing."""
    if np.any(model.empty_cache().length):
        raise AssertionError("init_cache must return an empty cache: set length to jnp.zeros(batch_size, jnp.int32).")
    texts = model.texts.copy()
    texts[:, ::2] = (texts[:, ::2] + 1) % model.decoder.vocab_size
    logits, other_logits = (model.read(x)[0][:, 1::2] for x in (model.texts, texts))  # of the tokens that are the same
    if not np.isfinite([logits, other_logits]).all():
        raise ValueError("params give logits that are not finite; pass trained parameters, or other random ones")
    if np.array_equal(logits, other_logits):
        raise ValueError(
            "params give logits that do not depend on the tokens before, as those that begin with zeros do: nothing "
            "can be checked with them; pass trained parameters, or other random ones"
        )


def _check_commit(model: _Model) -> None:
    """Chosen rows are appended in order, rejected ones are dropped, and all else stays, also where the cache ends."""
    rows, num_rows = np.array([[0, 9, 2], [4, 3, 14], [1, 5, 8]], np.int32), np.array([1, 3, 0], np.int32)
    _, block_kv = model.read(model.texts)
    whole = model.commit(model.empty_cache(), block_kv, EVERY_ROW, np.full(3, SIZE, np.int32))
    prefix = model.prefix
    keys, values = jax.tree.map(lambda layer: layer[:, :, : max(LENGTHS) + 1], (prefix.keys, prefix.values))
    new = model.commit(KVCache(keys=keys, values=values, length=prefix.length), block_kv, rows, num_rows)

    lengths = [cache.length.tolist() for cache in (whole, prefix, new)]
    if lengths != [[SIZE] * 3, LENGTHS.tolist(), (LENGTHS + num_rows).tolist()]:
        raise AssertionError(
            f"commit must add num_rows {num_rows.tolist()} to the lengths {LENGTHS.tolist()} of the cache, got "
            f"{lengths[2]}: only the first num_rows of each sequence's rows are accepted, the others are dropped."
        )
    for written, old, got in zip(*(jax.device_get((*c.keys, *c.values)) for c in (whole, prefix, new)), strict=True):
        for i, length in enumerate(LENGTHS):
            if not np.array_equal(got[i, :, :length], old[i, :, :length]):
                raise AssertionError(
                    "commit must leave what is below cache.length as it is, also where fewer than A rows are free: "
                    "jax.lax.dynamic_update_slice moves an update that does not fit. Use jlade.models.base.commit."
                )
            committed = [*range(length), *rows[i, : num_rows[i]]]
            if not np.array_equal(got[i, :, : len(committed)], written[i][:, committed]):
                raise AssertionError(
                    "commit must append block_kv of the block rows rows[:, :num_rows], in this order, from "
                    "cache.length on. Use jlade.models.base.commit."
                )


def _check_unused_rows(model: _Model) -> None:
    """What stands in the cache beyond its length is not seen."""
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
        "forward must see only the rows of the cache below cache.length, but what stands beyond changes the logits. "
        "Mask it, for each sequence by its own length.",
    )


def _check_batch(model: _Model) -> None:
    """A sequence gets what it would get alone."""
    cache = model.prefix
    together, _ = model.run(model.tokens, model.positions, cache)
    for i in range(3):
        alone = jax.tree.map(lambda x, i=i: x[i : i + 1], cache)
        model.require_equal(
            together[i : i + 1],
            model.run(model.tokens[i : i + 1], model.positions[i : i + 1], alone)[0],
            f"forward must give each sequence what it would get alone, but row {i} of a batch with the lengths "
            f"{LENGTHS.tolist()} gets other logits. Nothing may be summed or taken from other rows: neither "
            "cache.length nor positions nor normalisation.",
        )


def _check_mask(model: _Model) -> None:
    """Another token changes nothing for those that do not see it."""
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


def _check_splits(model: _Model) -> None:
    """A text gives the same logits in whatever blocks it is read."""

    def read(size: int) -> np.ndarray:
        cache, logits = model.empty_cache(), []
        for start in range(0, SIZE, size):
            tokens, rows = model.texts[:, start : start + size], EVERY_ROW[:, :size]
            new, block_kv = model.run(tokens, start + rows, cache, np.tri(size, dtype=bool))
            cache = model.commit(cache, block_kv, rows, np.full(3, size, np.int32))
            logits.append(new)
        return np.concatenate(logits, axis=1)

    one_by_one = read(1)
    for size in (5, SIZE):
        model.require_equal(
            read(size),
            one_by_one,
            f"forward must give a text the same logits in whatever blocks it is read, but causal blocks of {size} "
            "tokens differ from one token at a time. Each token sees all rows of the cache below cache.length and, of "
            "the block, what block_mask allows, itself included, under one softmax.",
        )


def _check_positions(model: _Model) -> None:
    """Every token of a lookahead block gets what it gets at the end of its own text, read in order."""
    got, _ = model.run(model.tokens, model.positions, model.prefix)
    for q, visible in enumerate(BLOCK.mask):
        texts, ends = model.texts.copy(), LENGTHS + np.sum(visible)
        for text, start, end, tokens in zip(texts, LENGTHS, ends, model.tokens, strict=True):
            text[start:end] = tokens[visible]  # these stand in the order of their positions
        model.require_equal(
            got[:, q],
            model.read(texts)[0][np.arange(3), ends - 1],
            "forward must place a token by positions, but in a block where tokens share positions, the logits differ "
            "from those of each token's own text, read in order. Take rotations or position embeddings from the "
            "argument positions, neither from the order in the block nor from cache.length.",
        )


def _check_order(model: _Model) -> None:
    """The order in which tokens stand in a block does not matter."""
    order = np.random.default_rng(2).permutation(SIZE)
    cache = model.prefix
    model.require_equal(
        model.run(model.tokens[:, order], model.positions[:, order], cache, BLOCK.mask[np.ix_(order, order)])[0],
        model.run(model.tokens, model.positions, cache)[0][:, order],
        "forward must go by block_mask and positions alone, but the same tokens in another order get other logits. Use "
        "no mask of your own beside block_mask: a token may see one that stands after it.",
    )


def _check_far_positions(model: _Model) -> None:
    """Guesses past the last position do no harm to those that do not see them."""
    cache = model.prefix
    seen = slice(0, BLOCK.candidate_rows[0, 0])
    far = model.positions.copy()
    far[:, seen.stop :] += model.decoder.max_positions
    model.require_equal(
        model.run(model.tokens, far, cache)[0][:, seen],
        model.run(model.tokens, model.positions, cache)[0][:, seen],
        "forward must bear positions of max_positions and more, where guesses beyond the end of a text stand, but they "
        "change the logits of tokens that do not see them: NaN of jnp.take, say. Use jnp.minimum(positions, "
        "max_positions - 1).",
    )


def _check_without_jit(model: _Model) -> None:
    """Without jit the logits are the same, and the cache that was read is as it was."""
    cache = model.prefix
    before = jax.device_get(cache)
    tokens, positions = jnp.asarray(model.tokens), jnp.asarray(model.positions)
    logits, _ = model.run_without_jit(model.params, tokens, positions, cache, BLOCK.mask)
    leaves = jax.tree.leaves(cache)
    if any(x.is_deleted() for x in leaves) or not all(map(np.array_equal, leaves, jax.tree.leaves(before))):
        raise AssertionError(
            "forward must not write the cache or donate it; return keys and values, for commit to write."
        )
    model.require_equal(
        logits,
        model.run(model.tokens, model.positions, cache)[0],
        "forward gives other logits without jit. It must compute with its arguments alone, and nothing that changes "
        "between calls.",
    )


def _check_vmap(model: _Model) -> None:
    """Under vmap, sequences of batches of one get what they get in a batch of three."""

    def run_and_commit(tokens: Any, positions: Any, cache: KVCache, rows: Any, num_rows: Any) -> Any:
        logits, block_kv = model.run_without_jit(model.params, tokens, positions, cache, BLOCK.mask)
        return logits, model.decoder.commit(cache, block_kv, rows, num_rows)

    cache = model.prefix
    logits, block_kv = model.run(model.tokens, model.positions, cache)
    in_threes = logits, model.commit(cache, block_kv, EVERY_ROW, LENGTHS)
    arrays = (model.tokens, model.positions, cache, EVERY_ROW, LENGTHS)
    in_ones = jax.jit(jax.vmap(run_and_commit))(*jax.tree.map(lambda x: x[:, None], arrays))
    for got, expected in zip(jax.tree.leaves(in_ones), jax.tree.leaves(in_threes), strict=True):
        model.require_equal(got[:, 0], expected, "under jax.vmap, the methods must do what they do without it.")
