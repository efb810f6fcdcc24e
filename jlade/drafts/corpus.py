"""Suffix matches in other texts, such as earlier texts of the same user (suffix decoding, arXiv 2411.04975)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts import index, suffix
from jlade.drafts.index import TextIndex
from jlade.drafts.source import Text
from jlade.drafts.suffix import Suffix
from jlade.drafts.tree import Proposals

RATES = 0.6 * suffix.RATES  # initial ones, assumed


@dataclasses.dataclass(frozen=True)
class Corpus(Suffix):
    """The corpus after the longest matches of the text's end. All sequences share its index."""

    about = "the same in other texts"

    @property
    def rates(self) -> np.ndarray:
        return RATES

    def propose(self, state: Any, text: Text, rates: jax.Array) -> Proposals:
        texts: TextIndex = text.shared["corpus"]
        tokens, last = texts.tokens, suffix.last(text.tokens, text.length)
        places = index.candidates(texts, last)
        found = suffix.best(places, suffix.before(tokens, places, last), len(tokens), suffix.MATCHES)
        return Proposals.of(self.shape, *suffix.chains(tokens, jnp.int32(len(tokens)), *found, self.reach))
