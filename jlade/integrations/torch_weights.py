"""The weights of a model of transformers as parameters, copied again when they have changed."""

import json
import weakref
from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch
import xxhash
from jax.sharding import Mesh
from transformers.core_model_loading import revert_weight_conversion

from jlade.conversion.memory import load_held
from jlade.models.llama import LlamaParams

# The copied weights of each model, with what they were copied from and for.
taken: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...], LlamaParams]] = weakref.WeakKeyDictionary()


def params(model: Any, dtype: jax.typing.DTypeLike, bits: int | None, mesh: Mesh | None) -> LlamaParams:
    """Returns the weights that a model has now, copied again if they have changed since the last call.

    Args:
      model: of transformers, a plain module of torch.
      dtype, bits, mesh: of `jlade.conversion.LoadOptions`.

    Raises:
      ValueError: names the tensor that is not supported.
    """
    stamp = _digests(model), str(dtype), bits, mesh
    if model not in taken or taken[model][0] != stamp:
        taken.pop(model, None)  # frees the old ones
        taken[model] = stamp, _copy(model, dtype, bits, mesh)
    return taken[model][1]


def _copy(model: Any, dtype: jax.typing.DTypeLike, bits: int | None, mesh: Mesh | None) -> LlamaParams:
    """Returns the weights of a model as parameters."""
    held = model.state_dict()
    if wrapped := [name for name in held if ".base_layer." in name]:
        raise ValueError(
            f"{type(model).__name__} has an adapter of peft at {wrapped[0]}: merge it, model.merge_and_unload()"
        )
    config = json.loads(model.config.to_json_string())
    config.pop("quantization_config", None)  # the tensors show whether they still are
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    config["tie_word_embeddings"] = getattr(head, "weight", None) is embedding.weight  # as it is now
    with torch.no_grad():
        tensors = revert_weight_conversion(model, held)
        return load_held(config, tensors, _to_numpy, dtype=dtype, bits=bits, mesh=mesh)


def _digests(model: Any) -> tuple[Any, ...]:
    """Returns name, type, shape and digest of each tensor of a model. They differ if any bit does.

    The counters of torch do not tell: writes through `.data` or a view of NumPy change neither address nor version.
    """
    return tuple(_digest(model, name, tensor) for name, tensor in model.state_dict().items())


def _digest(model: Any, name: str, tensor: Any) -> tuple[Any, ...]:
    if type(tensor) is not torch.Tensor:
        kind = f"{type(tensor).__module__}.{type(tensor).__name__}"
        raise ValueError(f"{name} of {type(model).__name__} must be a plain tensor of torch, got {kind}")
    if tensor.is_meta:
        raise ValueError(f"{type(model).__name__} has parameters on the device 'meta': load it without offloading")
    content: Any = tensor.cpu().flatten().view(torch.uint8).numpy()
    return name, tensor.dtype, tensor.shape, xxhash.xxh3_128_digest(content)


def _to_numpy(tensor: Any) -> np.ndarray:
    """Returns a tensor on the host, without a copy if it is there."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # which torch does not hand to NumPy
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
