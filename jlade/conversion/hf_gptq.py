"""Matrices of AWQ and GPTQ: integers of few bits in those of 32, with scales and zeros for each group of inputs."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jlade.conversion.hf_packed import SCALE_TYPES, Decoded, FileMatrix, file_matrix, unpack_integers
from jlade.conversion.weight_files import StoredTensor, check_kind

CODES, ZEROS, SCALES, ORDER = ".qweight", ".qzeros", ".scales", ".g_idx"  # ends of names
# Of eight outputs in turn, the places in their integer, of which 0 has the lowest bits.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def assembled(tensors: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Returns the tensors of files with each matrix as one.

    Args:
      settings: of the quantization in config.json.

    Raises:
      ValueError: names the file and the tensor that is missing, or does not fit.
    """
    found = dict(tensors)
    for name in tensors:
        if name.endswith(CODES):
            module = name.removesuffix(CODES)
            ends = (CODES, ZEROS, SCALES, ORDER)
            arrays = {module + end: found.pop(module + end) for end in ends if module + end in found}
            needed = ends if settings.get("desc_act") and settings["quant_method"] == "gptq" else ends[:3]
            if missing := [module + end for end in needed if module + end not in arrays]:
                raise ValueError(f"{tensors[name].file}: {missing[0]} is missing, though {name} is there")
            build = _awq if settings["quant_method"] == "awq" else _gptq
            found[f"{module}.weight"] = build(module, arrays, settings)
    return found


def _awq(module: str, arrays: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> FileMatrix:
    codes, zeros, scales = (arrays[module + end] for end in (CODES, ZEROS, SCALES))
    inputs, columns = _size(codes, module)
    groups, outputs = _size(scales, module)[0], 8 * columns
    check_kind(module + CODES, codes, (inputs, columns), ("I32",))
    check_kind(module + ZEROS, zeros, (groups, columns), ("I32",))
    check_kind(module + SCALES, scales, (groups, outputs), SCALE_TYPES)
    if groups < 1 or inputs % groups:
        raise ValueError(f"{scales.file}: {module}{SCALES} has {groups} groups, which do not divide {inputs} inputs")
    dtype = scales.value_dtype
    return file_matrix("AWQ", (outputs, inputs), arrays, 4, groups, _decode_awq, scales=dtype, has_zero=True)


def _decode_awq(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, order: np.ndarray | None = None) -> Decoded:
    def in_order(packed: np.ndarray) -> np.ndarray:
        return unpack_integers(packed, 4, axis=1, places=AWQ_PLACES).view(np.int8) - np.int8(8)

    groups = np.arange(len(codes)) // (len(codes) // len(scales))
    return Decoded(in_order(codes), scales, groups, in_order(zeros).astype(scales.dtype))


def _gptq(module: str, arrays: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> FileMatrix:
    codes, zeros, scales = (arrays[module + end] for end in (CODES, ZEROS, SCALES))
    (rows, outputs), groups = _size(codes, module), _size(scales, module)[0]
    bits = 32 * _size(zeros, module)[1] // max(1, outputs)
    if bits not in (4, 8):
        raise ValueError(f"{codes.file}: {module}{CODES} has {bits} bits; accepted are 4 and 8")
    inputs = rows * 32 // bits
    check_kind(module + CODES, codes, (rows, outputs), ("I32",))
    check_kind(module + ZEROS, zeros, (groups, outputs * bits // 32), ("I32",))
    check_kind(module + SCALES, scales, (groups, outputs), SCALE_TYPES)
    order = module + ORDER if module + ORDER in arrays else None
    if order is not None:
        check_kind(order, arrays[order], (inputs,), ("I32", "I64"))
    elif groups < 1 or inputs % groups:
        raise ValueError(f"{scales.file}: {module}{SCALES} has {groups} groups, which do not divide {inputs} inputs")
    subtracted = 1 if _format(settings) == "gptq" else 0
    decode = functools.partial(_decode_gptq, bits=bits, subtracted=subtracted)
    dtype = scales.value_dtype
    return file_matrix(
        "GPTQ", (outputs, inputs), arrays, bits, groups, decode, scales=dtype, has_zero=True, order=order
    )


def _decode_gptq(
    codes: np.ndarray,
    zeros: np.ndarray,
    scales: np.ndarray,
    order: np.ndarray | None = None,
    *,
    bits: int,
    subtracted: int,
) -> Decoded:
    """Returns a matrix whose zeros are larger than those in the file by `subtracted`.

    It is added to the integers of 32 bits, as GPTQModel adds it: a number without bits left carries over.
    """
    half = 1 << (bits - 1)
    of_all = np.uint32(subtracted * (0x11111111 if bits == 4 else 0x01010101))
    zero = unpack_integers(zeros.view(np.uint32) + of_all, bits, axis=1).astype(np.int16) - half
    own = unpack_integers(codes, bits, axis=0)
    groups = np.arange(len(own)) // max(1, len(own) // len(scales)) if order is None else order
    return Decoded((own - np.uint8(half)).view(np.int8), scales, groups, zero.astype(scales.dtype))


def _format(settings: Mapping[str, Any]) -> str:
    return str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()


def _size(tensor: StoredTensor, module: str) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise ValueError(f"{tensor.file}: a tensor of {module} has shape {tensor.shape}; it must be a matrix")
    return tensor.shape[0], tensor.shape[1]
