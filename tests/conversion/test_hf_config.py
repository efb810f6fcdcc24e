"""config.json of well-known checkpoints, as transformers 4.27 to 5, fine-tuning tools and MLX wrote them."""

import json
import math
import shutil
import warnings

import pytest
from safetensors.numpy import save_file

from jlade.conversion import load_hf
from jlade.conversion.hf_config import read_config
from jlade.models.llama import LlamaConfig
from jlade.models.rotary import LinearScaling, Llama3Scaling, YarnScaling
from tests.conversion.hf_files import CONFIGS, random_tensors, write_checkpoint

LLAMA_2 = LlamaConfig(32000, 4096, 11008, 32, 32, 32, 128, 4096, 1e-5, eos_ids=(2,))
MISTRAL = {"vocab_size": 32000, "intermediate_size": 14336, "num_kv_heads": 8, "max_positions": 32768}
QWEN_3 = LlamaConfig(
    151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6, 1e6, tie_embeddings=True, qk_norm=True, eos_ids=(151645,)
)
YARN = YarnScaling(4.0, 32.0, 1.0, 0.1 * math.log(4) + 1, 32768)
EXPECTED = {
    "llama-1-7b": vars(LLAMA_2) | {"max_positions": 2048, "norm_eps": 1e-6, "eos_ids": (1,)},
    "llama-2-7b": vars(LLAMA_2),
    "llama-transformers-5": vars(LLAMA_2),
    "codellama-7b": vars(LLAMA_2) | {"vocab_size": 32016, "max_positions": 16384, "rope_theta": 1e6},
    "vicuna-7b-16k": vars(LLAMA_2) | {"max_positions": 16384, "rope_scaling": LinearScaling(4.0)},
    "llama-3.2-1b": {
        "vocab_size": 128256,
        "head_dim": 64,
        "max_positions": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": Llama3Scaling(32.0, 1.0, 4.0, 8192),
        "tie_embeddings": True,
        "eos_ids": (128001, 128008, 128009),
    },
    "smollm2-135m": {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3, "rope_theta": 1e5, "eos_ids": (0,)},
    "mistral-7b-v0.1": vars(LLAMA_2) | MISTRAL | {"sliding_windows": (4096,) * 32},
    "mistral-7b-v0.3": vars(LLAMA_2) | MISTRAL | {"vocab_size": 32768, "rope_theta": 1e6},
    "qwen2.5-0.5b": {
        "head_dim": 64,
        "qkv_bias": True,
        "attention_output_bias": False,
        "qk_norm": False,
        "sliding_windows": (),
        "max_positions": 32768,
    },
    "qwen3-0.6b": vars(QWEN_3),
    "qwen3-0.6b-transformers-5-yarn": vars(QWEN_3) | {"max_positions": 131072, "rope_scaling": YARN},
    "smollm2-135m-instruct": {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3, "rope_theta": 1e5, "eos_ids": (2,)},
    "tinyllama-1.1b-chat": {"num_layers": 22, "num_kv_heads": 4, "head_dim": 64, "max_positions": 2048},
    "hermes-2-pro-llama-3-8b": {"vocab_size": 128288, "rope_theta": 5e5, "num_kv_heads": 8, "eos_ids": (128003,)},
    "axolotl-openhermes-2.5-mistral-7b": vars(LLAMA_2)
    | MISTRAL
    | {"vocab_size": 32002, "sliding_windows": (4096,) * 32, "eos_ids": (32000,)},
    "unsloth-llama-3.2-1b-instruct": {
        "tie_embeddings": True,
        "rope_scaling": Llama3Scaling(32.0, 1.0, 4.0, 8192),
        "eos_ids": (128009,),
    },
    "qwen2.5-coder-0.5b-instruct": {"qkv_bias": True, "sliding_windows": (), "eos_ids": (151645,)},
    "unsloth-qwen3-0.6b-transformers-5": vars(QWEN_3),
    "mistral-nemo-12b": {"head_dim": 128, "hidden_size": 5120, "max_positions": 128000, "sliding_windows": ()},
    "peft-merged-llama-2-7b": vars(LLAMA_2),
    "mlx-community-mistral-7b-instruct-v0.2": vars(LLAMA_2) | MISTRAL | {"rope_theta": 1e6},
}
UNKNOWN = {  # the keys that are neither read nor known to have no effect
    "unsloth-qwen3-0.6b-transformers-5": "model_name",
    "peft-merged-llama-2-7b": "model_max_length tokenizer_model_max_length tokenizer_padding_side",
    "mlx-community-mistral-7b-instruct-v0.2": "add_cross_attention cross_attention_hidden_size finetuning_task prefix "
    "tf_legacy_loss tie_encoder_decoder use_bfloat16",
}


def test_every_config_has_an_expectation():
    assert {file.stem for file in CONFIGS.iterdir()} == set(EXPECTED)


def read_with_warnings(directory):
    """Returns the configuration and the messages of all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = read_config(directory)
    return config, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", EXPECTED)
def test_configs_of_well_known_checkpoints(name, tmp_path):
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    config, messages = read_with_warnings(tmp_path)
    assert {key: getattr(config, key) for key in EXPECTED[name]} == EXPECTED[name]
    if name not in UNKNOWN:
        assert messages == []
        assert read_config(tmp_path, strict=True) == config
        return
    keys = ", ".join(UNKNOWN[name].split())
    assert messages == [f"{tmp_path / 'config.json'}: ignored unknown keys, which strict=True refuses: {keys}"]
    with pytest.raises(ValueError, match=rf"config\.json: strict=True refuses unknown keys: {keys}$"):
        read_config(tmp_path, strict=True)


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "mlx-community-mistral-7b-instruct-v0.2"])
@pytest.mark.parametrize("use_diff", [True, False], ids=["in short", "in full"])
def test_configs_that_transformers_rewrote(name, use_diff, tmp_path):
    transformers = pytest.importorskip("transformers")
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    expected, _ = read_with_warnings(tmp_path)
    transformers.AutoConfig.from_pretrained(tmp_path).to_json_file(tmp_path / "config.json", use_diff=use_diff)
    config, messages = read_with_warnings(tmp_path)
    assert config == expected
    assert len(messages) == (name in UNKNOWN)


def test_unknown_keys_are_ignored(tmp_path):
    """Also those of another family: only Qwen's windows begin at a layer."""
    write_checkpoint(tmp_path, model_type="mistral", sliding_window=4, max_window_layers=1, colour="red")
    with pytest.warns(UserWarning, match="unknown keys, .*: max_window_layers, colour$"):
        assert read_config(tmp_path).sliding_windows == (4, 4)


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("attention_multiplier", 0.015625, None),
        ("embedding_multiplier", 12.0, 1.0),
        ("residual_multiplier", 0.22, 1.0),
        ("logits_scaling", 8.0, 1),
        ("logit_scale", 0.0625, 1.0),
        ("attn_logit_softcapping", 50.0, None),
        ("final_logit_softcapping", 30.0, None),
        ("query_pre_attn_scalar", 256, None),
        ("hidden_activation", "gelu_pytorch_tanh", "silu"),
        ("mlp_layer_types", ["dense", "sparse"], None),
        ("num_experts", 8, None),
        ("num_local_experts", 8, None),
        ("no_rope_layers", [1, 1, 1, 0], None),
        ("use_qk_norm", True, False),
        ("partial_rotary_factor", 0.5, 1.0),
        ("per_layer_config", {"0": {"head_dim": 4}}, None),
        ("pruned_heads", {"0": [1]}, {}),
        ("rope_traditional", True, False),
        ("sliding_window", 4, None),
        ("layer_types", ["sliding_attention"] * 2, None),
    ],
)
def test_keys_that_change_the_output_are_refused(key, value, neutral, tmp_path):
    expected = read_config(write_checkpoint(tmp_path), strict=True)
    assert read_config(write_checkpoint(tmp_path, **{key: neutral}), strict=True) == expected
    with pytest.raises(ValueError, match=rf"config\.json: {key} is .*; supported is "):
        read_config(write_checkpoint(tmp_path, **{key: value}))


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-transformers-5"])
def test_checkpoints_of_both_layouts_load(name, tmp_path):
    """Both layouts load with weights, in a small size."""
    sizes = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | sizes | heads
    (tmp_path / "config.json").write_text(json.dumps({**config, **({"head_dim": 2} if "head_dim" in config else {})}))
    save_file(random_tensors(), tmp_path / "model.safetensors")
    assert load_hf(tmp_path, "float32").config.head_dim == 2
