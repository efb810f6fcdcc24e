"""Checkpoints that are loaded onto a mesh: the arrays of one device, in parts, read and held only once."""

import io
import math
import os
import tracemalloc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import jlade
from jlade import conversion
from jlade.conversion import load_hf, save_hf, weight_files
from jlade.conversion.parts import TensorPart, place
from jlade.conversion.weight_files import StoredTensor, stored_tensors
from jlade.mesh import COPIES
from jlade.models.llama import LlamaConfig, init_params, quantize
from jlade.models.quantization import is_int8
from tests.conversion.hf_files import MESHES, assert_placed
from tests.tiny import slow, with_arrays

SHAPE = LlamaConfig(24, 16, 32, 2, 8, 2, 4, 64, qkv_bias=True, attention_output_bias=True)
FORMATS = {"hf": (save_hf, load_hf), "own": (conversion.save, conversion.load)}


def random_params(dtype=jnp.bfloat16, **changes):
    config = LlamaConfig(**{**vars(SHAPE), **changes})
    return init_params(jax.random.key(0), config, dtype)


@pytest.mark.parametrize(
    ("kind", "dtype", "sizes"),
    [
        ("hf", "auto", (1, 2, 4)),
        slow("hf", "float32", (8, 1, 1)),
        slow("own", "float16", (1, 1, 8)),
        ("own", "auto", (2, 2, 2)),
    ],
    ids=str,
)
def test_parameters_are_those_of_one_device(kind, dtype, sizes, tmp_path):
    save, load = FORMATS[kind]
    params, mesh = random_params(), jlade.make_mesh(*sizes)
    save(params, tmp_path / "model")
    assert_placed(load(tmp_path / "model", dtype, mesh=mesh), load(tmp_path / "model", dtype), mesh)
    assert load(tmp_path / "model", mesh=mesh).norm.dtype == jnp.float32, "the default of CPUs"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), [("hf", {"vocab_size": 13}), ("own", {"tie_embeddings": True})], ids=str)
def test_a_vocabulary_that_does_not_divide_and_tied_embeddings(changes, kind, tmp_path):
    save, load = FORMATS[kind]
    params, mesh = random_params(jnp.float32, **changes), jlade.make_mesh(model=8)
    save(params, tmp_path / "model")
    loaded, _ = jlade.load(tmp_path / "model", mesh=mesh)
    assert_placed(loaded, params, mesh)
    assert loaded.embedding.is_fully_replicated == ("vocab_size" in changes)
    assert loaded.layers[0].attention.key.sharding.mesh.shape[COPIES] == 4, "2 KV heads on 8 devices"
    assert_placed(load(tmp_path / "model", bits=8, mesh=mesh), quantize(params), mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "sizes"), [("float32", (1, 1, 8)), ("bfloat16", (2, 2, 2))], ids=str)
def test_int8_is_that_of_one_device(dtype, sizes, tmp_path):
    mesh = jlade.make_mesh(*sizes)
    save_hf(random_params(), tmp_path / "hf")
    expected = load_hf(tmp_path / "hf", dtype, bits=8)
    assert_placed(load_hf(tmp_path / "hf", dtype, bits=8, mesh=mesh), expected, mesh)
    conversion.save(load_hf(tmp_path / "hf", dtype), tmp_path / "floating")
    assert_placed(conversion.load(tmp_path / "floating", dtype, bits=8, mesh=mesh), expected, mesh)
    conversion.save(expected, tmp_path / "int8")
    assert_placed(conversion.load(tmp_path / "int8", dtype, mesh=mesh), expected, mesh)


@pytest.mark.slow
def test_arrays_on_a_mesh_are_saved_and_restored_elsewhere(tmp_path):
    params, mesh, other = random_params(jnp.float32), jlade.make_mesh(model=8), jlade.make_mesh(1, 2, 2)
    save_hf(params, tmp_path / "hf")
    conversion.save(load_hf(tmp_path / "hf", mesh=mesh), tmp_path / "own")
    assert_placed(conversion.load(tmp_path / "own", mesh=other), params, other)
    for got, wanted in zip(jax.tree.leaves(conversion.load(tmp_path / "own")), jax.tree.leaves(params), strict=True):
        assert len(got.sharding.device_set) == 1
        np.testing.assert_array_equal(got, wanted)


def test_a_mesh_that_cannot_work_is_refused_before_a_tensor_is_read(tmp_path, monkeypatch):
    def read(*arguments):
        raise AssertionError("a tensor was read")

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    save_hf(random_params(), tmp_path / "hf")
    conversion.save(random_params(), tmp_path / "own")
    monkeypatch.setattr(StoredTensor, "read", read)
    for path in (tmp_path / "hf", tmp_path / "own"):
        with pytest.raises(ValueError, match=r"mesh has model=3, but the model has 8 heads, .* 1, 2, 4, 8 devices"):
            jlade.load(path, mesh=jlade.make_mesh(model=3))
        with pytest.raises(TypeError, match=r"mesh must be a mesh made by jlade\.make_mesh, got 8"):
            jlade.load(path, mesh=8)
        with pytest.raises(ValueError, match=r"sharding must be None with a mesh, .* got Single.*: give one"):
            jlade.load(path, sharding=device, mesh=jlade.make_mesh())


def test_the_demo_on_a_mesh(demo):
    mesh = jlade.make_mesh(lookahead=2, model=4)
    assert_placed(jlade.demo("float32", mesh=mesh)[0], demo[0], mesh)


@pytest.fixture
def counted(monkeypatch):
    """The sizes of all reads of weights."""
    sizes = []

    class Counting(io.FileIO):
        def readinto(self, buffer):
            sizes.append(super().readinto(buffer))
            return sizes[-1]

    def opened(file, mode, buffering=-1):
        return Counting(file, mode) if buffering == 0 else open(file, mode, buffering)

    monkeypatch.setattr(weight_files, "open", opened, raising=False)
    return sizes


@pytest.mark.parametrize("kind", ["hf", "own", "own, int8"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_byte_is_read_once(sizes, kind, counted, tmp_path):
    save, load = FORMATS[kind.partition(",")[0]]
    params = random_params(vocab_size=13)
    params = quantize(params) if "int8" in kind else params
    save(params, tmp_path / "model")
    load(tmp_path / "model", mesh=jlade.make_mesh(*sizes))
    assert sum(counted) == sum(array.nbytes for array in jax.tree.leaves(params))
    largest = max(array.nbytes for array in jax.tree.leaves(params))
    assert len(counted) <= 2 * 8 * len(jax.tree.leaves(params)), "columns of all devices are read with their rows"
    assert max(counted) <= largest


@pytest.mark.parametrize("chunk", [5, 2**20])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("shape", "indices"),
    [
        ((6, 8), [np.s_[2:4, :]]),
        ((6, 8), [np.s_[:, 2:4]]),
        ((6, 8), [np.s_[:, 6:8], np.s_[:, 0:2], np.s_[:, 2:4]]),
        ((6, 8), [np.s_[3:6, 4:8], np.s_[0:3, 0:4], np.s_[3:6, 0:4]]),
        ((6, 8), [np.s_[:, :]]),
        ((8,), [np.s_[6:8], np.s_[0:2]]),
    ],
    ids=str,
)
def test_a_process_reads_only_its_parts(shape, indices, dtype, chunk, counted, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "CHUNK", chunk)
    values = np.random.default_rng(0).normal(size=shape).astype(jnp.bfloat16)
    weight_files_of = {"first": np.ones(3, np.float32), "tensor": values, "last": np.ones(3, np.float32)}
    save_file(weight_files_of, tmp_path / "model.safetensors")
    parts = [TensorPart.of(index if isinstance(index, tuple) else (index,), shape) for index in indices]
    arrays, broken = stored_tensors(tmp_path)["tensor"].read("tensor", np.dtype(dtype), parts)
    assert broken == set()
    assert sum(counted) == sum(values[index].nbytes for index in indices)
    for array, index in zip(arrays, indices, strict=True):
        assert (array.dtype, array.shape, array.ctypes.data % 64) == (dtype, values[index].shape, 0)
        np.testing.assert_array_equal(array, values[index].astype(dtype))


def test_only_the_parts_of_the_devices_of_a_process_are_asked_for(monkeypatch):
    indices = {0: np.s_[0:2, 4:8], 1: np.s_[2:4, 4:8], 2: np.s_[0:2, 4:8]}  # 0 and 2 hold the same part
    asked = []

    def read(parts):
        asked.extend(parts)
        return [np.full((2, 4), i) for i in range(len(parts))]

    def make_array(shape, place, callback, dtype):
        return [callback(indices[i])[0, 0] for i in indices]

    monkeypatch.setattr(jax, "make_array_from_callback", make_array)
    sharding = types.SimpleNamespace(addressable_devices_indices_map=lambda shape: indices)
    assert place((4, 16), np.dtype("float32"), sharding, read) == [0, 1, 0]
    assert asked == [TensorPart(range(2), range(4, 8)), TensorPart(range(2, 4), range(4, 8))]


def test_a_file_that_is_cut_short_while_it_is_read_is_refused(tmp_path, monkeypatch):
    save_hf(random_params(), tmp_path / "hf")
    file, read = tmp_path / "hf" / "model.safetensors", StoredTensor.read

    def meanwhile(stored, name, dtype, parts):
        if name == "model.layers.1.mlp.down_proj.weight":
            os.truncate(file, stored.offset + stored.num_bytes - 2)
        return read(stored, name, dtype, parts)

    monkeypatch.setattr(StoredTensor, "read", meanwhile)
    with pytest.raises(ValueError, match=r"model\.safetensors changed while it was read: .*down_proj.* is cut short"):
        load_hf(tmp_path / "hf", mesh=jlade.make_mesh(model=8))


@pytest.mark.parametrize("column", [0, 31])
def test_an_element_that_is_not_finite_is_reported_once(column, tmp_path):
    params = random_params()
    layer = params.layers[1]
    layer = with_arrays(layer, {"mlp.down": layer.mlp.down.at[3, column].set(jnp.inf)})
    save_hf(params.replace(layers=(params.layers[0], layer)), tmp_path / "hf")
    message = r"NaN or infinite values in model\.layers\.1\.mlp\.down_proj\.weight \(1 of \d+ rows: 3\)$"
    with pytest.warns(UserWarning, match=message):
        load_hf(tmp_path / "hf", mesh=jlade.make_mesh(model=8))


def bytes_held(arrays=None):
    """Returns the bytes of the arrays, by default all live ones, on each device."""
    held = dict.fromkeys(jax.devices(), 0)
    for array in jax.live_arrays() if arrays is None else arrays:
        for device in array.sharding.device_set:
            held[device] += math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
    return np.array(list(held.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "bits"),
    [("hf", (1, 1, 8), None), ("own", (1, 2, 4), None), ("own", (1, 1, 8), 8)],
    ids=str,
)
def test_no_device_and_no_host_holds_the_model(kind, sizes, bits, tmp_path):
    save, load = FORMATS[kind]
    save(random_params(jnp.float32, vocab_size=2048, hidden_size=256, intermediate_size=1024), tmp_path / "model")
    options = {"dtype": "bfloat16", "bits": bits, "mesh": jlade.make_mesh(*sizes)}
    load(tmp_path / "model", **options)  # fills JAX's caches
    before, samples = bytes_held(), []
    tracemalloc.start()
    params = load(tmp_path / "model", **options, progress=lambda size: samples.append(bytes_held()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(samples) == len(jax.tree.leaves(params, is_leaf=is_int8))
    arrays = jax.tree.leaves(params)
    share, total = bytes_held(arrays).max(), sum(array.nbytes for array in arrays)
    assert share < 1.3 * total / sizes[-1]
    largest = params.embedding.nbytes
    floating = largest // sizes[-1] if bits else 0  # of a matrix before it is quantized
    assert np.max(samples - before) <= 1.1 * share + floating
    # On a CPU the devices' arrays are the host's.
    assert peak <= sizes[1] * total + 2 * largest
