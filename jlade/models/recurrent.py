"""Recurrent layers, whose state each token changes, for a block whose mask is a tree.

A convolution over each token's last tokens comes first, those of its own ancestors in the block and of the text. Its
outputs are queries, keys and values of the gated delta rule, or of Mamba-2: see `jlade.models.delta_rule`. In other
layers the convolution is all: see `_gated_convolution`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jlade.models.architecture import BEFORE_GATE, DELTA, LlamaConfig, Recurrence
from jlade.models.delta_rule import delta_rule
from jlade.models.layers import linear, normalize, scale, sum_linear

EPSILON = 1e-6  # of the norms of queries and keys


@flax.struct.dataclass
class RecurrentState:
    """What a layer keeps of the text: constant in size."""

    memory: jax.Array | None  # [B, HK, dk, HV / HK * dv] float32, heads with the same key side by side, None for none
    inputs: jax.Array  # [B, taps - 1, C], of the convolution, for the last tokens


class RecurrentBlock(NamedTuple):
    """What a layer keeps of a block's tokens, from which `commit` makes the state of those accepted."""

    inputs: jax.Array  # [B, T, C], of the convolution
    # None for a layer without memory
    keys: jax.Array | None = None  # [B, T, HK, dk] float32
    updates: jax.Array | None = None  # [B, T, HV, dv] float32
    decays: jax.Array | None = None  # [B, T, HV] float32, sums of logarithms from the text to each token


class Ancestry(NamedTuple):
    """The tree that the mask of a block is."""

    sees: jax.Array  # [1 or B, T, T] bool, ancestors and the token itself
    taps: jax.Array  # [1 or B, T, taps] int32, places of a token's last ancestors and its own, behind the text's last


def ancestry(mask: jax.Array | np.ndarray, taps: int) -> Ancestry:
    """Returns the tree of a mask [T, T] or [B, T, T], in which each token comes after those that it sees."""
    mask = jnp.asarray(mask)
    sees = (mask if mask.ndim == 3 else mask[None]) | jnp.eye(mask.shape[-1], dtype=bool)[None]
    depth = jnp.sum(sees, axis=-1, dtype=jnp.int32)  # from 1, of a token that sees itself alone
    distance = depth[:, :, None] - depth[:, None, :]

    def place(back: int) -> jax.Array:
        """Returns the place [1 or B, T] of the token that is `back` tokens before each."""
        in_block = jnp.argmax(sees & (distance == back), axis=-1).astype(jnp.int32) + taps - 1
        return jnp.where(depth > back, in_block, depth + taps - 2 - back)

    return Ancestry(sees, jnp.stack([place(back) for back in range(taps - 1, -1, -1)], axis=-1))


def init_state(sizes: Recurrence, batch_size: int, shards: int, dtype: jax.typing.DTypeLike) -> RecurrentState:
    """Returns the state of no text, of the heads on one of several devices."""
    heads, width = sizes.key_heads // shards, sizes.values // sizes.key_heads
    memory = jnp.zeros((batch_size, heads, sizes.key_size, width), jnp.float32) if sizes.has_memory else None
    return RecurrentState(memory, jnp.zeros((batch_size, sizes.taps - 1, sizes.channels // shards), dtype))


def mix(
    layer: Any,
    normed: jax.Array,
    state: RecurrentState,
    tree: Ancestry,
    config: LlamaConfig,
    axes: tuple[str, ...],
) -> tuple[jax.Array, RecurrentBlock]:
    """Returns the mixture [B, T, E] of a block, and what `commit` needs of it.

    Args:
      layer: a `jlade.models.llama.LlamaLayer` with the arrays of a recurrent layer.
      normed: [B, T, E].
      state: of the text.
      tree: of the block.
      config: of the model.
      axes: of the mesh, that divide the heads.
    """
    sizes, multipliers, eps = config.recurrence, config.multipliers, config.norm_eps
    assert sizes is not None
    normed = scale(normed, multipliers.recurrent_input)

    def product(field: str) -> jax.Array:
        # transformers has these factors in the dtype of the model.
        factor = np.asarray(getattr(multipliers, field), normed.dtype)
        return scale(linear(normed, getattr(layer, field)), float(factor))

    def output_of(gated: jax.Array) -> jax.Array:
        return scale(sum_linear(gated, layer.recurrent_output, None, axes), multipliers.recurrent_output)

    projected = [product(f"recurrent_{name}") for name in ("query", "key", "value")]
    if state.memory is None:
        gated, kept = _gated_convolution(layer, projected, state, tree)
        return output_of(gated), kept
    inputs = jnp.concatenate(projected, axis=-1)
    filters = jnp.concatenate([layer.query_filter, layer.key_filter, layer.value_filter])
    bias = None
    if sizes.filter_bias:
        bias = jnp.concatenate([layer.query_filter_bias, layer.key_filter_bias, layer.value_filter_bias])
    mixed = jax.nn.silu(convolve(inputs, filters, bias, state.inputs, tree.taps))
    keys_end = mixed.shape[-1] * 2 * sizes.keys // sizes.channels
    queries, keys = jnp.split(_heads(mixed[..., :keys_end], sizes.key_size), 2, axis=2)
    values = _heads(mixed[..., keys_end:], sizes.value_size)
    rate, least = (x.astype(jnp.float32)[None, None] for x in (layer.decay_rate, layer.decay_bias))
    # The time that passes with each token, by which a state shrinks and a value of Mamba-2 grows
    step = jax.nn.softplus(product("decay").astype(jnp.float32) + least)
    decay = -jnp.exp(rate) * step
    if sizes.rule == DELTA:
        queries, keys = unit(queries) * sizes.key_size**-0.5, unit(keys)
        beta = jax.nn.sigmoid(linear(normed, layer.beta)).astype(jnp.float32)
        output, *updates = delta_rule(queries, keys, values, beta, decay, state.memory, tree.sees)
        gated = _norm_then_gate(layer, product("recurrent_gate"), output, eps)
    else:
        output, *updates = delta_rule(queries, keys, step[..., None] * values, None, decay, state.memory, tree.sees)
        output += layer.skip.astype(jnp.float32)[None, None, :, None] * values
        gate = product("recurrent_gate")
        gated = _gate_with_norm(layer, gate, output, keys.shape[2], sizes.norm_place, eps)
    return output_of(gated), RecurrentBlock(inputs, keys, *updates)


def _norm_then_gate(layer: Any, gate: jax.Array, output: jax.Array, eps: float) -> jax.Array:
    """Returns the norm of each head of `output` [B, T, HV, dv], times a gate [B, T, HV * dv] (Qwen3-Next)."""
    factors = jax.nn.silu(_heads(gate, output.shape[-1]))
    scaled = normalize(output.astype(gate.dtype), layer.recurrent_norm, "rms", eps).astype(jnp.float32)
    return (scaled * factors).astype(gate.dtype).reshape(gate.shape)


def _gate_with_norm(
    layer: Any, gate: jax.Array, output: jax.Array, groups: int, place: str | None, eps: float
) -> jax.Array:
    """Returns `output` [B, T, HV, dv] times a gate [B, T, HV * dv] (Mamba-2).

    A norm of all heads with the same one of `groups` keys comes after it or before it, or there is none.
    """
    factors, mixed = jax.nn.silu(gate.astype(jnp.float32)), output.reshape(gate.shape)
    if place != BEFORE_GATE:
        mixed *= factors
    if place is not None:
        grouped = mixed.reshape(*gate.shape[:2], groups, -1)
        weight = layer.recurrent_norm.astype(jnp.float32).reshape(grouped.shape[2:])
        mixed = normalize(grouped, weight[None, None], "rms", eps).reshape(gate.shape)
    if place == BEFORE_GATE:
        mixed *= factors
    return mixed.astype(gate.dtype)


def _gated_convolution(
    layer: Any, projected: Sequence[jax.Array], state: RecurrentState, tree: Ancestry
) -> tuple[jax.Array, RecurrentBlock]:
    """Returns queries times the convolution of keys times values (LFM2), all [B, T, C], and what `commit` needs."""
    queries, keys, values = projected
    inputs = keys * values
    mixed = convolve(inputs, layer.value_filter, layer.value_filter_bias, state.inputs, tree.taps)
    return queries * mixed, RecurrentBlock(inputs)


def _heads(x: jax.Array, size: int) -> jax.Array:
    """Returns the heads [B, T, H, size] of [B, T, H * size] in float32."""
    return x.reshape(*x.shape[:2], -1, size).astype(jnp.float32)


def convolve(
    inputs: jax.Array, filters: jax.Array, bias: jax.Array | None, before: jax.Array, taps: jax.Array
) -> jax.Array:
    """Returns the convolution [B, T, C] over the last tokens of each token's own text.

    Args:
      inputs: [B, T, C], of the block.
      filters: [C, taps], whose last column is of the token itself.
      bias: [C], None for none.
      before: [B, taps - 1, C], the inputs of the text's last tokens.
      taps: see `Ancestry`.
    """
    both = jnp.concatenate([before.astype(inputs.dtype), inputs], axis=1)
    total = jnp.zeros(inputs.shape, jnp.float32)
    if bias is not None:
        total += bias.astype(jnp.float32)[None, None]
    for i in range(filters.shape[1]):
        total += take(both, taps[..., i]).astype(jnp.float32) * filters[None, None, :, i].astype(jnp.float32)
    return total.astype(inputs.dtype)


def take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns [B, K, ...], for each sequence the rows of `x` [B, T, ...] with these indices [1 or B, K]."""
    if len(indices) == 1:
        return jnp.take(x, indices[0], axis=1)
    return jnp.take_along_axis(x, indices.reshape(*indices.shape, *[1] * (x.ndim - 2)), axis=1)


def unit(x: jax.Array) -> jax.Array:
    """Returns vectors [..., D] of length one."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPSILON)


@jax.jit
def commit(state: RecurrentState, kept: RecurrentBlock, indices: jax.Array, num_accepted: jax.Array) -> RecurrentState:
    """Returns the state of the text with the first `num_accepted` [B] of the block's tokens `indices` [B, A].

    These are a path of the tree, from the text on. Under `jax.jit`, it is traced once for all layers.
    """
    inputs, *of_rule = (take(array, indices) for array in kept if array is not None)
    both = jnp.concatenate([state.inputs, inputs.astype(state.inputs.dtype)], axis=1)
    at = num_accepted[:, None] + jnp.arange(state.inputs.shape[1], dtype=jnp.int32)[None]
    memory = None if state.memory is None else _remember(state.memory, of_rule, num_accepted)
    return RecurrentState(memory, take(both, at))


def _remember(memory: jax.Array, of_tokens: Sequence[jax.Array], num_accepted: jax.Array) -> jax.Array:
    """Returns a memory with the first `num_accepted` [B] of some tokens, given their keys, updates and decays."""
    keys, updates, decays = of_tokens
    is_kept = jnp.arange(keys.shape[1], dtype=jnp.int32)[None] < num_accepted[:, None]
    last = jnp.maximum(num_accepted - 1, 0)[:, None]
    total = jnp.where(num_accepted[:, None] > 0, take(decays, last)[:, 0], 0)  # [B, HV]
    shrink = jnp.exp(jnp.where(is_kept[..., None], total[:, None] - decays, -jnp.inf))
    # 0 * NaN is NaN: what is not accepted is no number to add.
    keys, updates = (jnp.where(is_kept[..., None, None], x, 0) for x in (keys, updates))
    (batch_size, groups, _, width), heads = memory.shape, total.shape[1]
    side_by_side = (shrink[..., None] * updates).reshape(batch_size, -1, groups, width)
    added = jnp.einsum("bagd,bagy->bgdy", keys, side_by_side, precision=jax.lax.Precision.HIGHEST)
    by_column = jnp.repeat(jnp.exp(total).reshape(batch_size, groups, 1, -1), width * groups // heads, axis=-1)
    return by_column * memory + added
