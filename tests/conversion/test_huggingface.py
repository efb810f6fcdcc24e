"""Loading Hugging Face directories, intact and broken."""

import json
import operator

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from jlade.conversion import load_hf
from jlade.conversion.hf_config import read_config
from jlade.models.rotary import Llama3Scaling
from tests.conversion.hf_files import CONFIG, DEMO, LAYER, SHAPES, assert_same_arrays, random_tensors, write_checkpoint


def test_every_tensor_is_in_its_field(tmp_path):
    tensors = random_tensors()
    params = load_hf(write_checkpoint(tmp_path, tensors), "float32")
    np.testing.assert_array_equal(params.embedding, tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params.norm, tensors["model.norm.weight"])
    np.testing.assert_array_equal(params.output, tensors["lm_head.weight"])
    attention = [f"attention.{name}" for name in ("query", "key", "value", "output")]
    fields = ["mixer_norm.weight", *attention, "mlp_norm.weight", "mlp.gate", "mlp.up", "mlp.down"]
    for i, layer in enumerate(params.layers):
        for field, name in zip(fields, LAYER, strict=True):
            np.testing.assert_array_equal(operator.attrgetter(field)(layer), tensors[f"model.layers.{i}.{name}.weight"])
    assert params.config.head_dim == 2
    assert params.config.eos_ids == (2,)


def test_several_files(tmp_path):
    tensors = random_tensors()
    whole = load_hf(write_checkpoint(tmp_path, tensors), "float32")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1-of-2.safetensors": names[:7], "model-2-of-2.safetensors": names[7:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    np.testing.assert_array_equal(load_hf(tmp_path, "float32").layers[1].mlp.down, whole.layers[1].mlp.down)
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"model-2-of-2\.safetensors is missing, though model\.safetensors\.index\.json"
    ):
        load_hf(tmp_path)


def test_tied_and_redundant_tensors(tmp_path):
    tensors = random_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(1, np.float32)}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    params = load_hf(write_checkpoint(tmp_path, tensors, tie_word_embeddings=True), "float32")
    assert params.output is None
    del tensors["lm_head.weight"]
    assert load_hf(write_checkpoint(tmp_path, tensors, tie_word_embeddings=True), "float32").output is None


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16, np.float16])
def test_dtype(dtype, tmp_path):
    params = load_hf(write_checkpoint(tmp_path), dtype)
    assert params.layers[0].mlp.gate.dtype == jnp.dtype(dtype)


def test_the_default_dtype_on_a_cpu_is_float32(tmp_path):
    assert load_hf(write_checkpoint(tmp_path)).embedding.dtype == jnp.float32


def test_bfloat16_files_are_read_exactly(demo):
    params, _ = demo
    file = DEMO / "model.safetensors"
    with safe_open(file, framework="numpy") as stored:
        raw = stored.get_tensor("model.norm.weight")
    assert raw.dtype == jnp.bfloat16
    np.testing.assert_array_equal(params.norm, raw.astype(np.float32))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3"}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "llama3"}},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "llama3"}},
    ],
    ids=["transformers 4", "older", "transformers 5"],
)
def test_rotary_settings_of_several_versions(changes, tmp_path):
    for settings in changes.values():
        if isinstance(settings, dict):
            settings |= {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
    config = read_config(write_checkpoint(tmp_path, **changes))
    assert config.rope_theta == 500.0
    assert config.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 16)


def test_generation_config_sets_the_end_tokens(tmp_path):
    write_checkpoint(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert read_config(tmp_path).eos_ids == (3, 4)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 1.0}))
    with pytest.warns(UserWarning, match=r"has no eos_token_id: texts end with 2, that of config\.json"):
        assert read_config(tmp_path).eos_ids == (2,)
    with pytest.raises(ValueError, match="strict=True refuses settings without eos_token_id"):
        read_config(tmp_path, strict=True)


def test_defaults_of_old_configs(tmp_path):
    write_checkpoint(tmp_path)
    config = {key: CONFIG[key] for key in CONFIG if key not in ("num_key_value_heads", "max_position_embeddings")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_config(tmp_path)
    assert (read.num_kv_heads, read.max_positions, read.rope_theta, read.norm_eps) == (4, 2048, 10000.0, 1e-6)
    assert not read.tie_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "opt"}, "model_type is 'opt'; supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type is None; supported are llama, mistral, qwen2, qwen3"),
        (
            {"model_type": "gemma3n"},
            r".*, of which gemma3 has the nearest name\. Another causal model runs with a decoder",
        ),
        (
            {"model_type": "bloom"},
            r".*, qwen3_vl_moe\. Another causal model runs with a decoder of your own, see docs/own_model",
        ),
        ({"architectures": ["LlamaModel"]}, r"architectures is \['LlamaModel'\]; supported is LlamaForCausalLM"),
        ({"sliding_window": 4}, "sliding_window is 4; supported is None"),
        ({"rope_interleaved": True}, "rope_interleaved is True; supported is False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
        ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        (
            {"quantization_config": {"bits": 4}},
            r"the weights are quantized with a method that is not named in 4 bits \(quantization_config\), which is "
            "not read. Load the model in floating point that they were made from",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "expert_dtype": "fp4"}},
            r"the weights are quantized with fp8 \(.*: expert_dtype is 'fp4', supported is 'fp8'",
        ),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}},
            "the .* quantized with modelopt .*: quant_algo is 'NVFP4_AWQ', supported is 'FP8' or .* 'MIXED_PRECISION'",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "modelopt",
                    "quant_algo": "MIXED_PRECISION",
                    "quantized_layers": {"lm_head": {"quant_algo": "W4A16_AWQ"}},
                }
            },
            "the .* modelopt .*: quant_algo of lm_head is 'W4A16_AWQ', supported is 'FP8' or",
        ),
        *(
            (
                {"quantization_config": {"quant_method": "torchao", "quant_type": kind}},
                f"the .* quantized with torchao .*: quant_type is {name!r}, supported is 'Int8WeightOnlyConfig' or",
            )
            for kind, name in [
                ("int4_weight_only", "int4_weight_only"),
                ({"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}, "Int4WeightOnlyConfig"),
                (
                    {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": {"a": {"_type": "X"}, "b": None}}}},
                    "X",
                ),
                ({"default": {"_type": "FqnToConfig"}}, None),
            ]
        ),
        (
            {"quantization_config": {"quant_method": "hqq", "bits": 4}},
            r"the weights are quantized with hqq in 4 bits \(",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}},
            r"the weights are quantized with awq .* which is not read: version is 'gemv', supported is 'gemm'\. Load",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 3}},
            r"the weights are quantized with gptq in 3 bits .*: bits is 3, supported is 4 or 8\. Load",
        ),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
            "the .* bitsandbytes in 8 bits .*: load_in_8bit is True, supported is False",
        ),
        (
            {"compression_config": {"quant_method": "compressed-tensors"}},
            "the .* quantized with compressed-tensors .*: format is None, supported is 'pack-quantized' or",
        ),
        *(
            (
                {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", key: value}},
                f"the .* quantized with compressed-tensors .*: {key} {message}, supported is ",
            )
            for key, value, message in [
                ("format", "marlin-24", "is 'marlin-24'"),
                ("quantization_status", "calibration", "is 'calibration'"),
                ("sparsity_config", {"format": "sparse-24-bitmask"}, "is {'format': 'sparse-24-bitmask'}"),
                ("transform_config", {"config_groups": {"R1": {}}}, "has transforms"),
            ]
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "the weights are quantized with mxfp4"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "the weights are quantized with mlx in 4 bits"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, got 'many'"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"intermediate_size": 8.5}, "intermediate_size must be a positive integer, got 8.5"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 3}, "head_dim must be even, got 3"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number, got -1"),
        ({"rope_theta": "big"}, "rope_theta must be a positive number, got 'big'"),
        (
            {"rope_scaling": {"type": "axial"}},
            "rope_type is 'axial'; supported are default, linear, dynamic, llama3, yarn, longrope, proportional",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a positive number, got None"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1.0, got 0.5"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window must be a positive integer, got -1"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked_attention"] * 2},
            "layer_types must name full_attention or sliding_attention for each of 2 layers, got",
        ),
        ({"rope_scaling": 2.0}, "rope_scaling must be an object, got 2.0"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor must be a positive number, got None"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them, got '</s>'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
    ],
    ids=str,
)
def test_configs_that_are_not_supported_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        load_hf(write_checkpoint(tmp_path, **changes))


def test_unknown_keys_change_no_tensor(tmp_path):
    expected = load_hf(write_checkpoint(tmp_path), "float32")
    write_checkpoint(tmp_path, unheard_of=0, trainer="none")
    with pytest.warns(UserWarning, match=r"config\.json: ignored unknown keys, .*: unheard_of, trainer$") as caught:
        params = load_hf(tmp_path, "float32")
    assert len(caught) == 1
    assert params.config == expected.config
    assert_same_arrays(params, expected)
    with pytest.raises(ValueError, match=r"config\.json: strict=True refuses unknown keys: unheard_of, trainer$"):
        load_hf(tmp_path, strict=True)


@pytest.mark.parametrize(
    ("content", "message"), [("", "not readable as JSON"), ("[]", "must hold a JSON object, got list")]
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_broken_json_is_refused(file, content, message, tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=f"{file} is {message}|{file} {message}"):
        load_hf(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, {"a": "../model.safetensors"}, {"a": "/etc/passwd"}])
def test_an_index_that_names_no_files_of_its_directory_is_refused(weight_map, tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: weight_map"):
        load_hf(tmp_path)


def test_a_directory_without_config_or_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"path must be a directory .* got '.*nowhere'"):
        load_hf(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_hf(tmp_path)
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no weights.*Only safetensors files are read"):
        load_hf(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, a format that can run code .* convert it .* python -c"):
        load_hf(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, 2000, -4])
def test_truncated_weights_are_refused(keep, tmp_path):
    file = write_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors file"):
        load_hf(tmp_path)


FIRST, QUERY = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict.fromkeys(("model.layers.1.mlp.up_proj.weight", "lm_head.weight")),
            r"2 tensors are missing: lm_head\.weight, model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        ({f"{QUERY}.bias": np.ones(8, np.float32)}, rf"1 tensors are not of this model: {QUERY}\.bias"),
        (
            {FIRST: np.ones((10, 8), np.float32)},
            rf"{FIRST} has shape \(10, 8\); config\.json implies \(8, 10\)",
        ),
        ({"model.norm.weight": np.ones(8, np.int8)}, r"norm\.weight is of type I8; accepted are F64, F32, F16, BF16"),
    ],
    ids=["missing", "unexpected", "shape", "type"],
)
def test_tensors_that_do_not_fit_are_named(changes, message, tmp_path):
    tensors = {name: array for name, array in (random_tensors() | changes).items() if array is not None}
    with pytest.raises(ValueError, match=message):
        load_hf(write_checkpoint(tmp_path, tensors))


@pytest.mark.parametrize(
    ("renamed", "message"),
    [
        ({FIRST: "other.weight"}, f"1 tensors are missing: {FIRST}; 1 tensors are not of this model: other.weight$"),
        ({name: f"lm.{name}" for name in SHAPES}, r"21 .* missing: .*; 21 .* \(the files' names begin with lm\.\)"),
        ({FIRST: f"{FIRST}_scale_inv"}, r"1 tensors are missing: .* \(these are of quantized weights\)"),
        ({f"{QUERY}.weight": f"{QUERY}.lora_A.weight"}, r"\(these are of an adapter, which belongs into adapter=\)"),
        (
            {"lm_head.weight": None},
            r"\(lm_head must be stored unless tie_word_embeddings is true\)",
        ),
        ({None: f"{QUERY}.bias"}, r"1 tensors are not of this model: .* \(the configuration has no biases for these\)"),
    ],
    ids=["both", "prefix", "quantized", "adapter", "tied", "biases"],
)
def test_the_cause_is_named_where_names_show_it(renamed, message, tmp_path):
    tensors = random_tensors()
    for old, new in renamed.items():
        array = tensors.pop(old, np.ones(8, np.float32))
        tensors |= {} if new is None else {new: array}
    with pytest.raises(ValueError, match=message):
        load_hf(write_checkpoint(tmp_path, tensors))


@pytest.mark.parametrize(("dtype", "error"), [("int8", ValueError), ("float8", TypeError), (object(), TypeError)])
def test_wrong_dtype_arguments_are_refused(dtype, error, tmp_path):
    with pytest.raises(error, match="dtype must be float32, bfloat16, float16 or 'auto', got"):
        load_hf(write_checkpoint(tmp_path), dtype)
