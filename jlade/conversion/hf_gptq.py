"""Matrices of AWQ and GPTQ: integers of few bits in those of 32, with scales and zeros for each group of inputs."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jlade.conversion.hf_packed import (
    SCALE_TYPES,
    DecodedMatrix,
    FileMatrix,
    file_matrix,
    matches,
    num_groups,
    take,
    unpack_integers,
)
from jlade.conversion.weight_files import StoredTensor, check_kind

CODES, ZEROS, SCALES, ORDER = ".qweight", ".qzeros", ".scales", ".g_idx"  # ends of names
GROUP_SIZE = 128  # inputs of a group in transformers, where config.json does not say
# Of eight outputs in turn, the places in their integer, of which 0 has the lowest bits.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def wrong_setting(settings: Mapping[str, Any]) -> str | None:
    """Returns the setting in config.json with which weights are not read, for a message."""
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(each, dict) for each in dynamic.values()):
        return f"dynamic is {dynamic!r}, supported is an object with objects"
    accepted = (4,) if settings["quant_method"] == "awq" else (4, 8)
    for place, own in [("", settings), *((f" in dynamic, {pattern},", own) for pattern, own in dynamic.items())]:
        size, bits = own.get("group_size", GROUP_SIZE), own.get("bits", 4)
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            return f"group_size{place} is {size!r}, supported is a positive integer or -1"
        if bits not in accepted:
            return f"bits{place} is {bits!r}, supported is {' or '.join(map(str, accepted))}"
    return None


def assembled(tensors: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Returns the tensors of files with each matrix as one, given the settings of the quantization in config.json."""
    result = dict(tensors)
    for name in tensors:
        if name.endswith(CODES):
            module = name.removesuffix(CODES)
            module_settings = _settings_of(module, settings)
            has_order = module_settings.get("desc_act") and module_settings["quant_method"] == "gptq"
            arrays = take(result, module, (CODES, ZEROS, SCALES, *([ORDER] if has_order else [])), [ORDER])
            build = _awq if module_settings["quant_method"] == "awq" else _gptq
            result[f"{module}.weight"] = build(module, arrays, module_settings)
    return result


def _settings_of(module: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a module: its own are those of the first pattern in `dynamic` that its name begins with.

    GPTQModel marks patterns of modules that are not quantized by "-:", and may mark others by "+:".
    """
    for pattern, own in (settings.get("dynamic") or {}).items():
        if not pattern.startswith("-:") and matches("dynamic", pattern.removeprefix("+:"), module):
            return {**settings, **own}
    return dict(settings)


def _awq(module: str, arrays: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> FileMatrix:
    codes, zeros, scales = (arrays[module + end] for end in (CODES, ZEROS, SCALES))
    inputs, columns = _size(codes, module)
    groups, outputs = num_groups(module, codes, inputs, settings.get("group_size", GROUP_SIZE)), 8 * columns
    check_kind(module + CODES, codes, (inputs, columns), ("I32",))
    check_kind(module + ZEROS, zeros, (groups, columns), ("I32",))
    check_kind(module + SCALES, scales, (groups, outputs), SCALE_TYPES)
    dtype = scales.value_dtype
    return file_matrix("AWQ", (outputs, inputs), arrays, 4, groups, _decode_awq, scales=dtype, has_zero=True)


def _decode_awq(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, order: np.ndarray | None = None
) -> DecodedMatrix:
    def in_order(packed: np.ndarray) -> np.ndarray:
        return unpack_integers(packed, 4, axis=1, places=AWQ_PLACES).view(np.int8) - np.int8(8)

    groups = np.arange(len(codes)) // (len(codes) // len(scales))
    return DecodedMatrix(in_order(codes), scales, groups, in_order(zeros).astype(scales.dtype))


def _gptq(module: str, arrays: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> FileMatrix:
    codes, zeros, scales = (arrays[module + end] for end in (CODES, ZEROS, SCALES))
    (rows, outputs), bits = _size(codes, module), settings.get("bits", 4)
    order, inputs = module + ORDER if module + ORDER in arrays else None, rows * 32 // bits
    groups = num_groups(module, codes, inputs, settings.get("group_size", GROUP_SIZE), has_order=order is not None)
    check_kind(module + CODES, codes, (rows, outputs), ("I32",))
    check_kind(module + ZEROS, zeros, (groups, outputs * bits // 32), ("I32",))
    check_kind(module + SCALES, scales, (groups, outputs), SCALE_TYPES)
    version = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    subtracted = 1 if str(version).lower() == "gptq" else 0
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
) -> DecodedMatrix:
    """Returns a matrix whose zeros are larger than those in the file by `subtracted`.

    It is added to the integers of 32 bits, as GPTQModel adds it: a number without bits left carries over.
    """
    half = 1 << (bits - 1)
    of_all = np.uint32(subtracted * (0x11111111 if bits == 4 else 0x01010101))
    zero = unpack_integers(zeros.view(np.uint32) + of_all, bits, axis=1).astype(np.int16) - half
    own = unpack_integers(codes, bits, axis=0)
    groups = np.arange(len(own)) // max(1, len(own) // len(scales)) if order is None else order
    return DecodedMatrix((own - np.uint8(half)).view(np.int8), scales, groups, zero.astype(scales.dtype))


def _size(tensor: StoredTensor, module: str) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise ValueError(f"{tensor.file}: a tensor of {module} has shape {tensor.shape}; it must be a matrix")
    return tensor.shape[0], tensor.shape[1]
