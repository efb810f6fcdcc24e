"""Matrices of bitsandbytes in four bits, NF4 or FP4: places in a table of 16 values, with a scale for each block."""

import functools
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jlade.conversion.hf_packed import DecodedMatrix, FileMatrix, file_matrix
from jlade.conversion.parts import Shape
from jlade.conversion.weight_files import StoredTensor, check_kind

STATE = ".quant_state.bitsandbytes__"  # follows a matrix's name; nf4 or fp4 follows it
LEVELS, SCALES = ".quant_map", ".absmax"
NESTED_LEVELS, NESTED_SCALES = ".nested_quant_map", ".nested_absmax"
STORAGE = ("U8", "I8", "BF16", "F16", "F32")  # of the bytes, whatever their dtype


class QuantState(NamedTuple):
    """Content of a tensor in JSON.

    Attributes:
      shape: of the matrix, [out, in].
      block: elements with one scale; blocks follow one another along the rows.
      nested_block: scales with one scale, if these are quantized too; 0 if not.
      offset: of these scales.
    """

    shape: Shape
    block: int
    nested_block: int
    offset: float


def wrong_setting(settings: Mapping[str, Any]) -> None:
    """No setting besides those of `hf_quantization.ACCEPTED` has values with which weights are not read."""


def assembled(tensors: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Returns the tensors of files with each matrix as one."""
    result = dict(tensors)
    for full in tensors:
        name, is_state, _ = full.partition(STATE)
        if is_state:
            state = _read_state(full, result.pop(full))
            ends = ("", SCALES, LEVELS, *((NESTED_SCALES, NESTED_LEVELS) if state.nested_block else ()))
            if missing := [name + end for end in ends if name + end not in result]:
                raise ValueError(f"{tensors[full].file}: {missing[0]} is missing, though {full} is there")
            result[name] = _matrix(name, {name + end: result.pop(name + end) for end in ends}, state)
    return result


def _read_state(name: str, tensor: StoredTensor) -> QuantState:
    check_kind(name, tensor, tensor.shape, ("U8",))
    try:
        content: dict[str, Any] = json.loads(tensor.read_bytes(name).tobytes())
        outputs, inputs = map(int, content["shape"])
        nested = int(content["nested_blocksize"]) if "nested_offset" in content else 0
        state = QuantState((outputs, inputs), int(content["blocksize"]), nested, float(content.get("nested_offset", 0)))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{tensor.file}: {name} must be JSON with the shape and blocks of a matrix: {error}"
        ) from error
    if min(*state.shape, state.block) < 1 or state.nested_block < 0:
        raise ValueError(f"{tensor.file}: {name} has shape {state.shape} and blocks of {state.block}")
    return state


def _matrix(name: str, arrays: Mapping[str, StoredTensor], state: QuantState) -> FileMatrix:
    (outputs, inputs), weight = state.shape, arrays[name]
    blocks = -(-outputs * inputs // state.block)
    check_kind(name, weight, weight.shape, STORAGE)
    if weight.num_bytes != -(-outputs * inputs // 2):
        raise ValueError(f"{weight.file}: {name} has {weight.num_bytes} bytes for a matrix of shape {state.shape}")
    check_kind(name + SCALES, arrays[name + SCALES], (blocks,), ("U8",) if state.nested_block else ("F32",))
    check_kind(name + LEVELS, arrays[name + LEVELS], (16,), ("F32",))
    if state.nested_block:
        check_kind(name + NESTED_SCALES, arrays[name + NESTED_SCALES], (-(-blocks // state.nested_block),), ("F32",))
        check_kind(name + NESTED_LEVELS, arrays[name + NESTED_LEVELS], (256,), ("F32",))
    decode = functools.partial(_decode, state=state)
    groups = inputs // state.block if inputs % state.block == 0 else 0
    return file_matrix("NF4 or FP4", state.shape, arrays, 4, groups, decode, scales="float32", has_levels=True)


def _decode(
    weight: np.ndarray, scales: np.ndarray, levels: np.ndarray, *nested: np.ndarray, state: QuantState
) -> DecodedMatrix:
    (outputs, inputs), block = state.shape, state.block
    stored = weight.reshape(-1).view(np.uint8)
    codes = np.stack([stored >> 4, stored & 15], axis=-1).reshape(-1)[: outputs * inputs].view(np.int8)
    if nested:
        scales_of_scales, values = nested
        of_blocks = np.arange(len(scales)) // state.nested_block
        scales = values[scales] * scales_of_scales[of_blocks] + np.float32(state.offset)
    if inputs % block:  # blocks begin within rows: each element gets its scale
        scales, block = np.repeat(scales, block)[: math.prod(state.shape)], 1
    scale = np.ascontiguousarray(scales.reshape(outputs, -1).T)
    codes = np.ascontiguousarray(codes.reshape(outputs, inputs).T)
    return DecodedMatrix(codes, scale, np.arange(inputs) // block, levels=levels)
