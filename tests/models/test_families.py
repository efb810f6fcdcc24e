"""The first families and every rotary scaling against transformers."""

import functools

import numpy as np
import pytest

import jlade
from jlade.conversion import load_hf
from jlade.conversion.families import FAMILIES
from tests.models.test_llama import run_blocks
from tests.tiny import PAPER, slow_but

LENGTH = 96


def rope(kind, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0} | settings}


CASES = {
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama, linear": ("Llama", rope("linear", factor=4.0)),
    "llama, dynamic": ("Llama", {"max_position_embeddings": 2 * LENGTH} | rope("dynamic", factor=4.0)),
    "llama, llama3": (
        "Llama",
        rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama, yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "mistral, short window": ("Mistral", {"sliding_window": 7}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2, short window in one layer": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3, biases, yarn": (
        "Qwen3",
        {"head_dim": 8, "attention_bias": True}
        | rope(
            "yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=4.0, attention_factor=1.3, truncate=False
        ),
    ),
    "llama, proportional": ("Llama", {"head_dim": 12} | rope("proportional", factor=2.0, partial_rotary_factor=0.5)),
}


SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


SCALES = "router.gate.weight", "layer_scalar", "router.scale", "per_expert_scale"


def class_of(model_type):
    """Returns the class of transformers, which AutoModelForCausalLM does not know for some families."""
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, FAMILIES[model_type].architecture)


def checkpoint(family, changes, directory):
    """Saves a random model of transformers; returns it and the parameters that jlade loads."""
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    transformers = pytest.importorskip("transformers")
    shape = SIZES | {
        "max_position_embeddings": 4 * LENGTH,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(shape | changes))
    model = class_of(config.model_type)(config).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            # transformers initialises them to ones and zeros.
            if "norm" in name or "ln_" in name or name.endswith(("bias", *SCALES)):
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model, load_hf(directory, "float32")


@functools.cache
def checkpoint_of(case, directory):
    return checkpoint(*CASES[case], directory)


@pytest.fixture
def models(request, tmp_path_factory):
    return checkpoint_of(request.param, tmp_path_factory.getbasetemp() / request.param.replace(" ", "_"))


@pytest.mark.parametrize("models", slow_but(CASES, *list(CASES)[::4]), indirect=True)
def test_logits_equal_transformers(models):
    import torch

    model, params = models
    tokens = np.random.default_rng(0).integers(0, 50, (2, LENGTH), dtype=np.int32)
    with torch.no_grad():
        expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(run_blocks(params, tokens, [LENGTH // 2] * 2), expected, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("models", ["mistral, short window"], indirect=True)
def test_greedy_texts_equal_transformers(models):
    import torch

    model, params = models
    prompt = np.random.default_rng(1).integers(0, 50, 12).tolist()
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0, 12:].tolist()
    out = jlade.generate(params, prompt, max_new_tokens=64, lookahead=PAPER)
    assert out.tokens[0].tolist() == expected
