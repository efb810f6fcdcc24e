"""LLaMA and its relatives Mistral, Qwen2 and Qwen3: pure functions on a pytree of parameters."""

import dataclasses
import functools
import math
from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jlade import mesh as mesh_lib
from jlade.mesh import HEADS, MODEL
from jlade.models import attention, base, padding, rotary
from jlade.models.attention import Operands, attend
from jlade.models.base import BlockKV, KVCache
from jlade.models.quantization import Int8Matrix, is_int8, multiply, quantize_matrix

SMALL_BLOCK = 128  # tokens, of all sequences together


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape and constants of a LLaMA model or a relative."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: rotary.Scaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False  # Qwen2
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3
    # Mistral, Qwen2: number of tokens that a token of each layer sees, itself included, None for all; () for no windows
    sliding_windows: tuple[int | None, ...] = ()
    eos_ids: tuple[int, ...] = ()  # tokens that end a text

    @property
    def family(self) -> str:
        """The `model_type` of transformers for these settings."""
        if self.qk_norm:
            return "qwen3"
        if self.qkv_bias and not self.attention_output_bias:
            return "qwen2"
        return "mistral" if any(self.sliding_windows) else "llama"


@flax.struct.dataclass
class LlamaLayer:
    """Parameters of one layer.

    Matrices are [out, in], as in the checkpoint: see `linear`. `quantize` makes each an `Int8Matrix`.
    """

    attention_norm: jax.Array  # [E]
    query: jax.Array  # [H * D, E]
    key: jax.Array  # [KH * D, E]
    value: jax.Array  # [KH * D, E]
    attention_output: jax.Array  # [E, H * D]
    mlp_norm: jax.Array  # [E]
    gate: jax.Array  # [F, E]
    up: jax.Array  # [F, E]
    down: jax.Array  # [E, F]
    # None for models without
    query_bias: jax.Array | None = None  # [H * D]
    key_bias: jax.Array | None = None  # [KH * D]
    value_bias: jax.Array | None = None  # [KH * D]
    attention_output_bias: jax.Array | None = None  # [E]
    gate_bias: jax.Array | None = None  # [F]
    up_bias: jax.Array | None = None  # [F]
    down_bias: jax.Array | None = None  # [E]
    query_norm: jax.Array | None = None  # [D], of each head
    key_norm: jax.Array | None = None  # [D], of each head


@flax.struct.dataclass
class LlamaParams:
    """Parameters of a LLaMA model and its configuration."""

    embedding: jax.Array  # [V, E]
    layers: tuple[LlamaLayer, ...]
    norm: jax.Array  # [E]
    output: jax.Array | None  # [V, E], None if the embedding is also the output matrix
    config: LlamaConfig = flax.struct.field(pytree_node=False)

    @property
    def decoder(self) -> "Llama":
        """The decoder that runs these parameters."""
        return Llama(self.config).on(self, mesh_lib.mesh_of(self))

    def __repr__(self) -> str:
        """Names family, shape, number of parameters, dtypes and bytes, also of traced parameters or their shapes."""
        c, arrays = self.config, [leaf for leaf in jax.tree.leaves(self) if hasattr(leaf, "dtype")]
        scales = [matrix.scale.size for matrix in jax.tree.leaves(self, is_leaf=is_int8) if is_int8(matrix)]
        return (
            f"LlamaParams({c.family}: {c.num_layers} layers of width {c.hidden_size} and {c.intermediate_size}, "
            f"{c.num_heads} heads of {c.head_dim}, vocabulary of {c.vocab_size}; "
            f"{sum(array.size for array in arrays) - sum(scales):,} parameters, "
            f"{' and '.join(sorted({array.dtype.name for array in arrays}))}, "
            f"{sum(array.size * array.dtype.itemsize for array in arrays):,} bytes)"
        )


@dataclasses.dataclass(frozen=True)
class Llama:
    """The `jlade.models.base.Decoder` that runs `LlamaParams`.

    Attributes:
      attention: implementation of attention, "auto", "plain", "gpu" or "tpu"; see `attention.attend`.
      axes: of the mesh, that divide heads, MLP columns and vocabulary; see `jlade.models.sharding`. `forward` and
        `logits` are then part of a `jax.shard_map` over these axes, and `logits` returns a slice of the vocabulary.
      pads: whether blocks are padded to sizes that CPUs multiply faster. The results are those of the block itself.
    """

    config: LlamaConfig
    attention: str = "auto"
    axes: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    pads: bool = dataclasses.field(default=False, repr=False)

    def __post_init__(self) -> None:
        attention.check_implementation(self.attention)

    def on(self, params: Any, mesh: Mesh | None = None) -> Self:
        """Returns the decoder for the device that holds `params`, or for those of a mesh, with `attention` resolved.

        "auto" may try a kernel, which takes seconds, on the device of concrete parameters. It takes the remembered
        verdict for shapes (`jax.ShapeDtypeStruct`), and plain attention for tracers and for parameters on several
        devices without a mesh: XLA does not partition kernels.

        Args:
          params: the parameters.
          mesh: a result of `jlade.models.sharding.mesh_for`.

        Raises:
          ValueError: `attention` names a kernel that cannot run there.
        """
        device, is_spread = mesh_lib.device_of(params, mesh), mesh is None and len(mesh_lib.devices_of(params)) > 1
        if mesh is not None:
            self = dataclasses.replace(self, axes=MODEL if mesh_lib.size(mesh, *MODEL) > 1 else ())
        self = dataclasses.replace(self, pads=device.platform == "cpu")
        if self.attention == "auto" and (device.platform not in attention.AUTOMATIC or is_spread):
            return dataclasses.replace(self, attention="plain")
        leaves = jax.tree.leaves(params)
        if self.attention == "auto" and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return dataclasses.replace(self, attention="plain")
        # The dtype is that of the cache. One layer tells it; tracing all of them takes 20 ms.
        one_layer = dataclasses.replace(self, config=dataclasses.replace(self.config, num_layers=1))
        cache = jax.eval_shape(lambda params: one_layer.init_cache(params, 1, 1), params)
        c, concrete = self.config, all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
        heads = c.num_heads // mesh_lib.size(mesh, *MODEL), c.num_kv_heads // mesh_lib.size(mesh, HEADS), c.head_dim
        chosen = attention.resolve(self.attention, device, cache.keys[0].dtype, *heads, may_run=concrete)
        return dataclasses.replace(self, attention=chosen)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.config.eos_ids

    def init_cache(self, params: LlamaParams, batch_size: int, capacity: int) -> KVCache:
        c = self.config
        key = params.layers[0].key
        keys = (key.weight if is_int8(key) else key).shape[0]  # of the KV heads on this device
        shape = (batch_size, keys // c.head_dim, capacity, c.head_dim)

        def zeros() -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros(shape, params.norm.dtype) for _ in range(c.num_layers))

        return KVCache(keys=zeros(), values=zeros(), length=jnp.zeros(batch_size, jnp.int32))

    def forward(
        self,
        params: LlamaParams,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        block_mask: jax.Array | np.ndarray,
    ) -> tuple[jax.Array, BlockKV]:
        c = self.config
        block_size = tokens.shape[1]
        if self.pads:
            tokens, positions, block_mask = padding.pad_block(tokens, positions, block_mask)
        hidden = self._embed(params, tokens)
        rotation = rotary.rotation(positions, c.head_dim, c.rope_theta, c.rope_scaling)
        windows = c.sliding_windows or (None,) * c.num_layers
        block_kv = []
        for layer, cached_keys, cached_values, window in zip(
            params.layers, cache.keys, cache.values, windows, strict=True
        ):
            prefix = cached_keys, cached_values, cache.length
            hidden, keys, values = _layer(
                layer,
                hidden,
                rotation,
                prefix,
                block_mask,
                positions,
                config=c,
                attention=self.attention,
                axes=self.axes,
                window=window,
            )
            block_kv.append((keys[:, :block_size], values[:, :block_size]))
        return hidden[:, :block_size], block_kv

    def _embed(self, params: LlamaParams, tokens: jax.Array) -> jax.Array:
        """Returns the embeddings [B, T, E] of tokens [B, T]."""
        rows = jax.tree.leaves(params.embedding)[0].shape[0]
        if rows == self.vocab_size:
            return params.embedding[tokens].astype(params.norm.dtype)
        local = tokens - rows * jax.lax.axis_index(self.axes)
        is_here = (local >= 0) & (local < rows)
        embedded = params.embedding[jnp.clip(local, 0, rows - 1)].astype(params.norm.dtype)
        return jax.lax.psum(jnp.where(is_here[..., None], embedded, 0), self.axes)

    def logits(self, params: LlamaParams, hidden: jax.Array) -> jax.Array:
        output = params.embedding if params.output is None else params.output
        normed = rms_norm(padding.pad(hidden) if self.pads else hidden, params.norm, self.config.rms_norm_eps)
        return linear(normed, output)[:, : hidden.shape[1]].astype(jnp.float32)

    def commit(self, cache: KVCache, block_kv: BlockKV, indices: jax.Array, num_accepted: jax.Array) -> KVCache:
        return base.commit(cache, block_kv, indices, num_accepted)


@functools.partial(jax.jit, static_argnames=("config", "attention", "axes", "window"))
def _layer(
    layer: LlamaLayer,
    hidden: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    prefix: tuple[jax.Array, jax.Array, jax.Array],
    block_mask: jax.Array | np.ndarray,
    positions: jax.Array,
    *,
    config: LlamaConfig,
    attention: str,
    axes: tuple[str, ...],
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the hidden states [B, T, E] after a layer, and its keys and values [B, T, KH, D].

    Under `jax.jit`, layers of one shape are traced and lowered once.
    """
    c = config
    normed = rms_norm(hidden, layer.attention_norm, c.rms_norm_eps)
    queries = _heads(linear(normed, layer.query, layer.query_bias), c.head_dim)
    keys = _heads(linear(normed, layer.key, layer.key_bias), c.head_dim)
    values = _heads(linear(normed, layer.value, layer.value_bias), c.head_dim)
    if layer.query_norm is not None and layer.key_norm is not None:
        queries = rms_norm(queries, layer.query_norm, c.rms_norm_eps)
        keys = rms_norm(keys, layer.key_norm, c.rms_norm_eps)
    queries, keys = (rotary.rotate(x, rotation) for x in (queries, keys))
    operands = Operands(queries, keys, values, *prefix, block_mask, positions)
    mixed = attend(operands, window, attention)
    mixed = mixed.reshape(*hidden.shape[:2], -1)
    hidden += sum_linear(mixed, layer.attention_output, layer.attention_output_bias, axes)
    normed = rms_norm(hidden, layer.mlp_norm, c.rms_norm_eps)
    # Two inputs keep XLA for GPUs from making one product of two small ones: it would join their weights in each step.
    again = jax.lax.optimization_barrier(normed) if axes else normed
    gate, up = linear(normed, layer.gate, layer.gate_bias), linear(again, layer.up, layer.up_bias)
    if hidden.size > hidden.shape[-1]:
        # XLA for TPUs otherwise computes `up` inside the product with `down` for most blocks of 2 to 60 tokens, and
        # reads `down` in narrow tiles: by its estimate 1.3 times as long as two products for LLaMA 3 8B on a v6e.
        apart = jax.lax.optimization_barrier
        gate, up = jax.lax.platform_dependent((gate, up), tpu=apart, default=lambda products: products)
    gated = jax.nn.silu(gate) * up
    return hidden + sum_linear(gated, layer.down, layer.down_bias, axes), keys, values


def init_params(key: jax.Array, config: LlamaConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> LlamaParams:
    """Returns random parameters that give hidden states and logits of order one."""

    def matrix(out_size: int, in_size: int) -> jax.Array:
        nonlocal key
        key, use = jax.random.split(key)
        return jax.random.normal(use, (out_size, in_size), dtype) / np.asarray(math.sqrt(in_size), dtype)

    def vector(size: int, wanted: bool) -> jax.Array | None:
        return matrix(size, 1)[:, 0] if wanted else None

    c = config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    ones = jnp.ones(c.hidden_size, dtype)
    layers = tuple(
        LlamaLayer(
            attention_norm=ones,
            query=matrix(queries, c.hidden_size),
            key=matrix(keys, c.hidden_size),
            value=matrix(keys, c.hidden_size),
            attention_output=matrix(c.hidden_size, queries),
            mlp_norm=ones,
            gate=matrix(c.intermediate_size, c.hidden_size),
            up=matrix(c.intermediate_size, c.hidden_size),
            down=matrix(c.hidden_size, c.intermediate_size),
            query_bias=vector(queries, c.qkv_bias),
            key_bias=vector(keys, c.qkv_bias),
            value_bias=vector(keys, c.qkv_bias),
            attention_output_bias=vector(c.hidden_size, c.attention_output_bias),
            gate_bias=vector(c.intermediate_size, c.mlp_bias),
            up_bias=vector(c.intermediate_size, c.mlp_bias),
            down_bias=vector(c.hidden_size, c.mlp_bias),
            query_norm=vector(c.head_dim, c.qk_norm),
            key_norm=vector(c.head_dim, c.qk_norm),
        )
        for _ in range(c.num_layers)
    )
    output = None if c.tie_embeddings else matrix(c.vocab_size, c.hidden_size)
    return LlamaParams(matrix(c.vocab_size, c.hidden_size), layers, ones, output, config)


def quantize(params: LlamaParams) -> LlamaParams:
    """Returns the parameters with their matrices in int8; int8 matrices stay as they are.

    Norms, biases and an untied embedding keep their dtype. A floating-point matrix is freed when nothing else refers
    to it: `jlade.load(..., int8=True)` never holds all of them.
    """

    def in_int8(tree: Any) -> Any:
        return jax.tree.map(lambda x: x if is_int8(x) or x.ndim != 2 else quantize_matrix(x), tree, is_leaf=is_int8)

    changed = {"layers": in_int8(params.layers)}
    if params.output is None:
        changed["embedding"] = in_int8(params.embedding)
    else:
        changed["output"] = in_int8(params.output)
    return dataclasses.replace(params, **changed)


def linear(x: jax.Array, weight: jax.Array | Int8Matrix, bias: jax.Array | None = None) -> jax.Array:
    """Returns [..., out], the product of `x` [..., in] and transposed `weight` [out, in], plus `bias` [out]."""
    if x.size == x.shape[-1]:
        product = jax.lax.platform_dependent(x, weight, tpu=multiply_row_twice, default=_multiply)
    else:
        product = _multiply(x, weight)
    return product if bias is None else product + jnp.broadcast_to(bias, product.shape)


def sum_linear(
    x: jax.Array, weight: jax.Array | Int8Matrix, bias: jax.Array | None, axes: tuple[str, ...]
) -> jax.Array:
    """Returns `linear` for `x` and `weight` that are divided along `in` among the devices of `axes`."""
    if not axes:
        return linear(x, weight, bias)
    product = jax.lax.psum(linear(x, weight), axes)
    return product if bias is None else product + jnp.broadcast_to(bias, product.shape)


def multiply_row_twice(x: jax.Array, weight: jax.Array | Int8Matrix) -> jax.Array:
    """Returns `linear` of a single row of `x`, as a product with two.

    XLA for TPUs computes a product with one row on the vector unit: by its own estimate that takes 20 times as long as
    a product with two rows on the matrix unit.
    """
    twice = jnp.broadcast_to(x.reshape(1, -1), (2, x.size))
    return _multiply(twice, weight)[0].reshape(*x.shape[:-1], -1)


def _multiply(x: jax.Array, weight: jax.Array | Int8Matrix) -> jax.Array:
    """Returns `linear` without a bias.

    Up to `SMALL_BLOCK` tokens are multiplied as weight times transposed x: on CPUs that reads the weights up to four
    times faster. Other compilers choose the order themselves.
    """
    if isinstance(weight, Int8Matrix):
        return jnp.moveaxis(multiply(weight, x), 0, -1)
    if x.size <= SMALL_BLOCK * x.shape[-1]:
        product = jax.lax.dot_general(weight, x, (((1,), (x.ndim - 1,)), ((), ())))
        return jnp.moveaxis(product, 0, -1)
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns `x` [..., E] divided by its root mean square, in float32, times `weight` [E]."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * jnp.broadcast_to(weight, x.shape)


def _heads(x: jax.Array, head_dim: int) -> jax.Array:
    """Returns [B, T, heads, D] from [B, T, heads * D]."""
    return x.reshape(*x.shape[:2], -1, head_dim)
