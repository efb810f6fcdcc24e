"""The matrices of heads for latents, of which files in Hugging Face's format have one tensor for keys and values.

Its rows are those of the first head's keys, of its values, of the second head's keys and so on.
"""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp

from jlade.conversion.hf_experts import ExpertTensor
from jlade.conversion.parts import Shape
from jlade.conversion.tensors import LAYER
from jlade.conversion.weight_files import StoredTensor
from jlade.models.llama import LlamaConfig

FIELDS = ("key_up", "value_up")
NAME = "self_attn.kv_b_proj.weight"  # within a layer


def files(config: LlamaConfig) -> dict[str, tuple[str, str]]:
    """Returns the names of the two arrays that each tensor holds, by its name."""
    if config.latent is None:
        return {}
    keys, values = (LAYER[field] for field in FIELDS)
    prefixes = [f"model.layers.{i}." for i in range(config.num_layers)]
    return {prefix + NAME: (prefix + keys, prefix + values) for prefix in prefixes}


def shapes(config: LlamaConfig) -> dict[str, Shape]:
    """Returns the shapes of the tensors by name."""
    heads = head_shapes(config)
    return {name: (sum(rows for rows, _ in heads), heads[0][1]) for name in files(config)}


def head_shapes(config: LlamaConfig) -> list[Shape]:
    """Returns the shapes of the matrices in a tensor: those for keys and for values in turn."""
    sizes = config.latent
    return [] if sizes is None else [(sizes.unrotated, sizes.rank), (sizes.value_size, sizes.rank)] * config.num_heads


def read(config: LlamaConfig, stored: Mapping[str, StoredTensor]) -> dict[str, ExpertTensor]:
    """Returns the arrays by name, given the tensors of the files, with the shapes of `shapes`."""
    found: dict[str, ExpertTensor] = {}
    for name, arrays in files(config).items():
        matrices = stored[name].divide(head_shapes(config))
        for i, array in enumerate(arrays):
            found[array] = ExpertTensor(matrices[i::2], slice(None), False, (config.num_heads, *matrices[i].shape))
    return found


def write(config: LlamaConfig, arrays: Mapping[str, jax.Array]) -> Iterator[tuple[str, jax.Array]]:
    """Yields the tensors of files with their names, given the arrays by name."""
    for name, (keys, values) in files(config).items():
        joined = jnp.concatenate([arrays[keys], arrays[values]], axis=1)
        yield name, joined.reshape(-1, joined.shape[-1])
