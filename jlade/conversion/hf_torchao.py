"""Matrices of torchao in int8, or fewer bits in int8, and FP8: those of compressed-tensors with other names."""

from collections.abc import Mapping
from typing import Any

from jlade.conversion.hf_compressed import SCALE, WEIGHT, ZERO, WeightScheme, fp8_matrix, int8_matrix
from jlade.conversion.hf_fp8 import FP8, of_matrix
from jlade.conversion.weight_files import StoredTensor

CODES, OTHERS = "._weight_qdata", "._weight_"  # of the names of a matrix's tensors
READERS = {FP8: fp8_matrix, "I8": int8_matrix}
ACCEPTED = (
    *("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"),
    *("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"),
    *("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"),
)
OF_MODULES = "FqnToConfig", "ModuleFqnToConfig"  # which have a configuration of `ACCEPTED` by modules


def wrong_setting(settings: Mapping[str, Any]) -> str | None:
    """Returns the setting in config.json with which weights are not read, for a message."""
    kind = settings.get("quant_type")
    default = kind.get("default") if isinstance(kind, dict) else kind
    for config in _of_modules(default):
        name = config.get("_type") if isinstance(config, dict) else config
        if name not in ACCEPTED:
            return f"quant_type is {name!r}, supported is {' or '.join(map(repr, ACCEPTED))}"
    return None


def assembled(tensors: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Returns the tensors of files with each matrix as one."""
    result = {name.replace(CODES, f".{WEIGHT}").replace(OTHERS, f".{WEIGHT}_"): tensors[name] for name in tensors}
    for full in tensors:
        module, is_codes, _ = full.rpartition(CODES)
        if is_codes and tensors[full].dtype in READERS:
            prefix = f"{module}."
            result[prefix + WEIGHT] = READERS[tensors[full].dtype](prefix, result, _scheme(prefix, result))
    return result


def _of_modules(config: Any) -> list[Any]:
    """Returns the configurations of modules in one, without those that are null: these modules are not quantized."""
    if not isinstance(config, dict) or config.get("_type") not in OF_MODULES:
        return [config]
    data = config.get("_data")
    own = data.get("fqn_to_config") or data.get("module_fqn_to_config") if isinstance(data, dict) else None
    return [each for each in own.values() if each is not None] if isinstance(own, dict) else [own]


def _scheme(prefix: str, tensors: Mapping[str, StoredTensor]) -> WeightScheme:
    """Returns how a matrix is quantized: the sizes of blocks follow from the number of scales."""
    codes, scales, zero = (tensors.get(prefix + kind) for kind in (WEIGHT, SCALE, ZERO))
    assert codes is not None
    shape = (1, 1) if scales is None else of_matrix(scales).shape  # those that are missing are named later
    if len(codes.shape) != 2 or len(shape) != 2 or 0 in shape:
        raise ValueError(f"{codes.file}: {prefix}{WEIGHT} has shape {codes.shape} and scales of shape {shape}")
    rows, columns = codes.shape[0] // shape[0], codes.shape[1] // shape[1]
    if codes.dtype == FP8:
        return WeightScheme("float", 8, "block", -1, (rows, columns), has_zeros=False, has_order=False)
    has_zeros = zero is not None and (zero.dtype != "I8" or bool(zero.read_bytes(prefix + ZERO).any()))
    return WeightScheme("int", 8, "tensor" if shape == (1, 1) else "group", columns, None, has_zeros, has_order=False)
