"""Written checkpoints come back bit for bit, and appear whole or not at all."""

import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jlade
from jlade import conversion
from jlade.conversion import load_hf, save_hf, weight_files
from jlade.conversion.json_files import read_json
from jlade.conversion.memory import load_held
from jlade.conversion.tensors import named_arrays
from jlade.conversion.weight_files import StoredTensor
from jlade.models.llama import quantize
from jlade.models.rotary import LinearScaling, Llama3Scaling, YarnScaling
from tests.conversion.hf_files import DEMO, assert_equal, change_config, random_params, stored, write_checkpoint
from tests.forward import run_blocks

FORMATS = {"hf": (save_hf, load_hf), "own": (conversion.save, conversion.load)}
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


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_family_round_trips(changes, kind, tmp_path):
    save, load = FORMATS[kind]
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


@pytest.mark.parametrize(("kind", "stem"), [("hf", "model"), ("own", "jlade")])
def test_large_checkpoints_are_divided(kind, stem, tmp_path, monkeypatch):
    save, _ = FORMATS[kind]
    params = random_params({}, jnp.float32)
    monkeypatch.setattr(weight_files, "MAX_FILE_BYTES", 1000)
    save(params, tmp_path / "divided")
    files = sorted(tmp_path.glob("divided/*.safetensors"))
    assert len(files) > 2
    assert max(file.stat().st_size for file in files) < 2500
    assert files[0].name == f"{stem}-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "divided" / f"{stem}.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in jax.tree.leaves(params))
    assert_equal(jlade.load(tmp_path / "divided", "float32")[0], params)
    files[1].unlink()
    with pytest.raises(ValueError, match=rf"{files[1].name} is missing, though {stem}\.safetensors\.index\.json names"):
        jlade.load(tmp_path / "divided")


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


@pytest.mark.parametrize("save", [save_hf, conversion.save])
def test_a_full_disk_leaves_nothing_behind(save, tmp_path, monkeypatch):
    def fails(arrays, path, **metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_files, "save_file", fails)
    with pytest.raises(OSError, match="No space left"):
        save(random_params({}), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def own(tmp_path):
    """A checkpoint of jlade in int8, and a function that writes its file with changed arrays, None for without."""
    conversion.save(quantize(random_params({})), tmp_path / "own")
    file = tmp_path / "own" / "jlade.safetensors"
    arrays = load_file(file)

    def change(changes):
        save_file({name: array for name, array in (arrays | changes).items() if array is not None}, file)

    return tmp_path / "own", change


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({QUERY: None}, rf"own: 1 tensors are missing: {QUERY}$"),
        ({f"{QUERY}_scale": None}, rf"own: 1 tensors are missing: {QUERY}_scale$"),
        ({"model.layers.2.more": np.zeros(3, np.int8)}, r"1 tensors are not of this model: model\.layers\.2\.more$"),
        ({QUERY: np.zeros((8, 9), np.int8)}, rf"jlade\.safetensors: {QUERY} has shape \(8, 9\); .* implies \(8, 8\)"),
        ({QUERY: np.zeros((8, 8), np.float32)}, rf"jlade\.safetensors: {QUERY} is of type F32; accepted are I8$"),
        ({f"{QUERY}_scale": np.zeros(8, np.float16)}, rf"{QUERY}_scale is of type F16; accepted are F32$"),
        ({"model.norm.weight": np.zeros(8, np.int8)}, r"norm\.weight is of type I8; accepted are F64, F32, F16, BF16$"),
    ],
    ids=str,
)
def test_arrays_that_are_not_those_of_config_json_are_refused(changes, message, own):
    directory, change = own
    change({})
    assert_equal(conversion.load(directory, "auto"), quantize(random_params({})))
    change(changes)
    with pytest.raises(ValueError, match=message):
        conversion.load(directory)


def test_the_stored_dtype_is_that_of_the_arrays_besides_int8(own):
    directory, _ = own
    change_config(directory, torch_dtype=None)
    assert conversion.load(directory, "auto").norm.dtype == jnp.bfloat16


def test_scales_that_are_not_finite_are_named(own):
    directory, change = own
    change({f"{QUERY}_scale": np.full(8, np.inf, np.float32)})
    with pytest.warns(
        UserWarning, match=rf"NaN or infinite values in {QUERY}_scale \(8 of 8 rows: 0, 1, 2, 3, 4, \.\.\.\)$"
    ):
        conversion.load(directory)


def test_the_formats_are_told_apart(own, tmp_path):
    directory, _ = own
    save_hf(random_params({}), tmp_path / "hf")
    for path in (tmp_path / "hf", tmp_path):
        with pytest.raises(ValueError, match=r"path must be a directory written by jlade\.conversion\.save, got"):
            conversion.load(path)
    with pytest.raises(ValueError, match=r"own has no weights: neither model\.safetensors nor"):
        load_hf(directory)
    (directory / "model.safetensors").write_bytes((tmp_path / "hf" / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"two checkpoints, jlade\.safetensors and model\.safetensors: remove one"):
        jlade.load(directory)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_sharding_divides_arrays_and_scales(kind, tmp_path):
    save, load = FORMATS[kind]
    params = quantize(random_params({})) if kind == "own" else random_params({})
    save(params, tmp_path / "model")
    mesh, asked = jax.make_mesh((2,), ("model",)), set()

    def place(name, shape):
        asked.add(name)
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))

    divided, whole = (load(tmp_path / "model", "float32", where, bits=8) for where in (place, None))
    assert_equal(divided, whole)
    for array in jax.tree.leaves(divided):
        assert array.addressable_shards[0].data.shape[0] == array.shape[0] // 2
    assert asked == set(named_arrays(params))


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
        path = tmp_path / "own"
        conversion.save(params, path)
        source = path / "jlade.safetensors"
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
