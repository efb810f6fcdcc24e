"""A layer's own input of each token, beside the hidden states (Gemma 3n, Gemma 4 E2B and E4B)."""

import flax.struct
import jax
import numpy as np

from jlade.models.architecture import LlamaConfig
from jlade.models.layers.arrays import Array, Arrays, whole
from jlade.models.layers.norm import neutral
from jlade.models.nn import activate, linear, normalize, scale
from jlade.models.quantization import Matrix


@flax.struct.dataclass
class PerLayer:
    """Embeddings of P numbers for each of L layers: parameters that layers share."""

    embedding: jax.Array  # [V'', L * P]
    projection: jax.Array  # [L * P, E]
    norm: jax.Array  # [P]

    def inputs(self, rows: jax.Array, embedded: jax.Array, config: LlamaConfig) -> jax.Array:
        """Returns the own inputs [B, T, L, P] of the layers.

        They follow from the rows [B, T, L * P] of `embedding` and the inputs [B, T, E] of the first layer.
        """
        c, shape = config, (*rows.shape[:2], config.num_layers, config.per_layer_size)
        # The multiplier is rounded to the dtype of the model, as that of the embedding is.
        of_tokens = scale(rows, float(np.asarray(c.per_layer_size**0.5, rows.dtype)))
        projected = scale(linear(embedded, self.projection), c.hidden_size**-0.5)
        normed = normalize(projected.reshape(shape), self.norm, c.norm, c.norm_eps)
        return scale(normed + of_tokens.reshape(shape), 2**-0.5)


@flax.struct.dataclass
class OwnInput:
    """What a layer adds for its own input of P numbers."""

    gate: Matrix  # [P, E]
    projection: Matrix  # [E, P]
    norm: jax.Array  # [E]

    @staticmethod
    def arrays(config: LlamaConfig, layer: int) -> Arrays:
        """Returns the arrays of the part in a layer."""
        size, hidden = config.per_layer_size, config.hidden_size
        return {
            "gate": whole(size, hidden),
            "projection": whole(hidden, size),
            "norm": Array((hidden,), fill=neutral(config)),
        }

    def feed(self, hidden: jax.Array, inputs: jax.Array, config: LlamaConfig) -> jax.Array:
        """Returns what to add to hidden states [B, T, E], given the layer's inputs [B, T, P]."""
        gated = activate(linear(hidden, self.gate), config.activation) * inputs
        return normalize(linear(gated, self.projection), self.norm, config.norm, config.norm_eps)
