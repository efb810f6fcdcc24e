"""Suffix matches in other texts, such as earlier texts of the same user (suffix decoding, arXiv 2411.04975)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts import suffix
from jlade.drafts.source import Text
from jlade.drafts.suffix import Suffix

RATES = 0.6 * suffix.RATES  # initial ones, assumed


@dataclasses.dataclass(frozen=True)
class Corpus(Suffix):
    """The corpus after the longest matches of the text's end. All sequences share its tokens."""

    @property
    def rates(self) -> np.ndarray:
        return RATES

    def propose(self, state: Any, text: Text, rates: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert text.corpus is not None
        last = suffix.last(text.tokens, text.length)
        return suffix.chains(text.corpus, jnp.int32(len(text.corpus)), last, self.reach)
