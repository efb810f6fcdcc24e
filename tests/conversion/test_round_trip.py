"""Written checkpoints come back bit for bit, and appear whole or not at all."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jlade
from jlade import conversion
from jlade.conversion import huggingface, load_hf, save_hf
from jlade.conversion.json_files import read_json
from jlade.conversion.memory import load_held
from jlade.conversion.weight_files import StoredTensor
from jlade.models.llama import LlamaConfig, init_params
from jlade.models.rotary import LinearScaling, Llama3Scaling, YarnScaling
from tests.conversion.test_huggingface import DEMO, write_checkpoint
from tests.models.test_llama import run_blocks

SHAPE = LlamaConfig(12, 8, 10, 2, 4, 2, 2, 64, eos_ids=(3, 4))
VARIANTS = {
    "llama": {},
    "llama, tied, llama3": {"tie_embeddings": True, "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 16)},
    "llama, biases": {"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True, "eos_ids": ()},
    "llama, linear": {"rope_scaling": LinearScaling(2.0), "rope_theta": 500.0},
    "mistral": {"sliding_windows": (5, 5), "eos_ids": (1,), "stop_strings": ("ab", "é")},
    "qwen2": {"qkv_bias": True, "sliding_windows": (None, 7)},
    "qwen3": {"qk_norm": True, "rope_scaling": YarnScaling(4.0, 32.0, 1.0, 1.2, 16, truncate=False)},
    "qwen3, biases": {"qk_norm": True, "qkv_bias": True, "attention_output_bias": True},
}


def random_params(changes, dtype=jnp.bfloat16):
    config = LlamaConfig(**{**vars(SHAPE), **changes})
    return init_params(jax.random.key(0), config, dtype)


def stored(directory):
    """Returns the bytes of every tensor of a checkpoint."""
    arrays = {}
    for file in sorted(directory.glob("*.safetensors")):
        arrays |= load_file(file)
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}


def assert_equal(params, expected):
    assert params.config == expected.config
    for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert got.dtype == wanted.dtype
        assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes()


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("module", [(save_hf, load_hf), (conversion.save, conversion.load)], ids=["hf", "own"])
def test_every_family_round_trips(changes, module, tmp_path):
    save, load = module
    params = random_params(changes)
    save(params, tmp_path / "new" / "checkpoint")
    assert_equal(load(tmp_path / "new" / "checkpoint", "auto"), params)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["checkpoint"]


def test_a_loaded_checkpoint_is_written_with_the_same_bytes(tmp_path):
    save_hf(load_hf(DEMO, "auto"), tmp_path / "copy")
    assert stored(tmp_path / "copy") == stored(DEMO)


@pytest.mark.slow
def test_transformers_reads_written_checkpoints(tmp_path):
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    transformers = pytest.importorskip("transformers")
    tokens = np.random.default_rng(0).integers(0, 12, (1, 40), dtype=np.int32)
    for name, changes in VARIANTS.items():
        params = random_params(changes, jnp.float32)
        save_hf(params, tmp_path / name)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(report.values()), report
        with torch.no_grad():
            expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
        np.testing.assert_allclose(run_blocks(params, tokens, [40]), expected, atol=2e-4)
        assert model.generation_config.eos_token_id == (list(params.config.eos_ids) or None) or (
            [model.generation_config.eos_token_id] == list(params.config.eos_ids)
        )


def test_large_checkpoints_are_divided(tmp_path, monkeypatch):
    params = random_params({}, jnp.float32)
    monkeypatch.setattr(huggingface, "MAX_FILE_BYTES", 1000)
    save_hf(params, tmp_path / "divided")
    files = sorted(tmp_path.glob("divided/*.safetensors"))
    assert len(files) > 2
    assert max(file.stat().st_size for file in files) < 2500
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "divided" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in jax.tree.leaves(params))
    assert_equal(load_hf(tmp_path / "divided", "float32"), params)


def test_settings_unknown_to_transformers_are_refused(tmp_path):
    for changes in (
        {"qk_norm": True, "mlp_bias": True},
        {"sliding_windows": (None, 7)},
        {"attention_output_bias": True},
    ):
        with pytest.raises(ValueError, match="no model of transformers has the settings"):
            save_hf(random_params(changes), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("save", [save_hf, conversion.save])
def test_nothing_is_overwritten(save, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match=r"path must not exist yet, got '.*there'"):
        save(random_params({}), tmp_path / "there")


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def fails(arrays, path, **metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "save_file", fails)
    with pytest.raises(OSError, match="No space left"):
        save_hf(random_params({}), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_broken_own_checkpoints_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"path must be a directory written by jlade\.conversion\.save"):
        conversion.load(tmp_path)
    conversion.save(random_params({}), tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps(config | {"intermediate_size": 11}))
    with pytest.raises(ValueError, match=r"differ from config\.json: .* has shape .*10.* expected is .*11"):
        conversion.load(tmp_path / "own")
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    for file in (tmp_path / "own" / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"is not a checkpoint of Orbax|cannot be restored"):
        conversion.load(tmp_path / "own")


SHARDED = """
import sys
import jax
import numpy as np
from jlade import conversion

mesh = jax.make_mesh((8,), ("model",))


def place(name, shape):
    rows = "model" if shape[0] % 8 == 0 else None
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(rows))


assert jax.device_count() == 8
whole = conversion.load_hf(sys.argv[1], "float32")
for load, path in ((conversion.load_hf, sys.argv[1]), (conversion.load, sys.argv[2])):
    params = load(path, "float32", place)
    assert len(params.embedding.sharding.device_set) == 8
    assert params.embedding.addressable_shards[0].data.shape[0] == params.embedding.shape[0] // 8
    for got, expected in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(got, expected)
    matrix, expected = (load(path, "float32", where, int8=True).layers[0].gate for where in (place, None))
    assert matrix.weight.addressable_shards[0].data.shape[0] == matrix.weight.shape[0] // 8
    np.testing.assert_array_equal(matrix.weight, expected.weight)
    np.testing.assert_array_equal(matrix.scale, expected.scale)
print("restored on 8 devices")
"""


@pytest.mark.slow
def test_checkpoints_are_restored_on_eight_devices(tmp_path):
    conversion.save(load_hf(DEMO, "float32"), tmp_path / "own")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SHARDED, str(DEMO), str(tmp_path / "own")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "restored on 8 devices\n", done.stderr


def broken_params():
    """Returns parameters with NaN or infinity in six rows of a matrix and in one element of a norm."""
    params = random_params({}, jnp.float32)
    values = jnp.array([jnp.nan, jnp.inf, -jnp.inf] * 2)
    embedding = params.embedding.at[jnp.array([11, 2, 3, 5, 7, 8]), jnp.array([0, 7, 3, 3, 1, 2])].set(values)
    return params.replace(embedding=embedding, norm=params.norm.at[2].set(jnp.nan))


BROKEN = (
    "NaN or infinite values in model.embed_tokens.weight (6 of 12 rows: 2, 3, 5, 7, 8, ...), "
    "model.norm.weight (1 of 8 rows: 2)"
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["hf", "own", "held"])
def test_rows_that_are_not_finite_are_named_and_strict_refuses_them(kind, dtype, tmp_path):
    params = broken_params()
    path = tmp_path / "checkpoint"
    save_hf(params, path)
    source = path / "model.safetensors"
    if kind == "own":
        source = path = tmp_path / "own"
        conversion.save(params, path)
    if kind == "held":
        config, tensors = read_json(path / "config.json"), load_file(source)
        source = "model.state_dict()"
        with pytest.warns(UserWarning, match=f"^{re.escape(f'{source}: {BROKEN}')}$"):
            load_held(config, tensors, lambda tensor: tensor, dtype=dtype)
        return
    with pytest.warns(UserWarning, match=f"^{re.escape(f'{source}: {BROKEN}')}$"):
        jlade.load(path, dtype)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{source}: strict=True refuses {BROKEN}')}$"):
        jlade.load(path, dtype, strict=True)


def test_values_that_a_narrower_type_lacks_are_named(tmp_path):
    params = random_params({}, jnp.float32)
    save_hf(params.replace(norm=params.norm.at[6].set(1e6)), tmp_path / "checkpoint")
    load_hf(tmp_path / "checkpoint", strict=True)
    with pytest.warns(UserWarning, match=r"NaN or infinite values in model\.norm\.weight \(1 of 8 rows: 6\)$"):
        load_hf(tmp_path / "checkpoint", "float16")


@pytest.mark.parametrize("kind", ["written to", "cut short", "removed"])
def test_a_file_that_changes_while_it_is_read_is_refused(kind, tmp_path, monkeypatch):
    directory = write_checkpoint(tmp_path)
    file = directory / "model.safetensors"
    changes = {
        "written to": lambda: os.utime(file, ns=(0, 0)),
        "cut short": lambda: os.truncate(file, 3000),
        "removed": file.unlink,
    }
    read = StoredTensor.read

    def meanwhile(stored, name, dtype, parts):
        if name == "model.norm.weight":
            changes[kind]()
        return read(stored, name, dtype, parts)

    monkeypatch.setattr(StoredTensor, "read", meanwhile)
    with pytest.raises(
        ValueError, match=r"model\.safetensors( changed while it was read|: model\.norm\.weight cannot be read)"
    ):
        load_hf(directory)
