"""Matrices of compressed-tensors: integers of four or eight bits, and NVFP4. Those in FP8 are in `hf_fp8`."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jlade.conversion.hf_packed import FP4, SCALE_TYPES, Decoded, FileMatrix, file_matrix, unpack_integers
from jlade.conversion.parts import Shape
from jlade.conversion.weight_files import StoredTensor, check_kind

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "dense")
PACKED, SHAPE, WEIGHT, SCALE = "weight_packed", "weight_shape", "weight", "weight_scale"
ZERO, ORDER, GLOBAL = "weight_zero_point", "weight_g_idx", "weight_global_scale"
NVFP4_GROUP = 16
# Ends of the names of tensors by which activations and caches would be rounded.
OF_ACTIVATIONS = (
    *(f".{place}_{kind}" for place in ("input", "output") for kind in ("scale", "zero_point", "global_scale")),
    *(f".{place}_scale" for place in "kvq"),
)


def wrong_setting(settings: Mapping[str, Any]) -> str | None:
    """Returns the setting in config.json with which weights are not read, for a message."""
    formats = [settings.get("format"), *(group.get("format") for group in _module_groups(settings))]
    given = [each for each in formats if each not in (None, "mixed-precision")]
    if others := [each for each in given or [None] if each not in FORMATS]:
        return f"format is {others[0]!r}, supported is {' or '.join(map(repr, FORMATS))}"
    status = settings.get("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):  # early files are compressed and say frozen
        return f"quantization_status is {status!r}, supported is 'compressed' or 'frozen'"
    sparsity = settings.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        return f"sparsity_config is {sparsity!r}, supported is the format 'dense'"
    transform = settings.get("transform_config")
    if transform and (not isinstance(transform, dict) or transform.get("config_groups")):
        return "transform_config has transforms, supported is none"
    return None


def assembled(tensors: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Returns the tensors of files with each matrix as one, but those in FP8, and without those of activations.

    Args:
      settings: of the quantization in config.json.

    Raises:
      ValueError: names the file and the tensor that is missing, or does not fit.
    """
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(OF_ACTIVATIONS)}
    zeros, optional = (ZERO,) if _have_zeros(settings) else (), (ZERO, ORDER)
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        prefix = f"{module}."
        if kind == PACKED and tensor.dtype == "U8":
            found[prefix + WEIGHT] = _nvfp4(prefix, _take(found, prefix, (PACKED, SCALE, GLOBAL)))
        elif kind == PACKED:
            found[prefix + WEIGHT] = _packed(prefix, _take(found, prefix, (PACKED, SCALE, SHAPE, *zeros), optional))
        elif kind == WEIGHT and tensor.dtype == "I8":
            found[prefix + WEIGHT] = _int8(prefix, _take(found, prefix, (WEIGHT, SCALE, *zeros), optional))
    return found


def _have_zeros(settings: Mapping[str, Any]) -> bool:
    """Whether the integers of all groups of modules have zeros."""
    weights = [group.get("weights") for group in _module_groups(settings)]
    integers = [each for each in weights if isinstance(each, dict) and each.get("type", "int") == "int"]
    return bool(integers) and not any(each.get("symmetric", True) for each in integers)


def _module_groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the settings of each group of modules."""
    groups = settings.get("config_groups")
    return [each for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []


def _take(
    found: dict[str, StoredTensor], prefix: str, needed: tuple[str, ...], others: tuple[str, ...] = ()
) -> dict[str, StoredTensor]:
    """Returns tensors that make up a matrix, by name, and removes them."""
    if missing := [prefix + kind for kind in needed if prefix + kind not in found]:
        file = found[prefix + needed[0]].file
        raise ValueError(f"{file}: {missing[0]} is missing, though {prefix}{needed[0]} is there")
    return {prefix + kind: found.pop(prefix + kind) for kind in (*needed, *others) if prefix + kind in found}


def _packed(prefix: str, arrays: dict[str, StoredTensor]) -> FileMatrix:
    codes, scales, size = arrays[prefix + PACKED], arrays[prefix + SCALE], arrays.pop(prefix + SHAPE)
    check_kind(prefix + SHAPE, size, (2,), ("I64", "I32"))
    outputs, inputs = size.read_bytes(prefix + SHAPE).tolist()
    columns = codes.shape[-1] if codes.shape else 0
    bits = next((bits for bits in (4, 8) if columns * 32 == inputs * bits), 0)
    if not bits:
        raise ValueError(
            f"{codes.file}: {prefix}{PACKED} has {columns} columns for {inputs} inputs; accepted are 4 or 8 bits"
        )
    check_kind(prefix + PACKED, codes, (outputs, columns), ("I32",))
    zero = arrays.get(prefix + ZERO)
    if zero is not None:
        whole = (outputs, _groups(prefix, scales, outputs))
        is_packed = zero.dtype == "I32"
        check_kind(prefix + ZERO, zero, (-(-outputs * bits // 32), whole[1]) if is_packed else whole, ("I32", "I8"))
    return _matrix(prefix, "pack-quantized", arrays, (outputs, inputs), bits)


def _int8(prefix: str, arrays: dict[str, StoredTensor]) -> FileMatrix:
    codes, zero = arrays[prefix + WEIGHT], arrays.get(prefix + ZERO)
    if len(codes.shape) != 2:
        raise ValueError(f"{codes.file}: {prefix}{WEIGHT} has shape {codes.shape}; it must be a matrix")
    if zero is not None:
        check_kind(prefix + ZERO, zero, arrays[prefix + SCALE].shape, ("I8",))
    return _matrix(prefix, "int-quantized", arrays, codes.shape, 8)


def _groups(prefix: str, scales: StoredTensor, outputs: int) -> int:
    """Returns the number of groups of inputs, 1 for a scale of each output or of the matrix."""
    shape = scales.shape
    groups = 1 if shape in ((), (1,), (1, 1)) else shape[1] if len(shape) == 2 and shape[0] == outputs else 0
    if not groups or scales.dtype not in SCALE_TYPES:
        raise ValueError(
            f"{scales.file}: {prefix}{SCALE} has shape {shape} and type {scales.dtype}; a matrix with {outputs} "
            "outputs must have a scale in floating point for each, or for each group of its inputs"
        )
    return groups


def _matrix(prefix: str, dtype: str, arrays: dict[str, StoredTensor], shape: Shape, bits: int) -> FileMatrix:
    outputs, inputs = shape
    scales, order = arrays[prefix + SCALE], prefix + ORDER if prefix + ORDER in arrays else None
    groups = _groups(prefix, scales, outputs)
    if order is not None:
        check_kind(order, arrays[order], (inputs,), ("I32", "I64"))
    elif inputs % groups:
        raise ValueError(f"{scales.file}: {prefix}{SCALE} has {groups} groups, which do not divide {inputs} inputs")
    kinds = [name.removeprefix(prefix) for name in arrays]
    decode = functools.partial(_decode, kinds=kinds, shape=shape, bits=bits, groups=groups)
    return file_matrix(
        dtype,
        shape,
        arrays,
        bits,
        groups,
        decode,
        scales=scales.value_dtype,
        has_zero=prefix + ZERO in arrays,
        order=order,
    )


def _decode(*stored: np.ndarray, kinds: list[str], shape: Shape, bits: int, groups: int) -> Decoded:
    arrays = dict(zip(kinds, stored, strict=True))
    outputs, inputs = shape

    def signed(array: np.ndarray, axis: int) -> np.ndarray:
        """Integers that are packed are larger by a half of their range."""
        if array.dtype == np.int8:
            return array
        return (unpack_integers(array, bits, axis) - np.uint8(1 << (bits - 1))).view(np.int8)

    def of_groups(array: np.ndarray) -> np.ndarray:
        """Returns an array [groups, out] of one with a value for each output and group, or for all."""
        rows = array.reshape(-1, groups)[:outputs]
        return np.ascontiguousarray(np.broadcast_to(rows, (outputs, groups)).T)

    codes = np.ascontiguousarray(signed(stored[0], axis=1).T)
    scale, zero = of_groups(arrays[SCALE]), arrays.get(ZERO)
    zero = None if zero is None else of_groups(signed(zero, axis=0)).astype(scale.dtype)
    of_inputs = arrays[ORDER] if ORDER in arrays else np.arange(inputs) // (inputs // groups)
    return Decoded(codes, scale, of_inputs, zero)


def _nvfp4(prefix: str, arrays: dict[str, StoredTensor]) -> FileMatrix:
    codes, scales, whole = arrays.values()
    if len(codes.shape) != 2 or 2 * codes.shape[1] % NVFP4_GROUP:
        raise ValueError(f"{codes.file}: {prefix}{PACKED} has shape {codes.shape}; it must be [out, in / 2]")
    outputs, inputs = codes.shape[0], 2 * codes.shape[1]
    groups = inputs // NVFP4_GROUP
    check_kind(prefix + SCALE, scales, (outputs, groups), ("F8_E4M3",))
    check_kind(prefix + GLOBAL, whole, (1,), ("F32",))
    return file_matrix("NVFP4", (outputs, inputs), arrays, 4, groups, _decode_nvfp4, scales="float32", has_levels=True)


def _decode_nvfp4(codes: np.ndarray, scales: np.ndarray, whole: np.ndarray) -> Decoded:
    numbers = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    with np.errstate(all="ignore"):  # the broken rows tell of it
        scale = np.ascontiguousarray((scales.astype(np.float32) / whole).T)
    groups = np.arange(numbers.shape[1]) // NVFP4_GROUP
    return Decoded(np.ascontiguousarray(numbers.T).view(np.int8), scale, groups, levels=FP4)
