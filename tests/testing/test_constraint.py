import flax.struct
import jax
import jax.numpy as jnp
import pytest

from jlade.testing import check_constraint
from tests.constraints.walk import Walk, automaton


@flax.struct.dataclass
class Even:
    """Tokens alternate between even and odd ones."""

    size: int = flax.struct.field(pytree_node=False, default=13)

    def start(self, tokens, length):
        return tokens[length - 1] % 2

    def advance(self, state, token):
        return token % 2

    def allowed(self, state):
        return jnp.arange(self.size) % 2 != state


@flax.struct.dataclass
class Longer(Even):
    def allowed(self, state):
        return jnp.arange(self.size + 1) % 2 != state


@flax.struct.dataclass
class Growing(Even):
    def advance(self, state, token):
        return jnp.stack([token, state])


@flax.struct.dataclass
class Blocked(Even):
    def allowed(self, state):
        return jnp.where(state == 0, jnp.arange(self.size) < 13, False)


@flax.struct.dataclass
class Impure(Even):
    def advance(self, state, token):
        return (token + jnp.int32(isinstance(token, jax.core.Tracer))) % 2


def test_right_ones_pass():
    check_constraint(Even(), 13)
    check_constraint(Walk(automaton(0), jnp.int32(1)), 13)


@pytest.mark.parametrize(
    ("constraint", "error", "message"),
    [
        (Longer(), ValueError, r"allowed must return \[13\] bool, got bool\[14\]"),
        (Growing(), TypeError, "advance must return what start does"),
        (Blocked(), AssertionError, "allowed returned a state in which no token"),
        (Impure(), AssertionError, "advance differs when it is compiled"),
    ],
)
def test_wrong_ones_are_named(constraint, error, message):
    with pytest.raises(error, match=message):
        check_constraint(constraint, 13)
