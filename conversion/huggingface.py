"""Hugging Face directories of LLaMA models and their relatives: safetensors files, read and written without torch."""

import dataclasses
import json
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jlade.conversion.hf_config import read_config, read_json, write_configs, write_json
from jlade.conversion.whole import written_whole
from jlade.models.llama import LlamaConfig, LlamaLayer, LlamaParams, quantize
from jlade.models.quantization import Int8Matrix, is_int8, quantize_matrix

EMBEDDING = "model.embed_tokens.weight"
SCALE = "_scale"  # what is added to the name of a matrix in int8
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' names
MAX_FILE_BYTES = 5 * 10**9
CHUNK = 2**20  # elements converted at once; they stay in the processor's cache

Sharding = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding]


def load_hf(
    path: str | os.PathLike[str],
    dtype: jax.typing.DTypeLike | None = None,
    sharding: Sharding | None = None,
    progress: Callable[[int], None] | None = None,
    int8: bool = False,
) -> LlamaParams:
    """Loads a checkpoint in Hugging Face format, of the families LLaMA, Mistral, Qwen2 and Qwen3.

    All names, shapes and types are checked before the first tensor is read; then one tensor at a time is read and moved
    to its place.

    Args:
      path: a directory with config.json and either model.safetensors or model.safetensors.index.json and the files it
        names. The end-of-text tokens come from generation_config.json where there is one.
      dtype: floating type of the parameters, and so of the computation; "auto" for the checkpoint's own. By default
        float32 on CPU, bfloat16 elsewhere.
      sharding: where the tensors go, or a function that tells it for each tensor's name in the checkpoint and shape; by
        default the default device.
      progress: is called with the bytes of each tensor in its file, once it is read.
      int8: whether to put the matrices in int8 (`jlade.models.llama.quantize`), each once it is in its place, so that
        only one is held in floating point besides.

    Raises:
      ValueError: names the file, and the config key or the tensor, that is missing, broken or not supported.

    Warns:
      UserWarning: names the tensors that hold NaN or infinite values.
    """
    directory = pathlib.Path(path)
    if not directory.is_dir():
        raise ValueError(f"path must be a directory with a Hugging Face checkpoint, got {os.fspath(path)!r}")
    config = read_config(directory)
    tensors = stored_tensors(directory)
    check_tensors(tensors, config, directory)
    target = check_dtype(dtype, {DTYPES[tensors[name].dtype] for name in expected_tensors(config)}, directory)
    broken: list[str] = []

    def read(name: str, shape: tuple[int, ...]) -> jax.Array | Int8Matrix:
        array, is_finite = tensors[name].read(name, target)
        if not is_finite:
            broken.append(name)
        if progress is not None:
            progress(tensors[name].num_bytes)
        placed = jax.device_put(array, place_of(sharding, name, shape))
        is_matrix = len(shape) == 2 and (name != EMBEDDING or config.tie_embeddings)
        # Waiting for the transfer keeps more than one tensor from being in the host's memory.
        return jax.block_until_ready(quantize_matrix(placed) if int8 and is_matrix else placed)

    params = build_params(config, read)
    for file, stamp in {stored.file: stored.stamp for stored in tensors.values()}.items():
        if _stamp(file) != stamp:
            raise ValueError(f"{file} changed while it was read")
    if broken:
        warnings.warn(f"{tensors[broken[0]].file}: NaN or infinite values in {some(broken)}", stacklevel=2)
    return params


def save_hf(params: LlamaParams, path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> None:
    """Writes a checkpoint that transformers and `load_hf` read; the directory appears whole or not at all.

    Args:
      params: their dtype is the files'.
      path: a directory that is not there yet.
      progress: is called with the bytes of each tensor, once its file is written.

    Raises:
      ValueError: when `path` exists, or transformers has no such model, as it has none for int8 matrices.
    """
    if any(map(is_int8, jax.tree.leaves(params, is_leaf=is_int8))):
        raise ValueError(
            "params must be in floating point, got int8 matrices: `jlade.conversion.save` writes them, or load the "
            "checkpoint they came from without int8"
        )
    with written_whole(path) as directory:
        directory.mkdir()
        write_configs(params.config, params.norm.dtype.name, directory)
        parts = list(_parts(params))
        names = [SINGLE_FILE]
        if len(parts) > 1:
            names = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
            weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
            total = sum(array.nbytes for part in parts for array in part.values())
            write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
        for name, part in zip(names, parts, strict=True):
            arrays = {tensor: np.ascontiguousarray(jax.device_get(array)) for tensor, array in part.items()}
            save_file(arrays, directory / name, metadata={"format": "pt"})
            if progress is not None:
                for array in arrays.values():
                    progress(array.nbytes)


def layer_tensors(config: LlamaConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns, for every field of `LlamaLayer` that the model has, the tensor's name within the layer and its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors = {
        "attention_norm": ("input_layernorm.weight", (hidden,)),
        "query": ("self_attn.q_proj.weight", (queries, hidden)),
        "key": ("self_attn.k_proj.weight", (keys, hidden)),
        "value": ("self_attn.v_proj.weight", (keys, hidden)),
        "attention_output": ("self_attn.o_proj.weight", (hidden, queries)),
        "mlp_norm": ("post_attention_layernorm.weight", (hidden,)),
        "gate": ("mlp.gate_proj.weight", (inner, hidden)),
        "up": ("mlp.up_proj.weight", (inner, hidden)),
        "down": ("mlp.down_proj.weight", (hidden, inner)),
    }
    biased = {
        "query": config.qkv_bias,
        "key": config.qkv_bias,
        "value": config.qkv_bias,
        "attention_output": config.attention_output_bias,
        "gate": config.mlp_bias,
        "up": config.mlp_bias,
        "down": config.mlp_bias,
    }
    for field in (field for field, has_bias in biased.items() if has_bias):
        name, shape = tensors[field]
        tensors[f"{field}_bias"] = (name.removesuffix("weight") + "bias", shape[:1])
    if config.qk_norm:
        tensors["query_norm"] = ("self_attn.q_norm.weight", (config.head_dim,))
        tensors["key_norm"] = ("self_attn.k_norm.weight", (config.head_dim,))
    return tensors


def build_params(config: LlamaConfig, read: Callable[[str, tuple[int, ...]], Any]) -> LlamaParams:
    """Assembles the parameters from what `read` returns for the name and shape of each tensor."""
    embedding_shape = (config.vocab_size, config.hidden_size)
    tensors = layer_tensors(config).items()
    return LlamaParams(
        embedding=read(EMBEDDING, embedding_shape),
        layers=tuple(
            LlamaLayer(**{field: read(f"model.layers.{i}.{name}", shape) for field, (name, shape) in tensors})
            for i in range(config.num_layers)
        ),
        norm=read("model.norm.weight", (config.hidden_size,)),
        output=None if config.tie_embeddings else read("lm_head.weight", embedding_shape),
        config=config,
    )


def expected_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of a model's tensors."""
    expected: dict[str, tuple[int, ...]] = {}
    build_params(config, expected.__setitem__)
    return expected


def arrays_of(config: LlamaConfig, dtype: np.dtype, int8: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of each array of a model's parameters, by the names that `named_arrays` gives them."""
    params = build_params(config, lambda name, shape: jax.ShapeDtypeStruct(shape, dtype))
    return named_arrays(jax.eval_shape(quantize, params) if int8 else params)


def named_arrays(params: LlamaParams) -> dict[str, Any]:
    """Returns the arrays of `params` by their names in a checkpoint; one in int8 is followed by its scale."""
    names = jax.tree.leaves(build_params(params.config, lambda name, shape: name))
    arrays: dict[str, Any] = {}
    for name, leaf in zip(names, jax.tree.leaves(params, is_leaf=is_int8), strict=True):
        arrays |= {name: leaf.weight, name + SCALE: leaf.scale} if is_int8(leaf) else {name: leaf}
    return arrays


def place_of(sharding: Sharding | None, name: str, shape: tuple[int, ...]) -> jax.sharding.Sharding | None:
    """Returns where a tensor goes."""
    return sharding(name, shape) if callable(sharding) else sharding


def check_dtype(dtype: Any, stored: set[str], directory: pathlib.Path) -> np.dtype:
    """Returns the dtype of the parameters, given what the caller wants and the dtypes of what is stored."""
    if dtype is None:
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    if isinstance(dtype, str) and dtype == "auto":
        if len(stored) > 1 or "float64" in stored:
            raise ValueError(f"{directory} holds {' and '.join(sorted(stored))}: dtype cannot be 'auto', name one")
        return jnp.dtype(next(iter(stored)))
    try:
        checked = jnp.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype must be float32, bfloat16, float16 or 'auto', got {dtype!r}") from error
    if checked not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"dtype must be float32, bfloat16, float16 or 'auto', got {checked}")
    return checked


def some(names: list[str]) -> str:
    """Returns the first few names, for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor in a file, as the file's header tells it."""

    file: pathlib.Path
    stamp: tuple[int, ...]
    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize

    def read(self, name: str, dtype: np.dtype) -> tuple[np.ndarray, bool]:
        """Returns the tensor in the dtype asked for, and whether all of it is finite.

        It is converted piece by piece into the memory that the parameters keep, so nothing large is held twice.
        """
        result = _aligned(self.shape, dtype)
        flat, is_finite = result.reshape(-1), True
        stored = np.dtype(DTYPES[self.dtype])
        buffer = np.empty(0 if stored == dtype else min(CHUNK, flat.size), stored)
        try:
            with open(self.file, "rb") as stream:
                stream.seek(self.offset)
                for begin in range(0, flat.size, CHUNK):
                    piece = flat[begin : begin + CHUNK]
                    read = piece if stored == dtype else buffer[: piece.size]
                    if stream.readinto(read.view(np.uint8)) != read.nbytes:  # type: ignore[arg-type]
                        raise ValueError(f"{self.file} changed while it was read: {name} is cut short")
                    if read is not piece:
                        with np.errstate(over="ignore"):  # told below
                            piece[:] = read
                    is_finite &= _is_finite(min(read, piece, key=lambda array: array.itemsize))
        except OSError as error:
            raise ValueError(f"{self.file}: {name} cannot be read: {error}") from error
        return result, is_finite


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array that JAX on CPUs takes over as it is, for which it has to begin at a multiple of 64 bytes."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + size].view(dtype).reshape(shape)


def _is_finite(array: np.ndarray) -> bool:
    """Whether no element has all bits of its exponent set, as NaN and the infinities have."""
    info = ml_dtypes.finfo(array.dtype)
    bits = array.view(f"u{array.itemsize}")
    exponent = bits.dtype.type(((1 << info.nexp) - 1) << info.nmant)
    return not np.any((bits & exponent) == exponent)


def _stamp(file: pathlib.Path) -> tuple[int, ...]:
    """Returns what changes when a file is written to or replaced."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def stored_tensors(directory: pathlib.Path) -> dict[str, _Stored]:
    """Returns the tensors in the weight files by name, from the files' headers alone."""
    tensors: dict[str, _Stored] = {}
    for file, expected in _weight_files(directory).items():
        try:
            stamp = _stamp(file)
            with safe_open(file, framework="numpy"):  # which checks the header, but does not tell where tensors lie
                pass
            with open(file, "rb") as stream:
                begin = 8 + int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(begin - 8))
            header.pop("__metadata__", None)
            found = {
                name: _Stored(file, stamp, begin + of["data_offsets"][0], tuple(of["shape"]), of["dtype"])
                for name, of in header.items()
            }
        except FileNotFoundError as error:
            raise ValueError(f"{file} is missing, though {INDEX_FILE} names it") from error
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from error
        if expected is not None and (absent := sorted(expected - found.keys())):
            raise ValueError(f"{file} has no tensor {absent[0]}, though {INDEX_FILE} says so")
        if twice := sorted(found.keys() & tensors.keys()):
            raise ValueError(f"{file} and {tensors[twice[0]].file} both have the tensor {twice[0]}")
        tensors |= found
    return tensors


def _weight_files(directory: pathlib.Path) -> dict[pathlib.Path, set[str] | None]:
    """Returns the weight files, and the tensors that an index says each of them has."""
    index = directory / INDEX_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index}: weight_map must map tensor names to files, got {weight_map!r}")
        files: dict[pathlib.Path, set[str] | None] = {}
        for tensor, name in sorted(weight_map.items(), key=str):
            if not isinstance(name, str) or name in ("", "..") or pathlib.PurePath(name).name != name or "\0" in name:
                raise ValueError(f"{index}: weight_map names {name!r}; accepted are files in the same directory")
            expected = files.setdefault(directory / name, set())
            assert expected is not None
            expected.add(tensor)
        return files
    if (directory / SINGLE_FILE).exists():
        return {directory / SINGLE_FILE: None}
    if pickled := [file.name for file in directory.glob("*.bin")]:
        raise ValueError(
            f"{directory} has weights only in {pickled[0]}, whose format can run code when it is read; only "
            f"safetensors files are read. If you trust it, convert it where transformers and torch are installed: "
            f'python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{directory}', dtype='auto').save_pretrained('NEW_DIR')\""
        )
    raise ValueError(
        f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}. Only safetensors files are read; "
        f"transformers' `save_pretrained` writes them"
    )


def check_tensors(tensors: dict[str, _Stored], config: LlamaConfig, directory: pathlib.Path) -> None:
    """Raises an error unless the files hold the tensors of this configuration, in shape and type, and no others."""
    expected = expected_tensors(config)
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise ValueError(f"{directory}: {len(missing)} tensors are missing: {some(missing)}")
    unexpected = sorted(name for name in tensors.keys() - expected.keys() if not _is_redundant(name, config))
    if unexpected:
        raise ValueError(f"{directory}: {len(unexpected)} tensors are not of this model: {some(unexpected)}")
    for name, shape in expected.items():
        stored = tensors[name]
        if stored.shape != shape:
            raise ValueError(f"{stored.file}: {name} has shape {stored.shape}; config.json implies {shape}")
        if stored.dtype not in DTYPES:
            raise ValueError(f"{stored.file}: {name} is of type {stored.dtype}; accepted are {', '.join(DTYPES)}")


def _is_redundant(name: str, config: LlamaConfig) -> bool:
    """Whether a tensor only repeats what the model has: old files store rotary tables and tied output matrices."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings)


def _parts(params: LlamaParams) -> Iterator[dict[str, jax.Array]]:
    """Divides the tensors, by their names in the checkpoint, into files of up to `MAX_FILE_BYTES`."""
    part: dict[str, jax.Array] = {}
    for name, array in named_arrays(params).items():
        if part and sum(a.nbytes for a in part.values()) + array.nbytes > MAX_FILE_BYTES:
            yield part
            part = {}
        part[name] = array
    yield part
