"""Checks that the logits of a token depend on its text alone: on positions, not on blocks, order and cache."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jlade.models.base import Cache
from jlade.testing.model import BLOCK, CAUSAL, IN_ORDER, LENGTHS, SIZE, TestedDecoder


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
    cache = model.prefix
    model.require_equal(
        model.run(model.tokens[:, order], model.positions[:, order], cache, BLOCK.mask[np.ix_(order, order)])[0],
        model.run(model.tokens, model.positions, cache)[0][:, order],
        "forward must depend on block_mask and positions alone, but the same tokens in another order have other "
        "logits. Take from block_mask which tokens a token sees: it may not see the one before it in the block.",
    )


def check_far_positions(model: TestedDecoder) -> None:
    """Checks that guesses past the last position do not affect the tokens that do not see them."""
    cache = model.prefix
    seen = slice(0, BLOCK.first_draft)
    far = model.positions.copy()
    far[:, seen.stop :] += model.decoder.max_positions
    model.require_equal(
        model.run(model.tokens, far, cache)[0][:, seen],
        model.run(model.tokens, model.positions, cache)[0][:, seen],
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
