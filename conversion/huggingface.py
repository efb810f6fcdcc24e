"""Hugging Face LLaMA directories: config.json and safetensors files, read without torch."""

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jlade.models.llama import Llama3Scaling, LlamaConfig, LlamaLayer, LlamaParams

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def load_hf(path: str | os.PathLike[str], dtype: jax.typing.DTypeLike | None = None) -> LlamaParams:
    """Loads a LLaMA checkpoint in Hugging Face format.

    All names, shapes and types are checked before the first tensor is read; then one tensor at a time is read and moved
    to the default device.

    Args:
      path: a directory with config.json and either model.safetensors or model.safetensors.index.json and the files it
        names. The end-of-text tokens come from generation_config.json where there is one.
      dtype: floating type of the parameters, and so of the computation. By default float32 on CPU, bfloat16 elsewhere.

    Raises:
      ValueError: names the file, and the config key or the tensor, that is missing, broken or not supported.
    """
    directory = pathlib.Path(path)
    if not directory.is_dir():
        raise ValueError(f"path must be a directory with a Hugging Face LLaMA checkpoint, got {os.fspath(path)!r}")
    dtype = _check_dtype(dtype)
    config = read_config(directory)
    with contextlib.ExitStack() as stack:
        tensors = _open_tensors(directory, stack)
        _check_tensors(tensors, config, directory)

        def read(name: str, shape: tuple[int, ...]) -> jax.Array:
            file, reader = tensors[name]
            try:
                return jnp.asarray(reader.get_tensor(name).astype(dtype, copy=False))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file}: {name} cannot be read: {error}") from error

        return _build_params(config, read)


def read_config(directory: pathlib.Path) -> LlamaConfig:
    """Reads config.json, in the form of transformers 4 or 5, and generation_config.json where there is one."""
    file = directory / "config.json"
    raw = _read_json(file)
    if raw.get("model_type") != "llama":
        raise ValueError(f"{file}: model_type is {raw.get('model_type')!r}; supported is 'llama'")
    for key, supported in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if raw.get(key, supported) != supported:
            raise ValueError(f"{file}: {key} is {raw[key]!r}; supported is {supported!r}")
    if raw.get("quantization_config"):
        raise ValueError(f"{file}: quantization_config is set; supported are unquantized weights")

    def size(key: str, default: int | None = None) -> int:
        value = raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{file}: {key} must be a positive integer, got {value!r}")
        return value

    rope = _rope_parameters(file, raw)
    tied = raw.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ValueError(f"{file}: tie_word_embeddings must be true or false, got {tied!r}")
    num_heads = size("num_attention_heads")
    config = LlamaConfig(
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=size("num_key_value_heads", num_heads),
        head_dim=size("head_dim", size("hidden_size") // num_heads),
        max_positions=size("max_position_embeddings", 2048),
        rms_norm_eps=_number(file, raw, "rms_norm_eps", 1e-6),
        rope_theta=_number(file, rope, "rope_theta", 10000.0),
        rope_scaling=_read_rope_scaling(file, rope),
        tie_embeddings=tied,
        eos_ids=_read_eos_ids(directory, raw),
    )
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"{file}: num_attention_heads ({config.num_heads}) must be a multiple of "
            f"num_key_value_heads ({config.num_kv_heads})"
        )
    if config.head_dim % 2:
        raise ValueError(f"{file}: head_dim must be even, got {config.head_dim}")
    return config


def _layer_tensors(config: LlamaConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns, for every field of `LlamaLayer`, the tensor's name within the layer and its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "attention_norm": ("input_layernorm", (hidden,)),
        "query": ("self_attn.q_proj", (queries, hidden)),
        "key": ("self_attn.k_proj", (keys, hidden)),
        "value": ("self_attn.v_proj", (keys, hidden)),
        "attention_output": ("self_attn.o_proj", (hidden, queries)),
        "mlp_norm": ("post_attention_layernorm", (hidden,)),
        "gate": ("mlp.gate_proj", (inner, hidden)),
        "up": ("mlp.up_proj", (inner, hidden)),
        "down": ("mlp.down_proj", (hidden, inner)),
    }


def _build_params(config: LlamaConfig, read: Callable[[str, tuple[int, ...]], Any]) -> LlamaParams:
    """Assembles the parameters from what `read` returns for the name and shape of each tensor."""
    embedding_shape = (config.vocab_size, config.hidden_size)
    tensors = _layer_tensors(config).items()
    return LlamaParams(
        embedding=read("model.embed_tokens.weight", embedding_shape),
        layers=tuple(
            LlamaLayer(**{field: read(f"model.layers.{i}.{name}.weight", shape) for field, (name, shape) in tensors})
            for i in range(config.num_layers)
        ),
        norm=read("model.norm.weight", (config.hidden_size,)),
        output=None if config.tie_embeddings else read("lm_head.weight", embedding_shape),
        config=config,
    )


def _open_tensors(directory: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, tuple[pathlib.Path, Any]]:
    """Opens the weight files; returns, for every tensor in them, its file and the reader of that file."""
    tensors = {}
    for file in _weight_files(directory):
        try:
            reader = stack.enter_context(safe_open(file, framework="numpy"))
        except FileNotFoundError as error:
            raise ValueError(f"{file} is missing, though {INDEX_FILE} names it") from error
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from error
        tensors.update(dict.fromkeys(reader.keys(), (file, reader)))
    return tensors


def _weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    index = directory / INDEX_FILE
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index}: weight_map must map tensor names to files, got {weight_map!r}")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if pathlib.Path(name).name != name:
                raise ValueError(f"{index}: weight_map names {name!r}; accepted are files in the same directory")
        return [directory / name for name in names]
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    raise ValueError(
        f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}. Only safetensors files are read; "
        f"transformers' `save_pretrained` writes them"
    )


def _check_tensors(tensors: Mapping[str, tuple[pathlib.Path, Any]], config: LlamaConfig, directory: pathlib.Path):
    """Raises an error unless the files hold the tensors of this configuration, in shape and type, and no others."""
    expected: dict[str, tuple[int, ...]] = {}
    _build_params(config, expected.__setitem__)
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise ValueError(f"{directory}: {len(missing)} tensors are missing: {_some(missing)}")
    unexpected = sorted(name for name in tensors.keys() - expected.keys() if not _is_redundant(name, config))
    if unexpected:
        raise ValueError(f"{directory}: {len(unexpected)} tensors are not of this model: {_some(unexpected)}")
    for name, shape in expected.items():
        file, reader = tensors[name]
        stored = reader.get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise ValueError(f"{file}: {name} has shape {tuple(stored.get_shape())}; config.json implies {shape}")
        if stored.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise ValueError(f"{file}: {name} is of type {stored.get_dtype()}; accepted are F64, F32, F16 and BF16")


def _is_redundant(name: str, config: LlamaConfig) -> bool:
    """Whether a tensor only repeats what the model has: old files store rotary tables and tied output matrices."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{file} is missing") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content


def _number(file: pathlib.Path, raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{file}: {key} must be a positive number, got {value!r}")
    return float(value)


def _rope_parameters(file: pathlib.Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary settings as transformers 5 writes them; 4 writes the base beside them."""
    key = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    parameters = raw.get(key)
    if not isinstance(parameters, dict | None):
        raise ValueError(f"{file}: {key} must be an object, got {parameters!r}")
    return {"rope_theta": raw.get("rope_theta", 10000.0)} | (parameters or {})


def _read_rope_scaling(file: pathlib.Path, rope: Mapping[str, Any]) -> Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"{file}: rope_type is {kind!r}; supported are 'default' and 'llama3'")
    scaling = Llama3Scaling(
        factor=_number(file, rope, "factor"),
        low_freq_factor=_number(file, rope, "low_freq_factor"),
        high_freq_factor=_number(file, rope, "high_freq_factor"),
        original_max_positions=int(_number(file, rope, "original_max_position_embeddings")),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ValueError(
            f"{file}: high_freq_factor ({scaling.high_freq_factor}) must exceed low_freq_factor "
            f"({scaling.low_freq_factor})"
        )
    return scaling


def _read_eos_ids(directory: pathlib.Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    file = directory / "generation_config.json"
    generation = _read_json(file) if file.exists() else {}
    if generation.get("eos_token_id") is None:
        file, generation = directory / "config.json", dict(raw)
    value = generation.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError(f"{file}: eos_token_id must be a token id or a list of them, got {value!r}")
    outside = [i for i in ids if i >= raw["vocab_size"]]
    if outside:
        raise ValueError(f"{file}: eos_token_id must be below vocab_size, {raw['vocab_size']}, got {outside[0]}")
    return tuple(ids)


def _check_dtype(dtype: jax.typing.DTypeLike | None) -> np.dtype:
    if dtype is None:
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    try:
        checked = jnp.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}") from error
    if checked not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {checked}")
    return checked
