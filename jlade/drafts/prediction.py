"""Drafts from a predicted text, which the answer is expected to resemble, such as the file that it edits.

OpenAI's API calls them Predicted Outputs; the way to find the place in the text is jlade's. The answer is followed
through the prediction. A place is where its next token stands. While the answer agrees, a place moves along; after a
difference it is found anew, by the last tokens of the answer. The anchor is the place after the last tokens that
agreed: the prediction goes on near there.
"""

import dataclasses
from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts import suffix
from jlade.drafts.source import Setting, Source, Step, Text
from jlade.drafts.suffix import LONGEST
from jlade.drafts.tree import NONE, Proposals, TreeShape
from jlade.vocabulary import VocabularyShard

MAX_LENGTH = 60  # tokens of a draft
PLACES = 2  # places from which the prediction is read, the best first
SECOND = 12  # most tokens that are read from the second place
TRUSTED = 1  # tokens after the anchor, and after one token in its place, count as matches of this length
CONFIRMED = 2  # tokens that must agree at another place before the anchor moves there
# Initial acceptance rates by length of the match and by place, assumed.
_BY_LENGTH = np.array([0.25, 0.5, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97])
_BY_PLACE = np.array([1.0, 0.4])
RATES = (_BY_LENGTH[:, None] * _BY_PLACE[None, :]).reshape(-1)


@flax.struct.dataclass
class Reading:
    """A predicted text and the places in it; [B, ...] for a batch."""

    text: jax.Array  # [S] int32, `NONE` after its end
    anchor: jax.Array  # [] int32
    places: jax.Array  # [PLACES] int32, of the next token
    matched: jax.Array  # [PLACES] int32, tokens before the place that match the answer's last ones, 0 for no place

    @classmethod
    def begin(cls, text: Any) -> Self:
        """Returns the state before an answer that is expected to begin as the text [..., S] does, in NumPy."""
        *batch, _ = text.shape
        matched: Any = np.zeros((*batch, PLACES), np.int32)
        matched[..., 0] = TRUSTED
        anchor: Any = np.zeros(batch, np.int32)
        return cls(text, anchor, np.zeros_like(matched), matched)


@dataclasses.dataclass(frozen=True)
class Prediction(Source):
    """The prediction from its best places on: a long chain and a short one. Kinds are lengths of matches and places."""

    about = "the text that the answer is expected to resemble"
    rates = RATES
    reach: int  # tokens of the long chain

    @classmethod
    def max_length(cls, lookahead: Setting) -> int:
        return MAX_LENGTH

    @classmethod
    def of(cls, lookahead: Setting, vocabulary: VocabularyShard) -> Self:
        return cls(min(MAX_LENGTH, lookahead.num_drafted))

    @property
    def shape(self) -> TreeShape:
        return TreeShape.join([TreeShape.chains(1, length) for length in self._lengths])

    @property
    def _lengths(self) -> tuple[int, int]:
        return self.reach, min(self.reach, SECOND)

    def empty(self) -> Reading:
        nothing: Reading = jax.tree.map(jnp.asarray, Reading.begin(np.full(1, NONE, np.int32)))
        return nothing

    def propose(self, state: Reading, text: Text, rates: jax.Array) -> Proposals:
        tokens, kinds = [], []
        for i, length in enumerate(self._lengths):
            offset = jnp.arange(length, dtype=jnp.int32)
            following = state.text.at[state.places[i] + offset].get(mode="fill", fill_value=NONE)
            tokens.append(jnp.where(state.matched[i] > 0, following, NONE))
            kinds.append((jnp.clip(state.matched[i] + offset, 1, LONGEST) - 1) * PLACES + i)
        return Proposals.of(self.shape, jnp.concatenate(tokens), jnp.concatenate(kinds))

    def learn(self, state: Reading, step: Step) -> Reading:
        num_accepted = step.length - step.before
        offset = jnp.arange(step.max_accepted, dtype=jnp.int32)
        accepted = step.text.at[step.before + offset].get(mode="clip")
        read = state.text.at[state.places[:, None] + offset[None, :]].get(mode="fill", fill_value=NONE)
        agrees = (read == accepted[None, :]) & (offset < num_accepted)[None, :] & (state.matched > 0)[:, None]
        agreed = jnp.sum(jnp.cumprod(agrees, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
        best = jnp.argmax(agreed)
        is_confirmed = (agreed[best] >= CONFIRMED) | (state.places[best] == state.anchor)
        anchor = jnp.where(is_confirmed, state.places[best] + agreed[best], state.anchor)
        places, matched = find(state.text, anchor, suffix.last(step.text, step.length))
        goes_on = num_accepted > 0
        return dataclasses.replace(
            state,
            anchor=jnp.where(goes_on, anchor, state.anchor),
            places=jnp.where(goes_on, places, state.places),
            matched=jnp.where(goes_on, matched, state.matched),
        )


def find(text: jax.Array, anchor: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the places of the longest matches of some tokens in a text; of equal ones those nearest to the anchor.

    Args:
      text: [S] int32.
      anchor: [] int32.
      last: [K] int32, from the end of another text on, `NONE` for fewer.

    Returns:
      Places [PLACES] int32, and lengths of their matches [PLACES] int32, 0 where there are fewer matches.
    """
    size = len(text)
    place = jnp.arange(size, dtype=jnp.int32)
    is_near = (place == anchor) | (place == anchor + 1)
    matched = jnp.maximum(suffix.matching(text, last), jnp.where(is_near, TRUSTED, 0))
    matched = jnp.where(text == NONE, 0, matched)  # nothing to read
    distance = jnp.abs(place - anchor)
    score = jnp.where(matched > 0, matched * size + size - 1 - distance, -1)
    score, places = jax.lax.top_k(score.astype(jnp.float32), min(PLACES, size))  # as in `suffix.find`
    missing = (0, PLACES - len(places))
    return jnp.pad(places.astype(jnp.int32), missing), jnp.pad(jnp.maximum(score, 0).astype(jnp.int32) // size, missing)
