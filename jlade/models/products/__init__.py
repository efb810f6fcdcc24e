"""Products with matrices in groups, and the choice of their implementation."""

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jlade.models import grouped, trial
from jlade.models.grouped import GroupedMatrix, is_grouped
from jlade.models.products.contest import prepare
from jlade.models.products.shape import MatrixShape as MatrixShape

IMPLEMENTATIONS = ("auto", "plain", "gpu", "tpu")


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
    return _kernel(name).multiply(rows, matrix, interpret).reshape(*x.shape[:-1], -1)


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


def takes_tiles(matrices: Any, dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether matrices, of whatever type, have a kernel that takes them, with tiles of up to 512 tokens."""
    if not is_grouped(matrices) or matrices.implementation not in ("gpu", "tpu"):
        return False
    return _obstacle(matrices.implementation, MatrixShape.of(matrices, dtype)) is None


def _takes(name: str, x: jax.Array, matrix: GroupedMatrix) -> bool:
    """Returns whether a kernel multiplies `x` [T, in] by a matrix, or by one of experts."""
    if name not in ("gpu", "tpu") or _obstacle(name, MatrixShape.of(matrix, x.dtype)) is not None:
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


def resolve(implementation: str, device: jax.Device, shapes: Sequence[MatrixShape], may_run: bool = True) -> str:
    """Returns the implementation that runs on `device`: "plain", "gpu" or "tpu".

    "auto" gives the kernel of the device if it passes its trials, otherwise "plain"; see `jlade.models.trial`. Other
    implementations are not tried.

    Args:
      implementation: one of `IMPLEMENTATIONS`.
      device: the device that holds the parameters.
      shapes: of the largest matrix of each kind, largest first. Those that a kernel does not take have no trial.
      may_run: whether "auto" may run the kernel on `device` to try it; otherwise only a remembered verdict counts.

    Raises:
      ValueError: `implementation` is unknown, or names a kernel that can run on `device` with none of the matrices.
    """
    check_implementation(implementation)
    name = device.platform if implementation == "auto" else implementation
    if name not in ("gpu", "tpu"):
        return "plain"
    obstacles = {shape: _obstacle(name, shape, device) for shape in shapes}
    taken = [shape for shape, obstacle in obstacles.items() if obstacle is None]
    if implementation != "auto":
        if not taken:
            raise ValueError(f"products {name!r} {obstacles[shapes[0]]}; choose 'auto' or 'plain'")
        return name
    kernel, plain = (functools.partial(multiply, implementation=each) for each in (name, "plain"))

    def passes(shape: MatrixShape) -> bool:
        contest = functools.partial(prepare, kernel, plain, device, shape)
        return trial.passes("products", name, device, shape, contest, may_run)

    return name if taken and all(map(passes, taken)) else "plain"


def resolve_unattached(implementation: str, device: jax.Device, shapes: Sequence[MatrixShape]) -> str:
    """Returns `resolve` for a device that is not there: "auto" is its kernel if that can run, as if it had passed."""
    if implementation == "auto" and device.platform in ("gpu", "tpu"):
        can_run = any(_obstacle(device.platform, shape, device) is None for shape in shapes)
        return device.platform if can_run else "plain"
    return resolve(implementation, device, shapes)


def check_implementation(implementation: str) -> None:
    """Raises a ValueError if `implementation` is unknown."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"products must be one of {', '.join(map(repr, IMPLEMENTATIONS))}; got {implementation!r}")


def _obstacle(name: str, shape: MatrixShape, device: jax.Device | None = None) -> str | None:
    """Returns the reason why a kernel cannot run, None if it can."""
    if device is not None and device.platform != name:
        return f"needs a {name.upper()}, and the device is {device.device_kind}"
    # Newer versions of JAX may lack it.
    if name == "gpu" and importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return "needs Pallas's back end for Triton, which this version of JAX lacks"
    return _kernel(name).obstacle(shape)
