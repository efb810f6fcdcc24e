"""`check_constraint`: walks of random tokens through a constraint of your own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlade.constraints.constraint import Constraint

WALKS, LENGTH = 4, 24


def check_constraint(constraint: Constraint, vocab_size: int) -> None:
    """Walks through a constraint with random tokens that it allows, and checks everything that jlade relies on.

    Args:
      constraint: for one sequence: its arrays have no batch axis.
      vocab_size: V.

    Raises:
      TypeError, ValueError: a shape, a dtype or the structure of a state is wrong.
      AssertionError: no token is allowed, or compiled and mapped methods differ from plain ones.
      Each message names the method. Exceptions of the constraint itself pass through.
    """
    constraint = jax.tree.map(jnp.asarray, constraint)
    rng = np.random.default_rng(0)
    advance, allowed = jax.jit(lambda c, s, t: c.advance(s, t)), jax.jit(lambda c, s: c.allowed(s))
    for walk in range(WALKS):
        prompt = jnp.asarray(rng.integers(vocab_size, size=8), jnp.int32)
        state = constraint.start(prompt, jnp.int32(1 + walk))
        shapes = _shapes(state)
        for _ in range(LENGTH):
            found = allowed(constraint, state)
            if found.shape != (vocab_size,) or found.dtype != bool:
                raise ValueError(f"allowed must return [{vocab_size}] bool, got {found.dtype}{list(found.shape)}")
            assert found.any(), "allowed returned a state in which no token may come next: allow the end token there"
            token = jnp.int32(rng.choice(np.flatnonzero(found)))
            after = advance(constraint, state, token)
            if _shapes(after) != shapes:
                raise TypeError(f"advance must return what start does, {shapes}, got {_shapes(after)}")
            _check_equal("advance", after, constraint.advance(state, token))
            _check_equal("allowed", found, constraint.allowed(state))
            two = jax.tree.map(lambda x, y: jnp.stack([x, y]), state, after)
            mapped = jax.vmap(constraint.advance)(two, jnp.stack([token, token]))
            _check_equal("advance under vmap", after, jax.tree.map(lambda x: x[0], mapped))
            _check_equal("allowed under vmap", found, jax.vmap(constraint.allowed)(two)[0])
            state = after


def _shapes(state: Any) -> str:
    return str(jax.tree.map(lambda x: f"{jnp.asarray(x).dtype}{list(jnp.shape(x))}", state))


def _check_equal(name: str, first: Any, second: Any) -> None:
    same = jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), first, second)
    assert all(jax.tree.leaves(same)), f"{name} differs when it is compiled or mapped: it must be a pure function"
