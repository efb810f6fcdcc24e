"""Checkpoints in FP8 with scales of blocks or matrices, against transformers' dequantization."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors

import jlade
from jlade.cli import main
from jlade.conversion import load_hf, save_hf, weight_files
from jlade.models.architecture import IndexSizes, Latent
from jlade.models.llama import LlamaConfig, init_params
from tests.conversion.hf_files import assert_same_arrays, change_config
from tests.conversion.packed_files import in_blocks

torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
torch_files = pytest.importorskip("safetensors.torch")

SHAPE = {"vocab_size": 40, "hidden_size": 48, "intermediate_size": 160, "num_layers": 2, "num_heads": 4}
SHAPE |= {"num_kv_heads": 2, "head_dim": 12, "max_positions": 64}
MIXTURE = {"num_experts": 4, "expert_size": 32, "experts_per_token": 2, "intermediate_size": 0}
CASES = {
    "qwen3": {"qk_norm": True},
    "phi3": {"model_type": "phi3", "norm_eps": 1e-5},  # gate and product are rows of one matrix
    "qwen3_moe": MIXTURE | {"model_type": "qwen3_moe", "qk_norm": True},
    "deepseek_v3": MIXTURE
    | {"model_type": "deepseek_v3", "routing": "sigmoids", "selection_bias": True, "intermediate_size": 32}
    | {"latent": Latent(32, rank=32, rotated=16, unrotated=12, value_size=12), "num_kv_heads": 1, "head_dim": 48}
    | {"rotary_dim": 16, "interleaved_rotary": True},  # no block ends where the rows of a head do
}
SPARSE = dataclasses.replace(CASES["deepseek_v3"]["latent"], index=IndexSizes(4, 24, chosen=9))
CASES["deepseek_v32"] = CASES["deepseek_v3"] | {"model_type": "deepseek_v32", "latent": SPARSE, "head_dim": 72}


def as_torch(matrix):
    return torch.tensor(matrix.view(np.uint8)).view(torch.float8_e4m3fn)


def read_tensors(file):
    with safetensors.safe_open(file, "pt") as stored:
        return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118


def settings_of(kind, rows, columns):
    """Returns the settings in config.json for scales of blocks, exponents in their place, or static ones (Mistral)."""
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}
    changes = {
        "exponents": {"scale_fmt": "ue8m0"},
        "static": {"activation_scheme": "static", "weight_block_size": None, "dequantize": False},
    }
    return settings | {"modules_to_not_convert": ["lm_head"]} | changes.get(kind, {})


def write(directory, case, rows=8, columns=16, kind="blocks"):
    """Writes a random model with its matrices in FP8 and returns them by name, as products with their scales."""
    config = LlamaConfig(**SHAPE | CASES[case])
    save_hf(init_params(jax.random.key(0), config), directory)
    file = directory / "model.safetensors"
    tensors, values = read_tensors(file), {}
    for name, tensor in list(tensors.items()):
        if ("proj" in name or "indexer.w" in name) and "weights_proj" not in name:
            height, width = tensor.shape if kind == "static" else (rows, columns)
            matrix, scales = in_blocks(tensor.numpy(), height, width)
            if kind == "exponents":
                scales = np.exp2(np.ceil(np.log2(scales)))
            stored = torch.tensor(scales)
            if kind == "static":
                stored = stored.reshape(()).bfloat16()
                scales = stored.float().numpy().reshape(1, 1)
                tensors[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5)
            tensors[name] = as_torch(matrix)
            tensors[name + "_scale_inv"] = stored.to(torch.float8_e8m0fnu) if kind == "exponents" else stored
            of_elements = np.repeat(np.repeat(scales, height, axis=0), width, axis=1)
            values[name] = matrix.astype(np.float32) * of_elements[: matrix.shape[0], : matrix.shape[1]]
    torch_files.save_file(tensors, file, {"format": "pt"})
    change_config(directory, quantization_config=settings_of(kind, rows, columns))
    return values


@pytest.mark.parametrize(
    ("case", "kind"), [*((case, "blocks") for case in CASES), ("qwen3", "exponents"), ("qwen3_moe", "static")]
)
def test_values_are_those_that_transformers_dequantizes(case, kind, tmp_path):
    import transformers

    write(tmp_path / "fp8", case, kind=kind)
    params = load_hf(tmp_path / "fp8", "float32", strict=True)
    settings = settings_of(kind, 8, 16) | {"dequantize": True}
    settings = transformers.FineGrainedFP8Config(**settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", dtype=torch.float32, quantization_config=settings
    )
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for i, layer in enumerate(params.layers):
        prefix = f"model.layers.{i}."
        if layer.experts is not None:
            joined = state[f"{prefix}mlp.experts.gate_up_proj"]
            found = np.concatenate([layer.mixture.gate, layer.mixture.up], axis=2).swapaxes(1, 2)
            np.testing.assert_array_equal(found, joined)
        if layer.index is not None:
            indexer = f"{prefix}self_attn.indexer."
            np.testing.assert_array_equal(layer.index.query, state[f"{indexer}wq_b.weight"])
            np.testing.assert_array_equal(layer.index.key, state[f"{indexer}wk.weight"])
        if case.startswith("deepseek"):
            heads = state[f"{prefix}self_attn.kv_b_proj.weight"].reshape(4, 24, 32)
            np.testing.assert_array_equal(layer.attention.key_up, heads[:, :12].reshape(-1, 32))
            np.testing.assert_array_equal(layer.attention.value_up, heads[:, 12:].reshape(-1, 32))
            np.testing.assert_array_equal(
                layer.attention.key_down, state[f"{prefix}self_attn.kv_a_proj_with_mqa.weight"]
            )
        elif case == "phi3":
            np.testing.assert_array_equal(
                np.concatenate([layer.attention.query, layer.attention.key, layer.attention.value]),
                state[f"{prefix}self_attn.qkv_proj.weight"],
            )
            joined = state[f"{prefix}mlp.gate_up_proj.weight"]
            np.testing.assert_array_equal(np.concatenate([layer.mlp.gate, layer.mlp.up]), joined)
        elif case == "qwen3":
            np.testing.assert_array_equal(layer.mlp.down, state[f"{prefix}mlp.down_proj.weight"])
            np.testing.assert_array_equal(layer.attention.key, state[f"{prefix}self_attn.k_proj.weight"])


@pytest.mark.parametrize("scales", [(4, 1), (2, 1), (1, 1)], ids=["blocks", "gates and products", "matrices"])
def test_experts_in_one_tensor(scales, tmp_path):
    """With their scales as transformers 5 makes them, on several devices too."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    kind, rng, prefix = "blocks" if scales == (4, 1) else "static", np.random.default_rng(0), "model.layers.1.mlp"
    write(tmp_path / "fp8", "qwen3_moe", 16, 48, kind)
    file = tmp_path / "fp8" / "model.safetensors"
    tensors = {name: tensor for name, tensor in read_tensors(file).items() if ".experts." not in name}
    for layer in range(2):
        for name, shape in {"gate_up_proj": (4, 64, 48), "down_proj": (4, 48, 32)}.items():
            own = scales if name == "gate_up_proj" else (3, 1) if kind == "blocks" else (1, 1)
            experts = f"model.layers.{layer}.mlp.experts.{name}"
            tensors[experts] = as_torch(rng.uniform(-400, 400, shape).astype(ml_dtypes.float8_e4m3fn))
            tensors[f"{experts}_scale_inv"] = torch.tensor(rng.uniform(0.5, 1, (4, *own)).astype(np.float32))
            tensors |= {} if kind == "blocks" else {f"{experts}_activation_scale": torch.ones(4)}
    torch_files.save_file(tensors, file, {"format": "pt"})
    gate_up, down = (
        Fp8Dequantize(None)
        ._dequantize_one(tensors[name], tensors[f"{name}_scale_inv"], torch.float32)
        .numpy()
        .swapaxes(1, 2)
        for name in (f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj")
    )
    for mesh in (None, jlade.make_mesh(model=2)):
        mixture = load_hf(tmp_path / "fp8", "float32", strict=True, mesh=mesh).layers[1].mixture
        np.testing.assert_array_equal(np.concatenate([mixture.gate, mixture.up], axis=2), gate_up)
        np.testing.assert_array_equal(mixture.down, down)


def test_blocks_at_the_edges_are_smaller(tmp_path):
    values = write(tmp_path / "fp8", "qwen3", 128, 128)  # of 160 rows
    params = load_hf(tmp_path / "fp8", "float32")
    np.testing.assert_array_equal(params.layers[1].mlp.up, values["model.layers.1.mlp.up_proj.weight"])
    np.testing.assert_array_equal(params.layers[1].mlp.down, values["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize(
    ("case", "kind"),
    [("phi3", "static"), *((case, "blocks") for case in ("phi3", "qwen3_moe", "deepseek_v3", "deepseek_v32"))],
)
def test_devices_read_their_parts(case, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "CHUNK", 100)
    write(tmp_path / "fp8", case, kind=kind)
    whole = load_hf(tmp_path / "fp8", "float32")
    divided = load_hf(tmp_path / "fp8", "float32", mesh=jlade.make_mesh(model=2))
    assert_same_arrays(divided, whole)


def test_converted_fp8_is_no_longer_quantized(tmp_path):
    write(tmp_path / "fp8", "qwen3")
    expected = load_hf(tmp_path / "fp8", "bfloat16")
    assert main(["convert", str(tmp_path / "fp8"), str(tmp_path / "hf"), "--dtype", "bfloat16", "--to", "hf"]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    assert_same_arrays(load_hf(tmp_path / "hf", "auto", strict=True), expected)


def test_nan_is_named(tmp_path):
    write(tmp_path / "fp8", "qwen3")
    file = tmp_path / "fp8" / "model.safetensors"
    stored = weight_files.read_header(file)["model.layers.0.mlp.up_proj.weight"]
    with open(file, "r+b") as stream:
        stream.seek(stored.offset + 3 * 48)
        stream.write(b"\x7f\x7e")  # NaN, and 448, the largest value
    with pytest.warns(UserWarning, match=r"up_proj.weight \(1 of 160 rows: 3\)"):
        load_hf(tmp_path / "fp8", "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.update(k=torch.zeros(2, 5)), r"k_proj.weight_scale_inv has shape \(2, 5\)"),
        (lambda tensors: tensors.update(k=tensors["k"].int()), "scale_inv is of type I32; accepted are"),
        (lambda tensors: tensors.pop("k"), "k_proj.weight is of type F8_E4M3; accepted are"),
    ],
)
def test_scales_that_do_not_fit_are_refused(change, message, tmp_path):
    write(tmp_path / "fp8", "qwen3")
    file, name = tmp_path / "fp8" / "model.safetensors", "model.layers.0.self_attn.k_proj.weight_scale_inv"
    tensors = {"k" if each == name else each: tensor for each, tensor in read_tensors(file).items()}
    change(tensors)
    torch_files.save_file({name if each == "k" else each: tensors[each] for each in tensors}, file)
    with pytest.raises(ValueError, match=message):
        load_hf(tmp_path / "fp8")
