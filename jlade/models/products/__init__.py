"""Products with matrices in groups, by plain JAX or a kernel."""

import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from jlade.models import grouped
from jlade.models.grouped import GroupedMatrix, MatrixShape, is_grouped


def multiply(
    x: jax.Array,
    matrix: GroupedMatrix,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns `x` [..., in] times `matrix` [in, out]: [..., out] in the dtype of `x`.

    "plain" is JAX without kernels: compilers for accelerators write out the converted matrix in each step. "gpu" is a
    kernel for NVIDIA GPUs and "tpu" one for TPUs, which read the codes and no more. Matrices that a kernel does not
    take, and for "tpu" more than 512 tokens, are multiplied by "plain".

    Args:
      implementation: None for that of the matrix; see `assign`.
      interpret: run the kernel as plain JAX, on any device; for tests.
    """
    name, rows = implementation or matrix.implementation, x.reshape(-1, x.shape[-1])
    if not _takes(name, rows, matrix):
        return grouped.multiply(x, matrix)
    arrays = rows[None], jnp.zeros(1, jnp.int32), matrix.mapped(lambda array: array[None])
    return _kernel(name).multiply_tiles(*arrays, interpret)[0].reshape(*x.shape[:-1], -1)


def multiply_each(x: jax.Array, matrices: GroupedMatrix, interpret: bool = False) -> jax.Array:
    """Returns `multiply` for each of `x` [N, T, in] with its matrix of [N, in, out]: [N, T, out]."""
    if _takes(matrices.implementation, x[0], matrices):
        return multiply_tiles(x, jnp.arange(len(x), dtype=jnp.int32), matrices, interpret)
    levels = matrices.levels  # of all matrices

    def multiply_one(x: jax.Array, matrix: GroupedMatrix) -> jax.Array:
        return grouped.multiply(x, matrix.replace(levels=levels))  # type: ignore[attr-defined]

    return jax.vmap(multiply_one)(x, matrices.replace(levels=None))  # type: ignore[attr-defined]


def multiply_tiles(tiles: jax.Array, experts: jax.Array, matrices: GroupedMatrix, interpret: bool = False) -> jax.Array:
    """Returns the products [P, M, out] of tiles with the matrices of their experts, by the kernel of the matrices.

    Only the matrices of experts with tiles are read; the products of tiles without an expert are unspecified.

    Args:
      tiles: [P, M, in] tokens, or padding.
      experts: [P] int32, the expert of each tile; N for none.
      matrices: [N, in, out], which `takes_tiles` accepts.
      interpret: see `multiply`.
    """
    product: jax.Array = _kernel(matrices.implementation).multiply_tiles(tiles, experts, matrices, interpret)
    return product


def parts_of(stored: jax.Array, is_place: bool = False) -> tuple[jax.Array, ...]:
    """Returns codes as kernels read them, int32: of bytes the lower and the upper four bits, of int8 the numbers.

    Args:
      is_place: whether codes are places in a table, 0 to 15, and no numbers with a sign.
    """
    numbers = stored.astype(jnp.int32)
    if stored.dtype != jnp.uint8:
        return (numbers & 15,) if is_place else (numbers,)
    return (numbers & 15, numbers >> 4) if is_place else (numbers << 28 >> 28, numbers << 24 >> 28)


def takes_tiles(matrices: Any, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether matrices, of whatever type, have a kernel that takes them, with tiles of up to 512 tokens."""
    if not is_grouped(matrices) or matrices.implementation not in ("gpu", "tpu"):
        return False
    return obstacle(matrices.implementation, MatrixShape.of(matrices, dtype)) is None


def obstacle(name: str, shape: MatrixShape) -> str | None:
    """Returns the reason why the kernel "gpu" or "tpu" does not take a matrix, None if it does."""
    # Newer versions of JAX may lack it.
    if name == "gpu" and importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return "needs Pallas's back end for Triton, which this version of JAX lacks"
    reason: str | None = _kernel(name).obstacle(shape)
    return reason


def _takes(name: str, x: jax.Array, matrix: GroupedMatrix) -> bool:
    """Returns whether a kernel multiplies `x` [T, in] by a matrix, or by one of experts."""
    if name not in ("gpu", "tpu") or obstacle(name, MatrixShape.of(matrix, x.dtype)) is not None:
        return False
    return name == "gpu" or len(x) <= _kernel(name).MAX_ROWS


def _kernel(name: str) -> Any:
    """Returns the module of a kernel. It is imported on demand, as some builds of JAX lack parts of Pallas."""
    return importlib.import_module(f"jlade.models.products.{name}")


def assign(params: Any, implementation: str) -> Any:
    """Returns a pytree whose matrices in groups are multiplied by an implementation."""

    def assigned(leaf: Any) -> Any:
        return leaf.replace(implementation=implementation) if is_grouped(leaf) else leaf  # type: ignore[attr-defined]

    return params if implementation in ("plain", "auto") else jax.tree.map(assigned, params, is_leaf=is_grouped)
