"""A corpus: earlier texts, such as those of the same user, in which drafts are searched too."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade import mesh as mesh_lib
from jlade.config import LookaheadConfig
from jlade.decoding.state import DecodeState
from jlade.drafts import graded
from jlade.drafts import recycled as recycling
from jlade.drafts.recycled import RecycledLogits
from jlade.drafts.source import RANKS, State
from jlade.drafts.suffix import BLOCK, LATEST, LONGEST, RECENT, TextIndex
from jlade.drafts.tree import NONE
from jlade.generation.prompts import SMALLEST_CAPACITY, Prompt, round_up, token_ids
from jlade.generation.text import Tokenizer

MAX_TOKENS = 2**27  # ranks of matches are 32-bit numbers
VOCAB_SIZE = 2**30  # more than any
LONG = 4 * RECENT  # tokens of texts whose prompts are indexed
# Shares of the most frequent next tokens, by rank; measured with SmolLM2.
SHARES = np.array([0.34, 0.1, 0.06, 0.04, 0.03, 0.025, 0.02, 0.015])


@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class Corpus:
    """Texts in which `jlade.generate` searches drafts, indexed once: `corpus=` takes it in place of their list.

    A step searches a million tokens as fast as a thousand. The index takes about 12 bytes of device memory for each
    token, and seconds for a million of them. `jlade.save_corpus` keeps it.

    Attributes:
      index: the texts and their sorted places, arrays of NumPy.
      followers: tokens int32[n], and the 8 most frequent tokens after each of them int32[n, 8], -1 for none.
    """

    index: TextIndex
    followers: tuple[np.ndarray, np.ndarray]

    def __init__(self, texts: Sequence[Prompt], tokenizer: Tokenizer | None = None):
        """Indexes texts.

        Args:
          texts: strings or token ids, int[L].
          tokenizer: of the model, needed for strings; `params.tokenizer` of parameters from `jlade.load`.

        Raises:
          TypeError, ValueError: name the text, the value and what is accepted; there are more than `MAX_TOKENS` tokens.
        """
        tokens = read(texts, tokenizer, VOCAB_SIZE, "texts")
        self._set(build(tokens), _followers(tokens))

    @classmethod
    def of(cls, index: TextIndex, followers: tuple[np.ndarray, np.ndarray]) -> "Corpus":
        """Returns the corpus of an index and its `followers`, int32[n] and int32[n, 8]."""
        corpus = cls.__new__(cls)
        corpus._set(index, followers)
        return corpus

    def _set(self, index: TextIndex, followers: tuple[np.ndarray, np.ndarray]) -> None:
        object.__setattr__(self, "index", index)
        object.__setattr__(self, "followers", followers)

    def check(self) -> None:
        """Raises a ValueError unless the arrays have the shapes and the types of an index.

        Their values need no check: they say where drafts may be, and a wrong draft is not accepted.
        """
        tokens, order, keys, latest = jax.tree.leaves(self.index)
        known, after = self.followers
        blocks = order.shape[0] if order.ndim else 0
        shapes = [(blocks * BLOCK,), (blocks, BLOCK), (blocks, LONGEST), (blocks, LONGEST, LATEST)]
        shapes += [known.shape[:1], (*known.shape[:1], RANKS)]
        found = [(array.dtype, array.shape) for array in (tokens, order, keys, latest, known, after)]
        if found != [(np.int32, shape) for shape in shapes] or not blocks:
            raise ValueError(f"its arrays are {', '.join(f'{dtype}{list(shape)}' for dtype, shape in found)}")
        if known.size and np.min(known) < 0:
            raise ValueError(f"it has the token {np.min(known)}")

    @functools.cached_property
    def largest_token(self) -> int:
        """-1 for no texts."""
        return int(max(np.max(array, initial=NONE) for array in (self.index.tokens, *self.followers)))

    @functools.cached_property
    def on_device(self) -> TextIndex:
        """The index in device memory, for all calls."""
        index: TextIndex = jax.tree.map(jnp.asarray, self.index)
        return index

    def __repr__(self) -> str:
        """Says the numbers of texts and tokens."""
        tokens = np.asarray(self.index.tokens)
        ends = tokens == NONE
        return f"Corpus of {int(np.sum(ends[1:] & ~ends[:-1]))} texts, {int(np.sum(~ends))} tokens"


Texts = Corpus | Sequence[Prompt | DecodeState]


def check(corpus: Texts, tokenizer: Tokenizer | None, vocab_size: int) -> Corpus:
    """Returns the index of texts, for a vocabulary of V tokens. Errors are those of `Corpus`."""
    if not isinstance(corpus, Corpus):
        tokens = read(corpus, tokenizer, vocab_size, "corpus")
        return Corpus.of(build(tokens), _followers(tokens))
    if corpus.largest_token >= vocab_size:
        raise ValueError(f"corpus holds token id {corpus.largest_token}; accepted are 0 to {vocab_size - 1}")
    return corpus


def read(texts: Any, tokenizer: Tokenizer | None, vocab_size: int, name: str) -> np.ndarray:
    """Returns the tokens of texts [S] int32, each followed by `NONE`; more of these before the first fill up.

    Errors are those of `Corpus`.
    """
    if isinstance(texts, str) or hasattr(texts, "__array__") or not isinstance(texts, Sequence):
        raise TypeError(
            f"{name} must be a list of texts, each a string, token ids, or the `state` of a Generation, "
            f"got {type(texts).__name__}"
        )
    parts: list[np.ndarray] = []
    for i, one in enumerate(texts):
        if isinstance(one, DecodeState):
            tokens, num_tokens = mesh_lib.fetch((one.tokens, one.num_tokens))
            parts += [row[:length] for row, length in zip(tokens, num_tokens, strict=True)]
        else:
            parts.append(token_ids(f"{name}[{i}]", one, tokenizer, vocab_size))
    tokens = np.concatenate([np.append(ids, NONE) for ids in parts]) if parts else np.array([NONE])
    if len(tokens) > MAX_TOKENS:
        raise ValueError(f"{name} must have at most {MAX_TOKENS} tokens, with one after each text, got {len(tokens)}")
    size = round_up(len(tokens), SMALLEST_CAPACITY)
    return np.pad(tokens, (size - len(tokens), 0), constant_values=NONE).astype(np.int32)


def build(tokens: np.ndarray) -> TextIndex:
    """Returns the index of the tokens of texts [S] int32, as `read` returns them."""
    size = len(tokens)
    place = np.arange(size)
    ends = np.maximum.accumulate(np.where(tokens == NONE, place, -1))
    known = place - 1 - np.append(-1, ends[:-1])  # tokens of the same text before each place
    known[tokens == NONE] = 0  # nothing follows the end of a text, so it is no match

    def before(places: np.ndarray, back: int) -> np.ndarray:
        return np.where(known[places] >= back, tokens[places - back], NONE)

    # Prefix doubling: two numbers for twice as many tokens become one.
    rank, length = before(place, 1).astype(np.int64), 1
    while length < LONGEST:
        further = np.where(known >= length, rank[place - length], -1)
        _, rank = np.unique((rank + 1) * (rank.max() + 2) + further + 1, return_inverse=True)
        length *= 2
    order = np.argsort(rank, kind="stable")
    first = np.arange(0, size, BLOCK)
    keys = np.stack([before(order[first], back) for back in range(1, LONGEST + 1)], axis=1)

    latest = np.zeros((len(first), LONGEST, LATEST), np.int32)
    begins = np.zeros(size, bool)  # whether the tokens before a sorted place differ from those of the one before it
    for back in range(1, LONGEST + 1):
        token = before(order, back)
        begins[1:] |= token[1:] != token[:-1]
        group = np.cumsum(begins)
        by_place = order[np.argsort(group * size + order)]
        at = np.searchsorted(group, group[first], side="right")[:, None] - 1 - np.arange(LATEST)[None, :]
        is_member = at >= np.searchsorted(group, group[first])[:, None]
        latest[:, back - 1] = np.where(is_member, by_place[at], 0)
    facts: Any = tokens, order.reshape(-1, BLOCK).astype(np.int32), keys.astype(np.int32), latest
    return TextIndex(*facts)


def of_prompts(prompts: Sequence[np.ndarray], capacity: int, lookahead: LookaheadConfig) -> dict[str, State]:
    """Returns the initial states of sources that have an index of each prompt, for texts of so many tokens."""
    if "suffix" not in lookahead.reach or capacity < LONG:
        return {}
    size = round_up(capacity, SMALLEST_CAPACITY)
    indices = [build(np.pad(ids, (0, size - len(ids)), constant_values=NONE)) for ids in prompts]
    return {"suffix": jax.tree.map(lambda *arrays: np.stack(arrays), *indices)}


def recycled(texts: Texts, corpus: Corpus, batch_size: int, vocab_size: int) -> RecycledLogits:
    """Returns tables [B, ...] to begin with: the latest entries of the states, else the most frequent next tokens.

    The texts are as they were given, and `corpus` is their index.
    """
    states = () if isinstance(texts, Corpus) else (one for one in texts if isinstance(one, DecodeState))
    tables = [state.sources.get("recycled") for state in states]
    rows = [
        jax.tree.map(operator.itemgetter(row), table)
        for table in tables
        if table is not None
        for row in range(len(table.pairs))
    ]
    tokens, after = corpus.followers
    after_token = np.full((vocab_size, RANKS), NONE, np.int32)
    after_token[tokens] = graded.of(after, SHARES)
    known = dataclasses.replace(recycling.empty(vocab_size), after_token=jnp.tile(after_token, (1, 2)))
    table = functools.reduce(_merge, rows, known)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch_size, *x.shape)), table)


def _followers(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns `Corpus.followers`, `NONE` where there are fewer."""
    is_pair = (tokens[:-1] >= 0) & (tokens[1:] >= 0)
    pairs = tokens[:-1][is_pair].astype(np.int64) * VOCAB_SIZE + tokens[1:][is_pair]
    pairs, counts = np.unique(pairs, return_counts=True)
    first, second = np.divmod(pairs, VOCAB_SIZE)
    order = np.lexsort((-counts, first))
    first, second = first[order], second[order]
    rank = np.arange(len(first)) - np.searchsorted(first, first)
    known, row = np.unique(first, return_inverse=True)
    after = np.full((len(known), RANKS), NONE, np.int32)
    is_kept = rank < RANKS
    after[row[is_kept], rank[is_kept]] = second[is_kept]
    return known.astype(np.int32), after


@jax.jit
def _merge(earlier: RecycledLogits, later: RecycledLogits) -> RecycledLogits:
    has_token, has_pair = later.after_token[:, :1] != NONE, later.pairs[:, :1] != NONE
    return RecycledLogits(
        after_token=jnp.where(has_token, later.after_token, earlier.after_token),
        pairs=jnp.where(has_pair, later.pairs, earlier.pairs),
        after_pair=jnp.where(has_pair, later.after_pair, earlier.after_pair),
        last=earlier.last,
    )
