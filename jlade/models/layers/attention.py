"""Attention with keys and values of heads, and what every kind of attention reads and does."""

from typing import TYPE_CHECKING, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jlade.mesh import HEADS, MODEL
from jlade.models import kv_rounding, rotary
from jlade.models.architecture import LlamaConfig
from jlade.models.attention import Choice, Operands, attend
from jlade.models.layers.arrays import Array, Arrays, by_inputs, by_outputs
from jlade.models.layers.index import Index
from jlade.models.layers.latent_attention import LatentAttention
from jlade.models.nn import linear, normalize, scale, split_heads, sum_linear
from jlade.models.quantization import Matrix

if TYPE_CHECKING:
    from jlade.models.llama import Llama


class Context(NamedTuple):
    """What attention reads besides hidden states, in a layer.

    Attributes:
      rotation: cosines and sines for the block's positions; None for no rotation.
      query_scales: of the block's queries; None for none.
      cached: the layer's arrays of the cache.
      length: [B] int32, tokens in the cache.
      table: of the cache's pages; see `Operands`.
      block_mask: [T, T] or [B, T, T] bool.
      positions: [B, T].
      kept: keys and values of the block that an earlier layer made; None for a layer with its own.
      choice: of the tokens that are seen, that an earlier layer made; None for all, and for a layer with an index.
    """

    rotation: tuple[jax.Array, jax.Array] | None
    query_scales: jax.Array | None
    cached: tuple[jax.Array, ...]
    length: jax.Array
    table: jax.Array | None
    block_mask: jax.Array | np.ndarray
    positions: jax.Array
    kept: tuple[jax.Array, ...] | None
    choice: Choice | None


@flax.struct.dataclass(kw_only=True)
class Attention:
    """Attention of H heads for queries and KH for keys and values, of D elements, or of V for values."""

    query: Matrix  # [H * D, E]
    key: Matrix | None = None  # [KH * D, E], None where an earlier layer's keys are read
    value: Matrix | None = None  # [KH * V, E], None too where `key` makes the values
    gate: Matrix | None = None  # [H * D, E], or [H, E], None for models without
    output: Matrix  # [E, H * V]
    query_bias: jax.Array | None = None  # [H * D]
    key_bias: jax.Array | None = None  # [KH * D]
    value_bias: jax.Array | None = None  # [KH * V]
    output_bias: jax.Array | None = None  # [E]
    query_norm: jax.Array | None = None  # [D], of each head, [H, D] or [H * D]
    key_norm: jax.Array | None = None  # [D], of each head, [KH, D] or [KH * D]
    sinks: jax.Array | None = None  # [H]

    @staticmethod
    def arrays(config: LlamaConfig, layer: int) -> Arrays:
        """Returns the arrays of the part in a layer."""
        c, heads, number = config, config.heads_of(layer), config.num_heads_of(layer)
        queries, keys, value_size = number * heads.size, heads.number * heads.size, c.value_size or heads.size
        has_key = layer in c.kv_layers
        has_value = has_key and not (c.values_from_keys and c.windows_by_layer[layer] is None)
        has_norm = c.qk_norm and c.qk_norm_kind != "weightless"
        key, value = (
            by_outputs(rows, c.hidden_size)._replace(spec=P(HEADS)) for rows in (keys, heads.number * value_size)
        )
        key_bias, value_bias = (Array(matrix.shape[:1], P(HEADS)) for matrix in (key, value))
        query_norm, key_norm = {
            "whole": (Array((queries,), P(MODEL)), Array((keys,), P(HEADS))),
            "each": (Array((number, heads.size), P(MODEL)), Array((heads.number, heads.size), P(HEADS))),
        }.get(c.qk_norm_kind, (Array((heads.size,)),) * 2)
        return {
            "query": by_outputs(queries, c.hidden_size),
            "key": key if has_key else None,
            "value": value if has_value else None,
            "gate": by_outputs(number if c.head_gates else queries, c.hidden_size) if c.output_gate else None,
            "output": by_inputs(c.hidden_size, number * value_size),
            "query_bias": Array((queries,), P(MODEL)) if c.qkv_bias else None,
            "key_bias": key_bias if c.qkv_bias and has_key else None,
            "value_bias": value_bias if c.qkv_bias and has_value else None,
            "output_bias": Array((c.hidden_size,)) if c.attention_output_bias else None,
            "query_norm": query_norm if has_norm else None,
            "key_norm": key_norm if has_norm and has_key else None,
            "sinks": Array((number,), P(MODEL)) if c.has_sinks(layer) else None,
        }

    def project(self, normed: jax.Array, context: Context, decoder: "Llama") -> list[jax.Array]:
        """Returns queries [B, T, H, D], keys and values [B, T, KH, D] of [B, T, E], with norms, rotations and scales.

        A layer that reads the keys and values of another has queries alone.
        """
        c, head_dim = decoder.config, context.cached[0].shape[-1]
        inputs = scale(normed, c.multipliers.attention_input)

        def norm(x: jax.Array, weight: jax.Array | None, axes: tuple[str, ...] = ()) -> jax.Array:
            return normalize(x, weight, c.norm, c.norm_eps, axes=axes)

        def norms(*kinds: str) -> tuple[jax.Array | None, jax.Array | None]:
            return (self.query_norm, self.key_norm) if c.qk_norm_kind in kinds else (None, None)

        def project(
            weight: Matrix, bias: jax.Array | None, whole_norm: jax.Array | None = None, size: int = head_dim
        ) -> jax.Array:
            product = linear(inputs, weight, bias)
            bounded = product if c.qkv_bound is None else jnp.clip(product, -c.qkv_bound, c.qkv_bound)
            return split_heads(norm(bounded, whole_norm, decoder.axes), size)

        of_queries, of_keys = norms("whole")
        turned = [project(self.query, self.query_bias, of_queries)]  # queries, and keys where the layer has its own
        values = []
        if self.key is not None:
            turned.append(scale(project(self.key, self.key_bias, of_keys), c.multipliers.key))
            size = c.value_size or head_dim
            values = [turned[1] if self.value is None else project(self.value, self.value_bias, size=size)]
            if size < head_dim:
                values = [jnp.pad(values[0], [(0, 0)] * 3 + [(0, head_dim - size)])]
        turned = list(map(norm, turned, norms("head", "each")))
        if context.rotation is not None:
            turned = [rotary.rotate(x, context.rotation, c.interleaved_rotary) for x in turned]
        weights = norms("rotated")
        if c.qk_norm and c.qk_norm_kind == "weightless" and context.rotation is not None:
            weights = (jnp.ones(head_dim, normed.dtype),) * 2
        queries, *keys = map(norm, turned, weights)
        if c.value_norm:
            values = [norm(x, jnp.ones(head_dim, normed.dtype)) for x in values]
        if context.query_scales is not None:
            queries = (queries.astype(jnp.float32) * context.query_scales).astype(queries.dtype)
        return [queries, *keys, *values]


def mix(
    attention: Attention | LatentAttention,
    normed: jax.Array,
    context: Context,
    window: int | None,
    decoder: "Llama",
    index: Index | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...], Choice | None]:
    """Returns the mixture [B, T, E] of a block, its keys and values [B, T, KH, D], and the choice of what it sees.

    With a `kv_dtype` keys and values are in 8 bits and followed by their scales. Those of an `index` are behind the
    latents, in the same array.
    """
    c, sinks = decoder.config, attention.sinks if isinstance(attention, Attention) else None
    split = None if c.latent is None else c.latent.rank
    queries, *projected = attention.project(normed, context, decoder)
    if index is not None:
        projected = [jnp.concatenate([*projected, index.keys(normed, context.rotation, c)], axis=-1)]
    if decoder.kv_dtype is not None:
        splits = () if c.latent is None else c.latent.splits(index is not None)
        projected = list(kv_rounding.round_all(projected, decoder.kv_dtype, splits))
    kept = context.kept or tuple(projected)
    rest = context.length, context.block_mask, context.positions, sinks
    operands, choice = Operands.of(queries, kept, context.cached, *rest, table=context.table), context.choice
    if index is not None:
        assert isinstance(attention, LatentAttention)
        choice = index.choose(operands, normed, attention.inputs_of_queries(normed), context.rotation, c)
    if choice is not None:
        operands = operands._replace(chosen=choice.cached, block_mask=choice.block)
    mixed = attend(operands, window, decoder.attention, c.score_scale, c.attention_cap, split)
    if isinstance(attention, LatentAttention):
        mixed = attention.values(mixed)
    if c.value_size is not None:
        mixed = mixed[..., : c.value_size]
    mixed = mixed.reshape(*normed.shape[:2], -1)
    if attention.gate is not None:
        gate = getattr(jax.nn, c.gate_activation)(linear(normed, attention.gate))
        mixed *= jnp.repeat(gate, mixed.shape[-1] // gate.shape[-1], axis=-1) if c.head_gates else gate
    joined = sum_linear(mixed, attention.output, attention.output_bias, decoder.axes)
    return scale(joined, c.multipliers.attention_output), kept, choice
