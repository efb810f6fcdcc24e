"""`jlade inspect`: describes a checkpoint and the memory it needs, from its headers."""

import argparse
import collections
import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

import jlade
from jlade import mesh
from jlade.cli import arguments, inspect_device, terminal
from jlade.conversion import formats, location
from jlade.conversion.checkpoint import Checkpoint, loaded_shapes
from jlade.conversion.tensors import SCALE, expected_tensors
from jlade.conversion.weight_files import Tensor
from jlade.costs import choice, devices
from jlade.errors import check_int
from jlade.generation import placement
from jlade.inspection import sequences
from jlade.inspection.model_programs import ModelPrograms
from jlade.inspection.sequences import Sequences
from jlade.lookahead import names
from jlade.lookahead.names import label
from jlade.mesh import default_device
from jlade.models import quantization
from jlade.models.base import cache_shapes
from jlade.models.llama import Llama, LlamaConfig, LlamaParams

FORMATS = {"huggingface": "in Hugging Face's format", "jlade": "in jlade's format", "gguf": "a GGUF file"}
DTYPE_CHOICES = ("auto", "float32", "bfloat16", "float16")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    result = arguments.Parser(
        prog="jlade inspect",
        description="Describe a checkpoint, the memory it needs, and the setting for it on this device; or, with "
        "--device, its programs on any device. Weights are not read, and those of the Hub not fetched; a checkpoint "
        "that jlade cannot load is an error.",
        examples=[
            "jlade inspect path/to/model --length 4096",
            "jlade inspect owner/name --device h100 --lookahead tree=63",
        ],
    )
    arguments.add_model_name(result, as_word=True)
    length = (
        "tokens of prompt and text in the cache; a call rounds up to 1024, 2048, 4096, ... (default: the model's "
        "maximum; with --device 1024)"
    )
    arguments.add_integer(result, "--length", "L", length)
    arguments.add_integer(result, "--batch-size", "B", "number of texts", 1)
    result.add_argument(
        "--dtype",
        choices=DTYPE_CHOICES,
        help="dtype of weights and cache in memory; auto: as in config.json, else that of the files (default: "
        "float32 on CPUs, else bfloat16)",
    )
    arguments.add(result, "--kv-dtype")
    result.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    inspect_device.add_arguments(result)
    return result


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    inspect_device.check(options)
    path = arguments.find(options)
    if options.device is not None:
        inspect_device.run(options, path)
        return
    batch_size = check_int("--batch-size", options.batch_size, 1)
    headers = _headers(options.model, path)
    config = headers.config
    length = check_int("--length", config.max_positions if options.length is None else options.length, 1)
    if length > config.max_positions:
        raise ValueError(f"--length must be at most {config.max_positions}, the model's maximum, got {length}")
    device = default_device()
    dtype = headers.checkpoint.dtype(options.dtype, headers.tensors, device)
    shapes = headers.shapes(dtype)
    weights_bytes = mesh.num_bytes(shapes)
    decoder, _ = placement.check(shapes, None, None, options.kv_dtype)
    assert isinstance(decoder, Llama)
    cache_bytes = mesh.num_bytes(cache_shapes(decoder, shapes, batch_size, length))
    lookahead = choice.choose(shapes, decoder, batch_size)
    rows = ModelPrograms(shapes, decoder, device, batch_size, length)
    setting = dataclasses.replace(lookahead, relative_step_time=None)
    fitting = sequences.from_shapes(rows, setting, devices.memory_of_attached(device))
    tuned = choice.find_all(shapes, decoder)
    facts = {
        "path": str(options.model or arguments.DEMO),
        "format": headers.checkpoint.format,
        "family": headers.checkpoint.model_type,
        "config": _config_facts(config),
        "mlp_widths": config.mlp_widths,
        "parameters": headers.num_parameters,
        "files": {"count": headers.num_files, "bytes": headers.file_bytes, "tensor_bytes": headers.bytes_by_dtype},
        "memory": {
            "dtype": dtype.name,
            "kv_dtype": options.kv_dtype,
            "kinds": quantization.kinds(shapes),
            "weights_bytes": weights_bytes,
            "length": length,
            "batch_size": batch_size,
            "kv_cache_bytes": cache_bytes,
            "total_bytes": weights_bytes + cache_bytes,
        },
        "engine": fitting.facts(),
        "tokenizer": headers.checkpoint.tokenizer() is not None,
        "chat_template": headers.checkpoint.has_chat_template,
        "sampling": {name: value for name, value in vars(jlade.load_sampling(path)).items() if value is not None},
        "device": device.device_kind,
        "lookahead": names.name(lookahead),
        "source": "tuned" if choice.find(shapes, decoder, batch_size) else "estimated",
        "tuned": [
            {
                "devices": found.key.devices,
                "batch_size": found.key.batch_size,
                "date": found.date,
                "lookahead": names.name(found.lookahead),
            }
            for found in tuned
        ],
    }
    if options.json:
        print(json.dumps(facts))
    else:
        Console(highlight=False).print(_table(facts, fitting))


@dataclasses.dataclass(frozen=True)
class Headers:
    """Facts about a checkpoint that need no weights.

    Attributes:
      tensors: of the model, by name; none where weights of the Hub have not been fetched.
      bytes_by_dtype: bytes of the model's tensors by their stored type, in the spelling of the format for GGUF.
      num_files, file_bytes: number of weight files and their total size on disk. These three are empty or 0 where
        weights of the Hub have not been fetched.
    """

    checkpoint: Checkpoint
    config: LlamaConfig
    tensors: Mapping[str, Tensor]
    bytes_by_dtype: dict[str, int]
    num_files: int
    file_bytes: int

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in expected_tensors(self.config).values())

    def shapes(self, dtype: np.dtype, bits: quantization.Bits = None) -> LlamaParams:
        """Returns the shapes of the parameters that are loaded with a dtype and bits."""
        return loaded_shapes(self.tensors, self.config, dtype, bits)


def _headers(model: str | None, path: pathlib.Path) -> Headers:
    """Returns the facts about the checkpoint that lies at a path and was named `model`."""
    checkpoint = formats.find(path)
    if model is None or location.is_local(model) or path.is_file() or any(path.glob("*.safetensors")):
        return read_headers(checkpoint)
    return Headers(checkpoint, checkpoint.config(), {}, {}, 0, 0)  # weights of the Hub have not been fetched


def read_headers(checkpoint: Checkpoint, strict: bool = False, adapter: str | None = None) -> Headers:
    """Returns the facts about a checkpoint, with an adapter if there is one.

    Raises:
      ValueError: if loading the checkpoint with `strict` would raise one.
    """
    config, found = checkpoint.weights(strict, adapter)
    names = [name + end for name in expected_tensors(config) for end in ("", SCALE)]
    tensors = [found[name] for name in names if name in found]
    sizes: collections.Counter[str] = collections.Counter()
    for tensor in tensors:
        sizes[tensor.dtype if checkpoint.format == "gguf" else tensor.value_dtype] += tensor.num_bytes
    files = [file.stat().st_size for file in {tensor.file for tensor in tensors}]
    return Headers(checkpoint, config, found, dict(sizes), len(files), sum(files))


def _config_facts(config: LlamaConfig) -> dict[str, Any]:
    """Returns the configuration as JSON-like values, with the type of rotary scaling."""
    facts = dataclasses.asdict(config)
    if config.rope_scaling is not None:
        kind = type(config.rope_scaling).__name__.removesuffix("Scaling").lower()
        facts["rope_scaling"] = {"type": kind, **facts["rope_scaling"]}
    return facts


def _heads(config: dict[str, Any]) -> str:
    """Returns the heads of the layers, for people."""
    heads = f"{config['num_heads']} of {config['head_dim']}, {config['num_kv_heads']} for keys and values"
    if config["global_heads"]:
        number, size = config["global_heads"]
        heads += f"; without a window {config['num_heads']} of {size}, {number} for keys and values"
    if shared := config["shared_kv_layers"]:
        heads += f"; the last {shared} layers read keys and values of earlier ones"
    if recurrence := config["recurrence"]:
        number, values = len(config["recurrent_layers"]), recurrence["value_heads"]
        heads += f"; {number} recurrent layers, {recurrence['rule'].replace('_', ' ')} with {values:,} heads for values"
    if alone := config["mlp_layers"]:
        heads += f"; {len(alone)} layers without a mixer"
    return heads


def _table(facts: dict[str, Any], fitting: Sequences) -> Table:
    """Returns the facts as a table, with the sequences of an engine that fit."""
    config, files, memory, lookahead = (facts[name] for name in ("config", "files", "memory", "lookahead"))
    biases = [name for name in ("qkv", "attention_output", "mlp") if config[f"{name}_bias"]]
    windows = [size for size in config["sliding_windows"] if size is not None]
    scaling = dict(config["rope_scaling"] or {"type": "none"})
    sampling = dict(facts["sampling"])
    temperature = sampling.pop("temperature")
    tokens = f"temperature={temperature}" if temperature else "greedy"
    dtypes = files["tensor_bytes"]
    of_cache = "" if memory["kv_dtype"] is None else f" in {memory['kv_dtype']}"
    stored = (
        ", ".join(f"{decimal(dtypes[name])} of {name}" for name in dtypes)
        if len(dtypes) > 1
        else next(iter(dtypes), "")
    )
    rows = {
        "checkpoint": f"{facts['path']}, {FORMATS[facts['format']]}",
        "family": facts["family"],
        "parameters": f"{facts['parameters']:,}",
        "layers": f"{config['num_layers']}, of width {config['hidden_size']:,} and {facts['mlp_widths']}",
        "heads": _heads(config),
        "vocabulary": f"{config['vocab_size']:,}, output matrix "
        + ("shared with the embedding" if config["tie_embeddings"] else "of its own"),
        "positions": f"{config['max_positions']:,}",
        "rotary base": f"{config['rope_theta']:,.0f}",
        "rotary scaling": " ".join([scaling.pop("type"), *(f"{name}={value}" for name, value in scaling.items())]),
        "sliding windows": f"{windows[0]:,} tokens in {len(windows)} of {config['num_layers']} layers"
        if windows
        else "none",
        "biases": ", ".join(biases) or "none",
        "norms": "of layers, queries and keys" if config["qk_norm"] else "of layers",
        "end tokens": ", ".join(map(str, config["eos_ids"])) or "none",
        "sampling": ", ".join([tokens, *(f"{name}={value}" for name, value in sampling.items())]),
        "tokenizer": "yes" if facts["tokenizer"] else "no",
        "chat template": "yes" if facts["chat_template"] else "no",
        "files": f"{files['count']}, {decimal(files['bytes'])}, {stored}" if dtypes else "not fetched",
        f"weights in {' and '.join([*memory['kinds'], memory['dtype']])}": decimal(memory["weights_bytes"]),
        f"KV cache{of_cache}": f"{decimal(memory['kv_cache_bytes'])} for {memory['batch_size']} x "
        f"{memory['length']:,} tokens",
        "total memory": decimal(memory["total_bytes"]),
        "engine": inspect_device.in_words(fitting, memory["length"]),
        f"setting on {facts['device']}": f"{label(names.parse(lookahead))}, {facts['source']}",
    }
    for tuned in facts["tuned"]:
        found = f"{label(names.parse(tuned['lookahead']))}, on {tuned['date'] or 'an unknown date'}"
        number_or_mesh = tuned["devices"]
        devices = f"{number_or_mesh} devices" if number_or_mesh.isdecimal() else number_or_mesh
        where = "" if number_or_mesh == "1" else f" on {devices}"
        rows[f"tuned for batch size {tuned['batch_size']}{where}"] = found
    return terminal.facts_table(rows)
