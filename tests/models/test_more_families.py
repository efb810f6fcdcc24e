"""Families that differ from LLaMA by more than a bias, against transformers, in every format."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jlade
from jlade import conversion
from jlade.conversion import load_hf, save_hf
from jlade.models.llama import quantize
from tests.models.test_families import checkpoint, class_of, rope
from tests.models.test_llama import run_blocks, run_branches
from tests.tiny import PAPER, slow, slow_but

# transformers writes settings of generation without the end token of some configurations.
pytestmark = pytest.mark.filterwarnings("ignore:.*has no eos_token_id")

NEW_TOKENS = 40
PROMPT_LENGTHS = (17, 9)  # the texts are longer than every window
SLIDING = ["sliding_attention", "full_attention"]


def rope_of_full_attention(**settings):
    """Returns the rotation of layers without a window; that of the others is plain."""
    others = {"rope_type": "default", "rope_theta": 50.0}
    return {"rope_parameters": {"full_attention": settings, "sliding_attention": others}}


RECURRENT = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
RECURRENT_EXPERTS = RECURRENT | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
MAMBA = {
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_chunk_size": 8,
    "shared_intermediate_size": 40,
}
FALCON_H1 = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_chunk_size": 8,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.2,
    "attention_in_multiplier": 1.3,
    "key_multiplier": 0.4,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.35, 0.6, 0.7, 0.5, 0.8],
    "ssm_out_multiplier": 0.7,
    "mlp_multipliers": [0.9, 0.6],
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 5,
    "chunk_size": 8,
    "time_step_min": 1e-30,  # transformers bounds the steps of prompts alone by it
}
NEMOTRON_EXPERTS = NEMOTRON | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
}
# Of latent attention with small sizes, and of its experts.
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GEMMA_4 = {
    "num_key_value_heads": 4,
    "head_dim": 12,
    "global_head_dim": 20,
    "sliding_window": 7,
    "hidden_size_per_layer_input": 0,
}
GEMMA_4 |= {"num_hidden_layers": 4, "layer_types": [*SLIDING, *SLIDING]}
GEMMA_4 |= rope_of_full_attention(rope_type="proportional", rope_theta=500.0, partial_rotary_factor=0.25)
CASES = {
    "gemma": ("Gemma", {"head_dim": 12}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 10}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3_text": (
        "Gemma3Text",
        {"head_dim": 12, "sliding_window": 7, "layer_types": SLIDING, "query_pre_attn_scalar": 10}
        | rope_of_full_attention(rope_type="linear", factor=8.0, rope_theta=500.0),
    ),
    "gemma4_text": (
        "Gemma4Text",
        GEMMA_4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "final_logit_softcapping": 5.0},
    ),
    "gemma4_text, experts": (
        "Gemma4Text",
        GEMMA_4
        | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
    ),
    "gemma4_text, embeddings of layers": (
        "Gemma4Text",
        GEMMA_4
        | {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 52}
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "gemma4_unified_text": (
        "Gemma4UnifiedText",
        {key: value for key, value in GEMMA_4.items() if key != "hidden_size_per_layer_input"}
        | {"num_kv_shared_layers": 2, "attention_k_eq_v": True},
    ),
    "phi": ("Phi", {}),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": 4, "hidden_size": 64}),
    "gpt_neox, sequential": (
        "GPTNeoX",
        {"num_key_value_heads": 4, "use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True}
        | rope("linear", factor=4.0, partial_rotary_factor=0.5),
    ),
    "falcon": ("Falcon", {}),
    "falcon, 40B": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "tie_word_embeddings": False},
    ),
    "falcon, 11B": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 48}
        | rope("linear", factor=4.0),
    ),
    "falcon, heads of their own": ("Falcon", {"multi_query": False, "bias": True}),
    "falcon, sequential": ("Falcon", {"parallel_attn": False}),
    "phi3": ("Phi3", {"sliding_window": 7} | rope("default", partial_rotary_factor=0.75)),
    "phi3, longrope": (
        "Phi3",
        {"max_position_embeddings": 400, "original_max_position_embeddings": 96}
        | rope("longrope", short_factor=[1.0, 1.5, 2.0, 2.5], long_factor=[9.0] * 4),
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {"sliding_window": 7, "layer_types": SLIDING}
        | rope_of_full_attention(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 7.0},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {"num_local_experts": 0, "layer_types": ["full_attention"] * 2, "shared_intermediate_size": 40}
        | {"mamba_n_heads": 2, "position_embedding_type": "rope", "attention_multiplier": 0.2, "logits_scaling": 7.0},
    ),
    "granitemoehybrid, without positions": (
        "GraniteMoeHybrid",
        {"num_local_experts": 0, "layer_types": ["attention"] * 2, "mamba_n_heads": 2, "residual_multiplier": 0.4},
    ),
    "granitemoehybrid, recurrent": (
        "GraniteMoeHybrid",
        MAMBA | {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_conv_bias": False},
    ),
    "granitemoehybrid, experts": (
        "GraniteMoeHybrid",
        MAMBA | {"num_local_experts": 4, "residual_multiplier": 0.4, "logits_scaling": 7.0},
    ),
    "smollm3": (
        "SmolLM3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 7, "layer_types": SLIDING},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 7}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm, parallel": ("StableLm", {"use_parallel_residual": True}),
    "glm": ("Glm", {"head_dim": 12, "eos_token_id": 49}),
    "glm4": ("Glm4", {"head_dim": 12, "eos_token_id": 49}),  # otherwise tokens of the real vocabulary
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "cohere, norms of queries and keys": ("Cohere", {"use_qk_norm": True}),
    "cohere2": ("Cohere2", {"sliding_window": 7, "layer_types": SLIDING, "logit_scale": 0.5}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 12}),
    "ernie4_5, biases": ("Ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "hy_v3": (
        "HYV3",
        {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "num_shared_experts": 2, "head_dim": 12},
    ),
    "afmoe": (
        "Afmoe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "route_scale": 1.7, "head_dim": 12}
        | {"num_hidden_layers": 3, "layer_types": [*SLIDING, SLIDING[0]], "sliding_window": 7, "mup_enabled": True},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"num_hidden_layers": 3, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_norm_min": 0.8},
    ),
    "ernie4_5_moe, some layers": (
        "Ernie4_5_Moe",
        {"num_hidden_layers": 6, "moe_layer_interval": 2, "moe_layer_start_index": 2, "moe_layer_end_index": 3}
        | {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 0},
    ),
    "helium": ("Helium", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "exaone4": ("Exaone4", {"sliding_window": 7, "layer_types": SLIDING}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 12} | rope("dynamic", alpha=100.0, factor=1.0)),
    "seed_oss": ("SeedOss", {"head_dim": 12, "attention_out_bias": True, "mlp_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 7}),
    "phimoe": (
        "Phimoe",
        {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}
        | {"original_max_position_embeddings": 96}
        | rope("longrope", short_factor=[1.0, 1.5, 2.0, 2.5], long_factor=[9.0] * 4, short_mscale=1.2, long_mscale=1.3),
    ),
    "llama4_text": (
        "Llama4Text",
        {"num_local_experts": 4, "head_dim": 12, "no_rope_layers": [1, 0]}
        | {"attention_chunk_size": 96, "floor_scale": 9, "attn_scale": 0.7}
        | rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=32),
    ),
    "llama4_text, Maverick": (
        "Llama4Text",
        {"num_local_experts": 4, "head_dim": 12, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 2}
        | {"attention_chunk_size": 96, "use_qk_norm": False, "intermediate_size_mlp": 40},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
        },
    ),
    "qwen2_moe, some layers": (
        "Qwen2Moe",
        {"num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
    ),
    "qwen3_moe, some layers": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 24, "decoder_sparse_step": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2}
        | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True}
        | {"attention_bias": True, "head_dim": 12},
    ),
    "dots1": (
        "Dots1",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1}
        | {"first_k_dense_replace": 0, "sliding_window": 7, "layer_types": SLIDING, "norm_topk_prob": True},
    ),
    "solar_open": (
        "SolarOpen",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 12},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_shared_experts": 2}
        | {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 2}
        | {"sliding_window": 7, "layer_types": [*SLIDING, "sliding_attention"]},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 12} | rope("default", partial_rotary_factor=0.5),
    ),
    "deepseek_v2": (
        "DeepseekV2",
        LATENT
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
        | {"n_shared_experts": 2, "first_k_dense_replace": 1}
        | rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.7),
    ),
    "deepseek_v2, Lite": ("DeepseekV2", LATENT | {"q_lora_rank": None, "n_shared_experts": 1}),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT
        | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
        | rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.8, beta_fast=4.0),
    ),
    "deepseek_v3, halves": (
        "DeepseekV3",
        LATENT | {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        LATENT | {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"], "norm_topk_prob": False},
    ),
    "mistral4": (
        "Mistral4",
        LATENT
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}
        | rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            llama_4_scaling_beta=0.7,
            mscale=1.0,
            mscale_all_dim=0.6,
        ),
    ),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "residual_multiplier": 0.4}),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 7}
        | rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=4.0, truncate=False),
    ),
    "ministral3": (
        "Ministral3",
        {"sliding_window": 7, "head_dim": 12}
        | rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.7, mscale=1.0),
    ),
    "cwm": (
        "Cwm",
        {"sliding_window": 7, "head_dim": 12, "mlp_bias": True, "bos_token_id": 48, "eos_token_id": 49}
        | rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "ministral": ("Ministral", {"sliding_window": 7, "layer_types": SLIDING, "head_dim": 12}),
    "falcon_h1": ("FalconH1", FALCON_H1),
    "falcon_h1, norms before gates": (
        "FalconH1",
        FALCON_H1
        | {"mamba_rms_norm": True, "mamba_conv_bias": False, "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    ),
    "falcon_h1, norms after gates": (
        "FalconH1",
        FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 4}),
    "lfm2, sizes as they are": (
        "Lfm2",
        {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False, "conv_L_cache": 4, "tie_word_embeddings": False},
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "routed_scaling_factor": 1.7}
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    ),
    "nemotron_h": (
        "NemotronH",
        NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "use_conv_bias": False},
    ),
    "nemotron_h, experts": (
        "NemotronH",
        NEMOTRON_EXPERTS | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
    ),
    "nemotron_h, experts of a latent": (
        "NemotronH",
        NEMOTRON_EXPERTS
        | {"layers_block_type": ["linear_attention", "moe", "full_attention"] * 2}
        | {"moe_latent_size": 12, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "qwen3_next": ("Qwen3Next", RECURRENT_EXPERTS),
    "qwen3_5_text": ("Qwen3_5Text", RECURRENT),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", RECURRENT_EXPERTS | {"linear_conv_kernel_dim": 3}),
}


GEMMA_4_FORMS = ("gemma4_text", "gemma4_text, experts", "gemma4_text, embeddings of layers")
DECODED = ("gemma2", "qwen3_5_text", *map(slow, (*GEMMA_4_FORMS, "gpt_oss", "deepseek_v3", "nemotron_h, experts")))
QUANTIZED = ("gemma", "gemma4_text", "phi3", "cohere2", "starcoder2", "stablelm", "phimoe", "llama4_text")
QUANTIZED += ("qwen2_moe", "gpt_oss", "deepseek_v3", "falcon, 40B", "nemotron_h, experts of a latent")
# Norms, caps, windows, rotary by layer, parallel residuals, experts, sinks, latents and recurrent layers come once.
QUICK = ("gemma2", "gemma4_text, embeddings of layers", "cohere2", "smollm3", "phimoe", "gpt_oss", "deepseek_v3")
QUICK += ("falcon, 40B", "qwen3_next", "granitemoehybrid, experts", "falcon_h1", "lfm2", "nemotron_h, experts")


@pytest.fixture(params=slow_but(CASES, *QUICK))
def case(request):
    return request.param


@pytest.fixture
def models(case, tmp_path_factory):
    return checkpoint(*CASES[case], tmp_path_factory.getbasetemp() / case.replace(" ", "_"))


def test_logits_are_those_of_transformers_and_every_format_keeps_them(models, case, tmp_path):
    import torch

    model, params = models
    text, branch = np.random.default_rng(1).integers(0, 50, (2, 40), dtype=np.int32)  # longer than every window
    branch[:16] = text[:16]
    with torch.no_grad():
        wanted, other = model(torch.tensor(np.stack([text, branch]), dtype=torch.long)).logits.numpy()
    prefix, branches, rest = run_branches(params, text[:16], np.stack([branch[16:24], text[16:24]]), text[24:])
    found = np.concatenate([prefix[0], branches[0, 8:], rest[0]])
    np.testing.assert_allclose(found, wanted, atol=2e-4)
    np.testing.assert_allclose(branches[0, :8], other[16:24], atol=2e-4)

    if case in QUANTIZED:
        rounded = run_blocks(quantize(params), text[None], [40])[0]
        assert np.mean(np.argmax(rounded, axis=-1) == np.argmax(wanted, axis=-1)) > 0.8

    for save, load, name in ((save_hf, load_hf, "hf"), (conversion.save, conversion.load, "own")):
        save(params, tmp_path / name)
        again = load(tmp_path / name, "float32", strict=True)
        assert dataclasses.replace(again.config, eos_ids=params.config.eos_ids) == params.config
        assert_same_arrays(again, params)
    assert_same_arrays(jlade.adopt(load_file(tmp_path / "hf" / "model.safetensors"), tmp_path / "hf"), params)
    theirs = class_of(params.config.family).from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        given = theirs(torch.tensor(text[None], dtype=torch.long)).logits.numpy()[0]
    np.testing.assert_allclose(given, wanted, atol=1e-5)
    assert_same_arrays(load_hf(tmp_path / "hf", "float32", mesh=jlade.make_mesh(model=2)), params)


def assert_same_arrays(params, expected):
    for got, stored in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, stored)


@pytest.mark.slow
@pytest.mark.parametrize("case", DECODED, indirect=True)
def test_texts_are_those_of_transformers(models):
    import torch

    model, params = models
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 50, length).tolist() for length in PROMPT_LENGTHS]
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    out = jlade.generate(params, prompts, max_new_tokens=NEW_TOKENS, lookahead=PAPER, eos_ids=())
    assert out.tokens.tolist() == expected
