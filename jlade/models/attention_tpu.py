"""Attention of a block to its prefix and to itself as one Pallas kernel for TPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jlade.models.folding import fold, unfold

CHUNK = 1024  # rows of the cache read at once, at most
SCORES = 2**19  # held at once: 2 MB, and a few arrays more of that size
LANES = 128


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    cached_keys: jax.Array,
    cached_values: jax.Array,
    cached_length: jax.Array,
    block_mask: jax.Array | np.ndarray,
    interpret: bool = False,
) -> jax.Array:
    """`jlade.models.attention.attend` without sliding windows.

    The steps of the grid run in order, the chunks of one KV head after each other, so that the softmax is kept up in
    scratch memory from step to step. The grid ends with the longest sequence; a shorter one asks for its last chunk
    again, which is then not fetched again.

    Args:
      interpret: run the kernel as plain JAX, on any device; for tests.
    """
    batch_size, block_size, heads, head_dim = queries.shape
    kv_heads, capacity = cached_keys.shape[1:3]
    queries, keys, values, mask = fold(queries, keys, values, block_mask, 16, LANES)
    rows, columns = mask.shape
    chunk = min(max(SCORES // rows // LANES, 1) * LANES, CHUNK, capacity)

    def own(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, size, head_dim), lambda b, h, i, length: (b, h, 0, 0))

    def cached_chunk(b: jax.Array, h: jax.Array, i: jax.Array, length: jax.Array) -> tuple[jax.Array | int, ...]:
        return b, h, jnp.minimum(i, jnp.maximum(length[b] - 1, 0) // chunk), 0

    cached = pl.BlockSpec((None, None, chunk, head_dim), cached_chunk)
    num_chunks = jnp.maximum(1, (jnp.max(cached_length) + chunk - 1) // chunk)
    mixed = pl.pallas_call(
        functools.partial(_kernel, chunk=chunk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch_size, kv_heads, num_chunks),
            in_specs=[
                own(rows),
                own(columns),
                own(columns),
                pl.BlockSpec((rows, columns), lambda b, h, i, length: (0, 0)),
                cached,
                cached,
            ],
            out_specs=own(rows),
            scratch_shapes=[
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, head_dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="attend",
    )(cached_length, queries, keys, values, mask.astype(jnp.float32), cached_keys, cached_values)
    return unfold(mixed, heads, block_size)


def _kernel(
    length_ref, queries_ref, keys_ref, values_ref, mask_ref, cached_keys_ref, cached_values_ref, out_ref,
    highest_ref, total_ref, mixed_ref, *, chunk: int,
):  # fmt: skip
    """One chunk of one KV head.

    The block is taken in before the first chunk, so that the highest score is finite: every token sees itself. The
    highest score and the total weight of each row stand in all lanes of theirs, as TPUs have no narrower arrays.
    """
    length, start = length_ref[pl.program_id(0)], pl.program_id(2) * chunk
    scale = queries_ref.shape[-1] ** -0.5

    def take_in(keys: jax.Array, values: jax.Array, seen: jax.Array) -> None:
        product = jax.lax.dot_general(
            queries_ref[...], keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        scores = jnp.where(seen, product * scale, -jnp.inf)
        highest = highest_ref[:, :1]
        higher = jnp.maximum(highest, jnp.max(scores, axis=1, keepdims=True))
        shrink, weights = jnp.exp(highest - higher), jnp.exp(scores - higher)
        mixed = jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        total = total_ref[:, :1] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        highest_ref[...] = jnp.broadcast_to(higher, highest_ref.shape)
        total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
        mixed_ref[...] = mixed_ref[...] * shrink + mixed

    @pl.when(start == 0)
    def _() -> None:
        highest_ref[...] = jnp.full_like(highest_ref, jnp.finfo(jnp.float32).min)
        total_ref[...] = jnp.zeros_like(total_ref)
        mixed_ref[...] = jnp.zeros_like(mixed_ref)
        take_in(keys_ref[...], values_ref[...], mask_ref[...] > 0)

    @pl.when(start < length)
    def _() -> None:
        def in_use(shape: tuple[int, int], axis: int) -> jax.Array:
            return start + jax.lax.broadcasted_iota(jnp.int32, shape, axis) < length

        # What follows the last row of the cache may be no number, and a weight of zero would not undo that.
        values = cached_values_ref[...]
        values = jnp.where(in_use(values.shape, 0), values, jnp.zeros_like(values))
        take_in(cached_keys_ref[...], values, in_use((queries_ref.shape[0], chunk), 1))

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        # Rows that fill up the tile have seen nothing, and their total is 0.
        out_ref[...] = (mixed_ref[...] / jnp.maximum(total_ref[:, :1], 1e-30)).astype(out_ref.dtype)
