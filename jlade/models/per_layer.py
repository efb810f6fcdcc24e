"""Embeddings for each layer, which a layer adds to the hidden states through a gate (Gemma 3n, Gemma 4 E2B and E4B)."""

from typing import Any

import flax.struct
import jax
import numpy as np

from jlade.models.architecture import LlamaConfig
from jlade.models.layers import activate, linear, normalize, scale


@flax.struct.dataclass
class PerLayer:
    """Parameters that all layers share, for L layers and embeddings of P numbers for each."""

    embedding: jax.Array  # [V'', L * P]
    projection: jax.Array  # [L * P, E]
    norm: jax.Array  # [P]


def inputs(per_layer: PerLayer, rows: jax.Array, embedded: jax.Array, config: LlamaConfig) -> jax.Array:
    """Returns the inputs [B, T, L, P] of the layers.

    Args:
      per_layer: the parameters.
      rows: [B, T, L * P], those of `per_layer.embedding` for the tokens.
      embedded: [B, T, E], the inputs of the first layer.
      config: of the model.
    """
    c, shape = config, (*rows.shape[:2], config.num_layers, config.per_layer_size)
    # The multiplier is rounded to the dtype of the model, as that of the embedding is.
    of_tokens = scale(rows, float(np.asarray(c.per_layer_size**0.5, rows.dtype)))
    projected = scale(linear(embedded, per_layer.projection), c.hidden_size**-0.5)
    normed = normalize(projected.reshape(shape), per_layer.norm, c.norm, c.norm_eps)
    return scale(normed + of_tokens.reshape(shape), 2**-0.5)


def add(hidden: jax.Array, layer_inputs: jax.Array, layer: Any, config: LlamaConfig) -> jax.Array:
    """Returns the hidden states [B, T, E] with a layer's own inputs [B, T, P], gated by the hidden states, added.

    Args:
      layer: a `jlade.models.llama.LlamaLayer`.
    """
    c = config
    gated = activate(linear(hidden, layer.input_gate), c.activation) * layer_inputs
    return hidden + normalize(linear(gated, layer.input_projection), layer.input_norm, c.norm, c.norm_eps)
