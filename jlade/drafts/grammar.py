"""The text that a grammar makes likely: what has to come next, and between such parts the most probable token.

Long parts of structured text have no choice, such as the names of properties. A chain follows them, over the choices
between them too: there it takes the most probable token of the recycled logits that the grammar accepts.
"""

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts import recycled, suffix
from jlade.drafts.branch import if_any
from jlade.drafts.source import Setting, Source, Text
from jlade.drafts.tree import NONE, Proposals, TreeShape
from jlade.vocabulary import VocabularyShard

MAX_LENGTH = 16  # tokens of a draft
CERTAIN, AFTER_PAIR, AFTER_TOKEN, LIKELY = range(4)
REFUSED = -1  # the state after a token that the grammar refuses
RATES = np.array([0.9, 0.7, 0.4, 0.25])  # initial ones, assumed


@dataclasses.dataclass(frozen=True)
class Grammar(Source):
    """Two chains along the grammar of the text, the second from the token that leads to its end. Kinds are reasons."""

    about = "what the grammar makes likely"
    rates = RATES
    length: int

    @classmethod
    def max_length(cls, lookahead: Setting) -> int:
        return MAX_LENGTH

    @classmethod
    def of(cls, lookahead: Setting, vocabulary: VocabularyShard) -> Self:
        return cls(min(MAX_LENGTH, lookahead.num_drafted))

    @property
    def shape(self) -> TreeShape:
        return TreeShape.chains(2, self.length)

    def propose(self, state: None, text: Text, rates: jax.Array) -> Proposals:
        if text.guide is None:
            return Proposals.of(self.shape, *_no_chains(self.length))
        tables = ({name: each[name] for name in ("recycled",) if name in each} for each in (text.shared, text.states))
        known = Text(text.tokens, text.length, None, text.guide, *tables)
        chains, none = functools.partial(_chains, length=self.length), lambda _: _no_chains(self.length)
        return Proposals.of(self.shape, *if_any(text.guide.restricts, chains, none, known))


def _no_chains(length: int) -> tuple[jax.Array, jax.Array]:
    return jnp.full(2 * length, NONE, jnp.int32), jnp.zeros(2 * length, jnp.int32)


def _chains(text: Text, length: int) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of both chains, one after the other, and their kinds, [2 * length] int32."""
    assert text.guide is not None
    constraint, state = text.guide
    last = jnp.broadcast_to(suffix.last(text.tokens, text.length)[1::-1], (2, 2))
    states = jnp.broadcast_to(state, 2)  # `REFUSED` after the end of a chain
    table, prior = text.states.get("recycled"), text.shared.get("recycled")
    tokens, kinds = [], []
    for place in range(length):
        here = jnp.maximum(states, 0)
        token, is_certain = constraint.likely(here)
        token = jnp.where(states == REFUSED, NONE, token)[:, None]
        kind = jnp.where(is_certain, CERTAIN, LIKELY)[:, None]
        if table is not None:
            best, of_best = recycled.find(table, prior, last)
            is_free = ~is_certain & (states != REFUSED)
            if place == 0:
                is_free &= np.array([True, False])
            best = jnp.where(is_free[:, None], best, NONE)
            of_best = jnp.where(of_best < recycled.AFTER_PAIR, AFTER_TOKEN, AFTER_PAIR)
            token, kind = jnp.append(best, token, axis=1), jnp.append(of_best, kind, axis=1)
        after = jnp.where(token == NONE, REFUSED, constraint.after(here[:, None], jnp.maximum(token, 0)))
        token, kind, states = _first(token, kind, after)  # the most probable one that is accepted
        tokens.append(token)
        kinds.append(kind)
        states, token = jax.lax.optimization_barrier((states, token))  # see `constraint.along`
        last = jnp.stack([last[:, 1], token], axis=1)
    return jnp.stack(tokens, axis=1).reshape(-1), jnp.stack(kinds, axis=1).reshape(-1)


def _first(token: jax.Array, kind: jax.Array, after: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the first accepted token of each row, its kind and the state after it; `NONE`, 0 and `REFUSED` for none.

    All come from one reduction, which is a single kernel.
    """

    def better(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        is_one = (one[3] != REFUSED) & ((other[3] == REFUSED) | (one[0] < other[0]))
        return tuple(jnp.where(is_one, *pair) for pair in zip(one, other, strict=True))

    places = jax.lax.broadcasted_iota(jnp.int32, token.shape, 1)
    none = tuple(np.array(each, np.int32) for each in (0, NONE, 0, REFUSED))
    return jax.lax.reduce((places, token, kind, after), none, better, (1,))[1:]
