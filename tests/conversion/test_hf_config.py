"""config.json of well-known checkpoints, as transformers 4.27 to 5 wrote them."""

import json
import math
import pathlib
import shutil

import pytest
from safetensors.numpy import save_file

from jlade.conversion import load_hf
from jlade.conversion.hf_config import read_config
from jlade.models.llama import LlamaConfig
from jlade.models.rotary import LinearScaling, Llama3Scaling, YarnScaling
from tests.conversion.test_huggingface import random_tensors

CONFIGS = pathlib.Path(__file__).parent / "configs"
LLAMA_2 = LlamaConfig(32000, 4096, 11008, 32, 32, 32, 128, 4096, 1e-5, eos_ids=(2,))
MISTRAL = {"vocab_size": 32000, "intermediate_size": 14336, "num_kv_heads": 8, "max_positions": 32768}
QWEN_3 = LlamaConfig(
    151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6, 1e6, tie_embeddings=True, qk_norm=True, eos_ids=(151645,)
)
YARN = YarnScaling(4.0, 32.0, 1.0, 0.1 * math.log(4) + 1, 32768)
EXPECTED = {
    "llama-1-7b": vars(LLAMA_2) | {"max_positions": 2048, "rms_norm_eps": 1e-6, "eos_ids": (1,)},
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
}


def test_every_config_has_an_expectation():
    assert {file.stem for file in CONFIGS.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_configs_of_well_known_checkpoints(name, tmp_path):
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    config = vars(read_config(tmp_path))
    assert {key: config[key] for key in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-transformers-5"])
def test_checkpoints_of_both_layouts_load(name, tmp_path):
    """Both layouts load with weights, in a small size."""
    sizes = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | sizes | heads
    (tmp_path / "config.json").write_text(json.dumps({**config, **({"head_dim": 2} if "head_dim" in config else {})}))
    save_file(random_tensors(), tmp_path / "model.safetensors")
    assert load_hf(tmp_path, "float32").config.head_dim == 2
