"""Sequences of tokens that a text must not have, as transformers defines them, and several constraints at once."""

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.constraints.constraint import Constraint, State
from jlade.drafts.tree import NONE
from jlade.errors import check_int
from jlade.mesh import SHARED


@flax.struct.dataclass
class NoRepeatedNgrams:
    """A constraint: no sequence of `size` tokens occurs twice in prompt and text (`no_repeat_ngram_size`).

    The state is the text, int32[C], with -1 after its end, and its length, int32[].
    """

    size: int = flax.struct.field(pytree_node=False)
    vocab_size: int = flax.struct.field(pytree_node=False)

    def __post_init__(self) -> None:
        check_int("size", self.size, 1)
        check_int("vocab_size", self.vocab_size, 1)

    def start(self, tokens: jax.Array, length: jax.Array) -> State:
        return jnp.where(jnp.arange(len(tokens)) < length, tokens, NONE), length

    def advance(self, state: State, token: jax.Array) -> State:
        text, length = state
        return text.at[length].set(token, mode="drop"), length + 1

    def allowed(self, state: State) -> jax.Array:
        text, length = state
        before = self.size - 1
        place = jnp.arange(len(text))
        # The places of tokens that follow an earlier occurrence of the last tokens.
        follows = (place >= before) & (place < length) & (length >= before)
        for back in range(1, self.size):
            follows &= jnp.roll(text, back) == text[jnp.maximum(length - back, 0)]
        return _all_but(jnp.where(follows, text, self.vocab_size), self.vocab_size)


@flax.struct.dataclass
class BannedSequences:
    """A constraint: none of some sequences of tokens occurs in the text (`bad_words_ids`), made by `of`.

    The state is the last tokens, int32[longest - 1], with -1 before the text.

    Attributes:
      sequences: int32[K, longest], K sequences, each at the end of its row, after -1.
      vocab_size: V.
    """

    sequences: Annotated[jax.Array, SHARED]
    vocab_size: int = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], vocab_size: int) -> Self:
        """Returns the constraint for some sequences of tokens below `vocab_size`.

        Raises:
          ValueError: names what is accepted.
        """
        rows = [list(each) for each in sequences]
        if not rows or not all(row and all(0 <= token < vocab_size for token in row) for row in rows):
            raise ValueError(
                f"sequences must be one or more lists of token ids from 0 to {vocab_size - 1}, got {sequences!r}"
            )
        longest = max(map(len, rows))
        array = np.array([[NONE] * (longest - len(row)) + row for row in rows], np.int32)
        return cls(jnp.asarray(array), vocab_size)

    def start(self, tokens: jax.Array, length: jax.Array) -> State:
        places = length + jnp.arange(1 - self.sequences.shape[1], 0)
        return jnp.where(places >= 0, tokens[jnp.maximum(places, 0)], NONE)

    def advance(self, state: State, token: jax.Array) -> State:
        return jnp.append(state, token)[1:]

    def allowed(self, state: State) -> jax.Array:
        before, last = self.sequences[:, :-1], self.sequences[:, -1]
        has_begun = ((before == NONE) | (before == state[None])).all(axis=1)
        return _all_but(jnp.where(has_begun, last, self.vocab_size), self.vocab_size)


@flax.struct.dataclass
class Every:
    """A constraint: all of several."""

    constraints: tuple[Constraint, ...]

    def start(self, tokens: jax.Array, length: jax.Array) -> State:
        return tuple(rule.start(tokens, length) for rule in self.constraints)

    def advance(self, state: State, token: jax.Array) -> State:
        return tuple(rule.advance(its_state, token) for rule, its_state in zip(self.constraints, state, strict=True))

    def allowed(self, state: State) -> jax.Array:
        allowed: list[Any] = [rule.allowed(its_state) for rule, its_state in zip(self.constraints, state, strict=True)]
        return functools.reduce(jnp.logical_and, allowed)


def _all_but(banned: jax.Array, vocab_size: int) -> jax.Array:
    """Returns all tokens [V] bool but those in an array, which has V for none."""
    return jnp.ones(vocab_size, bool).at[banned].set(False, mode="drop")
