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
from jlade.decoding.state import DecodeState
from jlade.drafts import recycled as recycling
from jlade.drafts.recycled import RecycledLogits
from jlade.drafts.source import RANKS
from jlade.drafts.tree import NONE
from jlade.generation import prompts as prompts_lib
from jlade.generation.prompts import Prompt
from jlade.generation.text import Tokenizer

Corpus = Sequence[Prompt | DecodeState]
SMALLEST = 1024  # tokens; sizes are this times a power of two, so that few programs are compiled


def read(corpus: Any, tokenizer: Tokenizer | None, vocab_size: int) -> np.ndarray:
    """Returns the tokens of the texts [S] int32, each followed by `NONE`; more of these before the first fill up.

    Raises:
      TypeError, ValueError: name the text, the value and what is accepted.
    """
    if isinstance(corpus, str) or hasattr(corpus, "__array__") or not isinstance(corpus, Sequence):
        raise TypeError(
            "corpus must be a list of texts, each a string, token ids, or the `state` of a Generation, "
            f"got {type(corpus).__name__}"
        )
    texts: list[np.ndarray] = []
    for i, one in enumerate(corpus):
        if isinstance(one, DecodeState):
            tokens, num_tokens = mesh_lib.fetch((one.tokens, one.num_tokens))
            texts += [row[:length] for row, length in zip(tokens, num_tokens, strict=True)]
        else:
            texts.append(prompts_lib.token_ids(f"corpus[{i}]", one, tokenizer, vocab_size))
    tokens = np.concatenate([np.append(ids, NONE) for ids in texts]) if texts else np.array([NONE])
    size = prompts_lib.round_up(len(tokens), SMALLEST)
    return np.pad(tokens, (size - len(tokens), 0), constant_values=NONE).astype(np.int32)


def recycled(corpus: Corpus, tokens: np.ndarray, batch_size: int, vocab_size: int) -> RecycledLogits:
    """Returns tables [B, ...] to begin with: the latest entries of the states, else the most frequent next tokens.

    Args:
      corpus: the texts.
      tokens: [S] int32, as `read` returns them.
      batch_size: B.
      vocab_size: V.
    """
    tables = [one.memory.drafts.states.get("recycled") for one in corpus if isinstance(one, DecodeState)]
    rows = [
        jax.tree.map(operator.itemgetter(row), table)
        for table in tables
        if table is not None
        for row in range(len(table.pairs))
    ]
    followers = jnp.asarray(_followers(tokens, vocab_size))
    table = functools.reduce(_merge, rows, dataclasses.replace(recycling.empty(vocab_size), after_token=followers))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch_size, *x.shape)), table)


def _followers(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns the most frequent next tokens [V, k] int32 of each token, `NONE` where there are fewer."""
    pairs = np.stack([tokens[:-1], tokens[1:]], axis=1)
    pairs, counts = np.unique(pairs[(pairs >= 0).all(axis=1)], axis=0, return_counts=True)
    order = np.lexsort((-counts, pairs[:, 0]))
    first, second = pairs[order].T
    rank = np.arange(len(first)) - np.searchsorted(first, first)
    table = np.full((vocab_size, RANKS), NONE, np.int32)
    is_kept = rank < RANKS
    table[first[is_kept], rank[is_kept]] = second[is_kept]
    return table


@jax.jit
def _merge(earlier: RecycledLogits, later: RecycledLogits) -> RecycledLogits:
    has_token, has_pair = later.after_token[:, :1] != NONE, later.pairs[:, :1] != NONE
    return RecycledLogits(
        after_token=jnp.where(has_token, later.after_token, earlier.after_token),
        pairs=jnp.where(has_pair, later.pairs, earlier.pairs),
        after_pair=jnp.where(has_pair, later.after_pair, earlier.after_pair),
    )
