"""Attention of a block to its prefix in the cache and to itself, and which implementation computes it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

IMPLEMENTATIONS = ("auto", "plain", "gpu", "tpu")
# Kernels that "auto" takes: none before it has run on its device and not in simulation alone.
AUTOMATIC: tuple[str, ...] = ()
CHUNK = 256  # rows of the cache read at once


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    cached_keys: jax.Array,
    cached_values: jax.Array,
    cached_length: jax.Array,
    block_mask: jax.Array | np.ndarray,
    positions: jax.Array | None = None,
    window: int | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Grouped-query attention with one softmax over prefix and block.

    The prefix needs no mask but its length; the mask is for the block alone. Every implementation reads the prefix in
    chunks, as many as are in use, so that the work grows with the text and not with the cache's capacity, and gives
    the same result up to rounding.

    Args:
      queries: [B, T, H, D].
      keys, values: [B, T, KH, D] of the block; H is a multiple of KH.
      cached_keys, cached_values: [B, KH, S, D].
      cached_length: [B], rows of the cache in use.
      block_mask: [T, T] bool, which token (row) sees which (column); every token sees itself.
      positions: [B, T] of the block's tokens; needed with `window`. Row i of the cache is position i.
      window: the most positions that a token sees, its own included; None for all.
      implementation: one of `IMPLEMENTATIONS`. "plain" is JAX without kernels and runs everywhere; "gpu" is a kernel
        for NVIDIA's Hopper GPUs (H100, H200), 16-bit floats, D = 16, 32, ... 128, and JAX 0.11.2 or newer; "tpu" is a
        kernel for TPUs. "auto" is that of `AUTOMATIC` which can run on the default device, otherwise "plain". No kernel
        has windows: where there is one, it is "plain" in any case.

    Returns:
      [B, T, H, D] in the dtype of `queries`; scores and softmax are float32.

    Raises:
      ValueError: `implementation` is not known or cannot run here.
    """
    kernel = _kernel(implementation, queries)
    if kernel is None or window is not None:
        block, prefix = (queries, keys, values), (cached_keys, cached_values, cached_length)
        return _plain(*block, *prefix, block_mask, positions, window)
    return kernel(queries, keys, values, cached_keys, cached_values, cached_length, block_mask)


def check_implementation(implementation: str) -> None:
    """Raises a ValueError if there is no such implementation."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention must be one of {', '.join(map(repr, IMPLEMENTATIONS))}; got {implementation!r}")


def _kernel(implementation: str, queries: jax.Array) -> Callable[..., jax.Array] | None:
    """Returns the kernel that was chosen, None for plain attention."""
    check_implementation(implementation)
    device = _device()
    if implementation == "auto":
        implementation = device.platform if device.platform in AUTOMATIC else "plain"
        if _obstacle(implementation, device, queries):
            return None
    elif obstacle := _obstacle(implementation, device, queries):
        raise ValueError(f"attention {implementation!r} {obstacle}; choose 'auto' or 'plain'")
    # Imported when needed, as not every build of JAX brings every part of Pallas.
    if implementation == "gpu":
        from jlade.models import attention_gpu

        return attention_gpu.attend
    if implementation == "tpu":
        from jlade.models import attention_tpu

        return attention_tpu.attend
    return None


def _obstacle(implementation: str, device: jax.Device, queries: jax.Array) -> str | None:
    """Returns why the implementation cannot run, None if it can."""
    if implementation == "gpu":
        if getattr(device, "compute_capability", None) != "9.0":
            return f"needs an NVIDIA GPU of compute capability 9.0 (H100, H200), and the device is {device.device_kind}"
        if jax.__version_info__ < (0, 11, 2):
            return f"needs JAX 0.11.2 or newer, and this is {jax.__version__}"
        if queries.dtype not in (jnp.bfloat16, jnp.float16) or queries.shape[-1] not in range(16, 129, 16):
            shape = f"{queries.dtype.name} and {queries.shape[-1]}"
            return f"needs 16-bit floats and heads of a multiple of 16 up to 128, and these are {shape}"
    if implementation == "tpu" and device.platform != "tpu":
        return f"needs a TPU, and the device is {device.device_kind}"
    return None


def _device() -> jax.Device:
    """The device that a program runs on unless its arguments say otherwise."""
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    return default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]


def _plain(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    cached_keys: jax.Array,
    cached_values: jax.Array,
    cached_length: jax.Array,
    block_mask: jax.Array | np.ndarray,
    positions: jax.Array | None,
    window: int | None,
) -> jax.Array:
    """The softmax is kept up as the chunks come (arXiv 1805.02867), as many as the longest sequence fills."""
    batch_size, block_size, heads, head_dim = queries.shape
    kv_heads, capacity = cached_keys.shape[1:3]
    grouped = (batch_size, kv_heads, heads // kv_heads, block_size)
    chunk = min(CHUNK, capacity)
    # Heads first, the queries of a group in one dimension: so each product is one plain matrix product per KV head.
    queries = jnp.transpose(queries * head_dim**-0.5, (0, 2, 1, 3)).reshape(batch_size, kv_heads, -1, head_dim)
    keys, values = jnp.transpose(keys, (0, 2, 1, 3)), jnp.transpose(values, (0, 2, 1, 3))

    def scores(keys: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns [B, KH, H/KH * T, rows] for keys [B, KH, rows, D] and a mask [B or 1, T or 1, rows]."""
        product = jnp.einsum("bkqd,bksd->bkqs", queries, keys, preferred_element_type=jnp.float32)
        masked = jnp.where(mask[:, None, None], product.reshape(*grouped, -1), -jnp.inf)
        return masked.reshape(product.shape)

    def mix(weights: jax.Array, values: jax.Array) -> jax.Array:
        weights = weights.astype(values.dtype)
        return jnp.einsum("bkqs,bksd->bkqd", weights, values, preferred_element_type=jnp.float32)

    def within_window(mask: jax.Array, rows: jax.Array | None) -> jax.Array:
        """Narrows the mask to those of the positions `rows` [B or 1, rows] that are near enough."""
        if window is None or positions is None or rows is None:
            return mask
        return mask & (positions[:, :, None] - rows[:, None, :] < window)

    def read_chunk(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        highest, total, mixed = carry
        start = jnp.minimum(i * chunk, capacity - chunk)  # the last chunk may begin earlier, where the one before ended
        rows = start + jnp.arange(chunk, dtype=jnp.int32)
        in_use = (rows[None, :] >= i * chunk) & (rows[None, :] < cached_length[:, None])
        mask = within_window(in_use[:, None, :], rows[None, :])
        chunk_keys, chunk_values = (
            jax.lax.dynamic_slice_in_dim(x, start, chunk, 2) for x in (cached_keys, cached_values)
        )
        products = scores(chunk_keys, mask)
        higher = jnp.maximum(highest, jnp.max(products, axis=-1, keepdims=True))
        shrink, weights = jnp.exp(highest - higher), jnp.exp(products - higher)
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        return higher, total, mixed * shrink + mix(weights, chunk_values)

    products = scores(keys, within_window(jnp.asarray(block_mask)[None], positions))
    highest = jnp.max(products, axis=-1, keepdims=True)  # finite, as every token sees itself
    weights = jnp.exp(products - highest)
    carry = highest, jnp.sum(weights, axis=-1, keepdims=True), mix(weights, values)
    num_chunks = (jnp.max(cached_length) + chunk - 1) // chunk
    _, total, mixed = jax.lax.fori_loop(0, num_chunks, read_chunk, carry)

    mixed = (mixed / total).astype(values.dtype).reshape(batch_size, heads, block_size, head_dim)
    return jnp.transpose(mixed, (0, 2, 1, 3))
