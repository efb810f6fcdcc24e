"""jlade's own checkpoints: config.json as in Hugging Face's, and the arrays of the parameters, int8 included.

The weights are those of safetensors files whose names begin with "jlade", which no other program writes or reads.
"""

import os
import pathlib
import shutil
from collections.abc import Callable, Mapping

import jax
from jax.sharding import Mesh

from jlade.conversion import adapter_config, hf_quantization, huggingface, packed
from jlade.conversion.hf_config import auto_dtype, read_config, write_configs
from jlade.conversion.hf_experts import ExpertTensor
from jlade.conversion.hf_tensors import check_names
from jlade.conversion.json_files import read_json, write_json
from jlade.conversion.tensors import ARRAYS, SCALE, Sharding, bits_of, expected_tensors, named_arrays, scale_shape
from jlade.conversion.weight_files import FLOATS, SINGLE_FILE, Tensor, check_kind, stored_tensors, write_tensors
from jlade.files import written_whole
from jlade.models.llama import LlamaConfig, LlamaParams

OWN_FILE = "jlade.safetensors"
TIED = "tie_word_embeddings"
FILES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.txt", "*.model")  # of tokenizers: the last two


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a directory is a checkpoint written by `save`."""
    directory = pathlib.Path(path)
    kinds = {name: single for single in (OWN_FILE, SINGLE_FILE) for name in (f"{single}.index.json", single)}
    there = {kind: name for name, kind in kinds.items() if (directory / name).exists()}
    if len(there) > 1:
        raise ValueError(f"{directory} has two checkpoints, {' and '.join(there.values())}: remove one of them")
    return OWN_FILE in there


def save(params: LlamaParams, path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> None:
    """Writes a checkpoint. The directory appears whole or not at all.

    Args:
      params: the parameters, of any sharding and dtype, in few bits too.
      path: a new directory.
      progress: called with the bytes of each array when its file is written.

    Raises:
      ValueError: if `path` exists, or the parameters are divided among processes.
    """
    with written_whole(path) as directory:
        directory.mkdir()
        write_configs(params.config, params.norm.dtype.name, directory)
        write_tensors(named_arrays(params).items(), directory, OWN_FILE, progress)


def load(
    path: str | os.PathLike[str],
    dtype: jax.typing.DTypeLike | None = None,
    sharding: Sharding | None = None,
    progress: Callable[[int], None] | None = None,
    bits: int | None = None,
    strict: bool = False,
    mesh: Mesh | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> LlamaParams:
    """Returns the parameters of a checkpoint that `save` wrote.

    Like `load_hf` it holds one array at a time besides the parameters, and reads only the parts of this process. The
    arguments are those of `load_hf`, except that:

    * A function `sharding` is also called for the scales of int8 matrices, whose names end with "_scale".
    * Matrices in few bits stay so without `bits`.
    * An adapter is refused.

    Raises:
      ValueError, warns: as `load_hf` does.
    """
    directory = pathlib.Path(path)
    if not is_checkpoint(directory):
        raise ValueError(f"path must be a directory written by jlade.conversion.save, got {os.fspath(path)!r}")
    config, tensors = headers_of(directory, strict, adapter)
    dtype = auto_dtype(dtype, directory)
    return huggingface.read_params(tensors, config, directory, dtype, sharding, progress, bits, strict, mesh)


def headers_of(
    directory: pathlib.Path, strict: bool = False, adapter: str | os.PathLike[str] | None = None
) -> tuple[LlamaConfig, Mapping[str, Tensor]]:
    """Returns the configuration of a checkpoint in any format and its tensors by name, all checked."""
    if not is_checkpoint(directory):
        return huggingface.headers_of(directory, strict, adapter)
    if adapter is not None:
        raise ValueError(
            f"adapter must be None for {directory}, a checkpoint of jlade: merge it into the original, "
            f"`jlade convert ORIGINAL NEW_DIR --adapter {os.fspath(adapter)}`"
        )
    config = read_config(directory, strict)
    stored = stored_tensors(directory, strict, OWN_FILE)
    expected, tensors, used = expected_tensors(config), dict[str, Tensor](), set[str]()
    lacking = set[str]()
    for name, shape in expected.items():
        ends = ARRAYS if bits_of(name, config, 8) is not None else {"weight": ""}
        arrays = {field: stored[name + end] for field, end in ends.items() if name + end in stored}
        used |= {name + ends[field] for field in arrays}
        weight, scale = arrays.get("weight"), arrays.get("scale")
        if weight is None or (scale is None and len(ends) > 1 and weight.dtype in ("I8", "U8")):
            lacking.add(name if weight is None else name + SCALE)
        elif scale is not None and len(scale.shape) == len(shape):
            tensors[name] = packed.own_matrix(name, shape, arrays)
        else:
            check_kind(name, weight, shape, FLOATS if scale is None else ("I8",))
            of_experts = len(shape) == 3
            tensors[name] = ExpertTensor(weight.rows(), slice(None), False, shape) if of_experts else weight
            if scale is not None:
                check_kind(name + SCALE, scale, scale_shape(shape), ("F32",))
                tensors[name + SCALE] = scale
    check_names(directory, lacking, stored.keys() - used)
    return config, tensors


def copy_metadata(source: pathlib.Path, target: pathlib.Path) -> None:
    """Gives the metadata of a checkpoint to one that `save` or `save_hf` has written with its parameters, in any dtype.

    In config.json, dtype and tying are those of the new weights, which are not quantized as those of the original are.
    """
    original, written = (read_json(directory / "config.json") for directory in (source, target))
    if "text_config" in original:  # the copy has the text part alone
        original = written
    dtype_keys = [key for key in ("dtype", "torch_dtype") if key in original] or ["torch_dtype"]
    changed = dict.fromkeys(dtype_keys, written["torch_dtype"]) | {TIED: written[TIED]}
    kept = {key: original[key] for key in original if key not in hf_quantization.KEYS}
    write_json(target / "config.json", kept | changed)
    (target / "generation_config.json").unlink()  # the original may have none
    for pattern in FILES:
        for file in source.glob(pattern):
            # An index lists weight files, and an adapter would be merged once more.
            if file.name not in ("config.json", adapter_config.NAME) and not file.name.endswith(".index.json"):
                copy = target / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
