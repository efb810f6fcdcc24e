"""The index of DeepSeek Sparse Attention (DeepSeek V3.2, arXiv 2512.02556, section 2.1).

A token sees the tokens with the best scores alone. The queries of a score are products of the latent that also makes
those of attention, and the cache has one key for each token, behind the latent of keys and values.
"""

import flax.struct
import jax
import jax.numpy as jnp

from jlade.models.architecture import IndexSizes, LlamaConfig
from jlade.models.attention import Choice, Operands
from jlade.models.attention.choice import choose
from jlade.models.layers.arrays import Array, Arrays
from jlade.models.layers.latent_attention import NORM_EPS, sizes_of
from jlade.models.nn import linear, normalize, split_heads
from jlade.models.rotary import rotate

Rotation = tuple[jax.Array, jax.Array]


@flax.struct.dataclass(kw_only=True)
class Index:
    """The index of a layer, with H heads of D elements, for a latent of queries of Q elements.

    Its matrices are in no few bits, as those of routers: rounding would choose other tokens.
    """

    query: jax.Array  # [H * D, Q]
    key: jax.Array  # [D, E]
    key_norm: jax.Array  # [D]
    key_norm_bias: jax.Array  # [D]
    weights: jax.Array  # [H, E] float32

    @staticmethod
    def arrays(config: LlamaConfig, layer: int) -> Arrays:
        """Returns the arrays of the part in a layer."""
        sizes, query_rank = _sizes(config), sizes_of(config).query_rank
        assert query_rank is not None
        return {
            "query": Array((sizes.heads * sizes.size, query_rank)),
            "key": Array((sizes.size, config.hidden_size)),
            "key_norm": Array((sizes.size,)),
            "key_norm_bias": Array((sizes.size,)),
            "weights": Array((sizes.heads, config.hidden_size), is_exact=True),
        }

    def keys(self, normed: jax.Array, rotation: Rotation | None, config: LlamaConfig) -> jax.Array:
        """Returns the keys [B, T, 1, D] of hidden states [B, T, E]."""
        keys = normalize(linear(normed, self.key), self.key_norm, "layer", NORM_EPS, self.key_norm_bias)
        return _rotated(keys[:, :, None], rotation, config)

    def choose(
        self, operands: Operands, normed: jax.Array, latent: jax.Array, rotation: Rotation | None, config: LlamaConfig
    ) -> Choice | None:
        """Returns the tokens that each token sees; None for all, where the cache has no room for more than are chosen.

        Args:
          operands: those of attention, with the keys of the index.
          normed: hidden states [B, T, E].
          latent: of queries [B, T, Q].
          rotation: that of attention.
          config: of the model.
        """
        sizes = _sizes(config)
        if operands.capacity <= sizes.chosen:  # a token that is kept sees no more
            return None
        queries = _rotated(split_heads(linear(latent, self.query), sizes.size), rotation, config)
        # The published scores have positive factors, of sizes and heads, which change no choice.
        weights = linear(normed.astype(jnp.float32), self.weights)
        return choose(operands, queries, weights, sizes.chosen)


def _rotated(x: jax.Array, rotation: Rotation | None, config: LlamaConfig) -> jax.Array:
    """Returns queries or keys [B, T, H, D], of which the first elements are rotated."""
    return x if rotation is None else rotate(x, rotation, _sizes(config).interleaved)


def _sizes(config: LlamaConfig) -> IndexSizes:
    sizes = sizes_of(config).index
    assert sizes is not None
    return sizes
