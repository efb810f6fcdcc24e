"""Small checkpoints in Hugging Face's format, changes of them, and comparisons of what is read."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

import jlade
from jlade.mesh import mesh_of
from jlade.models import sharding
from jlade.models.llama import LlamaConfig, init_params

DEMO = pathlib.Path(jlade.__file__).parent / "demo"
CONFIGS = pathlib.Path(__file__).parent / "configs"  # of well-known checkpoints
MESHES = [(1, 1, 8), (1, 2, 4), (2, 2, 2), (8, 1, 1)]
SHAPE = LlamaConfig(12, 8, 10, 2, 4, 2, 2, 64, eos_ids=(3, 4))
CONFIG = {
    "model_type": "llama",
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "eos_token_id": 2,
}
LAYER = {
    "input_layernorm": (8,),
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (4, 8),
    "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 8),
    "post_attention_layernorm": (8,),
    "mlp.gate_proj": (10, 8),
    "mlp.up_proj": (10, 8),
    "mlp.down_proj": (8, 10),
}
SHAPES = {
    "model.embed_tokens.weight": (12, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (12, 8),
    **{f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in LAYER.items()},
}


def random_tensors():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def write_checkpoint(directory, tensors=None, **changes):
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(random_tensors() if tensors is None else tensors, directory / "model.safetensors")
    return directory


def change_config(directory, **changes):
    """Sets keys of config.json, or removes those that are None; returns what it was."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    removed = {key for key, value in changes.items() if value is None}
    file.write_text(json.dumps({key: value for key, value in (config | changes).items() if key not in removed}))
    return config


def change_tensors(directory, changes):
    """Adds or replaces tensors of model.safetensors, or removes those that are None; returns what they were."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file({name: array for name, array in (tensors | changes).items() if array is not None}, file, {"format": "pt"})
    return tensors


def assert_equal(params, expected):
    """Asserts that two models have one configuration and the same arrays, bit for bit."""
    assert params.config == expected.config
    for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert got.dtype == wanted.dtype
        assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes()


def assert_same_arrays(params, expected):
    for array, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert array.dtype == wanted.dtype
        np.testing.assert_array_equal(array, wanted)


def assert_placed(params, expected, mesh):
    """Asserts that `params` are `expected` on the mesh, and that decoding there copies nothing."""
    divided = sharding.mesh_for(expected.config, mesh)
    for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(sharding.put(expected, divided)), strict=True):
        assert (got.dtype, got.sharding) == (wanted.dtype, wanted.sharding)
        assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes()
        for part, other in zip(got.addressable_shards, wanted.addressable_shards, strict=True):
            assert part.device == other.device
            assert np.asarray(part.data).tobytes() == np.asarray(other.data).tobytes()
    assert mesh_of(params) == divided
    kept = sharding.put(params, divided)
    assert all(map(lambda a, b: a is b, jax.tree.leaves(params), jax.tree.leaves(kept)))


def random_params(changes, dtype=jnp.bfloat16):
    """Returns random parameters of `SHAPE` with the `changes` of its configuration."""
    config = LlamaConfig(**{**vars(SHAPE), **changes})
    return init_params(jax.random.key(0), config, dtype)


def stored(directory):
    """Returns the bytes of every tensor of a checkpoint."""
    arrays = {}
    for file in sorted(directory.glob("*.safetensors")):
        arrays |= load_file(file)
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}
