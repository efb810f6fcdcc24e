"""Devices and dtypes of the arrays of a checkpoint."""

import types

import jax
import jax.numpy as jnp
import pytest

from jlade.conversion import load_hf
from jlade.conversion.tensors import EMBEDDING, check_dtype, device_of
from jlade.mesh import default_device
from tests.conversion.hf_files import SHAPE, write_checkpoint

DTYPES = {"cpu": "float32", "gpu": "bfloat16", "tpu": "bfloat16"}


def fake_sharding(platform):
    """Returns a stand-in for a sharding on another platform; this machine may have none."""
    device = types.SimpleNamespace(platform=platform)
    return types.SimpleNamespace(
        device_set=[device], addressable_devices_indices_map=lambda shape: {0: (slice(None),) * len(shape)}
    )


def test_the_device_without_a_sharding_is_the_default_device():
    assert device_of(None, SHAPE) == default_device() == jax.devices()[0]
    last = jax.devices()[-1]
    with jax.default_device(last):
        assert default_device() == last
    with jax.default_device("cpu"):
        assert default_device() == jax.devices("cpu")[0]


def test_the_device_of_a_sharding_is_that_of_the_embedding():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])

    def place(name, shape):
        assert (name, shape) == (EMBEDDING, (12, 8))
        return sharding

    assert device_of(sharding, SHAPE) == device_of(place, SHAPE) == jax.devices()[-1]


@pytest.mark.parametrize("platform", DTYPES)
def test_the_default_dtype_is_that_of_the_device(platform, tmp_path):
    (device,) = fake_sharding(platform).device_set
    assert check_dtype(None, "float16", tmp_path, device) == DTYPES[platform]
    assert check_dtype("auto", "float16", tmp_path, device) == jnp.float16


@pytest.mark.parametrize("platform", DTYPES)
@pytest.mark.parametrize("per_tensor", [False, True])
def test_loaded_arrays_have_the_default_dtype_of_their_device(per_tensor, platform, tmp_path, monkeypatch):
    sharding = fake_sharding(platform)

    def make_array(shape, place, read, dtype):
        assert place is sharding
        return jnp.asarray(read((slice(None),) * len(shape)))

    monkeypatch.setattr(jax, "make_array_from_callback", make_array)
    params = load_hf(write_checkpoint(tmp_path), sharding=(lambda name, shape: sharding) if per_tensor else sharding)
    assert {array.dtype for array in jax.tree.leaves(params)} == {jnp.dtype(DTYPES[platform])}
