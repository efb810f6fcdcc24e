"""Changes of checkpoints in Hugging Face's format, and comparisons of what is read from them."""

import json

import jax
import numpy as np
from safetensors.numpy import load_file, save_file


def change_config(directory, **changes):
    """Sets keys of config.json, or removes those that are None; returns what it was."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in (config | changes).items() if value is not None}))
    return config


def change_tensors(directory, changes):
    """Adds or replaces tensors of model.safetensors, or removes those that are None; returns what they were."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file({name: array for name, array in (tensors | changes).items() if array is not None}, file, {"format": "pt"})
    return tensors


def assert_same_arrays(params, expected):
    for array, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(array, wanted)
