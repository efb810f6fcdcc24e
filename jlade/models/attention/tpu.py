"""Attention as one Pallas kernel for TPUs."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jlade.models import kv_rounding, nn
from jlade.models.attention.folding import entry_positions, fold, unfold
from jlade.models.attention.operands import Operands

CHUNK = 1024  # cache entries read at once, at most
SCORES = 2**19  # scores in memory at once: 2 MB, and a few more arrays of that size
LANES = 128

Refs = Sequence[jax.Ref]  # of the parts of a chunk


def attend(
    operands: Operands,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns `jlade.models.attention.attend` for a mask [1 or B, T, T].

    The chunks of a KV head are consecutive steps of the grid, so the state of the online softmax (arXiv 1805.02867)
    stays in scratch memory. The grid has the chunks of the longest sequence; a shorter sequence names its last chunk
    again, which is not fetched twice. Keys and values in 8 bits are converted in on-chip memory, a chunk at a time.

    Args:
      interpret: run the kernel as plain JAX, on any device; for tests.
    """
    cached_keys, cached_values, cached_length = operands[3:6]
    cached_scales = [  # [B, KH, 1, S]
        x if x is None else x[:, :, None] for x in (operands.cached_key_scales, operands.cached_value_scales)
    ]
    batch_size, block_size, heads, head_dim = operands.queries.shape
    kv_heads, capacity = cached_keys.shape[1], operands.capacity
    queries, keys, values, mask, oldest, sinks, *scales = fold(operands, window, 16, LANES)
    num_masks, rows, columns = mask.shape
    chunk = min(max(SCORES // rows // LANES, 1) * LANES, CHUNK, capacity)
    # A chunk is one part of a sequence's entries, or as many as it has pages.
    part, num_parts = chunk, 1
    scalars = [cached_length]
    if operands.table is not None:
        part = cached_keys.shape[2]
        num_parts = max(chunk // part, 1)
        chunk = num_parts * part
        scalars.append(operands.table)

    def own(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, size, head_dim), lambda b, h, i, *scalars: (b, h, 0, 0))

    def place(number: int, b: jax.Array, h: jax.Array, i: jax.Array, length: jax.Array, *table: jax.Array) -> Any:
        """Returns the place (b, h, part) of a part of chunk i, the last one in use for those past it."""
        index = jnp.minimum(i * num_parts + number, jnp.maximum(length[b] - 1, 0) // part)
        return (table[0][b, index], h, 0) if table else (b, h, index)

    def cached_part(number: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, part, head_dim), lambda *at: (*place(number, *at), 0))

    def scales_part(number: int) -> pl.BlockSpec:
        def at(*at: jax.Array) -> Any:
            *head, index = place(number, *at)
            return *head, 0, index

        return pl.BlockSpec((None, None, 1, part), at)

    cached = [cached_part(number) for number in range(num_parts)]
    own_scales = pl.BlockSpec((None, None, 1, columns), lambda b, h, i, *scalars: (b, h, 0, 0))
    has_scales = operands.key_scales is not None
    cached_scales_parts = [scales_part(number) for number in range(num_parts)] if has_scales else None
    of_sequence = pl.BlockSpec((None, rows, 1), lambda b, h, i, *scalars: (b, 0, 0))
    of_head = pl.BlockSpec((None, rows, 1), lambda b, h, i, *scalars: (h, 0, 0))
    if not interpret:
        # Otherwise the compiler fetches every layer of the cache, up to its capacity, into on-chip memory before use.
        cached_keys, cached_values = (
            pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (cached_keys, cached_values)
        )
    longest = jnp.max(cached_length)
    if window is not None:
        longest = jnp.minimum(longest, capacity)
    num_chunks = jnp.maximum(1, (longest + chunk - 1) // chunk)
    scale = head_dim**-0.5 if scale is None else scale
    kernel = functools.partial(_kernel, chunk=chunk, capacity=capacity, scale=scale, cap=cap)
    mixed = pl.pallas_call(
        # Where chunks lie is all that the table says.
        kernel if operands.table is None else lambda length_ref, table_ref, *refs: kernel(length_ref, *refs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch_size, kv_heads, num_chunks),
            in_specs=[
                own(rows),
                own(columns),
                own(columns),
                pl.BlockSpec((None, rows, columns), lambda b, h, i, *scalars: (b if num_masks > 1 else 0, 0, 0)),
                cached,
                cached,
                None if oldest is None else of_sequence,
                None if sinks is None else of_head,
                *2 * [own_scales if has_scales else None],
                *2 * [cached_scales_parts],
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
    )(
        *(*scalars, queries, keys, values, mask.astype(jnp.float32)),
        *([x] * num_parts for x in (cached_keys, cached_values)),
        *(x if x is None else x[..., None] for x in (oldest, sinks)),
        *scales,
        *(x if x is None else [x] * num_parts for x in cached_scales),
    )
    return unfold(mixed, heads, block_size)


def _kernel(
    length_ref: jax.Ref, queries_ref: jax.Ref, keys_ref: jax.Ref, values_ref: jax.Ref, mask_ref: jax.Ref,
    cached_keys_refs: Refs, cached_values_refs: Refs, oldest_ref: jax.Ref | None, sinks_ref: jax.Ref | None,
    key_scales_ref: jax.Ref | None, value_scales_ref: jax.Ref | None,
    cached_key_scales_refs: Refs | None, cached_value_scales_refs: Refs | None,
    out_ref: jax.Ref, highest_ref: jax.Ref, total_ref: jax.Ref, mixed_ref: jax.Ref,
    *, chunk: int, capacity: int, scale: float, cap: float | None,
) -> None:  # fmt: skip
    """Adds one chunk of one KV head to the softmax.

    The block comes before the first chunk, so that the highest score is finite: every token sees itself. All lanes of
    a row hold its highest score and its total weight, as TPUs have no narrower arrays.
    """
    length: jax.Array = length_ref[pl.program_id(0)]
    in_use = length if oldest_ref is None else jnp.minimum(length, capacity)  # entries
    start = pl.program_id(2) * chunk

    def add_keys(
        keys: jax.Array,
        values: jax.Array,
        seen: jax.Array,
        key_scales: jax.Array | None,
        value_scales: jax.Array | None,
    ) -> None:
        product = jax.lax.dot_general(
            queries_ref[...], keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        if key_scales is not None:
            product *= key_scales
        scores = jnp.where(seen, nn.cap(product * scale, cap), -jnp.inf)
        highest = highest_ref[:, :1]
        higher = jnp.maximum(highest, jnp.max(scores, axis=1, keepdims=True))
        shrink, weights = jnp.exp(highest - higher), jnp.exp(scores - higher)
        weights_of_values = weights if value_scales is None else weights * value_scales
        mixed = jnp.dot(weights_of_values.astype(values.dtype), values, preferred_element_type=jnp.float32)
        total = total_ref[:, :1] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        highest_ref[...] = jnp.broadcast_to(higher, highest_ref.shape)
        total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
        mixed_ref[...] = mixed_ref[...] * shrink + mixed

    @pl.when(start == 0)
    def _() -> None:
        highest_ref[...] = jnp.full_like(highest_ref, jnp.finfo(jnp.float32).min)
        total_ref[...] = jnp.zeros_like(total_ref)
        mixed_ref[...] = jnp.zeros_like(mixed_ref)
        keys, values = (kv_rounding.numbers(ref[...], queries_ref.dtype) for ref in (keys_ref, values_ref))
        scales = [None if ref is None else ref[...] for ref in (key_scales_ref, value_scales_ref)]
        add_keys(keys, values, mask_ref[...] > 0, *scales)

    @pl.when(start < in_use)
    def _() -> None:
        def entries(shape: tuple[int, int], axis: int) -> jax.Array:
            return start + jax.lax.broadcasted_iota(jnp.int32, shape, axis)

        # Past the end of the cache there may be NaN, and 0 * NaN is NaN.
        keys, values = (
            kv_rounding.numbers(_whole(refs, 0), queries_ref.dtype) for refs in (cached_keys_refs, cached_values_refs)
        )
        values = jnp.where(entries((chunk, values.shape[1]), 0) < in_use, values, jnp.zeros_like(values))
        scales = [
            None if refs is None else jnp.where(entries((1, chunk), 1) < in_use, _whole(refs, 1), 0.0)
            for refs in (cached_key_scales_refs, cached_value_scales_refs)
        ]
        seen = entries((queries_ref.shape[0], chunk), 1) < in_use
        if oldest_ref is not None:
            seen &= entry_positions(entries((1, chunk), 1), length, capacity) >= oldest_ref[...]
        add_keys(keys, values, seen, *scales)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        mixed, total = mixed_ref[...], total_ref[:, :1]
        if sinks_ref is not None:
            total += jnp.exp(sinks_ref[...] - highest_ref[:, :1])  # inf where a sink takes all the weight
        # A row of padding may see nothing, and then its total is 0.
        out_ref[...] = (mixed / jnp.maximum(total, 1e-30)).astype(out_ref.dtype)


def _whole(refs: Refs, axis: int) -> jax.Array:
    """Returns the parts of a chunk as one array."""
    parts = [ref[...] for ref in refs]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
