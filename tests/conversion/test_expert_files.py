"""Experts in files of Hugging Face's format: MXFP4, several files, devices that hold some of them, and errors."""

import dataclasses
import json
import operator

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jlade
from jlade import conversion
from jlade.cli import main
from jlade.conversion import load_hf, save_hf, weight_files
from jlade.conversion.families import FAMILIES
from jlade.models.architecture import (
    CHANNEL_DELTA,
    CONVOLUTION,
    DELTA,
    STATE_SPACE,
    Heads,
    IndexSizes,
    Latent,
    Multipliers,
    Recurrence,
)
from jlade.models.llama import LlamaConfig, init_params, quantize
from jlade.models.rotary import Rotary
from tests.conversion.hf_files import assert_same_arrays, change_config, change_tensors
from tests.tiny import slow_but

MIXTURE = {"num_experts": 4, "expert_size": 64, "experts_per_token": 2}
LATENT = {"latent": Latent(12, rank=16, rotated=4, unrotated=8, value_size=6), "num_kv_heads": 1, "head_dim": 20}
LATENT |= {"rotary_dim": 4, "interleaved_rotary": True}
INDEX = LATENT | {"latent": dataclasses.replace(LATENT["latent"], index=IndexSizes(4, 6, 5)), "head_dim": 26}


def random_params(model_type, **changes):
    shape = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 0, "num_layers": 2, "num_heads": 4}
    shape |= {"num_kv_heads": 2, "head_dim": 8, "max_positions": 64, "model_type": model_type}
    return init_params(jax.random.key(0), LlamaConfig(**shape | MIXTURE | changes))


@pytest.fixture
def gpt_oss():
    """Random parameters like GPT-OSS's."""
    biases = dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias", "router_bias", "sinks"), True)
    return random_params("gpt_oss", norm_eps=1e-5, rope_theta=150000.0, activation="clipped_silu", **biases)


def pack(directory):
    """Puts random experts in MXFP4 in the place of those of a checkpoint; returns blocks and scales by name."""
    rng = np.random.default_rng(0)
    tensors, packed = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        number, inputs, outputs = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (number, outputs, inputs // 32, 16), np.uint8)
        packed[name] = blocks, rng.integers(118, 130, blocks.shape[:3], np.uint8)
        tensors |= {f"{name}_blocks": packed[name][0], f"{name}_scales": packed[name][1]}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return packed


def test_mxfp4_is_read_as_by_transformers(gpt_oss, tmp_path):
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    save_hf(gpt_oss, tmp_path / "model")
    packed = pack(tmp_path / "model")
    params = load_hf(tmp_path / "model", "float32", strict=True)
    kept = load_hf(tmp_path / "model", "float32", strict=True, bits=4)
    for i, layer in enumerate(params.layers):
        gate_up, down = (
            mxfp4.convert_moe_packed_tensors(
                *map(torch.tensor, packed[f"model.layers.{i}.mlp.experts.{name}"]), dtype=torch.float32
            ).numpy()
            for name in ("gate_up_proj", "down_proj")
        )
        np.testing.assert_array_equal(layer.mixture.gate, gate_up[..., ::2])
        np.testing.assert_array_equal(layer.mixture.up, gate_up[..., 1::2])
        np.testing.assert_array_equal(layer.mixture.down, down)
        np.testing.assert_array_equal(layer.mixture.up_bias, gpt_oss.layers[i].mixture.up_bias)
        for field in ("mixture.gate", "mixture.up", "mixture.down"):
            matrix = operator.attrgetter(field)(kept.layers[i])
            assert (matrix.group, matrix.weight.dtype, matrix.scale.dtype) == (32, "uint8", "bfloat16")
            np.testing.assert_array_equal(matrix.values(), operator.attrgetter(field)(layer))


@pytest.mark.parametrize("kind", ["hf", "jlade"])
def test_converted_mxfp4_is_no_longer_quantized(kind, gpt_oss, tmp_path):
    save_hf(gpt_oss, tmp_path / "model")
    pack(tmp_path / "model")
    expected = load_hf(tmp_path / "model", "bfloat16", strict=True)
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / kind), "--dtype", "bfloat16", "--to", kind]) == 0
    config = json.loads((tmp_path / kind / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == "bfloat16"
    assert_same_arrays(jlade.load(tmp_path / kind, "auto", strict=True)[0], expected)


MIXTURES = [name for name, family in FAMILIES.items() if "num_experts" in family.keys]


@pytest.mark.parametrize("model_type", slow_but(MIXTURES, "mixtral", "gpt_oss", "qwen3_next"))
def test_devices_read_their_experts(model_type, gpt_oss, tmp_path, monkeypatch):
    """From several files, in floating point and in int8."""
    recurrent = {"recurrent_layers": (0,), "recurrence": Recurrence(DELTA, 4, 8, 8, 6, 4), "output_gate": True}
    recurrent |= {"intermediate_size": 16, "shared_router": True, "rotary_dim": 2, "norm": "rms_plus_one"}
    recurrent |= {"qk_norm": True}
    channels = LATENT | {"routing": "sigmoids", "selection_bias": True, "float32_router": True, "num_layers": 3}
    channels |= {"recurrent_layers": (0,), "intermediate_size": 64, "dense_layers": (2,), "dense_size": 32}
    changes = {
        "qwen2_moe": {"intermediate_size": 16, "shared_router": True, "qkv_bias": True},
        "qwen3_moe": {"qk_norm": True},
        "olmoe": {"qk_norm": True, "qk_norm_kind": "whole", "norm_eps": 1e-5},
        "hunyuan_v1_moe": {"qk_norm": True, "qk_norm_kind": "rotated", "norm_eps": 1e-5, "intermediate_size": 64},
        "flex_olmo": {"qk_norm": True, "qk_norm_kind": "whole", "pre_norms": False, "post_norms": True},
        "granitemoe_swa": {"sinks": True, "intermediate_size": 64},
        "cohere2_moe": {"norm": "layer", "parallel": True, "interleaved_rotary": True, "intermediate_size": 64}
        | {"sliding_windows": (7, None), "layer_rotary": (Rotary(1e4), None), "dense_layers": (0,), "dense_size": 32}
        | {"averages_mixture": True},
        "laguna": {"routing": "sigmoids", "selection_bias": True, "qk_norm": True, "intermediate_size": 64}
        | {"output_gate": True, "head_gates": True, "gate_activation": "softplus", "query_heads": (4, 8)}
        | {"dense_layers": (0,), "dense_size": 32},
        "mimo_v2_flash": {"routing": "sigmoids", "selection_bias": True, "float32_router": True, "norm_eps": 1e-5}
        | {"num_heads": 8, "num_kv_heads": 8, "global_heads": Heads(4, 8), "value_size": 6, "rope_theta": 5e5}
        | {"sliding_windows": (7, None), "layer_rotary": (Rotary(1e4), Rotary(5e5)), "sinks": True}
        | {"window_sinks": True, "multipliers": Multipliers(attention_output=0.6)},
        "axk1": LATENT
        | {"routing": "sigmoids", "selection_bias": True, "expert_post_norm": True, "intermediate_size": 64}
        | {"dense_layers": (0,), "dense_size": 32},
        "mellum": {"qk_norm": True, "sliding_windows": (7, None), "layer_rotary": (Rotary(1e4), Rotary(5e5))}
        | {"rope_theta": 5e5},
        "mixtral": {"norm_eps": 1e-5},
        "phimoe": {"norm": "layer", "norm_bias": True, "output_bias": True, "routing": "sparsemixer"},
        "glm4_moe": {"routing": "sigmoids", "selection_bias": True, "rotary_dim": 4, "norm_eps": 1e-5}
        | {"intermediate_size": 64, "dense_layers": (0,), "dense_size": 32},
        "dots1": {"routing": "sigmoids", "selection_bias": True, "qk_norm": True},
        "solar_open": {"routing": "sigmoids", "selection_bias": True, "norm_eps": 1e-5, "rope_theta": 1e6},
        "exaone_moe": {"routing": "sigmoids", "selection_bias": True, "qk_norm": True, "norm_eps": 1e-5}
        | {"dense_layers": (0,), "dense_size": 32},
        "deepseek_v32": INDEX | {"routing": "sigmoids", "selection_bias": True, "intermediate_size": 64},
        "glm_moe_dsa": INDEX
        | {"routing": "sigmoids", "selection_bias": True, "intermediate_size": 64, "norm_eps": 1e-5}
        | {"latent": dataclasses.replace(INDEX["latent"], index=IndexSizes(4, 6, 5, interleaved=True))},
        "deepseek_v2": LATENT
        | {"routing": "probabilities", "group_leaders": 1, "normalized_experts": False}
        | {"intermediate_size": 64, "dense_layers": (0,), "dense_size": 32, "expert_groups": 2},
        "deepseek_v3": LATENT | {"routing": "sigmoids", "selection_bias": True, "intermediate_size": 64},
        "glm4_moe_lite": LATENT | {"routing": "sigmoids", "selection_bias": True, "norm_eps": 1e-5},
        "mistral4": LATENT | {"routing": "probabilities", "expert_scale": 1.5},
        "hy_v3": {"routing": "sigmoids", "selection_bias": True, "float32_router": True, "norm_eps": 1e-5}
        | {"qk_norm": True, "intermediate_size": 64, "dense_layers": (0,), "dense_size": 32},
        "afmoe": {"routing": "sigmoids", "selection_bias": True, "qk_norm": True, "norm_eps": 1e-5}
        | {"post_norms": True, "output_gate": True, "intermediate_size": 64, "sliding_windows": (7, None)}
        | {"layer_rotary": (Rotary(1e4), None)},
        "ernie4_5_moe": {"routing": "probabilities", "selection_bias": True, "float32_router": True, "norm_eps": 1e-5}
        | {"least_divisor": 1e-12, "rope_theta": 5e5}
        | {"interleaved_rotary": True, "intermediate_size": 64, "dense_layers": (0,), "dense_size": 32},
        "minimax_m2": {"routing": "sigmoids", "selection_bias": True, "qk_norm": True, "qk_norm_kind": "whole"},
        "granitemoehybrid": {"intermediate_size": 16, "recurrent_layers": (0,)}
        | {"recurrence": Recurrence(STATE_SPACE, 4, 8, 8, 8, 4, filter_bias=True)},
        "lfm2_moe": {
            "routing": "sigmoids",
            "selection_bias": True,
            "qk_norm": True,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
        }
        | {"recurrent_layers": (0,), "recurrence": Recurrence(CONVOLUTION, 32, 32, 1, 1, 3), "expert_epsilon": 1e-6}
        | {"dense_layers": (0,), "dense_size": 32},
        "kimi_linear": channels
        | {"layer_rotary": (None,) * 3, "interleaved_rotary": False, "norm_eps": 1e-5}
        | {"recurrence": Recurrence(CHANNEL_DELTA, 4, 4, 8, 8, 4, gate_rank=8)},
        "bailing_hybrid": channels
        | {"recurrence": Recurrence(CHANNEL_DELTA, 4, 4, 8, 8, 4, least_decay=-5.0)}
        | {"rope_theta": 6e6, "output_gate": True, "head_gates": True},
        "nemotron_h": {"norm": "rms_late", "activation": "relu2", "gated_mlp": False, "norm_eps": 1e-5}
        | {"routing": "sigmoids", "selection_bias": True, "float32_router": True, "layer_rotary": (None,) * 4}
        | {"num_layers": 4, "mlp_layers": (1, 3), "dense_layers": (3,), "dense_size": 32, "intermediate_size": 16}
        | {"recurrent_layers": (0,), "recurrence": Recurrence(STATE_SPACE, 4, 8, 8, 8, 4, filter_bias=True)}
        | {"expert_latent": 20},
        "qwen3_next": recurrent,
        "qwen3_5_moe_text": recurrent,
        "gemma4_text": {
            "intermediate_size": 64,
            "norm": "rms_late",
            "activation": "gelu_tanh",
            "separate_experts": True,
        }
        | {"global_heads": Heads(2, 12), "attention_scale": 1.0, "embedding_scale": 32**0.5}
        | dict.fromkeys(("post_norms", "qk_norm", "value_norm", "layer_scale", "values_from_keys"), True),
        "llama4_text": {"intermediate_size": 64, "experts_per_token": 1, "routing": "sigmoid"}
        | {"qk_norm": True, "qk_norm_kind": "weightless", "interleaved_rotary": True},
    }
    params = gpt_oss if model_type == "gpt_oss" else random_params(model_type, **changes.get(model_type, {}))
    monkeypatch.setattr(weight_files, "MAX_FILE_BYTES", 20000)
    save_hf(params, tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    conversion.save(quantize(params), tmp_path / "int8")
    assert len(list((tmp_path / "int8").glob("*.safetensors"))) > 1
    mesh = jlade.make_mesh(model=4)
    found = [load_hf(tmp_path / "hf", "float32", mesh=mesh), load_hf(tmp_path / "hf", "float32", bits=8)]
    found += [load_hf(tmp_path / "hf", "float32", bits=8, mesh=mesh), conversion.load(tmp_path / "int8", mesh=mesh)]
    for got, wanted in zip(found, [params, *[quantize(params)] * 3], strict=True):
        assert_same_arrays(got, wanted)
    experts = found[0].layers[1].mixture.up
    assert [shard.data.shape[0] for shard in experts.addressable_shards[:4]] == [1, 1, 1, 1]


def test_broken_files_are_refused(gpt_oss, tmp_path):
    params = random_params("mixtral", norm_eps=1e-5)
    save_hf(params, tmp_path / "mixtral")
    missing = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    tensors = change_tensors(tmp_path / "mixtral", {missing: None})
    with pytest.raises(ValueError, match=f"1 tensors are missing: {missing}"):
        load_hf(tmp_path / "mixtral")
    change_tensors(tmp_path / "mixtral", {missing: tensors[missing][:, 1:].copy()})
    with pytest.raises(ValueError, match=rf"{missing} has shape \(32, 63\); config.json implies \(32, 64\)"):
        load_hf(tmp_path / "mixtral")
    change_tensors(tmp_path / "mixtral", {missing: np.zeros((32, 64), np.uint8)})
    with pytest.raises(ValueError, match=f"{missing} is of type U8; accepted are F64, F32, F16, BF16"):
        load_hf(tmp_path / "mixtral")

    save_hf(gpt_oss, tmp_path / "gpt_oss")
    pack(tmp_path / "gpt_oss")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    scales = load_file(tmp_path / "gpt_oss" / "model.safetensors")[name]
    change_tensors(tmp_path / "gpt_oss", {name: scales.astype(np.float32)})
    with pytest.raises(ValueError, match=f"{name} is of type F32; accepted are U8"):
        load_hf(tmp_path / "gpt_oss")
    change_tensors(tmp_path / "gpt_oss", {name: np.full_like(scales, 255)})
    with pytest.warns(
        UserWarning,
        match=r"NaN or infinite values in model.layers.0.mlp.experts.down_proj.weight \(4 of 4 rows: 0, 1, 2, 3\)",
    ):
        load_hf(tmp_path / "gpt_oss")
