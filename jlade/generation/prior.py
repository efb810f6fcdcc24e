"""A prior of a model: the tokens that it finds most probable after pairs of tokens, learned from texts in advance."""

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts import graded
from jlade.drafts.recycled import PriorTable, place_in_prior
from jlade.drafts.source import RANKS
from jlade.drafts.tree import NONE
from jlade.generation import corpus as corpus_lib
from jlade.generation import text
from jlade.generation.prompts import Prompt, round_up
from jlade.generation.text import Tokenizer
from jlade.models.base import Params
from jlade.vocabulary import VocabularyShard

WINDOW, SMALLEST = 512, 64  # most tokens that are read at once, and the least after padding
TOKENS = 2048  # of all windows that are read at once
MIN_PLACES, MAX_PLACES = 2**10, 2**21  # places for pairs, of 40 bytes each
SPARE = 4  # places for each pair, or more: few pairs then share one


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Prior:
    """The most probable tokens after pairs of tokens, as a model saw them in some texts: `jlade.prior` makes it.

    Attributes:
      table: arrays of NumPy.
      vocabulary: a fingerprint of the tokenizer, "" for none.
      path: of the file that it was read from, None for none.
    """

    table: PriorTable
    vocabulary: str = ""
    path: str | None = None

    def check(self) -> None:
        """Raises a ValueError unless the arrays have the shapes and the types of a table."""
        pairs, after_pair, after_token = jax.tree.leaves(self.table)
        size = len(pairs) if pairs.ndim else 0
        expected = [(size, 2), (size, RANKS), (len(after_token) if after_token.ndim else 0, RANKS)]
        found = [(array.dtype, array.shape) for array in (pairs, after_pair, after_token)]
        if found != [(np.int32, shape) for shape in expected] or size < 1 or size & size - 1:
            raise ValueError(f"its arrays are {', '.join(f'{dtype}{list(shape)}' for dtype, shape in found)}")

    @functools.cached_property
    def largest_token(self) -> int:
        """Of those that drafts may be."""
        highest = max(np.max(array, initial=NONE) for array in (self.table.after_pair, self.table.after_token))
        return int(graded.tokens(highest))

    @functools.cached_property
    def on_device(self) -> PriorTable:
        """The table in device memory, for all calls."""
        table: PriorTable = jax.tree.map(jnp.asarray, self.table)
        return table

    def __repr__(self) -> str:
        """Says the numbers of pairs and bytes."""
        num_pairs = int(np.sum(self.table.pairs[:, 1] != NONE))
        return f"Prior of {num_pairs} pairs of tokens, {sum(x.nbytes for x in jax.tree.leaves(self.table))} bytes"


def prior(params: Params, texts: Sequence[Prompt], tokenizer: Tokenizer | None = None) -> Prior:
    """Returns the prior of a model: what it finds most probable after the pairs of tokens in some texts.

    The model reads the texts once. Where a pair occurs several times, the mean probabilities count. Good texts are like
    those that the model will write, such as its own answers to other prompts; some hundred thousand tokens are enough.

    Args:
      params: the model's parameters, as `jlade.load` returns them.
      texts: strings or token ids int[L].
      tokenizer: needed for strings; by default that of the parameters.

    Raises:
      TypeError, ValueError: name the text, the value and what is accepted; the texts have no pair of tokens.
    """
    tokenizer = text.tokenizer_of(params) if tokenizer is None else tokenizer
    decoder: Any = getattr(params, "decoder", None)
    if decoder is None:
        raise TypeError(f"params must be those of one of jlade's models, got {type(params).__name__}")
    tokens = corpus_lib.read(texts, tokenizer, decoder.vocab_size, "texts")
    windows = _windows(tokens, min(WINDOW, decoder.max_positions))
    if not any(np.any(pairs[:, 0] != NONE) for pairs in windows):
        raise ValueError("texts must hold a text of two tokens or more")
    seen = [_read(params, windows_of_size) for windows_of_size in _by_size(windows).values()]
    pairs, best, chances = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    return Prior(table_of(pairs, best, chances, decoder.vocab_size), fingerprint(tokenizer, decoder.vocab_size))


def table_of(pairs: np.ndarray, best: np.ndarray, chances: np.ndarray, vocab_size: int) -> PriorTable:
    """Returns the table of the most probable tokens after pairs, and after their second tokens.

    Args:
      pairs: [n, 2] int32, in which a model saw them, with `NONE` before the first token of a text.
      best: [n, k] int32, the most probable tokens after each, `NONE` for fewer.
      chances: [n, k] float32, their probabilities.
      vocab_size: V.
    """
    after_token: Any = np.full((vocab_size, RANKS), NONE, np.int32)
    tokens, after, _ = _means(pairs[:, 1].astype(np.int64), best, chances)
    after_token[tokens] = after
    is_whole = pairs[:, 0] != NONE
    whole = pairs[is_whole].astype(np.int64)
    keys, after, counts = _means(whole[:, 0] * vocab_size + whole[:, 1], best[is_whole], chances[is_whole])
    known = np.stack(np.divmod(keys, vocab_size), axis=1).astype(np.int32)
    size = min(MAX_PLACES, max(MIN_PLACES, 1 << (SPARE * len(known) - 1).bit_length()))
    order = np.argsort(counts, kind="stable")  # the most frequent one of a place comes last, and stays
    at = place_in_prior(known[order], size)
    places: Any = np.full((size, 2), NONE, np.int32)
    after_pair: Any = np.full((size, RANKS), NONE, np.int32)
    places[at], after_pair[at] = known[order], after[order]
    return PriorTable(pairs=places, after_pair=after_pair, after_token=after_token)


def _means(keys: np.ndarray, best: np.ndarray, chances: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the keys [m], the tokens of the highest mean probabilities after each, graded [m, k], and counts [m].

    `keys` [n] int64 belong to the rows of `table_of`. A token that is not among the best ones has no probability.
    """
    known, row, counts = np.unique(keys, return_inverse=True, return_counts=True)
    row, token, chance = np.repeat(row, best.shape[1]), best.reshape(-1), chances.reshape(-1).astype(np.float64)
    order = np.lexsort((token, row))
    row, token, chance = row[order], token[order], chance[order]
    first = np.flatnonzero(np.append(True, (row[1:] != row[:-1]) | (token[1:] != token[:-1])))
    row, token, chance = row[first], token[first], np.add.reduceat(chance, first)
    chance[token == NONE] = -1.0
    order = np.lexsort((-chance, row))
    row, token, chance = row[order], token[order], chance[order]
    rank = np.arange(len(row)) - np.searchsorted(row, row)
    after = np.full((len(known), RANKS), NONE, np.int32)
    is_kept = rank < RANKS
    row, rank = row[is_kept], rank[is_kept]
    after[row, rank] = graded.of(token[is_kept], chance[is_kept] / counts[row])
    return known, after, counts


def _windows(tokens: np.ndarray, length: int) -> list[np.ndarray]:
    """Returns the texts in windows of up to `length` tokens, each a token after the one before it [l, 2] int32.

    The tokens are those that `corpus.read` returns, of texts each followed by `NONE`.
    """
    pairs = np.stack([np.append(NONE, tokens[:-1]), tokens], axis=1).astype(np.int32)
    texts = np.split(pairs, np.flatnonzero(tokens == NONE))
    texts = [text[text[:, 1] != NONE] for text in texts]
    return [text[begin : begin + length] for text in texts for begin in range(0, len(text), length)]


def _by_size(windows: list[np.ndarray]) -> dict[int, list[np.ndarray]]:
    """Returns the windows by their size after padding."""
    found = collections.defaultdict(list)
    for window in windows:
        found[round_up(len(window), SMALLEST)].append(window)
    return found


def _read(params: Params, windows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the pairs of windows of one size, and the best tokens after them with their probabilities."""
    size = round_up(len(windows[0]), SMALLEST)
    number = max(1, TOKENS // size)
    best, chances = list[np.ndarray](), list[np.ndarray]()
    for begin in range(0, len(windows), number):
        group = windows[begin : begin + number]
        tokens = np.zeros((number, size), np.int32)
        for row, window in zip(tokens, group, strict=False):
            row[: len(window)] = window[:, 1]
        found = jax.device_get(_best(params, tokens))
        for into, of_rows in zip((best, chances), found, strict=True):
            into += [row[: len(window)] for row, window in zip(of_rows, group, strict=False)]
    return np.concatenate(windows), np.concatenate(best), np.concatenate(chances)


@jax.jit
def _best(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the most probable tokens after each of `tokens` [B, T], and their probabilities, both [B, T, k]."""
    decoder = params.decoder
    number, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    cache = decoder.init_cache(params, number, length)
    hidden, _ = decoder.forward(params, tokens, positions, cache, np.tri(length, dtype=bool))

    def of_window(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:  # the logits of all take much memory
        logits = decoder.logits(params, hidden[None])[0].astype(jnp.float32)
        best, highest = VocabularyShard(decoder.vocab_size).top(logits, RANKS)
        return best, jnp.exp(highest - jax.nn.logsumexp(logits, axis=-1, keepdims=True))

    found: tuple[jax.Array, jax.Array] = jax.lax.map(of_window, hidden)
    return found


@functools.lru_cache(maxsize=8)
def fingerprint(tokenizer: Tokenizer | None, vocab_size: int) -> str:
    """Returns a fingerprint of the tokens' bytes, "" without a tokenizer."""
    if tokenizer is None:
        return ""
    of_token = text.token_bytes(tokenizer)
    spelled = b"".join(len(each).to_bytes(4, "little") + each for each in map(of_token.__getitem__, range(vocab_size)))
    return hashlib.sha256(spelled).hexdigest()[:16]


def check(prior: Any, tokenizer: Tokenizer | None, vocab_size: int) -> Prior:
    """Returns a prior for a vocabulary of V tokens.

    Raises:
      TypeError, ValueError: it is no prior, or of another vocabulary.
    """
    if not isinstance(prior, Prior):
        raise TypeError(f"prior must be a jlade.Prior, as jlade.prior makes it, got {type(prior).__name__}")
    size, of_model = len(prior.table.after_token), fingerprint(tokenizer, vocab_size)
    if size != vocab_size or (prior.vocabulary and of_model and prior.vocabulary != of_model):
        name = "prior" if prior.path is None else f"prior {prior.path}"
        raise ValueError(
            f"{name} is of another vocabulary, of {size} tokens with the fingerprint {prior.vocabulary or 'none'}; "
            f"accepted are {vocab_size} tokens with {of_model or 'any'}"
        )
    if prior.largest_token >= vocab_size:
        raise ValueError(f"prior holds token id {prior.largest_token}; accepted are 0 to {vocab_size - 1}")
    return prior
