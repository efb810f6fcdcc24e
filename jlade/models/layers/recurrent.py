"""Recurrent layers, whose state each token changes, for a block whose mask is a tree.

A convolution over each token's last tokens comes first, those of its own ancestors in the block and of the text. Its
outputs are queries, keys and values of the gated delta rule, or of Mamba-2: see `jlade.models.delta_rule`, and
`jlade.models.channel_delta_rule` for decays of channels. In other layers the convolution is all: see
`Recurrent._convolve_with_gates`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jlade.mesh import MODEL
from jlade.models.architecture import BEFORE_GATE, CHANNEL_DELTA, STATE_SPACE, LlamaConfig, Recurrence
from jlade.models.channel_delta_rule import channel_delta_rule
from jlade.models.delta_rule import delta_rule
from jlade.models.layers.arrays import Array, Arrays, by_inputs, by_outputs, whole
from jlade.models.nn import linear, normalize, scale, sum_linear
from jlade.models.quantization import Matrix

if TYPE_CHECKING:
    from jlade.models.llama import Llama

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
    # Logarithms, float32: [B, T, HV], sums from the text to each token, or [B, T, HK, dk], of a token's own channels
    decays: jax.Array | None = None


@flax.struct.dataclass
class Ancestry:
    """The tree that the mask of a block is."""

    sees: jax.Array  # [1 or B, T, T] bool, ancestors and the token itself
    taps: jax.Array  # [1 or B, T, taps] int32, places of a token's last ancestors and its own, behind the text's last
    is_chain: bool = flax.struct.field(pytree_node=False)  # whether `sees` is known to be a triangle


def ancestry(mask: jax.Array | np.ndarray, taps: int) -> Ancestry:
    """Returns the tree of a mask [T, T] or [B, T, T], in which each token comes after those that it sees."""
    is_chain = isinstance(mask, np.ndarray) and np.array_equal(mask, np.tri(len(mask), dtype=bool))
    mask = jnp.asarray(mask)
    sees = (mask if mask.ndim == 3 else mask[None]) | jnp.eye(mask.shape[-1], dtype=bool)[None]
    depth = jnp.sum(sees, axis=-1, dtype=jnp.int32)  # from 1, of a token that sees itself alone
    distance = depth[:, :, None] - depth[:, None, :]

    def place(back: int) -> jax.Array:
        """Returns the place [1 or B, T] of the token that is `back` tokens before each."""
        in_block = jnp.argmax(sees & (distance == back), axis=-1).astype(jnp.int32) + taps - 1
        return jnp.where(depth > back, in_block, depth + taps - 2 - back)

    return Ancestry(sees, jnp.stack([place(back) for back in range(taps - 1, -1, -1)], axis=-1), is_chain)


def init_state(sizes: Recurrence, batch_size: int, shards: int, dtype: jax.typing.DTypeLike) -> RecurrentState:
    """Returns the state of no text, of the heads on one of several devices."""
    heads, width = sizes.key_heads // shards, sizes.values // sizes.key_heads
    memory = jnp.zeros((batch_size, heads, sizes.key_size, width), jnp.float32) if sizes.has_memory else None
    return RecurrentState(memory, jnp.zeros((batch_size, sizes.taps - 1, sizes.channels // shards), dtype))


@flax.struct.dataclass(kw_only=True)
class Recurrent:
    """A recurrent mixer with HK heads of dk elements for queries and keys, and HV of dv for values."""

    query: Matrix  # [HK * dk, E]
    key: Matrix  # [HK * dk, E]
    value: Matrix  # [HV * dv, E]
    output: Matrix  # [E, HV * dv]
    value_filter: jax.Array  # [HV * dv, taps]
    value_filter_bias: Any = None  # [HV * dv], None for models without biases of filters
    # None for a convolution alone
    gate: Matrix | None = None  # [HV * dv, E]
    beta: jax.Array | None = None  # [HV, E], of the delta rule
    decay: Any = None  # [HV, E]
    decay_rate: Any = None  # [HV], its logarithm
    decay_bias: Any = None  # [HV]
    # Of decays for each channel, of which there are HK * dk in the place of HV. Gate and decay are then products of
    # latents of R elements, if any, in the place of E.
    gate_down: Matrix | None = None  # [R, E]
    decay_down: Matrix | None = None  # [R, E]
    query_filter: Any = None  # [HK * dk, taps]
    key_filter: Any = None  # [HK * dk, taps]
    query_filter_bias: Any = None  # [HK * dk], None too without these biases
    key_filter_bias: Any = None  # [HK * dk]
    skip: Any = None  # [HV], of Mamba-2: of the values, to the output
    norm: jax.Array | None = None  # [dv], of each head, or [HV * dv]; None too for a gate without a norm

    @staticmethod
    def arrays(config: LlamaConfig, layer: int) -> Arrays:
        """Returns the arrays of the part in a layer."""
        hidden, sizes = config.hidden_size, sizes_of(config)
        keys, values, heads = sizes.keys, sizes.values, sizes.value_heads
        is_space, has_memory, has_bias = sizes.rule == STATE_SPACE, sizes.has_memory, sizes.filter_bias
        has_channels, rank = sizes.rule == CHANNEL_DELTA, sizes.gate_rank

        def divided(*shape: int) -> Array:
            return Array(shape, P(MODEL))

        def of_memory(array: Array) -> Array | None:
            return array if has_memory else None

        norm = divided(values) if is_space else Array((sizes.value_size,))
        return {
            "output": by_inputs(hidden, values),
            "query": by_outputs(keys, hidden),
            "key": by_outputs(keys, hidden),
            "value": by_outputs(values, hidden),
            "gate": of_memory(by_outputs(values, rank or hidden)),
            "beta": divided(heads, hidden) if sizes.corrects else None,
            "decay": of_memory(divided(heads, hidden)) if not has_channels else by_outputs(keys, rank or hidden),
            "gate_down": whole(rank, hidden) if rank else None,
            "decay_down": whole(rank, hidden) if rank else None,
            "query_filter": of_memory(divided(keys, sizes.taps)),
            "key_filter": of_memory(divided(keys, sizes.taps)),
            "value_filter": divided(values, sizes.taps),
            "decay_rate": of_memory(divided(heads)._replace(is_exact=has_channels)),
            "decay_bias": of_memory(divided(sizes.decays)._replace(is_exact=has_channels)),
            "query_filter_bias": of_memory(divided(keys)) if has_bias else None,
            "key_filter_bias": of_memory(divided(keys)) if has_bias else None,
            "value_filter_bias": divided(values) if has_bias else None,
            "skip": divided(heads) if is_space else None,
            "norm": of_memory(norm._replace(fill=1)) if sizes.norm_place is not None else None,
        }

    def mix(
        self, normed: jax.Array, state: RecurrentState, tree: Ancestry, decoder: "Llama"
    ) -> tuple[jax.Array, RecurrentBlock]:
        """Returns the mixture [B, T, E] of a block [B, T, E], and what `commit` needs of it.

        `state` is that of the text, and `tree` that of the block.
        """
        c = decoder.config
        normed = scale(normed, c.multipliers.recurrent_input)
        projected = [self._product(normed, name, c) for name in ("query", "key", "value")]
        if state.memory is None:
            gated, kept = self._convolve_with_gates(projected, state, tree)
        else:
            gated, kept = self._follow_rule(normed, projected, state, tree, c)
        return scale(sum_linear(gated, self.output, None, decoder.axes), c.multipliers.recurrent_output), kept

    def _product(self, normed: jax.Array, name: str, config: LlamaConfig) -> jax.Array:
        """Returns the product of [B, T, E] with a matrix, times its multiplier."""
        multiplier = getattr(config.multipliers, name if name == "decay" else f"recurrent_{name}")
        down = getattr(self, f"{name}_down", None)
        inputs = normed if down is None else linear(normed, down)
        # transformers has these factors in the dtype of the model.
        return scale(linear(inputs, getattr(self, name)), float(np.asarray(multiplier, normed.dtype)))

    def _follow_rule(
        self,
        normed: jax.Array,
        projected: Sequence[jax.Array],
        state: RecurrentState,
        tree: Ancestry,
        config: LlamaConfig,
    ) -> tuple[jax.Array, RecurrentBlock]:
        """Returns the gated output of a rule with memory, [B, T, HV * dv], and what `commit` needs."""
        sizes = sizes_of(config)
        eps = config.norm_eps if sizes.norm_eps is None else sizes.norm_eps
        assert state.memory is not None
        inputs = jnp.concatenate(projected, axis=-1)
        filters, bias = jnp.concatenate([self.query_filter, self.key_filter, self.value_filter]), None
        if sizes.filter_bias:
            bias = jnp.concatenate([self.query_filter_bias, self.key_filter_bias, self.value_filter_bias])
        mixed = jax.nn.silu(convolve(inputs, filters, bias, state.inputs, tree.taps))
        keys_end = mixed.shape[-1] * 2 * sizes.keys // sizes.channels
        queries, keys = jnp.split(_heads(mixed[..., :keys_end], sizes.key_size), 2, axis=2)
        values = _heads(mixed[..., keys_end:], sizes.value_size)
        rate, least = (x.astype(jnp.float32)[None, None] for x in (self.decay_rate, self.decay_bias))
        raw = self._product(normed, "decay", config).astype(jnp.float32) + least
        has_channels = sizes.rule == CHANNEL_DELTA
        if has_channels:
            raw, rate = _heads(raw, sizes.key_size), rate[..., None]
        # The time that passes with each token, by which a state shrinks and a value of Mamba-2 grows
        step = jax.nn.softplus(raw)
        decay = -jnp.exp(rate) * step
        if sizes.least_decay is not None:
            decay = sizes.least_decay * jax.nn.sigmoid(jnp.exp(rate) * raw)
        gate = self._product(normed, "gate", config)
        if self.beta is not None:
            queries, keys = unit(queries) * sizes.key_size**-0.5, unit(keys)
            beta = scale(jax.nn.sigmoid(linear(normed, self.beta)), sizes.beta_scale).astype(jnp.float32)
            block = queries, keys, values, beta, decay, state.memory, tree.sees
            if has_channels:
                output, *updates = *channel_delta_rule(*block, tree.is_chain), decay
            else:
                output, *updates = delta_rule(*block)
            gated = self._norm_then_gate(gate, output, has_channels, eps)
        else:
            output, *updates = delta_rule(queries, keys, step[..., None] * values, None, decay, state.memory, tree.sees)
            output += self.skip.astype(jnp.float32)[None, None, :, None] * values
            gated = self._gate_with_norm(gate, output, keys.shape[2], sizes.norm_place, eps)
        return gated, RecurrentBlock(inputs, keys, *updates)

    def _norm_then_gate(self, gate: jax.Array, output: jax.Array, is_sigmoid: bool, eps: float) -> jax.Array:
        """Returns the norm of each head of `output` [B, T, HV, dv], times a gate [B, T, HV * dv].

        The gate is a SiLU (Qwen3-Next), or a sigmoid, with a norm in float32 (Kimi Linear).
        """
        factors = (jax.nn.sigmoid if is_sigmoid else jax.nn.silu)(_heads(gate, output.shape[-1]))
        rounded, weight = output.astype(gate.dtype), self.norm
        if is_sigmoid:
            assert weight is not None
            rounded, weight = rounded.astype(jnp.float32), weight.astype(jnp.float32)
        scaled = normalize(rounded, weight, "rms", eps).astype(jnp.float32)
        return (scaled * factors).astype(gate.dtype).reshape(gate.shape)

    def _gate_with_norm(
        self, gate: jax.Array, output: jax.Array, groups: int, place: str | None, eps: float
    ) -> jax.Array:
        """Returns `output` [B, T, HV, dv] times a gate [B, T, HV * dv] (Mamba-2).

        A norm of all heads with the same one of `groups` keys comes after it or before it, or there is none.
        """
        factors, mixed = jax.nn.silu(gate.astype(jnp.float32)), output.reshape(gate.shape)
        if place != BEFORE_GATE:
            mixed *= factors
        if self.norm is not None:
            grouped = mixed.reshape(*gate.shape[:2], groups, -1)
            weight = self.norm.astype(jnp.float32).reshape(grouped.shape[2:])
            mixed = normalize(grouped, weight[None, None], "rms", eps).reshape(gate.shape)
        if place == BEFORE_GATE:
            mixed *= factors
        return mixed.astype(gate.dtype)

    def _convolve_with_gates(
        self, projected: Sequence[jax.Array], state: RecurrentState, tree: Ancestry
    ) -> tuple[jax.Array, RecurrentBlock]:
        """Returns queries times the convolution of keys times values (LFM2), all [B, T, C], and what `commit` needs."""
        queries, keys, values = projected
        inputs = keys * values
        mixed = convolve(inputs, self.value_filter, self.value_filter_bias, state.inputs, tree.taps)
        return queries * mixed, RecurrentBlock(inputs)


def sizes_of(config: LlamaConfig) -> Recurrence:
    """Returns the sizes of the recurrent layers of a model that has them."""
    assert config.recurrence is not None
    return config.recurrence


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
    if decays.ndim == 4:
        return _remember_channels(memory, *(jnp.where(is_kept[..., None, None], x, 0) for x in of_tokens))
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


def _remember_channels(memory: jax.Array, keys: jax.Array, updates: jax.Array, decays: jax.Array) -> jax.Array:
    """Returns a memory with all of some tokens, given the decays of channels; those that are not accepted are zeros."""
    later = jnp.concatenate([decays[:, 1:], jnp.zeros_like(decays[:, :1])], axis=1)
    after = jax.lax.cumsum(later, axis=1, reverse=True)  # a difference of sums from the text on would round more
    faded = jnp.exp(after) * keys
    added = jnp.einsum("bagd,bagy->bgdy", faded, updates, precision=jax.lax.Precision.HIGHEST)
    return jnp.exp(after[:, 0] + decays[:, 0])[..., None] * memory + added
