"""jlade's own checkpoints: config.json as in Hugging Face's, and the arrays of the parameters, int8 included.

The weights are those of safetensors files whose names begin with "jlade", which no other program writes or reads.
"""

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from jlade.conversion import packed
from jlade.conversion.checkpoint import LoadOptions
from jlade.conversion.hf_config import write_configs
from jlade.conversion.hf_experts import ExpertTensor
from jlade.conversion.hf_tensors import check_names
from jlade.conversion.huggingface import HuggingFace
from jlade.conversion.tensors import ARRAYS, SCALE, bits_of, expected_tensors, named_arrays, scale_shape
from jlade.conversion.weight_files import FLOATS, SINGLE_FILE, Tensor, check_kind, stored_tensors, write_tensors
from jlade.files import written_whole
from jlade.models.llama import LlamaConfig, LlamaParams
from jlade.models.quantization import FILE

OWN_FILE = "jlade.safetensors"


class Own(HuggingFace):
    """A directory that `save` wrote. Its metadata are those of Hugging Face's format."""

    format: ClassVar[str] = "jlade"

    def weights(
        self, strict: bool = False, adapter: str | os.PathLike[str] | None = None
    ) -> tuple[LlamaConfig, Mapping[str, Tensor]]:
        """Matrices in few bits stay so. An adapter is refused."""
        if adapter is not None:
            raise ValueError(
                f"adapter must be None for {self.path}, a checkpoint of jlade: merge it into the original, "
                f"`jlade convert ORIGINAL NEW_DIR --adapter {os.fspath(adapter)}`"
            )
        config = self.config(strict)
        stored = stored_tensors(self.path, strict, OWN_FILE)
        expected, tensors, used = expected_tensors(config), dict[str, Tensor](), set[str]()
        lacking = set[str]()
        for name, shape in expected.items():
            ends = ARRAYS if bits_of(name, config, FILE) is not None else {"weight": ""}
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
        check_names(self.path, lacking, stored.keys() - used)
        return config, tensors


def is_own(directory: pathlib.Path) -> bool:
    """Whether a directory is a checkpoint written by `save`."""
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


def load(path: str | os.PathLike[str], *arguments: Any, **options: Any) -> LlamaParams:
    """Returns the parameters of a checkpoint that `save` wrote, as `Checkpoint.load` does.

    Args:
      path: the directory.
      arguments, options: see `jlade.conversion.LoadOptions`. An adapter is refused.
    """
    directory = pathlib.Path(path)
    if not is_own(directory):
        raise ValueError(f"path must be a directory written by jlade.conversion.save, got {os.fspath(path)!r}")
    return Own(directory).load(LoadOptions(*arguments, **options))
