"""Attention of a block to its prefix and to itself as one Pallas kernel for NVIDIA GPUs of the Hopper generation."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jlade.models.folding import fold, pad, unfold

CHUNK = 64  # keys that a program takes in at once
SLOTS = 3  # chunks that are held, or under way from memory, at once
ROWS = 64  # queries of a warpgroup, as many as its matrix product has rows
PROGRAMS = 128  # that the cache is split among if there are fewer without: a Hopper has 132 multiprocessors


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    cached_keys: jax.Array,
    cached_values: jax.Array,
    cached_length: jax.Array,
    block_mask: jax.Array | np.ndarray,
    interpret: Any = None,
) -> jax.Array:
    """`jlade.models.attention.attend` without sliding windows, for 16-bit floats and heads of 16, 32, ... 128.

    The keys, cache first and block last, are cut into chunks, and these are split among programs that run at the same
    time (flash decoding). Each keeps up its own softmax (arXiv 1805.02867), and the parts are joined here.

    Args:
      interpret: Pallas' parameters to simulate the GPU on a CPU; for tests.
    """
    batch_size, block_size, heads, head_dim = queries.shape
    kv_heads, capacity = cached_keys.shape[1:3]
    rows = heads // kv_heads * block_size
    warpgroups = 1 if rows <= ROWS else 2  # that share what a program reads
    tiles = pl.cdiv(rows, ROWS * warpgroups)
    splits = pl.cdiv(PROGRAMS, batch_size * kv_heads * tiles)

    queries, keys, values, mask = fold(queries, keys, values, block_mask, ROWS * warpgroups, CHUNK)
    if capacity < CHUNK or capacity % 8:  # the hardware's copies start at rows 0, 8, ... and are whole chunks
        cached_keys, cached_values = (pad(x, 2, CHUNK) for x in (cached_keys, cached_values))

    def tiled(*shape: int, dtype: Any = queries.dtype) -> Any:
        """Shared memory in the layout that matrix products and copies take; all operands need the same swizzle."""
        swizzle = next(bytes_ for bytes_ in (128, 64, 32) if 2 * head_dim % bytes_ == 0)
        tile = (8, swizzle // jnp.dtype(dtype).itemsize)
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle)))

    written = min(ROWS, pl.cdiv(rows, 8) * 8)  # rows of a warpgroup that hold a query
    parts = (batch_size, kv_heads, splits, tiles * warpgroups, written)
    kernel = plgpu.kernel(
        functools.partial(_kernel, block_chunks=pl.cdiv(block_size, CHUNK)),
        out_type=(
            jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ),
        scratch_types={
            "queries_smem": tiled(warpgroups, ROWS, head_dim),
            "keys_smem": tiled(SLOTS, CHUNK, head_dim),
            "values_smem": tiled(SLOTS, CHUNK, head_dim),
            "weights_smem": tiled(warpgroups, ROWS, CHUNK),
            "mixed_smem": tiled(warpgroups, ROWS, head_dim, dtype=jnp.float32),
            "highest_smem": plgpu.SMEM((warpgroups, ROWS), jnp.float32),
            "total_smem": plgpu.SMEM((warpgroups, ROWS), jnp.float32),
            "queries_ready": plgpu.Barrier(num_barriers=warpgroups),
            "mask_ready": plgpu.Barrier(num_barriers=warpgroups),
            "keys_ready": plgpu.Barrier(num_barriers=SLOTS),
            "values_ready": plgpu.Barrier(num_barriers=SLOTS),
            "slot_free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=SLOTS),
        },
        grid=(splits * tiles, kv_heads, batch_size),
        grid_names=("part", "head", "sequence"),
        num_threads=warpgroups + 1,  # the last one loads
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=interpret,
    )
    mixed, highest, total = kernel(
        cached_length, queries, keys, values, mask.astype(queries.dtype), cached_keys, cached_values
    )

    shrink = jnp.exp2(highest - jnp.max(highest, axis=2, keepdims=True))
    mixed = jnp.sum(mixed * shrink[..., None], axis=2) / jnp.sum(total * shrink, axis=2)[..., None]
    mixed = mixed.astype(values.dtype).reshape(batch_size, kv_heads, -1, head_dim)
    return unfold(mixed, heads, block_size)


def _kernel(
    length_ref, queries_ref, keys_ref, values_ref, mask_ref, cached_keys_ref, cached_values_ref,
    mixed_ref, highest_ref, total_ref,
    *,
    queries_smem, keys_smem, values_smem, weights_smem, mixed_smem, highest_smem, total_smem,
    queries_ready, mask_ready, keys_ready, values_ready, slot_free, block_chunks,
):  # fmt: skip
    """One split of one KV head's keys, for one tile of its queries: one warpgroup loads, the others compute.

    Scores are in units of log 2, as GPUs have an instruction for powers of two.
    """
    sequence, head, part = (jax.lax.axis_index(name) for name in ("sequence", "head", "part"))
    warpgroup = jax.lax.axis_index("warpgroup")
    splits, warpgroups = mixed_ref.shape[2], queries_smem.shape[0]
    tile, split = jax.lax.div(part, jnp.int32(splits)), jax.lax.rem(part, jnp.int32(splits))
    capacity, head_dim = cached_keys_ref.shape[2:]

    length = length_ref[sequence]
    cached_chunks = pl.cdiv(length, jnp.int32(CHUNK))
    num_chunks = cached_chunks + block_chunks
    share = pl.cdiv(num_chunks, jnp.int32(splits))
    first = split * share
    count = jnp.clip(num_chunks - first, 0, share)

    def first_row(chunk: jax.Array) -> jax.Array:
        """The last chunk of a full cache begins earlier, where the one before has not ended yet."""
        return jnp.minimum(chunk * CHUNK, capacity - CHUNK)

    @pl.when(warpgroup == warpgroups)
    def _() -> None:
        @pl.loop(0, count)
        def _(i: jax.Array) -> None:
            chunk, slot = first + i, jax.lax.rem(i, jnp.int32(SLOTS))

            def load(keys_ref: Any, values_ref: Any, row: jax.Array) -> None:
                at = (sequence, head, pl.ds(row, CHUNK))
                plgpu.copy_gmem_to_smem(keys_ref.at[at], keys_smem.at[slot], keys_ready.at[slot])
                plgpu.copy_gmem_to_smem(values_ref.at[at], values_smem.at[slot], values_ready.at[slot])

            @pl.when(i >= SLOTS)
            def _() -> None:
                plgpu.barrier_wait(slot_free.at[slot])

            @pl.when(chunk < cached_chunks)
            def _() -> None:
                load(cached_keys_ref, cached_values_ref, first_row(chunk))

            @pl.when(chunk >= cached_chunks)
            def _() -> None:
                load(keys_ref, values_ref, (chunk - cached_chunks) * CHUNK)

        @pl.loop(jnp.maximum(count - SLOTS, 0), count)
        def _(i: jax.Array) -> None:
            plgpu.barrier_wait(slot_free.at[jax.lax.rem(i, jnp.int32(SLOTS))])

    @pl.when(warpgroup < warpgroups)
    def _() -> None:
        group = tile * warpgroups + warpgroup  # of ROWS queries
        rows = pl.ds(group * ROWS, ROWS)
        own_queries, own_weights = queries_smem.at[warpgroup], weights_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(queries_ref.at[sequence, head, rows], own_queries, queries_ready.at[warpgroup])
        plgpu.barrier_wait(queries_ready.at[warpgroup])

        def matmul(a_ref: Any, b_ref: Any) -> jax.Array:
            def run(accumulator: Any) -> jax.Array:
                plgpu.wgmma(accumulator, a_ref, b_ref)
                return accumulator[...]  # waits for the product

            return pl.run_scoped(run, plgpu.ACC((ROWS, b_ref.shape[1]), jnp.float32))

        def take_in(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            highest, total, mixed = carry
            chunk, slot = first + i, jax.lax.rem(i, jnp.int32(SLOTS))
            plgpu.barrier_wait(keys_ready.at[slot])
            scores = matmul(own_queries, keys_smem.at[slot].T)
            scores *= head_dim**-0.5 * math.log2(math.e)

            def within_length() -> jax.Array:
                row = first_row(chunk) + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                return jnp.where((row >= chunk * CHUNK) & (row < length), scores, -jnp.inf)

            def within_block() -> jax.Array:
                columns = pl.ds((chunk - cached_chunks) * CHUNK, CHUNK)
                plgpu.commit_smem()  # the weights of the chunk before are used up: the mask takes their place
                plgpu.copy_gmem_to_smem(mask_ref.at[rows, columns], own_weights, mask_ready.at[warpgroup])
                plgpu.barrier_wait(mask_ready.at[warpgroup])
                seen = own_weights[...].astype(jnp.float32)
                plgpu.commit_smem()
                return jnp.where(seen > 0, scores, -jnp.inf)

            whole = (chunk + 1) * CHUNK <= length
            scores = jax.lax.cond(
                whole, lambda: scores, lambda: jax.lax.cond(chunk < cached_chunks, within_length, within_block)
            )
            higher = jnp.maximum(highest, jnp.max(scores, axis=1))
            shrink = jnp.exp2(highest - higher)
            weights = jnp.exp2(scores - jax.lax.broadcast_in_dim(higher, scores.shape, [0]))
            own_weights[...] = weights.astype(own_weights.dtype)
            plgpu.commit_smem()
            plgpu.barrier_wait(values_ready.at[slot])
            added = matmul(own_weights, values_smem.at[slot])
            plgpu.barrier_arrive(slot_free.at[slot])
            mixed = mixed * jax.lax.broadcast_in_dim(shrink, mixed.shape, [0]) + added
            return higher, total * shrink + jnp.sum(weights, axis=1), mixed

        nothing = (
            jnp.full((ROWS,), -1e30, jnp.float32),  # finite, as a split may see nothing at all
            jnp.zeros((ROWS,), jnp.float32),
            jnp.zeros((ROWS, head_dim), jnp.float32),
        )
        highest_smem.at[warpgroup][...], total_smem.at[warpgroup][...], mixed_smem.at[warpgroup][...] = (
            jax.lax.fori_loop(0, count, take_in, nothing)
        )
        plgpu.commit_smem()
        at, written = (sequence, head, split, group), pl.ds(0, mixed_ref.shape[-2])
        plgpu.copy_smem_to_gmem(highest_smem.at[warpgroup, written], highest_ref.at[at])
        plgpu.copy_smem_to_gmem(total_smem.at[warpgroup, written], total_ref.at[at])
        plgpu.copy_smem_to_gmem(mixed_smem.at[warpgroup, written], mixed_ref.at[at])
        plgpu.wait_smem_to_gmem(0)
