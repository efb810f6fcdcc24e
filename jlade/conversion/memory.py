"""Models that another package holds in memory, as parameters."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jlade.conversion import hf_config, hf_quantization
from jlade.conversion.checkpoint import LoadOptions, read_params
from jlade.conversion.hf_tensors import model_tensors
from jlade.conversion.parts import Shape, TensorPart
from jlade.conversion.weight_files import DTYPES, StoredTensor, aligned, broken_rows
from jlade.models.llama import LlamaParams

NAMES = {dtype: name for name, dtype in DTYPES.items()}  # in safetensors


@dataclasses.dataclass(frozen=True, eq=False)
class HeldTensor(StoredTensor):
    """A tensor in memory in the place of one in a file. `file` says whose it is, for messages.

    Attributes:
      values: the tensor, of any package. Its parts are slices of it.
      to_numpy: returns `values` or a part of it in NumPy.
    """

    values: Any
    to_numpy: Callable[[Any], np.ndarray]

    def divide(self, shapes: Iterable[Shape]) -> list[StoredTensor]:
        parts: list[StoredTensor] = []
        begin = 0
        for shape in shapes:
            is_whole = not self.shape or shape[0] == self.shape[0]
            values = self.values.reshape(shape) if is_whole else self.values[begin : begin + shape[0]]
            parts.append(dataclasses.replace(self, shape=shape, values=values))
            begin += shape[0]
        return parts

    def rows(self) -> list[StoredTensor]:
        return [dataclasses.replace(self, shape=self.shape[1:], values=self.values[i]) for i in range(self.shape[0])]

    def read_bytes(self, name: str) -> np.ndarray:
        return self.to_numpy(self.values)

    def read(self, name: str, dtype: np.dtype, parts: Sequence[TensorPart]) -> tuple[list[np.ndarray], set[int]]:
        """Returns copies of parts of the tensor as `dtype`, and its rows with NaN or infinite elements in them."""
        arrays: list[np.ndarray] = []
        broken: set[int] = set()
        for rows, columns in parts:
            part = self.values[rows.start : rows.stop]
            part = part if part.ndim == 1 else part[:, columns.start : columns.stop]
            array = aligned(tuple(part.shape), dtype)
            with np.errstate(over="ignore"):  # the broken rows tell of it
                array[...] = self.to_numpy(part)
            as_matrix = array.reshape(len(rows), -1)
            broken |= broken_rows(as_matrix, as_matrix, rows.start)
            arrays.append(array)
        return arrays, broken


def hold(
    tensors: Mapping[str, Any], source: pathlib.Path, to_numpy: Callable[[Any], np.ndarray]
) -> dict[str, StoredTensor]:
    """Returns tensors of any package as those of a `source`, see `HeldTensor`."""
    held: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).rpartition(".")[2]  # torch's names begin with "torch."
        held[name] = HeldTensor(source, (), 0, tuple(tensor.shape), NAMES.get(kind, kind), tensor, to_numpy)
    return held


def load_held(
    config: Mapping[str, Any],
    tensors: Mapping[str, Any],
    to_numpy: Callable[[Any], np.ndarray],
    *,
    owner: str = "model",
    dtype: jax.typing.DTypeLike | None = None,
    bits: int | None = None,
    mesh: Mesh | None = None,
) -> LlamaParams:
    """Returns copies of the tensors of a model in memory as parameters, moved to their devices one at a time.

    Args:
      config: the content of its config.json.
      tensors: by their names in a checkpoint. They have `shape` and `dtype`, and can be sliced and reshaped.
      to_numpy: returns a tensor in NumPy.
      owner: the name of the model, for messages.
      dtype, bits, mesh: see `LoadOptions`.

    Raises:
      ValueError, warns: as `Checkpoint.load` does, with `owner`.config and `owner`.state_dict() in the place of files.
    """
    architecture = hf_config.check(pathlib.Path(f"{owner}.config"), config)
    method = hf_quantization.settings_of(config).get("quant_method")
    if method in hf_quantization.ACCEPTED:
        raise ValueError(f"{owner} is quantized with {method}; only its files are read: `jlade.load(PATH, bits=4)`")
    source = pathlib.Path(f"{owner}.state_dict()")
    architecture, tensors_of_model = model_tensors(hold(tensors, source, to_numpy), architecture, source)
    return read_params(tensors_of_model, architecture, source, LoadOptions(dtype, bits=bits, mesh=mesh))
