"""Jacobi decoding: a chain of m guesses, all of which are updated in each step (arXiv 2402.02057, Algorithm 1).

A step is one iteration: each guess becomes the model's prediction after the guess before it. The guesses that have
converged are those that verification accepts. The chain then begins after them, and ends in new guesses.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jlade.drafts.source import Prompt, Setting, Source, Step, Text
from jlade.drafts.tree import NONE, Proposals, Tree, TreeShape
from jlade.vocabulary import VocabularyShard

KINDS = 8  # places in the chain with acceptance rates of their own; later ones share the last rate
RATES = np.array([0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3])  # initial ones by place
# A guess for a position that no iteration has reached is a token drawn from the text. The draws are the same in every
# run: random numbers take long to compile.
DRAWS = np.random.default_rng(0).integers(2**31, size=1024, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Chain(Source):
    """The guesses for the next m tokens, which are the state [m] int32. Kinds are places in the chain."""

    about = "guesses of Jacobi decoding"
    rates = RATES
    length: int  # m

    @classmethod
    def max_length(cls, lookahead: Setting) -> int:
        return lookahead.num_drafted

    @classmethod
    def of(cls, lookahead: Setting, vocabulary: VocabularyShard) -> Self:
        return cls(lookahead.num_drafted)

    @property
    def shape(self) -> TreeShape:
        return TreeShape.chains(1, self.length)

    def empty(self) -> jax.Array:
        return jnp.full(self.length, NONE, jnp.int32)

    def start(self, state: jax.Array, prompt: Prompt) -> jax.Array:
        return first_guesses(prompt.tokens, prompt.length, prompt.length + jnp.arange(self.length, dtype=jnp.int32))

    def propose(self, state: jax.Array, text: Text, rates: jax.Array) -> Proposals:
        kinds = jnp.asarray(np.minimum(np.arange(self.length, dtype=np.int32), KINDS - 1))
        return Proposals.of(self.shape, state, kinds)

    def learn(self, state: jax.Array, step: Step) -> jax.Array:
        # An iteration, for the m + 1 positions after the text before the step.
        place = jnp.arange(self.length + 1, dtype=jnp.int32)
        predicted = after(state, step.tree, step.predictions)
        drawn = first_guesses(step.text, step.length, step.before + place)
        guesses = jnp.where(predicted == NONE, jnp.append(state, drawn[-1]), predicted)
        # The chain after the accepted tokens.
        num_accepted = step.length - step.before
        new = first_guesses(step.text, step.length, step.length + place[:-1])
        moved = guesses.at[num_accepted + place[:-1]].get(mode="fill", fill_value=NONE)
        return jnp.where(num_accepted == 0, state, jnp.where(moved == NONE, new, moved))


def first_guesses(text: jax.Array, length: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns guesses [K] for positions [K] int32: tokens drawn from the first `length` [] tokens of a text [C]."""
    return text[jnp.asarray(DRAWS)[positions % len(DRAWS)] % length]


def after(chain: jax.Array, tree: Tree, predictions: jax.Array) -> jax.Array:
    """Returns the predictions after the current token and after each token of a chain [m] int32: [m + 1] int32.

    `predictions` [1 + M] int32 are those after the current token and after each of the M drafts that the model read.
    `NONE` stands for the prediction after a token that has no place in the tree.
    """
    depths = jnp.asarray(tree.form.depths)
    agrees = tree.tokens == chain.at[depths - 1].get(mode="fill", fill_value=NONE)
    is_of_chain = jnp.all(~jnp.asarray(tree.form.mask) | agrees[None, :], axis=1) & (tree.tokens != NONE)
    is_at = is_of_chain[None, :] & (depths[None, :] == jnp.arange(1, len(chain) + 1, dtype=jnp.int32)[:, None])
    predicted = jnp.max(jnp.where(is_at, predictions[None, 1:], NONE), axis=1, initial=NONE)
    return jnp.append(predictions[:1], predicted)
