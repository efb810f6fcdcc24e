"""Matrices of compressed-tensors: integers of four or eight bits, FP8, MXFP8, MXFP4 and NVFP4."""

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jlade.conversion.hf_fp4 import MXFP4_GROUP, NVFP4_GROUP, mxfp4, nvfp4
from jlade.conversion.hf_fp8 import FP8, BlockScaled, are_sizes, in_blocks, of_matrix
from jlade.conversion.hf_packed import (
    OF_ACTIVATIONS,
    SCALE_TYPES,
    DecodedMatrix,
    FileMatrix,
    file_matrix,
    matches,
    num_groups,
    take,
    unpack_integers,
)
from jlade.conversion.parts import Shape
from jlade.conversion.weight_files import StoredTensor, check_kind

FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
PACKED, SHAPE, WEIGHT, SCALE = "weight_packed", "weight_shape", "weight", "weight_scale"
ZERO, ORDER, GLOBAL = "weight_zero_point", "weight_g_idx", "weight_global_scale"
STRATEGIES: dict[tuple[str, int], tuple[str, ...]] = {  # by the type of weights and their bits
    ("int", 4): ("tensor", "channel", "group"),
    ("int", 8): ("tensor", "channel", "group"),
    ("float", 8): ("tensor", "channel", "group", "block"),
    ("float", 4): ("tensor_group", "group"),  # NVFP4 and MXFP4
}
# The type and the bits of weights, by the end of the name of their tensor and its dtype.
KINDS: dict[tuple[str, str], tuple[tuple[str, int], ...]] = {
    (PACKED, "I32"): (("int", 4), ("int", 8)),
    (PACKED, "U8"): (("float", 4),),
    (WEIGHT, "I8"): (("int", 4), ("int", 8)),
    (WEIGHT, FP8): (("float", 8),),
}
PATTERN = "re:"  # begins a target that is a regular expression


class WeightScheme(NamedTuple):
    """How config.json says that the weights of some modules are quantized.

    Attributes:
      kind: "int" or "float".
      bits: of a code.
      strategy: what has a scale of its own, one of `STRATEGIES`.
      group_size: inputs of a group, -1 for all.
      blocks: rows and columns of a block, for the strategy "block".
      has_zeros: whether groups have zeros.
      has_order: whether the files have the group of each input.
    """

    kind: str
    bits: int
    strategy: str
    group_size: int
    blocks: tuple[int, int] | None
    has_zeros: bool
    has_order: bool


def wrong_setting(settings: Mapping[str, Any]) -> str | None:
    """Returns the setting in config.json with which weights are not read, for a message."""
    formats = [settings.get("format"), *(group.get("format") for group in _module_groups(settings))]
    named = [name for name in formats if name not in (None, "mixed-precision")]
    if others := [name for name in named or [None] if name not in FORMATS]:
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
    try:
        _targets(settings)
    except ValueError as error:
        return str(error)
    return None


def assembled(tensors: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Returns the tensors of files with each matrix as one, given the settings of the quantization in config.json."""
    result = {name: tensor for name, tensor in tensors.items() if not name.endswith(OF_ACTIVATIONS)}
    targets = _targets(settings)
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        if end == PACKED:
            check_kind(name, tensor, tensor.shape, ("I32", "U8"))
        if (end, tensor.dtype) not in KINDS or (tensor.dtype == FP8 and f"{module}.{SCALE}" not in tensors):
            continue
        weights = _weights_of(module, tensor, targets)
        if (weights.kind, weights.bits) not in KINDS[end, tensor.dtype]:
            raise ValueError(
                f"{tensor.file}: {name} is of type {tensor.dtype}; config.json implies {weights.bits} bits of the type "
                f"{weights.kind!r}"
            )
        read = {"U8": _fp4, FP8: fp8_matrix, "I8": int8_matrix}.get(tensor.dtype, _packed)
        result[f"{module}.{WEIGHT}"] = read(f"{module}.", result, weights)
    return result


def _module_groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the settings of each group of modules."""
    groups = settings.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _targets(settings: Mapping[str, Any]) -> dict[str, WeightScheme]:
    """Returns how weights are quantized by what they are of: a module, a pattern of names of modules, or a class."""
    groups = [group for group in _module_groups(settings) if isinstance(group.get("weights"), dict)]
    return {str(target): _read_weights(group["weights"]) for group in groups for target in group.get("targets") or ()}


def _read_weights(settings: Mapping[str, Any]) -> WeightScheme:
    """Returns the settings of a group of modules, with the values of compressed-tensors for missing ones."""
    kind, bits, size = str(settings.get("type", "int")).lower(), settings.get("num_bits", 8), settings.get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy, blocks = str(settings.get("strategy") or implied).lower(), settings.get("block_structure")
    if isinstance(blocks, str) and (match := re.fullmatch(r"(\d+)x(\d+)", blocks)):  # of early files
        blocks = [int(match[1]), int(match[2])]
    if (kind, bits) not in STRATEGIES:
        raise ValueError(f"num_bits is {bits!r} of the type {kind!r}, supported is 4 or 8 of 'int' or 'float'")
    if strategy not in STRATEGIES[kind, bits]:
        accepted = " or ".join(map(repr, STRATEGIES[kind, bits]))
        raise ValueError(f"strategy is {strategy!r} with {bits} bits of the type {kind!r}, supported is {accepted}")
    is_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
    of_group = size == MXFP4_GROUP if (kind, bits) == ("float", 4) else is_size
    fits = {"group": of_group, "tensor_group": size == NVFP4_GROUP}.get(strategy, size in (None, -1))
    if not fits:
        raise ValueError(f"group_size is {size!r} with the strategy {strategy!r}")
    if (blocks is not None) != (strategy == "block") or (strategy == "block" and not are_sizes(blocks)):
        raise ValueError(f"block_structure is {blocks!r} with the strategy {strategy!r}")
    has_zeros = settings.get("symmetric", True) is False
    if has_zeros and kind == "float":
        raise ValueError("symmetric is False with the type 'float', supported is True")
    has_order = str(settings.get("actorder")).lower() in ("group", "dynamic", "true")  # of early versions
    of_block = None if blocks is None else (blocks[0], blocks[1])
    return WeightScheme(kind, bits, strategy, -1 if size is None else size, of_block, has_zeros, has_order)


def _weights_of(module: str, tensor: StoredTensor, targets: Mapping[str, WeightScheme]) -> WeightScheme:
    """Returns how a matrix is quantized: by the name of its module, else the first pattern, else its class."""
    patterns = sorted(target for target in targets if target.startswith(PATTERN))
    fitting = [pattern for pattern in patterns if matches("targets", pattern.removeprefix(PATTERN), module)]
    for target in (module, *fitting, "Linear"):
        if target in targets:
            return targets[target]
    raise ValueError(f"{tensor.file}: {module} is quantized, and config_groups in config.json has no target for it")


def _take_integers(
    tensors: dict[str, StoredTensor], prefix: str, needed: tuple[str, ...], weights: WeightScheme
) -> dict[str, StoredTensor]:
    """Returns tensors that make up a matrix of integers, by name, and removes them."""
    zero = tensors.get(prefix + ZERO)
    if zero is not None and not weights.has_zeros:  # early files have zeros that are all 0
        if zero.dtype != "I8" or zero.read_bytes(prefix + ZERO).any():
            raise ValueError(f"{zero.file}: {prefix}{ZERO} must be 0: config.json says that weights are symmetric")
        del tensors[prefix + ZERO]
    more = ((ZERO,) if weights.has_zeros else ()) + ((ORDER,) if weights.has_order else ())
    return take(tensors, prefix, needed + more, (ORDER,))


def _packed(prefix: str, tensors: dict[str, StoredTensor], weights: WeightScheme) -> FileMatrix:
    arrays, bits = _take_integers(tensors, prefix, (PACKED, SCALE, SHAPE), weights), weights.bits
    codes, size = arrays[prefix + PACKED], arrays.pop(prefix + SHAPE)
    check_kind(prefix + SHAPE, size, (2,), ("I64", "I32"))
    outputs, inputs = size.read_bytes(prefix + SHAPE).tolist()
    columns = codes.shape[-1] if codes.shape else 0
    if columns * 32 != inputs * bits:
        raise ValueError(
            f"{codes.file}: {prefix}{PACKED} has {columns} columns for {inputs} inputs; config.json says {bits} bits"
        )
    check_kind(prefix + PACKED, codes, (outputs, columns), ("I32",))
    return _matrix(prefix, "pack-quantized", arrays, (outputs, inputs), weights)


def int8_matrix(prefix: str, tensors: dict[str, StoredTensor], weights: WeightScheme) -> FileMatrix:
    arrays = _take_integers(tensors, prefix, (WEIGHT, SCALE), weights)
    codes = arrays[prefix + WEIGHT]
    if len(codes.shape) != 2:
        raise ValueError(f"{codes.file}: {prefix}{WEIGHT} has shape {codes.shape}; it must be a matrix")
    return _matrix(prefix, "int-quantized", arrays, codes.shape, weights)


def fp8_matrix(prefix: str, tensors: dict[str, StoredTensor], weights: WeightScheme) -> BlockScaled:
    matrix, scales = take(tensors, prefix, (WEIGHT, SCALE)).values()
    sizes: dict[str, tuple[int | None, int | None]] = {"tensor": (None, None), "channel": (1, None)}
    sizes |= {"group": (1, weights.group_size), "block": weights.blocks or (None, None)}
    return in_blocks(prefix + WEIGHT, matrix, prefix + SCALE, scales, sizes[weights.strategy])


def _matrix(
    prefix: str, dtype: str, arrays: dict[str, StoredTensor], shape: Shape, weights: WeightScheme
) -> FileMatrix:
    outputs, inputs = shape
    order = prefix + ORDER if prefix + ORDER in arrays else None
    groups = num_groups(prefix + WEIGHT, arrays[prefix + SCALE], inputs, weights.group_size, order is not None)
    of_groups = (1, 1) if weights.strategy == "tensor" else (outputs, groups)
    check_kind(prefix + SCALE, of_matrix(arrays[prefix + SCALE]), of_groups, SCALE_TYPES)
    if weights.has_zeros:
        zero = arrays[prefix + ZERO]
        rows = -(-outputs * weights.bits // 32) if zero.dtype == "I32" else of_groups[0]
        is_packed = dtype == "pack-quantized" and weights.strategy != "tensor"  # early files have integers of 8 bits
        check_kind(prefix + ZERO, of_matrix(zero), (rows, groups), ("I32", "I8") if is_packed else ("I8",))
    kinds = [name.removeprefix(prefix) for name in arrays]
    name = f"{arrays[prefix + SCALE].file}: {prefix}{WEIGHT}"
    decode = functools.partial(_decode, name=name, kinds=kinds, shape=shape, bits=weights.bits, groups=groups)
    return file_matrix(
        dtype,
        shape,
        arrays,
        weights.bits,
        groups,
        decode,
        scales=arrays[prefix + SCALE].value_dtype,
        has_zero=weights.has_zeros,
        order=order,
    )


def _decode(*stored: np.ndarray, name: str, kinds: list[str], shape: Shape, bits: int, groups: int) -> DecodedMatrix:
    arrays = dict(zip(kinds, stored, strict=True))
    (outputs, inputs), half = shape, 1 << (bits - 1)

    def signed(array: np.ndarray, axis: int) -> np.ndarray:
        """Integers that are packed are larger by a half of their range."""
        if array.dtype == np.int8:
            return array
        return (unpack_integers(array, bits, axis) - np.uint8(half)).view(np.int8)

    def of_groups(array: np.ndarray) -> np.ndarray:
        """Returns an array [groups, out] of one with a value for each output and group, or for all."""
        rows = array.reshape(-1, groups)[:outputs]
        return np.ascontiguousarray(np.broadcast_to(rows, (outputs, groups)).T)

    codes = np.ascontiguousarray(signed(stored[0], axis=1).T)
    if bits == 4 and not (-half <= codes.min() <= codes.max() < half):
        raise ValueError(f"{name} has integers of more than 4 bits, and config.json says 4")
    scale, zero = of_groups(arrays[SCALE]), arrays.get(ZERO)
    zero = None if zero is None else of_groups(signed(zero, axis=0)).astype(scale.dtype)
    of_inputs = arrays[ORDER] if ORDER in arrays else np.arange(inputs) // (inputs // groups)
    return DecodedMatrix(codes, scale, of_inputs, zero)


def _fp4(prefix: str, tensors: dict[str, StoredTensor], weights: WeightScheme) -> FileMatrix:
    if weights.strategy == "group":
        return mxfp4(take(tensors, prefix, (PACKED, SCALE)))
    return nvfp4(take(tensors, prefix, (PACKED, SCALE, GLOBAL)), np.divide, NVFP4_GROUP)
