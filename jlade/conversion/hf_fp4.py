"""Matrices of numbers of four bits with exponents, MXFP4 and NVFP4, with a scale for each group of inputs."""

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from jlade.conversion.hf_packed import DecodedMatrix, FileMatrix, file_matrix
from jlade.conversion.weight_files import EXPONENTS, StoredTensor, check_kind

NVFP4_GROUP, MXFP4_GROUP = 16, 32  # inputs with one scale
# The numbers of 4 bits: sign, exponent of two bits, one bit more (OCP Microscaling Formats, section 5.3.3).
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mxfp4(arrays: Mapping[str, StoredTensor]) -> FileMatrix:
    """Returns the matrix of bytes [out, in / 2], lower bits first, and exponents of scales [out, in / 32], by name."""

    def powers(exponents: np.ndarray) -> np.ndarray:
        return exponents.view(ml_dtypes.float8_e8m0fnu).astype(ml_dtypes.bfloat16)

    return _matrix("MXFP4", arrays, MXFP4_GROUP, EXPONENTS, powers, "bfloat16")


def nvfp4(arrays: Mapping[str, StoredTensor], combine: Callable[..., np.ndarray], group: int) -> FileMatrix:
    """Returns the matrix of bytes [out, in / 2], scales [out, in / group] and one for all of these, by name.

    `combine` is `np.multiply` or `np.divide`, of scales and the one for all.
    """
    *_, (name, whole) = arrays.items()
    check_kind(name, whole, (1,) if whole.shape else (), ("F32",))

    def combined(scales: np.ndarray, whole: np.ndarray) -> np.ndarray:
        return combine(scales.astype(np.float32), whole)

    return _matrix("NVFP4", arrays, group, ("F8_E4M3",), combined, "float32")


def _matrix(
    dtype: str,
    arrays: Mapping[str, StoredTensor],
    group: int,
    accepted: tuple[str, ...],
    scale_of: Callable[..., np.ndarray],
    scales_in: str,
) -> FileMatrix:
    """Returns a matrix, given a function of the scales in a file that returns those of the matrix, and their dtype."""
    (name, codes), (scales_name, scales), *_ = arrays.items()
    if len(codes.shape) != 2 or 2 * codes.shape[1] % group:
        raise ValueError(
            f"{codes.file}: {name} has shape {codes.shape}; it must be [out, in / 2], with groups of {group} inputs"
        )
    outputs, inputs = codes.shape[0], 2 * codes.shape[1]
    groups = inputs // group
    check_kind(name, codes, codes.shape, ("U8",))
    check_kind(scales_name, scales, (outputs, groups), accepted)

    def decode(codes: np.ndarray, *scales: np.ndarray) -> DecodedMatrix:
        numbers = np.stack([codes & 15, codes >> 4], axis=-1).reshape(outputs, inputs)
        with np.errstate(all="ignore"):  # the broken rows tell of it
            scale = np.ascontiguousarray(scale_of(*scales).T)
        of_inputs = np.arange(inputs) // group
        return DecodedMatrix(np.ascontiguousarray(numbers.T).view(np.int8), scale, of_inputs, levels=LEVELS)

    return file_matrix(dtype, (outputs, inputs), arrays, 4, groups, decode, scales=scales_in, has_levels=True)
