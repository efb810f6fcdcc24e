"""A constraint of a caller's own."""

from typing import Annotated

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.mesh import SHARED

V = 13


@flax.struct.dataclass
class Walk:
    """An automaton over the tokens: each sequence begins in a state of its own."""

    next_state: Annotated[jax.Array, SHARED]  # [S, V] int32, -1 for tokens that are not allowed
    first: jax.Array  # [B] int32

    def start(self, tokens, length):
        return self.first

    def advance(self, state, token):
        return jnp.maximum(self.next_state[state, token], 0)

    def allowed(self, state):
        return self.next_state[state] >= 0


def automaton(seed, states=5, share=0.4):
    """Some transitions between states; each allows three tokens at least."""
    rng = np.random.default_rng(seed)
    table = np.where(rng.random((states, V)) < share, rng.integers(states, size=(states, V)), -1)
    for row in table:
        row[rng.choice(V, 3, replace=False)] = rng.integers(states, size=3)
    return table.astype(np.int32)
