"""Checks of a cache that is no `KVCache`, by the texts that it holds: those whose logits the tokens after it have."""

import dataclasses

import numpy as np

from jlade.models.base import Cache, cache_shapes, divisible, resize
from jlade.testing.checks import CAPACITY, CAUSAL, CHOSEN, IN_ORDER, LENGTHS, NUM_ACCEPTED, SIZE, TestedDecoder

SMALL = int(max(LENGTHS)) + 1  # tokens of a cache that has no room for all of a block


def check_commit(model: TestedDecoder) -> None:
    """Checks that accepted tokens are appended in order and rejected ones dropped."""
    _check_commit(model, model.prefix)


def check_commit_at_the_end(model: TestedDecoder) -> None:
    """Checks the same at the end of a cache, where fewer entries are free than a block has tokens."""
    _check_commit(model, _resized(model, SMALL))


def check_capacities(model: TestedDecoder) -> None:
    """Checks that a cache holds its texts when its arrays are cut or extended to another capacity."""
    for capacity in (SMALL, 2 * CAPACITY):
        _require_texts(
            model,
            _resized(model, capacity),
            model.texts,
            LENGTHS,
            "init_cache must give the cache of a text the same arrays in all capacities, but for zeros at the ends of "
            f"their axes, but texts of {LENGTHS.tolist()} tokens differ after it was changed from {CAPACITY} to "
            f"{capacity} tokens. Put entries that are not for the text before those of the text.",
        )


def check_shortened(model: TestedDecoder) -> None:
    """Checks that a cache of texts that can be shortened holds fewer tokens with a smaller length."""
    if max(LENGTHS) <= divisible(model.prefix):
        _require_texts(
            model,
            dataclasses.replace(model.prefix, length=LENGTHS // 2),
            model.texts,
            LENGTHS // 2,
            f"a cache with divisible={divisible(model.prefix)} must hold the first tokens of its texts if length is "
            f"smaller, but {(LENGTHS // 2).tolist()} of {LENGTHS.tolist()} tokens differ. Leave divisible out if it "
            "cannot be shortened, as a recurrent state.",
        )


def _check_commit(model: TestedDecoder, cache: Cache) -> None:
    """Checks a commit to a cache of the first `LENGTHS` tokens of the texts."""
    texts = model.texts.copy()
    positions, mask = model.positions.copy(), np.tile(np.eye(SIZE, dtype=bool), (3, 1, 1))
    for i, (length, number, chosen) in enumerate(zip(LENGTHS, NUM_ACCEPTED, CHOSEN, strict=True)):
        positions[i, chosen] = length + np.arange(len(chosen))
        mask[i, chosen[:, None], chosen[None, :]] = np.tri(len(chosen), dtype=bool)
        texts[i, length : length + number] = model.tokens[i, chosen[:number]]
    _, block_kv = model.run(model.tokens, positions, cache, mask)
    new, lengths = model.commit(cache, block_kv, CHOSEN, NUM_ACCEPTED), LENGTHS + NUM_ACCEPTED
    model.require_lengths(new)
    _require_texts(
        model,
        new,
        texts,
        lengths,
        "commit must append the tokens indices[:, :num_accepted] of the block, in this order, and nothing else, but "
        "tokens after it do not have the logits that follow such a text. forward must not see an earlier block in "
        "spare entries, and commit must change nothing of the text, even where fewer than A entries are free.",
    )


def _resized(model: TestedDecoder, capacity: int) -> Cache:
    """Returns the cache of the first `LENGTHS` tokens of the texts, which was made for `CAPACITY`, for `capacity`."""
    shapes = cache_shapes(model.decoder, model.params, len(LENGTHS), capacity)
    return resize(model.prefix, LENGTHS, shapes)


def _require_texts(model: TestedDecoder, cache: Cache, texts: np.ndarray, lengths: np.ndarray, message: str) -> None:
    """Raises an AssertionError with `message` unless `cache` holds the first `lengths` tokens of `texts` [3, SIZE].

    Blocks of several sizes follow: a small one leaves tokens of an earlier block in the spare entries of a cache.
    """
    expected, _ = model.read(texts)
    for size in (5, SIZE):
        tokens = np.stack([np.roll(text, -length)[:size] for text, length in zip(texts, lengths, strict=True)])
        got, _ = model.run(tokens, lengths[:, None] + IN_ORDER[:, :size], cache, CAUSAL[:size, :size])
        for i, length in enumerate(lengths):
            number = min(size, SIZE - length)
            model.require_equal(got[i, :number], expected[i, length : length + number], message)
