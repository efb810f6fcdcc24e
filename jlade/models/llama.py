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
from jlade.models import base, implementations, kernels, kv_rounding, layers, products, quantization
from jlade.models.architecture import LlamaConfig as LlamaConfig
from jlade.models.attention import Choice
from jlade.models.base import BlockKV, KVCache
from jlade.models.layers import Layer, PerLayer, recurrent
from jlade.models.layers.arrays import Array
from jlade.models.layers.attention import Attention, Context
from jlade.models.layers.norm import neutral
from jlade.models.nn import cap, for_each_kind, linear, normalize, scale
from jlade.models.quantization import dense_shape, is_quantized

# Sizes that blocks are padded to on a platform, with the smallest block that takes at least as long as one of each
# size. On CPUs by the times of a step of 134 M parameters in float32 on two cores of an AMD EPYC; on GPUs XLA makes one
# kernel of a norm of several tokens, and two of that of one token.
PADDED_SIZES = {"cpu": {8: 5, 16: 9, 32: 25, 64: 49, 128: 113}, "gpu": {2: 1}}
OUTPUT_BITS = 8  # of the output matrix of a model in few bits: four cost more than they save


@flax.struct.dataclass
class LlamaParams:
    """Parameters of a LLaMA model and its configuration.

    Attributes:
      embedding: float[V, E], or of few bits if it is also the output matrix.
      layers: the parameters of each layer.
      norm: float[E].
      output: float[V, E], or of few bits; None if the embedding is also the output matrix.
      config: the model's shape.
      norm_bias: float[E], None for models without.
      output_bias: float[V], None for models without.
      per_layer: embeddings of tokens for each layer, None for models without.
      positions: float[max_positions, E], embeddings of positions, None for models without.
      tokenizer: that of the checkpoint. `jlade.load` sets it on the parameters that it returns. It is no part of the
        pytree: programs do not depend on it, and changed parameters, for example those of `jax.tree.map`, do not have
        it.
    """

    embedding: jax.Array
    layers: tuple[Layer, ...]
    norm: jax.Array
    output: jax.Array | None
    config: LlamaConfig = flax.struct.field(pytree_node=False)
    norm_bias: jax.Array | None = None
    output_bias: jax.Array | None = None
    per_layer: PerLayer | None = None
    positions: jax.Array | None = None
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
      pads_for: a platform to whose `PADDED_SIZES` blocks are padded, None for none. The results are those of the block
        itself.
      kv_dtype: of keys and values, "int8" or "float8_e4m3fn", None for the dtype of the parameters; see
        `jlade.models.kv_rounding`.
    """

    config: LlamaConfig
    attention: str = "auto"
    experts: str = "auto"
    products: str = "auto"
    axes: tuple[str, ...] = ()
    pads_for: str | None = None
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
        platform = (absent or mesh_lib.device_of(params, mesh)).platform
        chosen: dict[str, Any] = implementations.resolve(self, params, mesh, absent)
        # A GPU would read the experts of an added token, too.
        is_padded = platform == "cpu" or (platform == "gpu" and not self.config.num_experts)
        return dataclasses.replace(self, pads_for=platform if is_padded else None, **chosen)

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
    def media_ids(self) -> tuple[int, ...]:
        return self.config.media_ids

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.config.stop_strings

    def init_cache(self, params: LlamaParams, batch_size: int, capacity: int) -> KVCache:
        c = self.config

        def shape(layer: int, num_entries: int) -> tuple[int, ...]:
            (number, size), attention = c.heads_of(layer), params.layers[layer].attention
            if isinstance(attention, Attention) and attention.key is not None:  # those on this device
                number = dense_shape(attention.key)[0] // size
            return batch_size, number, num_entries, size

        entries = c.entries_by_layer(capacity)
        shapes = [shape(layer, entries[layer]) for layer in c.kv_layers]

        def zeros() -> tuple[jax.Array, ...]:
            dtype = params.norm.dtype if self.kv_dtype is None else kv_rounding.STORED[self.kv_dtype]
            return tuple(jnp.zeros(shape, dtype) for shape in shapes)

        def scales() -> tuple[jax.Array, ...]:
            parts = map(c.scales_of, c.kv_layers)
            sizes = zip(shapes, parts, strict=True)
            return tuple(jnp.zeros((batch, each * heads, number)) for (batch, heads, number, _), each in sizes)

        def state(layer: Layer) -> recurrent.RecurrentState:
            assert layer.recurrent is not None
            sizes = recurrent.sizes_of(c)
            shards = sizes.values // len(layer.recurrent.value_filter)
            return recurrent.init_state(sizes, batch_size, shards, params.norm.dtype)

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
        tokens, positions, block_mask = pad_block(self.pads_for, tokens, positions, block_mask)
        embed = functools.partial(self._embed, tokens=tokens, dtype=params.norm.dtype)
        factor = c.embedding_scale
        if c.norm != "rms":  # Gemma's is rounded to the dtype of the model
            factor = float(np.asarray(factor, params.norm.dtype))
        hidden = scale(embed(params.embedding, c.vocab_size), factor)
        if params.positions is not None:
            hidden += params.positions[positions]
        rotations = for_each_kind(c.rotated_by_layer, lambda pair: pair[0].rotation(positions, pair[1]))
        query_scales = for_each_kind(c.query_scalings_by_layer, lambda kind: kind.scales(positions))
        tree = None if c.recurrence is None else recurrent.ancestry(block_mask, c.recurrence.taps)
        own_inputs: Sequence[jax.Array | None] = [None] * c.num_layers
        if params.per_layer is not None:
            rows = embed(params.per_layer.embedding, c.per_layer_vocab_size)
            own_inputs = list(jnp.moveaxis(params.per_layer.inputs(rows, hidden, c), 2, 0))
        attend, cached = c.attention_layers, dict(zip(c.kv_layers, cache.layers_of(self._cached_windows), strict=True))
        states = {i: (state, tree) for i, state in zip(c.recurrent_layers, cache.states, strict=True)}
        kept_of_layers, kept_of_states, padded = [], [], dict[int, tuple[jax.Array, ...]]()
        choice: Choice | None = None
        for i, (layer, source, window, rotation, scales, own_input) in enumerate(
            zip(params.layers, c.kv_sources, c.windows_by_layer, rotations, query_scales, own_inputs, strict=True)
        ):
            context = None
            if i in attend:
                in_cache = cached[source], cache.length, cache.table if window is None else None
                choice = choice if layer.index is None else None
                context = Context(rotation, scales, *in_cache, block_mask, positions, padded.get(source), choice)
            hidden, kept, of_state, choice = layers.run(
                layer, hidden, context, states.get(i), own_input, decoder=self, window=window
            )
            if i in attend and source == i:
                padded[i] = kept
                kept_of_layers.append(tuple(array[:, :block_size] for array in kept))
            if of_state is not None:
                kept_of_states.append(tuple(array[:, :block_size] for array in of_state if array is not None))
        return hidden[:, :block_size], [*kept_of_layers, *kept_of_states]

    def _embed(self, table: Any, vocab_size: int, *, tokens: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns the rows [B, T, E] of a table [V, E], or of this device's part of it, for tokens [B, T]."""
        rows = dense_shape(table)[0]
        if rows == vocab_size:
            return cast(jax.Array, table[tokens].astype(dtype))
        local = tokens - rows * jax.lax.axis_index(self.axes)
        is_here = (local >= 0) & (local < rows)
        embedded = table[jnp.clip(local, 0, rows - 1)].astype(dtype)
        return jax.lax.psum(jnp.where(is_here[..., None], embedded, 0), self.axes)

    def logits(self, params: LlamaParams, hidden: jax.Array) -> jax.Array:
        c, output = self.config, params.embedding if params.output is None else params.output
        output = products.assign(output, self.products)
        normed = normalize(_pad(self.pads_for, hidden), params.norm, c.norm, c.norm_eps, params.norm_bias)
        logits = linear(normed, output, params.output_bias)[:, : hidden.shape[1]].astype(jnp.float32)
        return cap(scale(logits, c.logit_scale), c.logit_cap)

    def commit(self, cache: KVCache, block_kv: BlockKV, indices: jax.Array, num_accepted: jax.Array) -> KVCache:
        number = len(self.config.kv_layers)
        committed = base.commit(cache, block_kv[:number], indices, num_accepted, self._cached_windows)
        states = zip(cache.states, (recurrent.RecurrentBlock(*kept) for kept in block_kv[number:]), strict=True)
        return dataclasses.replace(
            committed, states=tuple(recurrent.commit(*pair, indices, num_accepted) for pair in states)
        )


def num_missing(platform: str | None, shape: tuple[int, ...]) -> int:
    """Returns the number of tokens to add to a block [B, T, ...]; 0 for several sequences, whose rows add up.

    XLA for CPUs multiplies a block of 30 tokens by a matrix in 1.4 times the time of a block of 32.
    """
    (batch_size, block_size), sizes = shape[:2], {} if platform is None else PADDED_SIZES[platform]
    size = next((size for size, least in sizes.items() if least <= block_size <= size), block_size)
    return size - block_size if batch_size == 1 else 0


def _pad(platform: str | None, x: jax.Array) -> jax.Array:
    """Returns [B, T, ...] with its last token repeated: its keys and values are finite if the model's are."""
    added = num_missing(platform, x.shape)
    return jnp.pad(x, [(0, added if axis == 1 else 0) for axis in range(x.ndim)], mode="edge") if added else x


def pad_block(
    platform: str | None, tokens: jax.Array, positions: jax.Array, mask: jax.Array | np.ndarray
) -> tuple[jax.Array, jax.Array, jax.Array | np.ndarray]:
    """Returns the arguments of `Decoder.forward` for the padded block.

    Added tokens see what the last token sees, and no other token sees them.
    """
    if added := num_missing(platform, tokens.shape):
        batch = [(0, 0)] * (mask.ndim - 2)
        rows = jnp.pad(jnp.asarray(mask), [*batch, (0, added), (0, 0)], mode="edge")
        mask = jnp.pad(rows, [*batch, (0, 0), (0, added)])
    return _pad(platform, tokens), _pad(platform, positions), mask


def init_params(key: jax.Array, config: LlamaConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> LlamaParams:
    """Returns random parameters that give hidden states and logits of order one."""

    def matrix(out_size: int, in_size: int) -> jax.Array:
        nonlocal key
        key, use = jax.random.split(key)
        return jax.random.normal(use, (out_size, in_size), dtype) / np.asarray(math.sqrt(in_size), dtype)

    def array(path: str, array: Array) -> jax.Array:
        shape = array.shape
        if array.fill is not None:
            return jnp.full(shape, array.fill, dtype)
        if len(shape) == 3:  # experts are [in, out]
            return jnp.stack([matrix(shape[2], shape[1]).T for _ in range(shape[0])])
        values = matrix(*shape) if len(shape) == 2 else matrix(shape[0], 1)[:, 0]
        return values.astype(array.dtype_in(dtype))

    c, of_layers = config, None
    norm = jnp.full(c.hidden_size, neutral(c), dtype)
    built = tuple(layers.build(c, i, array) for i in range(c.num_layers))
    output = None if c.tie_embeddings else matrix(c.vocab_size, c.hidden_size)
    embedding = matrix(c.vocab_size, c.hidden_size)
    output_bias = matrix(c.vocab_size, 1)[:, 0] if c.output_bias else None
    norm_bias = jnp.zeros(c.hidden_size, dtype) if c.norm_bias else None
    if c.per_layer_size:
        total = c.num_layers * c.per_layer_size
        tables = matrix(c.per_layer_vocab_size, total), matrix(total, c.hidden_size)
        of_layers = PerLayer(*tables, jnp.ones(c.per_layer_size, dtype))
    positions = matrix(c.max_positions, c.hidden_size) if c.learned_positions else None
    return LlamaParams(embedding, built, norm, output, config, norm_bias, output_bias, of_layers, positions)


def quantize(
    params: LlamaParams, bits: int = 8, shards: int = 1, importance: Sequence[Mapping[str, Any]] | None = None
) -> LlamaParams:
    """Returns the parameters with their matrices in 8 or 4 bits; those in few bits stay as they are.

    Norms, biases, embeddings for each layer and an untied embedding keep their dtype, and an output matrix has 8 bits.
    A floating-point matrix is freed when nothing else refers to it: `jlade.load(..., bits=4)` never holds all of them.

    Args:
      bits: 8 or 4.
      shards: devices that a mesh divides the model among, whose parts of a matrix then have whole groups.
      importance: of the inputs of the matrices of each layer [in], by path, for four bits: a result of
        `jlade.conversion.calibration.mean_squares`.

    Raises:
      ValueError: `bits` is neither.
    """
    quantization.check_bits(bits)

    def rounded(matrix: Any, bits: int, of_inputs: Any = None) -> Any:
        if matrix is None or is_quantized(matrix):
            return matrix
        return quantization.quantize(matrix, bits, shards, of_inputs)

    def rounded_layer(number: int, layer: Layer, of_inputs: Mapping[str, Any]) -> Layer:
        def change(path: str, array: Array, value: Any) -> Any:
            return rounded(value, bits, of_inputs.get(path)) if array.may_round else value

        return layers.changed(params.config, number, layer, change)

    name = "embedding" if params.output is None else "output"
    output = rounded(getattr(params, name), OUTPUT_BITS)
    numbers, known = range(len(params.layers)), importance or [{}] * len(params.layers)
    rounded_layers = tuple(map(rounded_layer, numbers, params.layers, known))
    return dataclasses.replace(params, layers=rounded_layers, **{name: output})
