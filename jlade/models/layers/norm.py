"""A norm of hidden states."""

import flax.struct
import jax

from jlade.models import nn
from jlade.models.architecture import LlamaConfig
from jlade.models.layers.arrays import Array, Arrays


@flax.struct.dataclass
class Norm:
    """A norm of the kind of the model."""

    weight: jax.Array  # [E]
    bias: jax.Array | None = None  # [E]

    @staticmethod
    def arrays(config: LlamaConfig, layer: int) -> Arrays:
        """Returns the arrays of the part in a layer."""
        shape = (config.hidden_size,)
        return {
            "weight": Array(shape, fill=neutral(config)),
            "bias": Array(shape, fill=0) if config.norm_bias else None,
        }


def neutral(config: LlamaConfig) -> float:
    """Returns the weight of a norm that scales nothing."""
    return 0 if config.norm.endswith("plus_one") else 1


def normalize(hidden: jax.Array, norm: Norm | None, config: LlamaConfig) -> jax.Array:
    """Returns hidden states [..., E] after a norm, as they are without one."""
    return hidden if norm is None else nn.normalize(hidden, norm.weight, config.norm, config.norm_eps, norm.bias)
