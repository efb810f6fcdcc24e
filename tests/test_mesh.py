"""Meshes, and arrays on them; decoding on meshes is in tests/decoding/test_mesh.py."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jlade
from jlade import mesh as mesh_lib
from jlade.mesh import MODEL
from jlade.models import sharding
from tests.tiny import tiny_llama


def test_axes_and_devices():
    mesh = jlade.make_mesh(data=2, lookahead=3)
    assert dict(mesh.shape) == {"data": 2, "lookahead": 3, "model": 1}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert jlade.make_mesh().size == 1
    assert jlade.make_mesh(model=2, devices=jax.devices()[4:]).devices.flat[0] == jax.devices()[4]


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"lookahead": 16}, ValueError, "needs 16 devices, and there are 8: .* at most 8"),
        ({"data": 0}, ValueError, "data must be at least 1, got 0"),
        ({"model": 2.0}, TypeError, "model must be an integer of at least 1, got 2.0"),
        ({"model": True}, TypeError, "model must be an integer of at least 1, got True"),
    ],
)
def test_sizes_that_cannot_work(sizes, error, message):
    with pytest.raises(error, match=message):
        jlade.make_mesh(**sizes)


def test_a_mesh_of_other_axes_is_refused():
    devices = np.array(jax.devices()).reshape(2, 4)
    with pytest.raises(ValueError, match="axes data, lookahead, model, got x, model"):
        mesh_lib.split(Mesh(devices, ("x", "model")), None)
    with pytest.raises(TypeError, match=r"made by jlade.make_mesh, got 'v5e'"):
        jlade.generate(tiny_llama(), [1, 2], mesh="v5e", max_new_tokens=2)
    # Axes in another order, and some of them alone, are accepted.
    assert mesh_lib.label(mesh_lib.split(Mesh(devices, ("model", "data")), 4)) == "data 4, lookahead 1, model 2"


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({"num_heads": 4, "num_kv_heads": 2}, "1, 2, 4"),
        ({"num_heads": 12, "num_kv_heads": 6}, "1, 2, 3, 6, 12"),
        ({"num_heads": 8, "num_kv_heads": 8, "intermediate_size": 30}, "1, 2"),
    ],
)
def test_a_model_that_cannot_be_divided(changes, accepted):
    with pytest.raises(ValueError, match=f"mesh has model=8, .* which divide among {accepted} devices"):
        jlade.generate(tiny_llama(**changes), [1, 2], max_new_tokens=2, mesh=jlade.make_mesh(model=8))


@pytest.mark.parametrize("vocab_size", [13, 16])
def test_places_of_parameters(vocab_size):
    """A device has its heads, KV heads, MLP columns and tokens, and nothing else of the matrices."""
    params = tiny_llama(vocab_size=vocab_size, num_heads=8, num_kv_heads=2, intermediate_size=32, qkv_bias=True)
    placed = sharding.put(params, sharding.mesh_for(params.config, jlade.make_mesh(lookahead=2, model=4)))
    layer, head_dim = placed.layers[0], params.config.head_dim
    tokens = vocab_size // 4 if vocab_size % 4 == 0 else vocab_size
    expected = {
        "attention.query": (2 * head_dim, 16),
        "attention.key": (head_dim, 16),
        "attention.value_bias": (head_dim,),
        "attention.output": (16, 2 * head_dim),
        "mlp.gate": (8, 16),
        "mlp.down": (16, 8),
        "mlp_norm.weight": (16,),
    }
    shapes = {name: operator.attrgetter(name)(layer).addressable_shards[0].data.shape for name in expected}
    assert shapes == expected
    assert placed.embedding.addressable_shards[0].data.shape == (tokens, 16)
    # Devices 0 and 1 have copies of the first KV head, with different query heads.
    first, second, third = (layer.attention.key.addressable_shards[i].data for i in (0, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, third)
    np.testing.assert_array_equal(
        layer.attention.query.addressable_shards[1].data, params.layers[0].attention.query[2 * head_dim : 4 * head_dim]
    )


def test_put_and_fetch():
    mesh = mesh_lib.split(jlade.make_mesh(2, 2, 2), 2)
    tree = {"x": np.arange(8.0), "key": jax.random.key(3), "none": None}
    specs = {"x": PartitionSpec(("data", *MODEL)), "key": PartitionSpec(), "none": PartitionSpec()}
    placed = mesh_lib.put(tree, mesh, specs)
    assert placed["x"].addressable_shards[0].data.shape == (2,)
    assert mesh_lib.mesh_of(placed) == mesh
    assert mesh_lib.mesh_of({"x": jnp.arange(3)}) is None
    np.testing.assert_array_equal(mesh_lib.fetch(placed["x"]), tree["x"])
    assert mesh_lib.put(placed, mesh, specs)["x"] is placed["x"]
