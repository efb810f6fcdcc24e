"""The text that a grammar makes likely: what has to come next, and between such parts the most probable token.

Long parts of structured text have no choice, such as the names of properties. A chain follows them, over the choices
between them too: there it takes the most probable token of the recycled logits that the grammar accepts.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jlade.config import LookaheadConfig
from jlade.drafts import recycled, suffix
from jlade.drafts.source import Source, Text
from jlade.drafts.tree import NONE, TreeShape
from jlade.vocabulary import VocabularyShard

CERTAIN, AFTER_PAIR, AFTER_TOKEN, LIKELY = range(4)
RATES = np.array([0.9, 0.7, 0.4, 0.25])  # initial ones, assumed


@dataclasses.dataclass(frozen=True)
class Grammar(Source):
    """Two chains along the grammar of the text, the second from the token that leads to its end. Kinds are reasons."""

    about = "what the grammar makes likely"
    length: int

    @classmethod
    def of(cls, lookahead: LookaheadConfig, vocabulary: VocabularyShard) -> Self:
        return cls(min(lookahead.reach["grammar"], lookahead.num_drafted))

    @property
    def shape(self) -> TreeShape:
        return TreeShape.chains(2, self.length)

    @property
    def rates(self) -> np.ndarray:
        return RATES

    def propose(self, state: None, text: Text, rates: jax.Array) -> tuple[jax.Array, jax.Array]:
        if text.guide is None:
            return jnp.full(2 * self.length, NONE, jnp.int32), jnp.zeros(2 * self.length, jnp.int32)
        chains = [_chain(text, self.length, begins_likely) for begins_likely in (False, True)]
        tokens, kinds = (jnp.concatenate(each) for each in zip(*chains, strict=True))
        return tokens, kinds


def _chain(text: Text, length: int, begins_likely: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of a chain and their kinds, both [length] int32."""
    guide, table = text.guide, text.recycled
    assert guide is not None
    last, state, is_live = suffix.last(text.tokens, text.length)[1::-1], guide.state, jnp.bool(True)
    tokens, kinds = [], []
    for place in range(length):
        token, is_certain = guide.constraint.likely(state)
        kind = jnp.where(is_certain, CERTAIN, LIKELY)
        if table is not None and not (begins_likely and place == 0):
            best, is_pair = recycled.find(table, last[None])
            accepts = jax.vmap(guide.constraint.accepts, in_axes=(None, 0))
            is_good = accepts(state, jnp.maximum(best[0], 0)) & (best[0] != NONE)
            takes_best = ~is_certain & jnp.any(is_good)
            token = jnp.where(takes_best, best[0, jnp.argmax(is_good)], token)
            kind = jnp.where(takes_best, jnp.where(is_pair[0], AFTER_PAIR, AFTER_TOKEN), kind)
        is_live &= token != NONE
        token = jnp.where(is_live, token, NONE)
        tokens.append(token)
        kinds.append(kind)
        state, last = guide.constraint.advance(state, jnp.maximum(token, 0)), jnp.stack([last[1], token])
    return jnp.stack(tokens), jnp.stack(kinds)
