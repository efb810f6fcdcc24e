"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434, section 2.1).

The keys and values of all heads are products of one latent, which the cache keeps in their place. A score is the
product of a query, a head's matrix for keys and a latent. The query is multiplied by the matrix here, not each latent:
attention then has one KV head, whose keys are the latents followed by the rotated elements that all heads share. Its
values are the latents too, and a head's matrix for values multiplies their weighted sum.
"""

from typing import TYPE_CHECKING

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jlade.mesh import MODEL
from jlade.models.architecture import Latent, LlamaConfig
from jlade.models.layers.arrays import Array, Arrays, by_inputs, by_outputs, whole
from jlade.models.nn import linear, normalize, split_heads
from jlade.models.quantization import Matrix
from jlade.models.rotary import rotate

if TYPE_CHECKING:
    from jlade.models.layers.attention import Context
    from jlade.models.llama import Llama

NORM_EPS = 1e-6  # of the norms of latents, whatever that of the hidden states


@flax.struct.dataclass(kw_only=True)
class LatentAttention:
    """Attention of H heads with a latent of Q elements for queries, and one of R for keys and values.

    The sizes are those of `jlade.models.architecture.Latent`; queries have D elements, and values V.
    """

    query_down: Matrix | None = None  # [Q, E]; `query` is then [H * D, Q]
    query_down_norm: jax.Array | None = None  # [Q]
    query: Matrix  # [H * D, E]
    key_down: Matrix  # [R + rotated, E]
    key_down_norm: jax.Array  # [R]
    key_up: jax.Array  # [H * unrotated, R]
    value_up: jax.Array  # [H * V, R]
    gate: Matrix | None = None  # [H * V, E], or [H, E], None for models without
    output: Matrix  # [E, H * V]
    output_bias: jax.Array | None = None  # [E]

    @staticmethod
    def arrays(config: LlamaConfig, layer: int) -> Arrays:
        """Returns the arrays of the part in a layer."""
        c, sizes = config, sizes_of(config)
        query_rank, queries, values = sizes.query_rank, c.num_heads * sizes.query_size, c.num_heads * sizes.value_size
        return {
            "query": by_outputs(queries, query_rank or c.hidden_size),
            "output": by_inputs(c.hidden_size, values),
            "output_bias": Array((c.hidden_size,)) if c.attention_output_bias else None,
            "gate": by_outputs(c.num_heads if c.head_gates else values, c.hidden_size) if c.output_gate else None,
            "query_down": whole(query_rank, c.hidden_size) if query_rank else None,
            "query_down_norm": Array((query_rank,)) if query_rank else None,
            "key_down": whole(sizes.key_size, c.hidden_size),
            "key_down_norm": Array((sizes.rank,)),
            "key_up": Array((c.num_heads * sizes.unrotated, sizes.rank), P(MODEL)),
            "value_up": Array((values, sizes.rank), P(MODEL)),
        }

    def project(self, normed: jax.Array, context: "Context", decoder: "Llama") -> list[jax.Array]:
        """Returns queries [B, T, H, D] and keys [B, T, 1, D], which are the values too, of hidden states [B, T, E]."""
        c, sizes = decoder.config, sizes_of(decoder.config)
        queries = split_heads(linear(self.inputs_of_queries(normed), self.query), sizes.query_size)
        unrotated, rotated = jnp.split(queries, [sizes.unrotated], axis=-1)
        latent, shared = jnp.split(linear(normed, self.key_down)[:, :, None], [sizes.rank], axis=-1)
        latent = normalize(latent, self.key_down_norm, "rms", NORM_EPS)
        if context.rotation is not None:
            rotated, shared = (rotate(x, context.rotation, c.interleaved_rotary) for x in (rotated, shared))
        key_up = self.key_up.reshape(-1, sizes.unrotated, sizes.rank)
        queries = jnp.concatenate([_by_head("bthd,hdr->bthr", unrotated, key_up), rotated], axis=-1)
        if context.query_scales is not None:
            queries = (queries.astype(jnp.float32) * context.query_scales).astype(queries.dtype)
        return [queries, jnp.concatenate([latent, shared], axis=-1)]

    def inputs_of_queries(self, normed: jax.Array) -> jax.Array:
        """Returns the latent of queries [B, T, Q], or the hidden states [B, T, E] themselves."""
        if self.query_down is None:
            return normed
        return normalize(linear(normed, self.query_down), self.query_down_norm, "rms", NORM_EPS)

    def values(self, mixed: jax.Array) -> jax.Array:
        """Returns the values [B, T, H, V] of the weighted sums of keys [B, T, H, D]."""
        rank = self.value_up.shape[-1]
        up = self.value_up.reshape(mixed.shape[2], -1, rank)
        return _by_head("bthr,hvr->bthv", mixed[..., :rank], up)


def sizes_of(config: LlamaConfig) -> Latent:
    """Returns the sizes of the latents of a model that has them."""
    assert config.latent is not None
    return config.latent


def _by_head(equation: str, x: jax.Array, matrices: jax.Array) -> jax.Array:
    """Returns the products of each head with its matrix, on TPUs as in `nn.multiply_row_twice`."""

    def multiply(x: jax.Array, matrices: jax.Array) -> jax.Array:
        return jnp.einsum(equation, x, matrices, preferred_element_type=jnp.float32)

    def multiply_twice(x: jax.Array, matrices: jax.Array) -> jax.Array:
        return multiply(jnp.repeat(x, 2, axis=1), matrices)[:, :1]

    if x.shape[:2] != (1, 1):
        return multiply(x, matrices).astype(x.dtype)
    product = jax.lax.platform_dependent(x, matrices, tpu=multiply_twice, default=multiply)
    return product.astype(x.dtype)
