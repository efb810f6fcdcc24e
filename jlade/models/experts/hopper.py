"""Products of tokens with the matrices of their experts, as one Pallas kernel for NVIDIA GPUs of the Hopper generation.

With few tokens, reading the weights takes all the time. So each program reads some columns of an expert's matrices
once, block by block, with several blocks on their way. It computes the transposed product: the hardware multiplies at
least 64 rows by at least 8 columns, so the weights give the rows, and the tokens the columns.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = (8, 16, 32, 64)  # of a tile
BLOCK = 64  # rows of the weights, and the fewest columns, in a step of a program
SHARED_MEMORY = 96 * 1024  # bytes of the blocks of a program, so that a multiprocessor runs at least two programs
PROGRAMS = 128  # programs take wide blocks if there are at least this many; a Hopper has 132 multiprocessors


def obstacle(dtype: jax.typing.DTypeLike, rows: int, size: int, width: int) -> str | None:
    """Returns the reason why `multiply` does not take arrays of this dtype and shape, None if it does.

    Args:
      rows, size, width: M, K and O of `multiply`.
    """
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"needs 16-bit floats, and these are {jnp.dtype(dtype).name}"
    if rows not in ROWS:
        return f"needs tiles of 8, 16, 32 or 64 rows, and these have {rows}"
    if not size or not width or size % BLOCK or width % BLOCK:
        return f"needs matrices whose sides are multiples of {BLOCK}, and these are {size} x {width}"
    return None


def multiply(tiles: jax.Array, experts: jax.Array, *weights: jax.Array, interpret: Any = None) -> list[jax.Array]:
    """Returns the products [P, M, O] of tiles with the matrices of their experts, for each array of matrices.

    Only the weights of experts with tiles are read; the products of tiles without an expert are unspecified. Sums are
    in float32. Each tile reads the weights of its expert, which the L2 cache holds while its other tiles run.

    Args:
      tiles: [P, M, K] bfloat16 or float16, M tokens or padding each; M is 8, 16, 32 or 64.
      experts: [P] int32, the expert of each tile, ascending; N for none.
      weights: arrays [N, K, O] of the dtype of the tiles, such as the gate and up matrices of N MLPs, which share the
        programs; K and O are multiples of 64.
      interpret: parameters of Pallas that simulate the GPU on a CPU; for tests.

    Raises:
      ValueError: there is an `obstacle`.
    """
    num_tiles, rows, size = tiles.shape
    width = weights[0].shape[2]
    if reason := obstacle(tiles.dtype, rows, size, width):
        raise ValueError(f"the kernel of experts {reason}")
    is_wide = len(weights) == 1 and width % (2 * BLOCK) == 0 and num_tiles * width // (2 * BLOCK) >= PROGRAMS
    columns = 2 * BLOCK if is_wide else BLOCK

    step_bytes = tiles.dtype.itemsize * BLOCK * (rows + columns * len(weights))
    products = plgpu.kernel(
        functools.partial(_kernel, slots=SHARED_MEMORY // step_bytes),
        out_type=[jax.ShapeDtypeStruct((num_tiles, rows, width), tiles.dtype)] * len(weights),
        scratch_types={"products_smem": plgpu.SMEM((len(weights), rows, columns), tiles.dtype)},
        grid=(num_tiles, width // columns),
        grid_names=("tile", "column"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(experts, tiles, *weights)
    return list(products)


def _kernel(experts_ref: jax.Ref, tiles_ref: jax.Ref, *refs: jax.Ref, products_smem: jax.Ref, slots: int) -> None:
    """Multiplies a tile by some columns of the matrices of its expert. `refs` are those of the weights and products."""
    tile, column = jax.lax.axis_index("tile"), jax.lax.axis_index("column")
    number, rows, columns = products_smem.shape
    weights_refs, products_refs = refs[:number], refs[number:]

    expert = experts_ref[tile]

    @pl.when(expert < weights_refs[0].shape[0])
    def _() -> None:
        def accumulate(*sums: Any) -> list[jax.Array]:
            def add_block(_: Any, tile_smem: Any, *weights_smem: Any) -> None:
                for each, weights in zip(sums, weights_smem, strict=True):
                    plgpu.wgmma(each, weights.T, tile_smem.T)
                plgpu.wgmma_wait(number)  # for those of the step before, whose blocks are now replaced

            tile_block = plgpu.BlockSpec((None, rows, BLOCK), lambda i: (tile, 0, i), delay_release=1)
            weights_block = plgpu.BlockSpec((None, BLOCK, columns), lambda i: (expert, i, column), delay_release=1)
            plgpu.emit_pipeline(
                add_block,
                grid=(tiles_ref.shape[2] // BLOCK,),
                in_specs=[tile_block, *[weights_block] * number],
                max_concurrent_steps=slots,
            )(tiles_ref, *weights_refs)
            return [each[...] for each in sums]

        products = pl.run_scoped(accumulate, *[plgpu.WGMMAAccumulatorRef((columns, rows), jnp.float32)] * number)
        for i, product in enumerate(products):
            products_smem.at[i].T[...] = product.astype(products_smem.dtype)
        plgpu.commit_smem()
        for i, product_ref in enumerate(products_refs):
            at = (tile, slice(None), pl.ds(column * columns, columns))
            plgpu.copy_smem_to_gmem(products_smem.at[i], product_ref.at[at])
        plgpu.wait_smem_to_gmem(0)
