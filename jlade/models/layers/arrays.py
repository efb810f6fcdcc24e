"""What a part of a layer says of its arrays: all that loading, division and random parameters need of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jlade.mesh import MODEL


class Array(NamedTuple):
    """An array of a part of a layer. Matrices are [out, in], as in checkpoints, and those of experts [N, in, out].

    Attributes:
      shape: of the whole array.
      spec: its division on a mesh.
      may_round: whether `jlade.models.llama.quantize` holds it in few bits; norms, biases, routers and indices keep
        their dtype.
      is_exact: whether it is float32 in a model of any dtype: rounding would choose other experts or tokens.
      fill: the value of all elements in random parameters; None for random ones.
    """

    shape: tuple[int, ...]
    spec: P = P()
    may_round: bool = False
    is_exact: bool = False
    fill: float | None = None

    def dtype_in(self, dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
        """Returns the dtype of the array in a model of a dtype."""
        return jnp.float32 if self.is_exact else dtype


Arrays = dict[str, Array | None]  # by field of a part; None for those that a layer does not have


def by_outputs(*shape: int) -> Array:
    """Returns a matrix whose first axis the devices of `MODEL` divide."""
    return Array(shape, P(MODEL), may_round=True)


def by_inputs(*shape: int) -> Array:
    """Returns a matrix whose second axis the devices of `MODEL` divide."""
    return Array(shape, P(None, MODEL), may_round=True)


def whole(*shape: int) -> Array:
    """Returns a matrix that each device has whole."""
    return Array(shape, may_round=True)
