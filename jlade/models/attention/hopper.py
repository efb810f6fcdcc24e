"""Attention as one Pallas kernel for NVIDIA GPUs of the Hopper generation."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jlade.models import kv_rounding
from jlade.models.attention import plain
from jlade.models.attention.folding import entry_positions, fold, unfold
from jlade.models.attention.operands import Operands

CHUNK = 64  # keys per iteration of a program
SLOTS = 3  # chunks in shared memory at once, loaded or loading
ROWS = 64  # queries per warpgroup: the rows of its matrix product
PROGRAMS = 128  # the cache is split until there are this many; a Hopper has 132 multiprocessors


def attend(
    operands: Operands,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Returns `jlade.models.attention.attend` for a mask [1 or B, T, T].

    Dtypes are bfloat16 and float16, D is 16, 32, ... 128. The keys, cache first and block last, are cut into chunks,
    and the chunks are split among programs that run at the same time (flash decoding). Each program computes an online
    softmax (arXiv 1805.02867) over its chunks; the partial results are joined at the end. Keys and values in 8 bits are
    converted in shared memory, a chunk at a time. With a capacity below `CHUNK` or not a multiple of 8, or pages that
    have no whole chunks, plain attention runs instead.

    Args:
      interpret: parameters of Pallas that simulate the GPU on a CPU; for tests.
    """
    batch_size, block_size, heads, head_dim = operands.queries.shape
    kv_heads, capacity = operands.keys.shape[2], operands.capacity
    has_chunks = operands.table is None or operands.cached_keys.shape[2] % CHUNK == 0
    if capacity < CHUNK or capacity % 8 or not has_chunks:  # the hardware copies whole chunks, from entries 0, 8, ...
        return plain.attend(operands, window, scale, cap)
    rows = heads // kv_heads * block_size
    warpgroups = 1 if rows <= ROWS else 2  # they share the keys and values of a program
    tiles = pl.cdiv(rows, ROWS * warpgroups)
    splits = pl.cdiv(PROGRAMS, batch_size * kv_heads * tiles)

    queries, keys, values, mask, oldest, sinks, *scales = fold(operands, window, ROWS * warpgroups, CHUNK)
    in_8_bits = operands.key_scales is not None
    slots = SLOTS * 2 // 3 if in_8_bits else SLOTS  # of 3 bytes an element, before and after the conversion, or of 2

    def tiled(*shape: int, dtype: jax.typing.DTypeLike = queries.dtype) -> Any:
        """Returns shared memory in the layout of matrix products and copies; all operands need the same swizzle."""
        itemsize = jnp.dtype(dtype).itemsize
        swizzle = next(bytes_ for bytes_ in (128, 64, 32, 16) if min(itemsize, 2) * head_dim % bytes_ == 0)
        tiling = plgpu.TilingTransform((8, swizzle // itemsize))
        swizzling = [] if swizzle == 16 else [plgpu.SwizzleTransform(swizzle)]  # 16 bytes stay together anyway
        return plgpu.SMEM(shape, dtype, transforms=(tiling, *swizzling))

    def per_row(dtype: jax.typing.DTypeLike) -> Any:
        return plgpu.SMEM((warpgroups, ROWS), dtype)

    of_8_bits = {
        "numbers_smem": tiled(2, slots, CHUNK, head_dim, dtype=keys.dtype),
        "scales_smem": plgpu.SMEM((2, 2 * slots, CHUNK), jnp.float32),
        "numbers_ready": plgpu.Barrier(num_arrivals=4, num_barriers=slots),
    }
    written = min(ROWS, pl.cdiv(rows, 8) * 8)  # rows of a warpgroup with a query
    parts = (batch_size, kv_heads, splits, tiles * warpgroups, written)
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            num_rows=queries.shape[2],
            block_chunks=pl.cdiv(block_size, CHUNK),
            scale=head_dim**-0.5 if scale is None else scale,
            cap=cap,
        ),
        out_type=(
            jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ),
        scratch_types={
            "queries_smem": tiled(warpgroups, ROWS, head_dim),
            "keys_smem": tiled(slots, CHUNK, head_dim),
            "values_smem": tiled(slots, CHUNK, head_dim),
            "weights_smem": tiled(warpgroups, ROWS, CHUNK),
            "mixed_smem": tiled(warpgroups, ROWS, head_dim, dtype=jnp.float32),
            "highest_smem": per_row(jnp.float32),
            "total_smem": per_row(jnp.float32),
            **({} if oldest is None else {"oldest_smem": per_row(jnp.int32)}),
            "queries_ready": plgpu.Barrier(num_barriers=warpgroups),
            "mask_ready": plgpu.Barrier(num_barriers=warpgroups),
            "keys_ready": plgpu.Barrier(num_barriers=slots),
            "values_ready": plgpu.Barrier(num_barriers=slots),
            "slot_free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=slots),
            **(of_8_bits if in_8_bits else {}),
        },
        grid=(splits * tiles, kv_heads, batch_size),
        grid_names=("part", "head", "sequence"),
        num_threads=warpgroups + 1,  # the last warpgroup loads
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=interpret,
    )
    block = [keys, values, *(x[:, :, 0] for x in scales if x is not None)]
    if not in_8_bits:  # in one array, which XLA makes by one kernel
        queries, block = jnp.concatenate([queries, keys, values], axis=2), []
    scales_of_cache = operands.cached_key_scales, operands.cached_value_scales
    cache = [x for x in (operands.cached_keys, operands.cached_values, *scales_of_cache) if x is not None]
    numbers = [x for x in (operands.cached_length, operands.table) if x is not None]
    mixed, highest, total = kernel(numbers, queries, block, cache, mask.astype(queries.dtype), oldest)

    peak = jnp.max(highest, axis=2, keepdims=True)
    shrink = jnp.exp2(highest - peak)
    mixed, total = jnp.sum(mixed * shrink[..., None], axis=2), jnp.sum(total * shrink, axis=2)
    if sinks is not None:
        exponents = math.log2(math.e) * sinks[:, : total[0, 0].size].reshape(1, *total.shape[1:])
        total += jnp.exp2(exponents - peak[:, :, 0])  # inf where a sink takes all the weight
    mixed = mixed / total[..., None]
    mixed = mixed.astype(queries.dtype).reshape(batch_size, kv_heads, -1, head_dim)
    return unfold(mixed, heads, block_size)


def _kernel(
    number_refs: list[jax.Ref], queries_ref: jax.Ref, block_refs: list[jax.Ref], cached_refs: list[jax.Ref],
    mask_ref: jax.Ref, oldest_ref: jax.Ref | None, mixed_ref: jax.Ref, highest_ref: jax.Ref, total_ref: jax.Ref,
    *,
    queries_smem: jax.Ref, keys_smem: jax.Ref, values_smem: jax.Ref, weights_smem: jax.Ref,
    mixed_smem: jax.Ref, highest_smem: jax.Ref, total_smem: jax.Ref,
    queries_ready: jax.Ref, mask_ready: jax.Ref, keys_ready: jax.Ref, values_ready: jax.Ref, slot_free: jax.Ref,
    num_rows: int, block_chunks: int, scale: float, cap: float | None, oldest_smem: jax.Ref | None = None,
    numbers_smem: jax.Ref | None = None, scales_smem: jax.Ref | None = None, numbers_ready: jax.Ref | None = None,
) -> None:  # fmt: skip
    """Computes one split of a KV head's keys for one tile of its queries: one warpgroup loads, the others compute.

    Scores are exponents of 2, as GPUs have an instruction for powers of two. `block_refs` and `cached_refs` are keys,
    values and, in 8 bits, the scales of each; `number_refs` the lengths and, for a cache in pages, their table. Without
    `block_refs`, the block's keys and values follow the queries, of which there are `num_rows`, in their array.
    """
    sequence, head, part = (jax.lax.axis_index(name) for name in ("sequence", "head", "part"))
    warpgroup = jax.lax.axis_index("warpgroup")
    splits, warpgroups = mixed_ref.shape[2], queries_smem.shape[0]
    mask = sequence if mask_ref.shape[0] > 1 else 0
    tile, split = jax.lax.div(part, jnp.int32(splits)), jax.lax.rem(part, jnp.int32(splits))
    length_ref, *table_ref = number_refs
    part_size, head_dim = cached_refs[0].shape[2:]  # of a row, or of a page
    capacity = part_size * table_ref[0].shape[1] if table_ref else part_size
    slots = keys_smem.shape[0]

    length = length_ref[sequence]
    in_use = length if oldest_ref is None else jnp.minimum(length, capacity)  # entries
    cached_chunks = pl.cdiv(in_use, jnp.int32(CHUNK))
    num_chunks = cached_chunks + block_chunks
    share = pl.cdiv(num_chunks, jnp.int32(splits))
    first = split * share
    count = jnp.clip(num_chunks - first, 0, share)

    def first_entry(chunk: jax.Array) -> jax.Array:
        """Returns the first cache entry of a chunk; the last chunk of a full cache overlaps the one before."""
        return jnp.minimum(chunk * CHUNK, capacity - CHUNK)

    def scales_slot(i: jax.Array) -> jax.Array:
        """Returns the slot of the scales of a chunk, which stay while the next numbers are loaded and converted."""
        return jax.lax.rem(i, jnp.int32(2 * slots))

    @pl.when(warpgroup == warpgroups)
    def _() -> None:
        def load(i: jax.Array) -> None:
            chunk, slot = first + i, jax.lax.rem(i, jnp.int32(slots))
            to = [(keys_smem.at[slot], keys_ready.at[slot]), (values_smem.at[slot], values_ready.at[slot])]
            if numbers_smem is not None and scales_smem is not None and numbers_ready is not None:
                numbers = [numbers_smem.at[n, slot] for n in range(2)]
                scales = [scales_smem.at[n, scales_slot(i)] for n in range(2)]
                to = [(smem, numbers_ready.at[slot]) for smem in (*numbers, *scales)]

            def copy(refs: list[jax.Ref], owner: jax.Array, *starts: jax.Array) -> None:
                for ref, start, (smem, ready) in zip(refs, itertools.cycle(starts), to, strict=False):
                    plgpu.copy_gmem_to_smem(ref.at[owner, head, pl.ds(start, CHUNK)], smem, ready)

            @pl.when(chunk < cached_chunks)
            def _() -> None:
                if table_ref:
                    per_page = jnp.int32(part_size // CHUNK)
                    page = table_ref[0][sequence, jax.lax.div(chunk, per_page)]
                    copy(cached_refs, page, jax.lax.rem(chunk, per_page) * CHUNK)
                else:
                    copy(cached_refs, sequence, first_entry(chunk))

            @pl.when(chunk >= cached_chunks)
            def _() -> None:
                start = (chunk - cached_chunks) * CHUNK
                if block_refs:
                    copy(block_refs, sequence, start)
                else:
                    copy([queries_ref] * 2, sequence, num_rows + start, num_rows + block_chunks * CHUNK + start)

        if numbers_smem is not None:
            pl.loop(0, jnp.minimum(count, slots))(load)

        @pl.loop(0, count)
        def _(i: jax.Array) -> None:
            slot = jax.lax.rem(i, jnp.int32(slots))

            @pl.when(i >= slots)
            def _() -> None:
                plgpu.barrier_wait(slot_free.at[slot])

            if numbers_smem is None or numbers_ready is None:
                load(i)
                return
            plgpu.barrier_wait(numbers_ready.at[slot])
            for n, (smem, ready) in enumerate(((keys_smem, keys_ready), (values_smem, values_ready))):
                numbers = plgpu.layout_cast(numbers_smem[n, slot], plgpu.Layout.WGMMA_UPCAST_2X)
                smem[slot] = _converted(numbers, smem.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready.at[slot])

            @pl.when(i + slots < count)
            def _() -> None:
                load(i + slots)

        @pl.loop(jnp.maximum(count - slots, 0), count)
        def _(i: jax.Array) -> None:
            plgpu.barrier_wait(slot_free.at[jax.lax.rem(i, jnp.int32(slots))])

    @pl.when(warpgroup < warpgroups)
    def _() -> None:
        group = tile * warpgroups + warpgroup  # of ROWS queries
        rows = pl.ds(group * ROWS, ROWS)
        own_queries, own_weights = queries_smem.at[warpgroup], weights_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(queries_ref.at[sequence, head, rows], own_queries, queries_ready.at[warpgroup])
        plgpu.barrier_wait(queries_ready.at[warpgroup])
        oldest = None
        if oldest_ref is not None and oldest_smem is not None:
            own_oldest, ready = oldest_smem.at[warpgroup], mask_ready.at[warpgroup]
            plgpu.copy_gmem_to_smem(oldest_ref.at[sequence, rows], own_oldest, ready)
            plgpu.barrier_wait(ready)
            oldest = own_oldest[...]

        def matmul(a_ref: jax.Ref, b_ref: jax.Ref) -> jax.Array:
            def run(accumulator: Any) -> Any:
                plgpu.wgmma(accumulator, a_ref, b_ref)
                return accumulator[...]  # waits for the product

            accumulator = plgpu.WGMMAAccumulatorRef((ROWS, b_ref.shape[1]), jnp.float32)
            product: jax.Array = pl.run_scoped(run, accumulator)
            return product

        def add_chunk(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            highest, total, mixed = carry
            chunk, slot = first + i, jax.lax.rem(i, jnp.int32(slots))
            plgpu.barrier_wait(keys_ready.at[slot])

            def scaled(x: jax.Array, n: int) -> jax.Array:
                """Returns scores times the scales of keys, n = 0, or weights times those of values, n = 1."""
                if scales_smem is None:
                    return x
                return x * jax.lax.broadcast_in_dim(scales_smem[n, scales_slot(i)], x.shape, [1])

            scores = _exponents(scaled(matmul(own_queries, keys_smem.at[slot].T), 0), scale, cap)

            def within_length() -> jax.Array:
                entry = first_entry(chunk) + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                seen = (entry >= chunk * CHUNK) & (entry < in_use)
                if oldest is not None:
                    positions = entry_positions(entry, length, capacity)
                    seen &= positions >= jax.lax.broadcast_in_dim(oldest, positions.shape, [0])
                return jnp.where(seen, scores, -jnp.inf)

            def within_block() -> jax.Array:
                columns = pl.ds((chunk - cached_chunks) * CHUNK, CHUNK)
                plgpu.commit_smem()  # the weights of the chunk before are no longer needed: the mask takes their place
                plgpu.copy_gmem_to_smem(mask_ref.at[mask, rows, columns], own_weights, mask_ready.at[warpgroup])
                plgpu.barrier_wait(mask_ready.at[warpgroup])
                seen = own_weights[...].astype(jnp.float32)
                plgpu.commit_smem()
                return jnp.where(seen > 0, scores, -jnp.inf)

            def masked() -> jax.Array:
                result: jax.Array = jax.lax.cond(chunk < cached_chunks, within_length, within_block)
                return result

            whole = (chunk + 1) * CHUNK <= length
            scores = masked() if oldest is not None else jax.lax.cond(whole, lambda: scores, masked)
            higher = jnp.maximum(highest, jnp.max(scores, axis=1))
            shrink = jnp.exp2(highest - higher)
            weights = jnp.exp2(scores - jax.lax.broadcast_in_dim(higher, scores.shape, [0]))
            total = total * shrink + jnp.sum(weights, axis=1)  # before the product, which needs their registers
            own_weights[...] = scaled(weights, 1).astype(own_weights.dtype)
            plgpu.commit_smem()
            plgpu.barrier_wait(values_ready.at[slot])
            added = matmul(own_weights, values_smem.at[slot])
            plgpu.barrier_arrive(slot_free.at[slot])
            mixed = mixed * jax.lax.broadcast_in_dim(shrink, mixed.shape, [0]) + added
            return higher, total, mixed

        empty = (
            jnp.full((ROWS,), -1e30, jnp.float32),  # finite, as a split may have no keys
            jnp.zeros((ROWS,), jnp.float32),
            jnp.zeros((ROWS, head_dim), jnp.float32),
        )
        highest_smem.at[warpgroup][...], total_smem.at[warpgroup][...], mixed_smem.at[warpgroup][...] = (
            jax.lax.fori_loop(0, count, add_chunk, empty)
        )
        plgpu.commit_smem()
        at, written = (sequence, head, split, group), pl.ds(0, mixed_ref.shape[-2])
        plgpu.copy_smem_to_gmem(highest_smem.at[warpgroup, written], highest_ref.at[at])
        plgpu.copy_smem_to_gmem(total_smem.at[warpgroup, written], total_ref.at[at])
        plgpu.copy_smem_to_gmem(mixed_smem.at[warpgroup, written], mixed_ref.at[at])
        plgpu.wait_smem_to_gmem(0)


def _exponents(products: jax.Array, scale: float, cap: float | None) -> jax.Array:
    """Returns scores as exponents of 2, for products of queries and keys."""
    if cap is None:
        return products * (scale * math.log2(math.e))
    # tanh x is 1 - 2 / (1 + e^2x). The GPU's own tanh has 11 bits: too few for scores near the cap.
    return cap * math.log2(math.e) * (1 - 2 / (1 + jnp.exp2(products * (2 * math.log2(math.e) * scale / cap))))


def _converted(numbers: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns `kv_rounding.numbers`. The hardware converts 8-bit floats to float16 and float32 alone."""
    is_float = numbers.dtype == kv_rounding.STORED[kv_rounding.FLOAT8]
    between = jnp.float32 if is_float and dtype == jnp.bfloat16 else dtype
    return kv_rounding.numbers(numbers, between).astype(dtype)
