"""One decoder for LLaMA and its relatives, which differ by their description: functions on a pytree of parameters."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.mesh import MODEL
from jlade.models import (
    base,
    implementations,
    kernels,
    kv_rounding,
    latent,
    products,
    quantization,
    recurrent,
    rotary,
)
from jlade.models.architecture import LlamaConfig as LlamaConfig
from jlade.models.architecture import dtype_of, is_matrix, layer_arrays
from jlade.models.attention import Operands, attend
from jlade.models.base import BlockKV, KVCache
from jlade.models.experts import Experts, mix, route
from jlade.models.layers import activate, cap, for_each_kind, gated, linear, normalize, scale, split_heads, sum_linear
from jlade.models.quantization import dense_shape, is_quantized

# Sizes that blocks are padded to on CPUs, with the smallest block that takes at least as long as one of each size, by
# the times of a step of 134 M parameters in float32 on two cores of an AMD EPYC.
PADDED_SIZES = {8: 5, 16: 9, 32: 25, 64: 49, 128: 113}
OUTPUT_BITS = 8  # of the output matrix of a model in few bits: four cost more than they save


@flax.struct.dataclass(kw_only=True)
class LlamaLayer:
    """Parameters of one layer.

    Matrices are [out, in], as in the checkpoint: see `linear`. `quantize` makes each one of few bits.
    """

    attention_norm: jax.Array | None = None  # [E], None for layers without a norm before a mixer
    # None for layers without attention
    query: Any = None  # [H * D, E]
    key: jax.Array | None = None  # [KH * D, E], None too with a latent, or where an earlier layer's keys are read
    value: jax.Array | None = None  # [KH * D, E], None too where `key` makes the values
    output_gate: jax.Array | None = None  # [H * D, E], None for models without
    attention_output: Any = None  # [E, H * D]
    mlp_norm: jax.Array | None = None  # [E], None for layers without a norm before an MLP
    gate: jax.Array | None = None  # [F, E], None for models without a gate
    up: jax.Array | None = None  # [F, E], None for layers without an MLP for all tokens
    down: jax.Array | None = None  # [E, F]
    # None for models without
    query_bias: jax.Array | None = None  # [H * D]
    key_bias: jax.Array | None = None  # [KH * D]
    value_bias: jax.Array | None = None  # [KH * D]
    attention_output_bias: jax.Array | None = None  # [E]
    gate_bias: jax.Array | None = None  # [F]
    up_bias: jax.Array | None = None  # [F]
    down_bias: jax.Array | None = None  # [E]
    query_norm: jax.Array | None = None  # [D], of each head, [H, D] or [H * D]
    key_norm: jax.Array | None = None  # [D], of each head, [KH, D] or [KH * D]
    attention_norm_bias: jax.Array | None = None  # [E]
    mlp_norm_bias: jax.Array | None = None  # [E]
    attention_post_norm: jax.Array | None = None  # [E]
    mlp_post_norm: jax.Array | None = None  # [E]
    layer_scale: jax.Array | None = None  # [1]
    sinks: jax.Array | None = None  # [H]
    router: jax.Array | None = None  # [N, E] for N experts
    router_bias: jax.Array | None = None  # [N]
    selection_bias: jax.Array | None = None  # [N] float32
    shared_router: jax.Array | None = None  # [1, E]
    expert_gate: jax.Array | None = None  # [N, E, F']: experts are [in, out], as grouped products read them
    expert_up: jax.Array | None = None  # [N, E, F']
    expert_down: jax.Array | None = None  # [N, F', E]
    experts_input: Any = None  # [W, E], of the experts' inputs of W elements, which are E in the three above then
    experts_output: Any = None  # [E, W]
    shared_post_norm: jax.Array | None = None  # [E], of the MLP beside experts
    experts_norm: jax.Array | None = None  # [E], of the experts' input
    experts_post_norm: jax.Array | None = None  # [E], of their output
    router_scale: jax.Array | None = None  # [E], of the router's input
    experts_scales: jax.Array | None = None  # [N], of their weights
    input_gate: Any = None  # [P, E], for models with embeddings of P numbers for each layer
    input_projection: Any = None  # [E, P]
    input_norm: jax.Array | None = None  # [E]
    expert_gate_bias: jax.Array | None = None  # [N, F']
    expert_up_bias: jax.Array | None = None  # [N, F']
    expert_down_bias: jax.Array | None = None  # [N, E]
    # Of recurrent layers, with HK heads of dk for queries and keys, and HV of dv for values
    recurrent_query: jax.Array | None = None  # [HK * dk, E]
    recurrent_key: jax.Array | None = None  # [HK * dk, E]
    recurrent_value: jax.Array | None = None  # [HV * dv, E]
    recurrent_gate: jax.Array | None = None  # [HV * dv, E]
    recurrent_output: jax.Array | None = None  # [E, HV * dv]
    beta: jax.Array | None = None  # [HV, E]
    decay: jax.Array | None = None  # [HV, E]
    query_filter: jax.Array | None = None  # [HK * dk, taps]
    key_filter: jax.Array | None = None  # [HK * dk, taps]
    value_filter: jax.Array | None = None  # [HV * dv, taps]
    decay_rate: jax.Array | None = None  # [HV], its logarithm
    decay_bias: jax.Array | None = None  # [HV]
    query_filter_bias: jax.Array | None = None  # [HK * dk]
    key_filter_bias: jax.Array | None = None  # [HK * dk]
    value_filter_bias: jax.Array | None = None  # [HV * dv]
    skip: jax.Array | None = None  # [HV], of the values, to the output
    recurrent_norm: jax.Array | None = None  # [dv], of each head, or [HV * dv]; None for a gate without a norm
    # Of a latent of Q elements for queries and one of R for keys and values: see `jlade.models.latent`
    query_down: jax.Array | None = None  # [Q, E]; `query` is then [H * D, Q]
    query_down_norm: jax.Array | None = None  # [Q]
    key_down: jax.Array | None = None  # [R + rotated, E]
    key_down_norm: jax.Array | None = None  # [R]
    key_up: jax.Array | None = None  # [H * unrotated, R]
    value_up: jax.Array | None = None  # [H * V, R], for values of V elements

    @property
    def experts(self) -> Experts | None:
        """The experts, None for layers without."""
        if self.expert_up is None:
            return None
        biases = self.expert_gate_bias, self.expert_up_bias, self.expert_down_bias
        return Experts(self.expert_gate, self.expert_up, cast(Any, self.expert_down), *biases)


@flax.struct.dataclass
class PerLayer:
    """Embeddings of P numbers for each of L layers (Gemma 3n, Gemma 4 E2B and E4B): parameters that layers share."""

    embedding: jax.Array  # [V'', L * P]
    projection: jax.Array  # [L * P, E]
    norm: jax.Array  # [P]


@flax.struct.dataclass
class LlamaParams:
    """Parameters of a LLaMA model and its configuration.

    Attributes:
      embedding: float[V, E].
      layers: the parameters of each layer.
      norm: float[E].
      output: float[V, E], or of few bits; None if the embedding is also the output matrix.
      config: the model's shape.
      norm_bias: float[E], None for models without.
      output_bias: float[V], None for models without.
      per_layer: embeddings of tokens for each layer, None for models without.
      tokenizer: that of the checkpoint. `jlade.load` sets it on the parameters that it returns. It is no part of the
        pytree: programs do not depend on it, and changed parameters, for example those of `jax.tree.map`, do not have
        it.
    """

    embedding: jax.Array
    layers: tuple[LlamaLayer, ...]
    norm: jax.Array
    output: jax.Array | None
    config: LlamaConfig = flax.struct.field(pytree_node=False)
    norm_bias: jax.Array | None = None
    output_bias: jax.Array | None = None
    per_layer: PerLayer | None = None
    tokenizer: ClassVar[Any] = None

    @property
    def decoder(self) -> "Llama":
        """The decoder that runs these parameters."""
        return Llama(self.config).on(self, mesh_lib.mesh_of(self))

    def __repr__(self) -> str:
        """Names family, shape, number of parameters, dtypes and bytes, also of traced parameters or their shapes."""
        c, arrays = self.config, [leaf for leaf in jax.tree.leaves(self) if hasattr(leaf, "dtype")]
        matrices = [
            leaf for leaf in jax.tree.leaves(self, is_leaf=is_quantized) if hasattr(leaf, "dtype") or is_quantized(leaf)
        ]
        return (
            f"LlamaParams({c.family}: {c.num_layers} layers of width {c.hidden_size:,} and {c.mlp_widths}, "
            f"{c.num_heads} heads of {c.head_dim}, vocabulary of {c.vocab_size}; "
            f"{sum(math.prod(dense_shape(matrix)) for matrix in matrices):,} parameters, "
            f"{' and '.join(sorted({array.dtype.name for array in arrays}))}, "
            f"{sum(array.size * array.dtype.itemsize for array in arrays):,} bytes)"
        )


@dataclasses.dataclass(frozen=True)
class Llama:
    """The `jlade.models.base.Decoder` that runs `LlamaParams`.

    Attributes:
      attention: implementation of attention, "auto", "plain", "gpu" or "tpu"; see `attention.attend`.
      experts: implementation of experts, "auto", "plain" or "gpu", for models with experts; see `experts.mix`.
      products: implementation of products with matrices in groups, "auto", "plain", "gpu" or "tpu"; see
        `products.multiply`.
      axes: of the mesh, that divide heads, MLP columns and vocabulary; see `jlade.models.sharding`. `forward` and
        `logits` are then part of a `jax.shard_map` over these axes, and `logits` returns a slice of the vocabulary.
      pads: whether blocks are padded to sizes that CPUs multiply faster. The results are those of the block itself.
      kv_dtype: of keys and values, "int8" or "float8_e4m3fn", None for the dtype of the parameters; see
        `jlade.models.kv_rounding`.
    """

    config: LlamaConfig
    attention: str = "auto"
    experts: str = "auto"
    products: str = "auto"
    axes: tuple[str, ...] = ()
    pads: bool = False
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        kv_rounding.check(self.kv_dtype)
        for operation in kernels.KERNELS:
            kernels.check(operation, getattr(self, operation))

    def __repr__(self) -> str:
        """Names what the time of a step depends on: tuned settings are stored under it."""
        others = f", experts={self.experts!r}" if self.config.num_experts else ""
        others += f", products={self.products!r}" if self.products in ("gpu", "tpu") else ""
        others += "" if self.kv_dtype is None else f", kv_dtype={self.kv_dtype!r}"
        return f"{type(self).__qualname__}(config={self.config!r}, attention={self.attention!r}{others})"

    def on(self, params: Any, mesh: Mesh | None = None, absent: Any = None) -> Self:
        """Returns the decoder for the device that holds `params`, or for those of a mesh, with kernels resolved.

        "auto" is resolved by the table of `jlade.models.kernels`. It is "plain" for tracers, and for parameters on
        several devices without a mesh: XLA does not partition kernels.

        Args:
          params: the parameters.
          mesh: a result of `jlade.models.sharding.mesh_for`.
          absent: a `jax.Device` that is not attached and takes the place of that of `params`, or None.

        Raises:
          ValueError: `attention`, `experts` or `products` names a kernel that cannot run there.
        """
        if mesh is not None:
            self = dataclasses.replace(self, axes=MODEL if mesh_lib.size(mesh, *MODEL) > 1 else ())
        pads = (absent or mesh_lib.device_of(params, mesh)).platform == "cpu"
        chosen: dict[str, Any] = implementations.resolve(self, params, mesh, absent)
        return dataclasses.replace(self, pads=pads, **chosen)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.config.eos_ids

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.config.stop_strings

    def init_cache(self, params: LlamaParams, batch_size: int, capacity: int) -> KVCache:
        c = self.config

        def shape(layer: int, num_entries: int) -> tuple[int, ...]:
            (number, size), key = c.heads_of(layer), params.layers[layer].key
            if key is not None:  # those on this device
                number = dense_shape(key)[0] // size
            return batch_size, number, num_entries, size

        entries = c.entries_by_layer(capacity)
        shapes = [shape(layer, entries[layer]) for layer in c.kv_layers]

        def zeros() -> tuple[jax.Array, ...]:
            dtype = params.norm.dtype if self.kv_dtype is None else kv_rounding.STORED[self.kv_dtype]
            return tuple(jnp.zeros(shape, dtype) for shape in shapes)

        def scales() -> tuple[jax.Array, ...]:
            parts = 1 if c.latent is None else 2
            return tuple(jnp.zeros((batch, parts * heads, number)) for batch, heads, number, _ in shapes)

        def state(layer: LlamaLayer) -> recurrent.RecurrentState:
            assert c.recurrence is not None
            assert layer.value_filter is not None
            shards = c.recurrence.values // len(layer.value_filter)
            return recurrent.init_state(c.recurrence, batch_size, shards, params.norm.dtype)

        names = ("keys", "values")[: c.arrays_per_layer]
        arrays: dict[str, Any] = {name: zeros() for name in names}
        if self.kv_dtype is not None:
            arrays |= {f"{name.removesuffix('s')}_scales": scales() for name in names}
        states = tuple(state(params.layers[i]) for i in c.recurrent_layers)
        arrays = {"values": ()} | arrays
        return KVCache(**arrays, length=jnp.zeros(batch_size, jnp.int32), states=states)

    def init_pages(
        self, params: LlamaParams, batch_size: int, capacity: int, num_pages: int, page_size: int
    ) -> KVCache:
        """Returns the cache of `init_cache` with its layers without a window in pages; see `base.in_pages`."""
        shapes = base.cache_shapes(self, params, batch_size, capacity)
        return base.in_pages(shapes, self._cached_windows, num_pages, page_size)

    @property
    def _cached_windows(self) -> list[int | None]:
        """The windows of the layers of a cache."""
        return [self.config.windows_by_layer[i] for i in self.config.kv_layers]

    def forward(
        self,
        params: LlamaParams,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        block_mask: jax.Array | np.ndarray,
    ) -> tuple[jax.Array, BlockKV]:
        c, block_size = self.config, tokens.shape[1]
        params = products.assign(params, self.products)
        if self.pads:
            tokens, positions, block_mask = pad_block(tokens, positions, block_mask)
        embed = functools.partial(self._embed, tokens=tokens, dtype=params.norm.dtype)
        factor = c.embedding_scale
        if c.norm != "rms":  # Gemma's is rounded to the dtype of the model
            factor = float(np.asarray(factor, params.norm.dtype))
        hidden = scale(embed(params.embedding, c.vocab_size), factor)
        rotations = for_each_kind(c.rotated_by_layer, lambda pair: pair[0].rotation(positions, pair[1]))
        query_scales = for_each_kind(c.query_scalings_by_layer, lambda kind: kind.scales(positions))
        tree = None if c.recurrence is None else recurrent.ancestry(block_mask, c.recurrence.taps)
        own_inputs: Sequence[jax.Array | None] = [None] * c.num_layers
        if params.per_layer is not None:
            rows = embed(params.per_layer.embedding, c.per_layer_vocab_size)
            own_inputs = list(jnp.moveaxis(_layer_inputs(params.per_layer, rows, hidden, c), 2, 0))
        attend, cached = c.attention_layers, dict(zip(c.kv_layers, cache.layers_of(self._cached_windows), strict=True))
        states = {i: (state, tree) for i, state in zip(c.recurrent_layers, cache.states, strict=True)}
        kept_of_layers, kept_of_states, padded = [], [], dict[int, tuple[jax.Array, ...]]()
        for i, (layer, source, window, rotation, scales, layer_inputs) in enumerate(
            zip(params.layers, c.kv_sources, c.windows_by_layer, rotations, query_scales, own_inputs, strict=True)
        ):
            if i in attend:
                table = cache.table if window is None else None
                prefix, earlier = (*cached[source], cache.length, table), padded.get(source)
                context = prefix, block_mask, positions, earlier, layer_inputs, states.get(i)
                hidden, kept, of_state = _layer(layer, hidden, rotation, scales, *context, decoder=self, window=window)
                if source == i:
                    padded[i] = kept
                    kept_of_layers.append(tuple(array[:, :block_size] for array in kept))
            elif i in states:
                hidden, of_state = _recurrent_layer(layer, hidden, *states[i], decoder=self)
            else:
                hidden, of_state = _mlp_layer(layer, hidden, decoder=self), None
            if of_state is not None:
                kept_of_states.append(tuple(array[:, :block_size] for array in of_state if array is not None))
        return hidden[:, :block_size], [*kept_of_layers, *kept_of_states]

    def _embed(self, table: Any, vocab_size: int, *, tokens: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns the rows [B, T, E] of a table [V, E], or of this device's part of it, for tokens [B, T]."""
        rows = jax.tree.leaves(table)[0].shape[0]
        if rows == vocab_size:
            return cast(jax.Array, table[tokens].astype(dtype))
        local = tokens - rows * jax.lax.axis_index(self.axes)
        is_here = (local >= 0) & (local < rows)
        embedded = table[jnp.clip(local, 0, rows - 1)].astype(dtype)
        return jax.lax.psum(jnp.where(is_here[..., None], embedded, 0), self.axes)

    def logits(self, params: LlamaParams, hidden: jax.Array) -> jax.Array:
        c, output = self.config, params.embedding if params.output is None else params.output
        output = products.assign(output, self.products)
        padded = _pad(hidden) if self.pads else hidden
        normed = normalize(padded, params.norm, c.norm, c.norm_eps, params.norm_bias)
        logits = linear(normed, output, params.output_bias)[:, : hidden.shape[1]].astype(jnp.float32)
        return cap(scale(logits, c.logit_scale), c.logit_cap)

    def commit(self, cache: KVCache, block_kv: BlockKV, indices: jax.Array, num_accepted: jax.Array) -> KVCache:
        number = len(self.config.kv_layers)
        committed = base.commit(cache, block_kv[:number], indices, num_accepted, self._cached_windows)
        states = zip(cache.states, (recurrent.RecurrentBlock(*kept) for kept in block_kv[number:]), strict=True)
        return dataclasses.replace(
            committed, states=tuple(recurrent.commit(*pair, indices, num_accepted) for pair in states)
        )


@functools.partial(jax.jit, static_argnames=("decoder", "window"))
def _layer(
    layer: LlamaLayer,
    hidden: jax.Array,
    rotation: tuple[jax.Array, jax.Array] | None,
    query_scales: jax.Array | None,
    prefix: tuple[Any, ...],
    block_mask: jax.Array | np.ndarray,
    positions: jax.Array,
    earlier: tuple[jax.Array, ...] | None,
    layer_inputs: jax.Array | None,
    of_state: tuple[recurrent.RecurrentState, recurrent.Ancestry] | None,
    *,
    decoder: Llama,
    window: int | None,
) -> tuple[jax.Array, tuple[jax.Array, ...], recurrent.RecurrentBlock | None]:
    """Returns the hidden states [B, T, E] after a layer, and the keys and values [B, T, KH, D] that it has read.

    Those are `earlier`, of an earlier layer, for a layer without its own. With a `kv_dtype` they are in 8 bits and
    followed by their scales. `layer_inputs` [B, T, P] are its own inputs. A layer with a recurrent mixer beside
    attention has `of_state`, its state and the block's tree, and returns last what it keeps of the block. Under
    `jax.jit`, layers of one shape are traced and lowered once.
    """
    c = decoder.config
    normed = normalize(hidden, layer.attention_norm, c.norm, c.norm_eps, layer.attention_norm_bias)
    *cached, length, table = prefix
    if c.latent is None:
        inputs = scale(normed, c.multipliers.attention_input)
        queries, *projected = _project(layer, inputs, rotation, query_scales, cached[0].shape[-1], decoder)
    else:
        queries, *projected = latent.project(layer, normed, rotation, query_scales, c)
    split = None if c.latent is None else c.latent.rank
    if decoder.kv_dtype is not None:
        projected = list(kv_rounding.round_all(projected, decoder.kv_dtype, split))
    kept = earlier or tuple(projected)
    operands = Operands.of(queries, kept, cached, length, block_mask, positions, layer.sinks, table=table)
    mixed = attend(operands, window, decoder.attention, c.score_scale, c.attention_cap, split)
    if c.latent is not None:
        mixed = latent.values(layer, mixed)
    mixed = mixed.reshape(*hidden.shape[:2], -1)
    if layer.output_gate is not None:
        mixed *= jax.nn.sigmoid(linear(normed, layer.output_gate))
    mixed = sum_linear(mixed, layer.attention_output, layer.attention_output_bias, decoder.axes)
    mixed, kept_of_state = scale(mixed, c.multipliers.attention_output), None
    if of_state is not None:
        beside, kept_of_state = recurrent.mix(layer, normed, *of_state, c, decoder.axes)
        mixed += beside
    return _add(layer, hidden, normed, mixed, layer_inputs, decoder), kept, kept_of_state


@functools.partial(jax.jit, static_argnames="decoder")
def _recurrent_layer(
    layer: LlamaLayer,
    hidden: jax.Array,
    state: recurrent.RecurrentState,
    tree: recurrent.Ancestry,
    *,
    decoder: Llama,
) -> tuple[jax.Array, recurrent.RecurrentBlock]:
    """Returns the hidden states [B, T, E] after a recurrent layer, and what it keeps of the block."""
    c = decoder.config
    normed = normalize(hidden, layer.attention_norm, c.norm, c.norm_eps, layer.attention_norm_bias)
    mixed, kept = recurrent.mix(layer, normed, state, tree, c, decoder.axes)
    return _add(layer, hidden, normed, mixed, None, decoder), kept


@functools.partial(jax.jit, static_argnames="decoder")
def _mlp_layer(layer: LlamaLayer, hidden: jax.Array, *, decoder: Llama) -> jax.Array:
    """Returns the hidden states [B, T, E] after a layer that has no mixer."""
    return _add(layer, hidden, hidden, None, None, decoder)


def _add(
    layer: LlamaLayer,
    hidden: jax.Array,
    normed: jax.Array,
    mixed: jax.Array | None,
    layer_inputs: jax.Array | None,
    decoder: Llama,
) -> jax.Array:
    """Returns the hidden states [B, T, E] with all that a layer adds: its mixer, its MLP and its own inputs."""
    c = decoder.config
    norm = functools.partial(normalize, kind=c.norm, eps=c.norm_eps)
    if c.parallel and layer.mlp_norm is not None:
        normed = norm(hidden, layer.mlp_norm, bias=layer.mlp_norm_bias)
    if mixed is not None:
        hidden += scale(norm(mixed, layer.attention_post_norm), c.residual_scale)
    if layer.up is None and layer.experts is None:
        return hidden
    if not c.parallel:
        normed = norm(hidden, layer.mlp_norm, bias=layer.mlp_norm_bias)
    added = norm(_feed_forward(layer, hidden, normed, decoder), layer.mlp_post_norm)
    hidden += scale(added, c.residual_scale)
    if layer_inputs is not None:
        gated_inputs = activate(linear(hidden, layer.input_gate), c.activation) * layer_inputs
        hidden += norm(linear(gated_inputs, layer.input_projection), layer.input_norm)
    return hidden if layer.layer_scale is None else hidden * jnp.broadcast_to(layer.layer_scale, hidden.shape)


def _layer_inputs(per_layer: PerLayer, rows: jax.Array, embedded: jax.Array, config: LlamaConfig) -> jax.Array:
    """Returns the own inputs [B, T, L, P] of the layers.

    They follow from the rows [B, T, L * P] of `per_layer.embedding` and the inputs [B, T, E] of the first layer.
    """
    c, shape = config, (*rows.shape[:2], config.num_layers, config.per_layer_size)
    # The multiplier is rounded to the dtype of the model, as that of the embedding is.
    of_tokens = scale(rows, float(np.asarray(c.per_layer_size**0.5, rows.dtype)))
    projected = scale(linear(embedded, per_layer.projection), c.hidden_size**-0.5)
    normed = normalize(projected.reshape(shape), per_layer.norm, c.norm, c.norm_eps)
    return scale(normed + of_tokens.reshape(shape), 2**-0.5)


def _project(
    layer: LlamaLayer,
    normed: jax.Array,
    rotation: tuple[jax.Array, jax.Array] | None,
    query_scales: jax.Array | None,
    head_dim: int,
    decoder: Llama,
) -> list[jax.Array]:
    """Returns queries [B, T, H, D], keys and values [B, T, KH, D] of [B, T, E], with norms, rotations and scales.

    A layer that reads the keys and values of another has queries alone.
    """
    c = decoder.config
    norm = functools.partial(normalize, kind=c.norm, eps=c.norm_eps)

    def norms(*kinds: str) -> tuple[jax.Array | None, jax.Array | None]:
        return (layer.query_norm, layer.key_norm) if c.qk_norm_kind in kinds else (None, None)

    def project(weight: Any, bias: jax.Array | None, whole_norm: jax.Array | None = None) -> jax.Array:
        return split_heads(norm(linear(normed, weight, bias), whole_norm, axes=decoder.axes), head_dim)

    of_queries, of_keys = norms("whole")
    turned = [project(layer.query, layer.query_bias, of_queries)]  # queries, and keys where the layer has its own
    values = []
    if layer.key is not None:
        turned.append(scale(project(layer.key, layer.key_bias, of_keys), c.multipliers.key))
        values = [turned[1] if layer.value is None else project(layer.value, layer.value_bias)]
    turned = list(map(norm, turned, norms("head", "each")))
    if rotation is not None:
        turned = [rotary.rotate(x, rotation, c.interleaved_rotary) for x in turned]
    weights = norms("rotated")
    if c.qk_norm and c.qk_norm_kind == "weightless" and rotation is not None:
        weights = (jnp.ones(head_dim, normed.dtype),) * 2
    queries, *keys = map(norm, turned, weights)
    if c.value_norm:
        values = [norm(x, jnp.ones(head_dim, normed.dtype)) for x in values]
    if query_scales is not None:
        queries = (queries.astype(jnp.float32) * query_scales).astype(queries.dtype)
    return [queries, *keys, *values]


def _feed_forward(layer: LlamaLayer, hidden: jax.Array, normed: jax.Array, decoder: Llama) -> jax.Array:
    """Returns the MLP of [B, T, E], the experts of each token, or the sum of both."""
    if layer.experts is None:
        return _mlp(layer, normed, decoder)
    assert layer.router is not None
    c = decoder.config
    if c.separate_experts:
        shared = normalize(_mlp(layer, normed, decoder), layer.shared_post_norm, c.norm, c.norm_eps)
        return shared + _separate_experts(layer, hidden, decoder)
    chosen, weights = route(normed, layer.router, layer.router_bias, layer.selection_bias, c)
    inputs = normed
    if c.routing == "sigmoid":  # the weight of the token's one expert is that of its input
        inputs, weights = normed * weights.astype(normed.dtype), jnp.ones_like(weights)
    if layer.experts_input is not None:
        inputs = linear(inputs, layer.experts_input)
    mixed = mix(inputs, chosen, weights, layer.experts, c.activation, decoder.axes, decoder.experts)
    if layer.experts_output is not None:
        mixed = linear(mixed, layer.experts_output)
    if layer.up is None:
        return mixed
    shared = _mlp(layer, normed, decoder)
    if layer.shared_router is not None:
        shared *= jax.nn.sigmoid(linear(normed, layer.shared_router))
    return mixed + shared


def _separate_experts(layer: LlamaLayer, hidden: jax.Array, decoder: Llama) -> jax.Array:
    """Returns the experts of each token of [B, T, E], with the norms and scales of `LlamaConfig.separate_experts`."""
    assert layer.experts is not None
    assert layer.router is not None
    assert layer.router_scale is not None
    assert layer.experts_scales is not None
    c = decoder.config
    norm = functools.partial(normalize, kind=c.norm, eps=c.norm_eps)
    scaled = norm(hidden, jnp.ones_like(layer.router_scale)) * jnp.broadcast_to(layer.router_scale, hidden.shape)
    chosen, weights = route(scale(scaled, c.hidden_size**-0.5), layer.router, None, None, c)
    weights *= layer.experts_scales[chosen].astype(weights.dtype)
    normed = norm(hidden, layer.experts_norm)
    mixed = mix(normed, chosen, weights, layer.experts, c.activation, decoder.axes, decoder.experts)
    return norm(mixed, layer.experts_post_norm)


def _mlp(layer: LlamaLayer, normed: jax.Array, decoder: Llama) -> jax.Array:
    """Returns the MLP of [B, T, E], with a gate if the layer has one."""
    assert layer.up is not None
    assert layer.down is not None
    config, axes = decoder.config, decoder.axes
    if layer.gate is None:
        inner = activate(linear(normed, layer.up, layer.up_bias), config.activation)
        return sum_linear(inner, layer.down, layer.down_bias, axes)
    # Two inputs keep XLA for GPUs from making one product of two small ones: it would join their weights in each step.
    again = jax.lax.optimization_barrier(normed) if axes else normed
    gate, up = linear(normed, layer.gate, layer.gate_bias), linear(again, layer.up, layer.up_bias)
    if normed.size > normed.shape[-1]:
        # XLA for TPUs otherwise computes `up` inside the product with `down` for most blocks of 2 to 60 tokens, and
        # reads `down` in narrow tiles: by its estimate 1.3 times as long as two products for LLaMA 3 8B on a v6e.
        apart = jax.lax.optimization_barrier
        gate, up = jax.lax.platform_dependent((gate, up), tpu=apart, default=lambda products: products)
    inner = gated(scale(gate, config.multipliers.gate), up, config.activation)
    return scale(sum_linear(inner, layer.down, layer.down_bias, axes), config.multipliers.down)


def num_missing(shape: tuple[int, ...]) -> int:
    """Returns the number of tokens to add to a block [B, T, ...]; 0 for several sequences, whose rows add up.

    XLA for CPUs multiplies a block of 30 tokens by a matrix in 1.4 times the time of a block of 32.
    """
    batch_size, block_size = shape[:2]
    size = next((size for size, least in PADDED_SIZES.items() if least <= block_size <= size), block_size)
    return size - block_size if batch_size == 1 else 0


def _pad(x: jax.Array) -> jax.Array:
    """Returns [B, T, ...] with its last token repeated: its keys and values are finite if the model's are."""
    added = num_missing(x.shape)
    return jnp.pad(x, [(0, added if axis == 1 else 0) for axis in range(x.ndim)], mode="edge") if added else x


def pad_block(
    tokens: jax.Array, positions: jax.Array, mask: jax.Array | np.ndarray
) -> tuple[jax.Array, jax.Array, jax.Array | np.ndarray]:
    """Returns the arguments of `Decoder.forward` for the padded block.

    Added tokens see what the last token sees, and no other token sees them.
    """
    if added := num_missing(tokens.shape):
        batch = [(0, 0)] * (mask.ndim - 2)
        rows = jnp.pad(jnp.asarray(mask), [*batch, (0, added), (0, 0)], mode="edge")
        mask = jnp.pad(rows, [*batch, (0, 0), (0, added)])
    return _pad(tokens), _pad(positions), mask


def init_params(key: jax.Array, config: LlamaConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> LlamaParams:
    """Returns random parameters that give hidden states and logits of order one."""

    def matrix(out_size: int, in_size: int) -> jax.Array:
        nonlocal key
        key, use = jax.random.split(key)
        return jax.random.normal(use, (out_size, in_size), dtype) / np.asarray(math.sqrt(in_size), dtype)

    c = config
    neutral = (jnp.zeros if c.norm == "rms_plus_one" else jnp.ones)(c.hidden_size, dtype)
    zeros = jnp.zeros(c.hidden_size, dtype)

    def array(field: str, shape: tuple[int, ...]) -> jax.Array:
        if field.endswith("norm_bias"):
            return zeros
        if field.endswith("norm") and not field.startswith(("query", "key")):
            return jnp.ones(shape, dtype) if field == "recurrent_norm" else neutral
        if "scale" in field:
            return jnp.ones(shape, dtype)
        if is_matrix(field) and len(shape) == 3:
            return jnp.stack([matrix(shape[2], shape[1]).T for _ in range(shape[0])])
        values = matrix(*shape) if len(shape) == 2 else matrix(shape[0], 1)[:, 0]
        return values.astype(dtype_of(c, field, dtype))

    layers = tuple(
        LlamaLayer(**{field: array(field, shape) for field, (shape, _) in layer_arrays(c, i).items()})
        for i in range(c.num_layers)
    )
    output = None if c.tie_embeddings else matrix(c.vocab_size, c.hidden_size)
    embedding = matrix(c.vocab_size, c.hidden_size)
    output_bias = matrix(c.vocab_size, 1)[:, 0] if c.output_bias else None
    norm_bias, of_layers = zeros if c.norm_bias else None, None
    if c.per_layer_size:
        total = c.num_layers * c.per_layer_size
        tables = matrix(c.per_layer_vocab_size, total), matrix(total, c.hidden_size)
        of_layers = PerLayer(*tables, jnp.ones(c.per_layer_size, dtype))
    return LlamaParams(embedding, layers, neutral, output, config, norm_bias, output_bias, of_layers)


def quantize(
    params: LlamaParams, bits: int = 8, shards: int = 1, importance: Sequence[Mapping[str, Any]] | None = None
) -> LlamaParams:
    """Returns the parameters with their matrices in 8 or 4 bits; those in few bits stay as they are.

    Norms, biases, embeddings for each layer and an untied embedding keep their dtype, and an output matrix has 8 bits.
    A floating-point matrix is freed when nothing else refers to it: `jlade.load(..., bits=4)` never holds all of them.

    Args:
      bits: 8 or 4.
      shards: devices that a mesh divides the model among, whose parts of a matrix then have whole groups.
      importance: of the inputs of the matrices of each layer [in], by field, for four bits: a result of
        `jlade.conversion.calibration.mean_squares`.

    Raises:
      ValueError: `bits` is neither.
    """
    quantization.check_bits(bits)

    def rounded(matrix: Any, bits: int, of_inputs: Any = None) -> Any:
        if matrix is None or is_quantized(matrix):
            return matrix
        return quantization.quantize(matrix, bits, shards, of_inputs)

    def rounded_layer(layer: LlamaLayer, of_inputs: Mapping[str, Any]) -> LlamaLayer:
        names = (field.name for field in dataclasses.fields(layer) if is_matrix(field.name))
        matrices = {name: rounded(getattr(layer, name), bits, of_inputs.get(name)) for name in names}
        return dataclasses.replace(layer, **matrices)

    name = "embedding" if params.output is None else "output"
    output = rounded(getattr(params, name), OUTPUT_BITS)
    layers = tuple(map(rounded_layer, params.layers, importance or [{}] * len(params.layers)))
    return dataclasses.replace(params, layers=layers, **{name: output})
