"""How config.json says that weights are quantized: the methods that are read, and their tensors as matrices."""

import pathlib
from collections.abc import Mapping
from typing import Any

from jlade.conversion import hf_bitsandbytes, hf_compressed, hf_fp8, hf_gptq, hf_modelopt, hf_torchao
from jlade.conversion.family import Family
from jlade.conversion.json_files import read_json
from jlade.conversion.weight_files import StoredTensor

KEYS = "quantization_config", "compression_config", "quantization"  # the last in files of MLX
OWN_FILE = "hf_quant_config.json"  # of ModelOpt, early versions of which write nothing into config.json
# By method, the values of settings with which weights are read. The first is that of a missing setting.
ACCEPTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "awq": {"bits": (4,), "version": ("gemm",), "zero_point": (True,)},
    "gptq": {"bits": (4, 8), "checkpoint_format": ("gptq", "gptq_v2"), "is_marlin_format": (False,)},
    "fp8": {"activation_scheme": ("dynamic", "static"), "expert_dtype": ("fp8",)},
    "compressed-tensors": {},
    "modelopt": {},
    "torchao": {},
    "bitsandbytes": {"load_in_8bit": (False,), "load_in_4bit": (True,)},
}
READERS: dict[str, Any] = {  # modules
    "awq": hf_gptq,
    "gptq": hf_gptq,
    "fp8": hf_fp8,
    "compressed-tensors": hf_compressed,
    "modelopt": hf_modelopt,
    "torchao": hf_torchao,
    "bitsandbytes": hf_bitsandbytes,
}
OTHER_NAMES = {"version": "format", "checkpoint_format": "format"}  # of settings, where the first is missing


def check(file: pathlib.Path, raw: Mapping[str, Any], family: Family) -> None:
    """Raises a ValueError that says how the weights are quantized, unless they are not, or in a way that is read."""
    key = next((key for key in KEYS if raw.get(key)), None)
    if key is None:
        return
    own = raw[key] if isinstance(raw[key], dict) else {}
    method = _method(own, key)
    if method == "mxfp4" and family.expert_layout == "interleaved":
        return
    wrong = None if method is None else _wrong_setting(method, own)
    if method in ACCEPTED and wrong is None:
        return
    bits = next((n for n, flag in ((4, "load_in_4bit"), (8, "load_in_8bit")) if own.get(flag)), own.get("bits"))
    raise ValueError(
        f"{file}: the weights are quantized with {method or 'a method that is not named'}"
        + (f" in {bits} bits" if bits else "")
        + f" ({key}), which is not read"
        + (f": {wrong}" if wrong else "")
        + ". Load the model in floating point that they were made from, with bits=8 or 4 for less memory, or a GGUF "
        "file of it"
    )


def read(directory: pathlib.Path) -> Mapping[str, Any]:
    """Returns the content of config.json, with the settings of the quantization that another file has."""
    raw, file = read_json(directory / "config.json"), directory / OWN_FILE
    if settings_of(raw) or not file.exists():
        return raw
    own = read_json(file).get("quantization")
    return {**raw, KEYS[0]: {**(own if isinstance(own, dict) else {}), "quant_method": "modelopt"}}


def settings_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of the quantization in the content of config.json; {} if the weights are not quantized."""
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, dict) else {}):
        for key in KEYS:
            if isinstance(part.get(key), dict) and part[key]:
                return {**part[key], "quant_method": _method(part[key], key)}
    return {}


def assembled(tensors: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> Mapping[str, StoredTensor]:
    """Returns the tensors of files, by their names there, with those of each quantized matrix as one.

    The settings are those of `settings_of`.
    """
    method = settings.get("quant_method")
    return READERS[method].assembled(tensors, settings) if method in READERS else tensors


def _method(settings: Mapping[str, Any], key: str) -> str | None:
    if "quant_method" not in settings and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"
    method = settings.get("quant_method", "mlx" if key == "quantization" else None)
    return None if method is None else str(method)


def _wrong_setting(method: str, settings: Mapping[str, Any]) -> str | None:
    """Returns the setting that has another value than those that are read, for a message."""
    for name, values in ACCEPTED.get(method, {}).items():
        key = name if settings.get(name) is not None else OTHER_NAMES.get(name, name)
        value = settings.get(key, values[0])
        own = value.lower() if isinstance(value, str) else value
        if own not in values and not (value is None and name in OTHER_NAMES):
            return f"{key} is {value!r}, supported is {' or '.join(map(repr, values))}"
    return READERS[method].wrong_setting(settings) if method in READERS else None
