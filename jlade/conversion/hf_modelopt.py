"""Matrices of NVIDIA's ModelOpt: FP8, MXFP8, NVFP4 and MXFP4. The tensors of a matrix say which one it is in."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jlade.conversion.hf_fp4 import NVFP4_GROUP, mxfp4, nvfp4
from jlade.conversion.hf_fp8 import FP8, in_blocks
from jlade.conversion.hf_packed import OF_ACTIVATIONS, take
from jlade.conversion.weight_files import EXPONENTS, StoredTensor

ALGORITHM, MIXED, LAYERS = "quant_algo", "MIXED_PRECISION", "quantized_layers"  # the last of the second
ALGORITHMS = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8"),
    *("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MXFP4"),
)
SCALE, WHOLE = "_scale", "_scale_2"  # ends of names; the second of NVFP4, a scale of scales
MXFP8_GROUP = 32  # inputs with one exponent
NVFP4_GROUPS = {"W4A8_NVFP4_FP8": 32}  # where no setting says it


def wrong_setting(settings: Mapping[str, Any]) -> str | None:
    """Returns the setting in config.json with which weights are not read, for a message."""
    layers = settings.get(LAYERS) or {}
    if not isinstance(layers, dict) or not all(isinstance(each, dict) for each in layers.values()):
        return f"{LAYERS} is {layers!r}, supported is an object with objects"
    for place, own in [("", settings), *((f" of {module}", own) for module, own in layers.items())]:
        algorithm, size = own.get(ALGORITHM), own.get("group_size")
        accepted = ALGORITHMS if place else (*ALGORITHMS, MIXED)
        if str(algorithm).upper() not in accepted:
            return f"{ALGORITHM}{place} is {algorithm!r}, supported is {' or '.join(map(repr, accepted))}"
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            return f"group_size{place} is {size!r}, supported is a positive integer"
    return None


def assembled(tensors: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Returns the tensors of files with each matrix as one, given the settings of the quantization in config.json."""
    result = {name: tensor for name, tensor in tensors.items() if not name.endswith(OF_ACTIVATIONS)}
    layers = settings.get(LAYERS) or {}
    for name, tensor in tensors.items():
        scales = result.get(name + SCALE)
        if tensor.dtype == FP8 and scales is not None:
            result[name] = _fp8(name, tensor, result.pop(name + SCALE))
        elif tensor.dtype == "U8" and scales is not None and scales.dtype in EXPONENTS:
            result[name] = mxfp4(take(result, name, ("", SCALE)))
        elif tensor.dtype == "U8" and name.endswith(".weight"):
            own = layers.get(name.rpartition(".")[0], settings)
            group = own.get("group_size") or NVFP4_GROUPS.get(str(own.get(ALGORITHM)).upper(), NVFP4_GROUP)
            result[name] = nvfp4(take(result, name, ("", SCALE, WHOLE)), np.multiply, group)
    return result


def _fp8(name: str, tensor: StoredTensor, scales: StoredTensor) -> StoredTensor:
    """Returns a matrix with a scale for all, for each output, or for some inputs of each output."""
    if scales.dtype in EXPONENTS:
        return in_blocks(name, tensor, name + SCALE, scales, (1, MXFP8_GROUP))
    if scales.shape in ((), (1,)):
        return in_blocks(name, tensor, name + SCALE, scales, (None, None))
    return in_blocks(name, tensor, name + SCALE, dataclasses.replace(scales, shape=(*scales.shape, 1)), (1, None))
