"""The protocol of a constraint, and its states along a tree of drafts, for one sequence."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jlade.drafts.source import Guide
from jlade.drafts.tree import Tree

State = Any  # a pytree of arrays


class Constraint(Protocol):
    """The tokens that a text may have: a pytree of arrays, such as a `flax.struct.dataclass`, with these methods.

    Its arrays are array[B, ...] for the sequences of a batch. Those of a field of the type
    `Annotated[jax.Array, SHARED]` (`jlade.mesh.SHARED`) are the same for all. The methods are for one sequence, whose
    arrays have no B. They are pure and traced: they may branch on shapes, not on values.
    """

    def start(self, tokens: jax.Array, length: jax.Array) -> State:
        """Returns the state after a prompt: the first `length`, int32[], of `tokens`, int32[C]."""

    def advance(self, state: State, token: jax.Array) -> State:
        """Returns the state after `token`, int32[]. After a token that is not allowed it may be any state."""

    def allowed(self, state: State) -> jax.Array:
        """Returns the tokens that may come next, bool[V], at least one. An end token ends the text."""


def restricts(constraint: Constraint, state: State) -> jax.Array:
    """Returns whether a token may not come next, [] bool; True if the constraint has no method of this name."""
    return Guide(constraint, state).restricts


def guide(constraint: Constraint | None, state: State) -> Guide | None:
    """Returns the guide of drafts after a text; None for a constraint that cannot guide them, or none."""
    return Guide(constraint, state) if hasattr(constraint, "likely") else None


def along(constraint: Constraint, state: State, tree: Tree, depth: int) -> State:
    """Returns the states after the current token and after each draft, [1 + M, ...] in every array.

    Those after drafts that are not allowed, and after what follows these, are any states.

    Args:
      constraint: of the sequence.
      state: after the current token.
      tree: M drafts.
      depth: of the deepest draft.
    """
    parents = jnp.asarray(tree.form.parents)
    tokens = jnp.maximum(tree.tokens, 0)

    def from_parents(first: jax.Array, after: jax.Array) -> jax.Array:
        is_first = (parents == tree.CURRENT).reshape(-1, *[1] * jnp.ndim(first))
        return jnp.where(is_first, first, after.at[jnp.maximum(parents, 0)].get(mode="promise_in_bounds"))

    after = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(tokens), *jnp.shape(x))), state)
    # Each round has the states after drafts that are deeper by one. It reads those of the round before once: XLA's
    # compiler for CPUs repeats the code of all rounds before it for each time that they are read.
    for _ in range(depth if len(tokens) else 0):
        after = jax.vmap(constraint.advance)(jax.tree.map(from_parents, state, after), tokens)
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), state, after)


def after_accepted(
    constraint: Constraint, states: State, path: jax.Array, tokens: jax.Array, num_accepted: jax.Array
) -> State:
    """Returns the state after the accepted tokens.

    Args:
      constraint: of the sequence.
      states: result of `along`.
      path: [A-1] int32, places in the tree of the accepted tokens but the last.
      tokens: [A] int32.
      num_accepted: [] int32, 0 to A.
    """
    last = jnp.maximum(num_accepted - 1, 0)
    before = jax.tree.map(lambda x: x[jnp.append(0, 1 + path)[last]], states)
    after = constraint.advance(before, tokens[last])
    return jax.tree.map(lambda x, y: jnp.where(num_accepted == 0, x[0], y), states, after)
