"""The families of models: a table of tiny configurations of transformers, and random checkpoints of them."""

import pytest

from jlade.conversion import load_hf
from jlade.conversion.families import FAMILIES

LENGTH = 96  # no text is longer
SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SLIDING = ["sliding_attention", "full_attention"]
LLAMA_3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def rope(kind, **settings):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0} | settings}


def rope_of_full_attention(**settings):
    """Returns the rotation of layers without a window; that of the others is plain."""
    others = {"rope_type": "default", "rope_theta": 50.0}
    return {"rope_parameters": {"full_attention": settings, "sliding_attention": others}}


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
RECURRENT = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_key_heads": 2}
RECURRENT |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
RECURRENT_EXPERTS = RECURRENT | EXPERTS | {"shared_expert_intermediate_size": 20}
STATES = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_chunk_size": 8}
MAMBA = STATES | {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 40}
FALCON_H1 = STATES | {"mamba_d_ssm": 48, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.2}
FALCON_H1 |= {"attention_in_multiplier": 1.3, "key_multiplier": 0.4, "attention_out_multiplier": 0.9}
FALCON_H1 |= {"ssm_in_multiplier": 1.25, "ssm_multipliers": [0.35, 0.6, 0.7, 0.5, 0.8], "ssm_out_multiplier": 0.7}
FALCON_H1 |= {"mlp_multipliers": [0.9, 0.6]}
NEMOTRON = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "head_dim": 8, "n_groups": 2}
NEMOTRON |= {"mamba_num_heads": 8, "mamba_head_dim": 6, "ssm_state_size": 5, "chunk_size": 8}
NEMOTRON["time_step_min"] = 1e-30  # transformers bounds the steps of prompts alone by it
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
NEMOTRON_EXPERTS = NEMOTRON | ROUTED | {"moe_shared_expert_intermediate_size": 20}
LATENT = ROUTED | {"kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
LATENT |= {"v_head_dim": 6, "num_key_value_heads": 4}
KIMI = {"num_local_experts" if key == "n_routed_experts" else key: value for key, value in LATENT.items()}
KIMI |= {"q_lora_rank": None, "layer_types": ["linear_attention", "full_attention"]}
LING = KIMI | {"first_k_dense_replace": 1, "layer_types": None, "layer_group_size": 2, "head_dim": 10}
KIMI |= {"linear_num_heads": 2, "linear_head_dim": 8}
INDEX = {"index_topk": 13, "index_head_dim": 10, "index_n_heads": 16}  # of few heads, many scores would be zero
GEMMA_4 = {"num_key_value_heads": 4, "head_dim": 12, "global_head_dim": 20, "sliding_window": 7}
GEMMA_4 |= {"hidden_size_per_layer_input": 0, "num_hidden_layers": 4, "layer_types": [*SLIDING, *SLIDING]}
GEMMA_4 |= rope_of_full_attention(rope_type="proportional", rope_theta=500.0, partial_rotary_factor=0.25)
# Each row is the name of a configuration in transformers and the changes of `SIZES` in it. A row for each form that a
# family's layers have in published checkpoints; names begin with the model type.
ROWS = {
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
    "arcee": ("Arcee", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "nemotron": ("Nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "num_key_value_heads": 1}),
    "apertus": ("Apertus", {"attention_bias": True, "num_key_value_heads": 1, "head_dim": 12}),
    "gemma": ("Gemma", {"head_dim": 12}),
    "vaultgemma": (
        "VaultGemma",
        {"head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 10, "final_logit_softcapping": 5.0},
    ),
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
    "gpt2": ("GPT2", {"num_key_value_heads": 4, "n_inner": 48}),
    "gpt_bigcode": ("GPTBigCode", {"num_key_value_heads": 4, "n_inner": 48, "activation_function": "gelu"}),
    "gpt_bigcode, all heads": ("GPTBigCode", {"num_key_value_heads": 4, "n_inner": 48, "multi_query": False}),
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
    "olmo": ("Olmo", {"clip_qkv": 0.7, "attention_bias": True, "num_key_value_heads": 1}),
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
    "granite_swa": (
        "GraniteSWA",
        {"sliding_window": 7, "num_key_value_heads": 1, "head_dim": 12, "attention_multiplier": 0.2}
        | {"num_hidden_layers": 3, "layer_rope_theta": [300.0, 0, 50.0], "eos_token_id": 49, "bos_token_id": 48},
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
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": [2, 2], "head_dim": 12}),
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
    "cohere2_moe": (
        "Cohere2Moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 2, "num_hidden_layers": 3, "head_dim": 12}
        | {"sliding_window": 7, "layer_types": [*SLIDING, "full_attention"], "logit_scale": 0.5}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "cohere2_moe, sigmoids": (
        "Cohere2Moe",
        {"num_experts": 8, "num_experts_per_tok": 1, "num_shared_experts": 1, "head_dim": 12, "rms_norm_eps": 1e-5}
        | {"shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid", "num_key_value_heads": 1}
        | {"mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention"] * 2}
        | {"prefix_dense_intermediate_size": 40, "prefix_dense_sliding_window_pattern": 2},
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
    "deepseek_v32": (
        "DeepseekV32",
        LATENT
        | INDEX
        | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
        | rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.8, beta_fast=4.0),
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        LATENT
        | INDEX
        | {"first_k_dense_replace": 1, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
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
    "flex_olmo": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": True}),
    "mellum": (
        "Mellum",
        EXPERTS
        | {"sliding_window": 7, "layer_types": SLIDING, "mlp_layer_types": ["sparse", "dense"], "head_dim": 12}
        | rope_of_full_attention(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=500.0),
    ),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoeshared": ("GraniteMoeShared", {"num_local_experts": 4, "shared_intermediate_size": 20}),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        {"num_local_experts": 4, "shared_intermediate_size": 20, "sliding_window": 7, "layer_rope_theta": [0, 300.0]},
    ),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "residual_multiplier": 0.4}),
    "laguna": (
        "Laguna",
        EXPERTS
        | {"shared_expert_intermediate_size": 20, "head_dim": 12, "sliding_window": 7, "num_hidden_layers": 3}
        | {"num_attention_heads_per_layer": [4, 6, 2], "layer_types": [*SLIDING, "full_attention"]}
        | {"moe_routed_scaling_factor": 1.7}
        | rope_of_full_attention(rope_theta=500.0, partial_rotary_factor=0.5, **YARN),
    ),
    "laguna, gates of elements": (
        "Laguna",
        EXPERTS | {"shared_expert_intermediate_size": 20, "gating": "per-element", "num_key_value_heads": 1},
    ),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        ROUTED
        | {"head_dim": 12, "v_head_dim": 8, "attention_value_scale": 0.6}
        | {"num_hidden_layers": 3, "layer_types": ["full_attention", *SLIDING], "sliding_window": 7},
    ),
    "axk1": ("AXK1", LATENT | {"n_group": 4, "topk_group": 2, "mlp_layer_types": ["dense", "sparse"]}),
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
    "bailing_hybrid": (
        "BailingHybrid",
        LING
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "short_conv_kernel_size": 3}
        | rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.8),
    ),
    "bailing_hybrid, unbounded decays": (
        "BailingHybrid",
        LING
        | {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": 20}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "kda_safe_gate": False}
        | {"num_experts_per_tok": 1, "norm_topk_prob": False, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    ),
    "kimi_linear": (
        "KimiLinear",
        KIMI | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "linear_conv_kernel_dim": 3},
    ),
    "kimi_linear, latents of queries": (
        "KimiLinear",
        KIMI
        | {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": 20}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"]}
        | {"num_experts_per_tok": 1, "norm_topk_prob": False, "n_shared_experts": 2},
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
    "lfm3": (
        "Lfm3",
        {"head_dim": 12, "num_key_value_heads": 1, "sliding_window": 5, "num_hidden_layers": 3, "conv_L_cache": 5}
        | {"layer_types": ["conv", "sliding_attention", "full_attention"]},
    ),
    "bamba": ("Bamba", STATES | {"attn_layer_indices": [1], "num_hidden_layers": 3, "attention_bias": True}),
    # transformers 5.24 divides the filters that it writes into three equal parts, whatever their sizes.
    "olmo_hybrid": (
        "OlmoHybrid",
        RECURRENT
        | {"linear_num_value_heads": 2, "linear_value_head_dim": 8, "num_key_value_heads": 1, "rope_theta": None},
    ),
    "olmo_hybrid, rotated": (
        "OlmoHybrid",
        {"num_hidden_layers": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"linear_allow_neg_eigval": False},
    ),
    "qwen3_next": ("Qwen3Next", RECURRENT_EXPERTS),
    "qwen3_5_text": ("Qwen3_5Text", RECURRENT),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", RECURRENT_EXPERTS | {"linear_conv_kernel_dim": 3}),
}


# transformers initialises these parameters, norms and biases to ones and zeros.
SCALES = "router.gate.weight", "layer_scalar", "router.scale", "per_expert_scale", "sinks"


def class_of(model_type):
    """Returns the class of transformers, which AutoModelForCausalLM does not know for some families."""
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, FAMILIES[model_type].architecture)


def model_of(family, changes):
    """Returns a model of transformers, random by a fixed seed, without end tokens."""
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
    return model


def checkpoint(family, changes, directory):
    """Saves a random model of transformers; returns it and the parameters that jlade loads."""
    model = model_of(family, changes)
    import torch

    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            is_mask = parameter.dtype == torch.bool
            if not is_mask and ("norm" in name or "ln_" in name or name.endswith(("bias", *SCALES))):
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model, load_hf(directory, "float32")
