"""config.json of the families in the table, and the text parts of models with other parts."""

import dataclasses
import json
import math
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jlade
from jlade import conversion
from jlade.cli import main
from jlade.conversion import load_hf, save_hf
from jlade.conversion.families import FAMILIES
from jlade.conversion.hf_config import read_config, to_hf
from jlade.conversion.hf_rotary import FULL, SLIDING
from jlade.conversion.hf_tensors import text_part
from jlade.models.architecture import CHANNEL_DELTA, STATE_SPACE, Heads, IndexSizes, Latent, Recurrence
from jlade.models.llama import LlamaConfig, init_params
from jlade.models.rotary import LinearScaling, Llama3Scaling, LongRopeScaling, QueryScaling, Rotary
from tests.conversion.hf_files import assert_same_arrays, change_tensors
from tests.families import LLAMA_3, MAMBA, NEMOTRON, RECURRENT, RECURRENT_EXPERTS, SIZES, YARN, checkpoint, rope
from tests.forward import run_blocks
from tests.tiny import slow_but


def write(directory, model_type, **changes):
    family = FAMILIES.get(model_type, FAMILIES["llama"])
    content = {key: value for key, value in SIZES.items() if key not in family.ignored} | {"model_type": model_type}
    if "kv_lora_rank" in family.reads:
        content |= {"num_key_value_heads": 4, "num_experts_per_tok": 2}
    if model_type == "nemotron_h" and {"layers_block_type", "hybrid_override_pattern"} & changes.keys():
        del content["num_hidden_layers"]
    if model_type == "granitemoehybrid":  # without these it would have no attention
        kinds = ["mamba"] * (changes.get("num_hidden_layers", 2) - 1) + ["attention"]
        content |= {"layer_types": kinds, "mamba_n_heads": 8}
    if model_type == "bamba":
        content |= {"attn_layer_indices": [changes.get("num_hidden_layers", 2) - 1], "mamba_n_heads": 8}
    (directory / "config.json").write_text(json.dumps(content | changes))
    return directory


ATTENDS, LETTERS = {"full_attention_interval": 2}, {"hybrid_override_pattern": "ME*-"}
TYPES = {"layer_types": ["linear_attention", "full_attention"]}
VL_MOE = SIZES | {"model_type": "qwen3_vl_moe_text"}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_defaults_of_every_family_come_back(name, tmp_path):
    number = {"kimi_linear": 5, "bailing_hybrid": 6}.get(name, 4)  # the last has attention
    config = read_config(write(tmp_path, name, num_hidden_layers=number), strict=True)
    assert config.family == name
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config, "float32")))
    assert read_config(tmp_path, strict=True) == config


def test_the_defaults_of_every_family_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, family in FAMILIES.items():
        if name == "gemma3_text":
            continue
        config = transformers.AutoConfig.for_model(name)
        theirs = config.to_dict() | (getattr(config, "rope_parameters", None) or {})
        for key, value in (family.reads | (family.reads["rope_scaling"] or {})).items():
            if key == "sliding_window" and theirs.get("use_sliding_window") is False:
                continue  # transformers replaces it
            if value is not None and theirs.get(key) is not None and key != "head_dim":
                assert theirs[key] == value, (name, key)


REFUSED = {  # by model_type: keys of config.json, and the message
    "granite_swa": [
        ({"layer_rope_theta": [1e4]}, "layer_rope_theta must list a base for each of 2 layers, got"),
        ({"layer_rope_theta": [1e4, -1]}, r"layer_rope_theta\[1\] must be a positive number, got -1"),
    ],
    "laguna": [
        (
            {"num_attention_heads_per_layer": [8]},
            "num_attention_heads_per_layer must list a number for each of 2 layers",
        ),
        ({"num_attention_heads_per_layer": [8, 7]}, "num_attention_heads_per_layer must have multiples of num_key_va"),
        ({"gating": False}, "gating is False; supported is True or 'per-head' or 'per-element'"),
    ],
    "mimo_v2_flash": [({"v_head_dim": 193}, "v_head_dim must be up to head_dim, 192, got 193")],
    "gpt2": [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; supported is False")
    ],
    "gemma": [({"hidden_act": "silu"}, "hidden_act is 'silu'; supported is 'gelu_pytorch_tanh' or 'gelu'")],
    "gemma2": [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True; supported is False"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number, got 0"),
    ],
    "gemma4_text": [
        ({"per_layer_config": {"2": {}}}, "per_layer_config must have objects with num_key_value_heads"),
        ({"per_layer_config": {"0": {"head_dim": 6}}}, "per_layer_config must be equal for all layers"),
        ({"global_head_dim": 7}, "global_head_dim must be even, got 7"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers must leave layers of each kind in layer_ty"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers must leave layers of each kind in layer_ty"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; supported is N"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling is .*; supported is None"),
        ({"enable_moe_block": True}, "num_experts must be a positive integer, got None"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            r"num_attention_heads \(4\) must be a multiple of num_global_key_value_heads \(3\)",
        ),
    ],
    "gemma3_text": [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; supported is None"),
        ({"rope_parameters": YARN}, "rope_parameters must be an object for each type of layers, got"),
        ({"rope_scaling": {"full_attention": YARN}}, "rope_scaling must be one object for all layers"),
    ],
    "phi": [
        ({"qk_layernorm": True}, "qk_layernorm is True; supported is False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'gelu_new' or 'gelu_pytorch_tanh'"),
    ],
    "gpt_neox": [
        ({"hidden_act": "gelu_fast"}, "hidden_act is 'gelu_fast'; supported is 'gelu'"),
        ({"rotary_pct": 0.5, "partial_rotary_factor": 0.25}, "rotary_pct is 0.5 and partial_rotary_factor i"),
    ],
    "falcon": [
        ({"alibi": True}, "alibi is True; supported is False"),
        ({"activation": "relu"}, "activation is 'relu'; supported is 'gelu'"),
        ({"head_dim": 8}, "head_dim is 8; supported is None"),
        ({"n_embed": 64}, "n_embed is 64; supported is None"),
        ({"multi_query": "no"}, "multi_query must be true or false, got 'no'"),
        ({"multi_query": None, "num_kv_heads": 2}, "num_kv_heads must be num_attention_heads, 4, unless new"),
        (
            {"new_decoder_architecture": True, "num_kv_heads": 3},
            "num_kv_heads must divide num_attention_heads, 4, got 3",
        ),
        (
            {"new_decoder_architecture": True, "parallel_attn": False},
            "parallel_attn must be true with new_decoder_architecture, got False",
        ),
        ({"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn must be 1 unless new_decoder_architecture"),
        (
            {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3},
            "num_ln_in_parallel_attn must be 1 or 2, got 3",
        ),
    ],
    "llama": [
        ({"alibi": True}, "alibi is True; supported is False"),
        ({"use_parallel_residual": True}, "use_parallel_residual is True; supported is False"),
        ({"key_multiplier": 0.5}, "key_multiplier is 0.5; supported is 1.0"),
        ({"rope_parameters": YARN, "rope_scaling": LLAMA_3}, "rope_scaling is .* and rope_parameters is"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN},
            "rope_scaling is .* and rope_parameters is .*: remove one of them, or make them equal",
        ),
        ({"is_causal": False}, "is_causal is False; supported is True"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights is 'other.safetensors'; supp"),
    ],
    "phi3": [
        ({"rope_scaling": {"type": "longrope"}}, "short_factor must be a list of positive numbers, got None"),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0]}}, "short_factor must have 4 numbers, got 1"),
    ],
    "phimoe": [
        ({"router_jitter_noise": 0.02}, "router_jitter_noise is 0.02; supported is 0.01"),
        ({"rope_scaling": {"type": "linear"}}, "short_mscale must be a positive number, got None"),
    ],
    "olmo2": [({"rope_scaling": {"type": "su"}}, "rope_type is 'su'; supported are default")],
    "stablelm": [
        ({"qk_layernorm": True}, "qk_layernorm is True; supported is False"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor must be a fraction that gives an even"),
    ],
    "llama4_text": [
        ({"moe_layers": [2]}, r"moe_layers must list some of 2 layers, got \[2\]"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2; supported is 1"),
    ],
    "exaone_moe": [({"mlp_layer_types": ["moe"]}, "mlp_layer_types must name dense or sparse for each of 2 layers")],
    "glm4_moe": [
        ({"n_group": 3}, "n_group must divide 128 experts into groups of 2 or more, got 3"),
        ({"n_group": 32}, "topk_group must be up to n_group, 32, with as many experts as num_experts_per"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a positive integer, got -1"),
    ],
    "smollm3": [
        ({"no_rope_layers": []}, "no_rope_layers must have 0 or 1 for each of 2 layers, got"),
        ({"no_rope_layers": [1]}, "no_rope_layers must have 0 or 1 for each of 2 layers, got"),
    ],
    "exaone4": [({"sliding_window_pattern": "LLLG"}, "sliding_window_pattern must be a positive integer, got")],
    "starcoder2": [({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'gelu_pytorch_tanh'")],
    "granite": [({"logits_scaling": 0}, "logits_scaling must be a positive number, got 0")],
    "granitemoehybrid": [
        ({"layer_types": ["mamba", "conv"]}, "layer_types must name attention or full_attention or mamba or"),
        ({"layer_types": ["mamba"] * 2}, "layer_types must name full_attention for one of 2 layers"),
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit is \[0.001, 0.1\]; supported is None"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias is True; supported is False"),
        (MAMBA | {"mamba_d_head": 3}, r"mamba_n_heads times mamba_d_head \(8 times 3\) must be"),
        (MAMBA | {"mamba_n_groups": 3}, r"mamba_n_heads \(8\) must be a multiple of mamba_n_groups"),
    ],
    "falcon_h1": [
        ({"projectors_bias": True}, "projectors_bias is True; supported is False"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias is True; supported is False"),
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit is \[0.001, 0.1\]; supported is None"),
        ({"mamba_d_head": 4}, r"mamba_n_heads times mamba_d_head \(128 times 4\) must be mamba_d_ssm \(1"),
        ({"mamba_d_ssm": None}, r"mamba_n_heads times mamba_d_head \(128 times 0\) must be mamba_expand"),
        ({"mlp_multipliers": [1.0]}, r"mlp_multipliers must list 2 positive numbers, got \[1.0\]"),
        ({"ssm_multipliers": [1, 1, 0, 1, 1]}, r"ssm_multipliers\[2\] must be a positive number, got 0"),
        ({"key_multiplier": None}, "key_multiplier must be a positive number, got None"),
    ],
    "lfm2": [
        ({"layer_types": ["conv", "mamba"]}, "layer_types must name full_attention or conv for each of 2 layers"),
        ({"full_attn_idxs": [2]}, r"full_attn_idxs must list some of 2 layers, got \[2\]"),
        ({"full_attn_idxs": []}, "layer_types must name full_attention for one of 2 layers"),
        ({"full_attn_idxs": [1], "conv_L_cache": 1}, "conv_L_cache must be 2 or more, got 1"),
        ({"conv_bias": True}, "conv_bias is True; supported is False"),
    ],
    "gemma3": [
        ({}, "text_config must be an object, got None"),
        ({"text_config": {}, "quantization_config": {"bits": 4}}, "the weights are quantized with a method"),
    ],
    "mistral3": [
        ({"text_config": {"model_type": "mistral5"}}, "model_type is 'mistral5'; supported are llama"),
        ({"text_config": {}, "architectures": ["Other"]}, r"architectures is \['Other'\]; supported is Mis"),
    ],
    "deepseek_v3": [
        ({"num_key_value_heads": 2}, "num_key_value_heads must be 4, as the other sizes imply, got 2"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim must be even, got 5"),
        ({"head_dim": 192}, "head_dim must be 64, as the other sizes imply, got 192"),
        ({"attention_bias": True}, "attention_bias is True; supported is False"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; supported is 'noaux_tc'"),
        ({"index_topk": 2048}, "index_topk is 2048; supported is None"),
    ],
    "deepseek_v32": [
        ({"q_lora_rank": None}, "q_lora_rank must be a positive integer, got None"),
        ({"index_topk": 0}, "index_topk must be a positive integer, got 0"),
        ({"index_head_dim": 32}, "index_head_dim must be at least qk_rope_head_dim, 64, got 32"),
        ({"indexer_types": ["full", "shared"]}, r"indexer_types is \['full', 'shared'\]; supported is None"),
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave is True; supported is False"),
    ],
    "glm_moe_dsa": [
        ({"indexer_types": ["full", "none"]}, "indexer_types must name full or shared for each of 2 layers"),
        ({"index_topk_pattern": "SF"}, r"indexer_types must begin with full, got \['shared', 'full'\]"),
        ({"index_topk_freq": -1}, "index_topk_freq must be a positive integer, got -1"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave is False; supported is None or True"),
    ],
    "afmoe": [
        ({"sliding_window": None}, "sliding_window must be a positive integer, got None"),
        ({"score_func": "softmax"}, "score_func is 'softmax'; supported is 'sigmoid'"),
    ],
    "hy_v3": [({"mlp_bias": True}, "mlp_bias is True; supported is False")],
    "ernie4_5_moe": [
        ({"use_bias": True}, "use_bias is True; supported is False"),
        ({"moe_layer_start_index": -1}, "moe_layer_start_index must be a positive integer, got -1"),
        ({"moe_k": 65}, "num_experts_per_tok must be up to the number of experts, 64, got 65"),
    ],
    "deepseek_v2": [
        ({"topk_method": "noaux_tc"}, "topk_method must be greedy or group_limited_greedy, got 'noaux"),
        ({"norm_topk_prob": True}, "norm_topk_prob is True; supported is False"),
    ],
    "mistral4": [({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor must give the 64 el")],
    "ministral3": [({"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "original_max_position_embeddings must be")],
    "kimi_linear": [
        ({"mla_use_nope": False}, "mla_use_nope is False; supported is True"),
        (
            {"linear_attn_config": {"gate_lower_bound": -5.0}},
            "linear_attn_config must be an object with some of full_att",
        ),
        (
            {"linear_attn_config": {"kda_layers": [0], "full_attn_layers": [1]}},
            r"kda_layers and full_attn_layers must list each of 2 layers once, from 1, got \[0\] and \[1\]",
        ),
        (
            {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": []}},
            "layer_types must name full_attention",
        ),
        (TYPES | {"linear_attn_config": {"short_conv_kernel_size": 1}}, "linear_conv_kernel_dim must be 2 or more"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True; supported is False"),
    ],
    "bailing_hybrid": [
        (
            {"layer_group_size": 2, "kda_lower_bound": 0.0},
            "kda_lower_bound must be a negative number with kda_safe_gate, got 0.0",
        ),
        ({"use_mla_nope": True}, "use_mla_nope is True; supported is False"),
        (
            {"architectures": ["BailingMoeV2_5ForCausalLM"]},
            "architectures is .*; supported is BailingHybridForCausalLM",
        ),
    ],
    "qwen3_next": [
        ({"layer_types": ["linear_attention"] * 2}, "layer_types must name full_attention for one of 2 layers"),
        (
            {"layer_types": ["mamba", "full_attention"]},
            "layer_types must name full_attention or linear_attention for each of 2",
        ),
        ({"full_attention_interval": 0}, "full_attention_interval must be a positive integer, got 0"),
        (
            ATTENDS | {"linear_num_value_heads": 24},
            r"linear_num_value_heads \(24\) must be a multiple of linear_num_key_heads \(16",
        ),
        (ATTENDS | {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be 2 or more, got 1"),
        (ATTENDS | {"attn_output_gate": False}, "attn_output_gate is False; supported is True"),
    ],
    "nemotron_h": [
        ({"layers_block_type": ["moe", "mamba"]}, "layers_block_type must name full_attention for one of 2 layers"),
        ({"layers_block_type": ["conv"]}, "layers_block_type must list linear_attention, full_attention, mlp, moe, ma"),
        ({"layers_block_type": "M*"}, "layers_block_type must list"),
        ({"hybrid_override_pattern": "M*-x"}, r"hybrid_override_pattern must be letters of M\*-E, got 'M\*-x'"),
        (
            {"hybrid_override_pattern": "M*-", "num_hidden_layers": 4},
            "num_hidden_layers must be 3, as layers_block_typ",
        ),
        (LETTERS | {"n_groups": 3}, r"mamba_num_heads \(128\) must be a multiple of n_groups \(3\)"),
        (LETTERS | {"conv_kernel": 4, "mamba_d_conv": 3}, "conv_kernel is 4 and mamba_d_conv is 3: remove one of them"),
        (LETTERS | {"n_group": 3}, "n_group must divide 8 experts into groups of 2 or more, got 3"),
        (LETTERS | {"n_shared_experts": 2}, "n_shared_experts is 2; supported is 1"),
        (LETTERS | {"mlp_bias": True}, "mlp_bias is True; supported is False"),
        (LETTERS | {"use_bias": True}, "use_bias is True; supported is False"),
        (LETTERS | {"residual_in_fp32": True}, "residual_in_fp32 is True; supported is False"),
        (LETTERS | {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; supported is 'relu2'"),
        (LETTERS | {"time_step_limit": [0.001, 0.1]}, "time_step_limit is .*; supported is None or"),
    ],
    "qwen3": [({"rope_parameters": {"full_attention": YARN}}, "rope_parameters must be one object for all layers")],
    "olmo3": [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling must have rope_type in the place of")
    ],
    "qwen3_vl_moe": [
        *(
            ({"text_config": VL_MOE | {key: value}}, f"text_config has {key} {value}; supported is ")
            for key, value in (("norm_topk_prob", False), ("sliding_window", 7))
        )
    ],
}


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [(name, *row) for name, rows in REFUSED.items() for row in rows],
    ids=str,
)
def test_what_is_not_supported_is_refused(model_type, changes, message, tmp_path):
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        read_config(write(tmp_path, model_type, **changes))


def test_the_published_keys_of_deepseek_v3_and_kimi_k2_are_read(tmp_path):
    """As in deepseek-ai/DeepSeek-V3 and moonshotai/Kimi-K2-Instruct, whose code is DeepSeek's."""
    deepseek = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [128, 128]},
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
        | {"original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    config = read_config(write(tmp_path, "deepseek_v3", **deepseek), strict=True)
    assert config.latent == Latent(1536, rank=512, rotated=64, unrotated=128, value_size=128)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rotary_dim) == (128, 1, 576, 64)
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert (config.dense_layers, config.dense_size, config.intermediate_size) == ((0, 1, 2), 18432, 2048)
    kimi = {"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1}
    kimi |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rope_theta": 50000.0}
    config = read_config(write(tmp_path, "kimi_k2", **deepseek | kimi), strict=True)
    assert config == read_config(write(tmp_path, "deepseek_v3", **deepseek | kimi), strict=True)


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({}, ()),
        ({"indexer_types": ["full", "shared", "shared", "full", "full"], "index_topk_freq": 2}, (1, 2)),
        ({"index_topk_pattern": "FSFSF"}, (1, 3)),
        ({"index_topk_pattern": ["full", "full", "shared", "full", "full"]}, (2,)),
        ({"index_topk_freq": 3}, (2, 3)),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, (1, 2, 4)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 4}, (4,)),
    ],
)
def test_the_layers_of_glm_5_that_share_a_choice_are_those_of_transformers(changes, shared, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = read_config(write(tmp_path, "glm_moe_dsa", num_hidden_layers=5, **changes), strict=True)
    assert config.latent.index == IndexSizes(32, 128, 2048, interleaved=True, shared_layers=shared)
    assert (config.max_positions, config.dense_layers) == (202752, (0, 1, 2))
    theirs = transformers.GlmMoeDsaConfig(num_hidden_layers=5, **changes)
    assert [i for i, kind in enumerate(theirs.indexer_types) if kind == "shared"] == list(shared)


def test_settings_of_no_family_are_not_written():
    config = LlamaConfig(12, 8, 10, 2, 4, 2, 2, 64, model_type="olmo2")
    with pytest.raises(ValueError, match="no model of transformers has the settings of"):
        to_hf(config, "float32")


def test_gemma_3_27b_leaves_out_what_transformers_fills_in(tmp_path):
    """As in google/gemma-3-27b-it."""
    text = {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.warns(UserWarning, match="only the text part of the model is read; left out are vision_config"):
        config = read_config(tmp_path)
    assert (config.vocab_size, config.max_positions, config.eos_ids) == (262208, 131072, (1, 106))
    assert config.tie_embeddings
    assert config.embedding_scale == 5376**0.5
    assert config.attention_scale == 168**-0.5
    assert config.sliding_windows[:7] == (1024,) * 5 + (None, 1024)
    assert config.layer_rotary[4:6] == (Rotary(1e4), Rotary(1e6, LinearScaling(8.0)))


def test_gemma_4_has_two_forms_of_heads_by_layer(tmp_path):
    """As transformers 5.24 writes them, and as earlier ones do."""
    newer = {"attention_k_eq_v": True, "per_layer_config": {"01": {"head_dim": 10, "num_key_value_heads": 1}}}
    older = {"attention_k_eq_v": True, "global_head_dim": 10, "num_global_key_value_heads": 1}
    read = [read_config(write(tmp_path, "gemma4_text", **form), strict=True) for form in (newer, older)]
    assert read[0] == read[1]
    assert read[0].global_heads == Heads(1, 10)
    assert read_config(write(tmp_path, "gemma4_text", **older | {"attention_k_eq_v": False})).global_heads == Heads(
        2, 10
    )
    config = read_config(write(tmp_path, "gemma4_text", **newer | {"attention_k_eq_v": False}))
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config, "float32")))
    assert read_config(tmp_path, strict=True) == config


def test_phi_4(tmp_path):
    """As in microsoft/phi-4."""
    changes = {"num_attention_heads": 40, "hidden_size": 5120, "num_key_value_heads": 10, "rope_theta": 250000}
    changes |= {"rope_scaling": None, "max_position_embeddings": 16384, "original_max_position_embeddings": 16384}
    write(tmp_path, "phi3", **changes, architectures=["Phi3ForCausalLM"], embd_pdrop=0.0, resid_pdrop=0.0)
    config = read_config(tmp_path, strict=True)
    assert (config.head_dim, config.rope_theta, config.rotary_dim, config.sliding_windows) == (128, 250000.0, None, ())


def test_olmo_3_scales_the_rotation_of_layers_without_a_window(tmp_path):
    """As in allenai/Olmo-3-1025-7B."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    yarn |= {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0}
    changes = {"num_hidden_layers": 4, "max_position_embeddings": 65536, "rope_theta": 500000, "rope_scaling": yarn}
    config = read_config(write(tmp_path, "olmo3", **changes, sliding_window=4096), strict=True)
    assert config.sliding_windows == (4096, 4096, 4096, None)
    assert config.layer_rotary == (Rotary(5e5),) * 3 + (Rotary(5e5, config.rope_scaling),)
    assert (config.rope_scaling.factor, config.max_positions) == (8.0, 65536)


def test_the_first_of_four_layers_of_cwm_has_no_window(tmp_path):
    """As transformers fills in, also the rotary scaling."""
    transformers = pytest.importorskip("transformers")
    config = read_config(write(tmp_path, "cwm", num_hidden_layers=6), strict=True)
    expected = transformers.CwmConfig(num_hidden_layers=6)
    assert config.sliding_windows == tuple(8192 if kind == SLIDING else None for kind in expected.layer_types)
    assert (config.rope_theta, config.rope_scaling) == (1e6, Llama3Scaling(16.0, 1.0, 4.0, 8192))


def test_phi_3_5_moe_ends_where_its_rotation_would_change(tmp_path):
    """As in microsoft/Phi-3.5-MoE-instruct."""
    scaling = {"type": "longrope", "short_factor": [1.5] * 4, "long_factor": [9.0] * 4}
    scaling |= {"short_mscale": 1.243, "long_mscale": 1.243, "original_max_position_embeddings": 4096}
    changes = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": scaling}
    changes |= {"attention_bias": True, "lm_head_bias": True, "sliding_window": 131072, "router_jitter_noise": 0.01}
    config = read_config(write(tmp_path, "phimoe", **changes), strict=True)
    assert config.rope_scaling == LongRopeScaling((1.5,) * 4, 1.243)
    assert (config.max_positions, config.num_experts, config.experts_per_token) == (4096, 16, 2)
    assert config.qkv_bias
    assert config.attention_output_bias
    assert config.output_bias


def test_ministral_3_scales_its_queries(tmp_path):
    """As in mistralai/Ministral-3-8B-Base-2512."""
    yarn = {"rope_type": "yarn", "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    rotary = yarn | {"rope_theta": 1000000.0, "llama_4_scaling_beta": 0.1}
    text = SIZES | {"model_type": "ministral3", "max_position_embeddings": 262144, "rope_parameters": rotary}
    config = read_config(write(tmp_path, "mistral3", text_config=text | {"sliding_window": None}), strict=True)
    assert config.query_scalings == (QueryScaling(0.1, 16384),) * 2
    assert (config.rope_theta, config.rope_scaling.factor, config.rope_scaling.attention_factor) == (1e6, 16.0, 1.0)
    assert config.max_positions == 262144


def test_ernie_4_5_has_experts_in_some_layers(tmp_path):
    """As in baidu/ERNIE-4.5-21B-A3B-PT, and with other layers."""
    own = {"moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_k": 6, "moe_intermediate_size": 1536}
    own |= {"moe_layer_start_index": 1, "moe_layer_interval": 1, "moe_capacity": [64, 64, 64], "moe_gate": "topk"}
    own |= {"num_hidden_layers": 6, "moe_use_aux_free": True, "use_rmsnorm": True, "use_bias": False}
    config = read_config(write(tmp_path, "ernie4_5_moe", **own), strict=True)
    assert (config.dense_layers, config.dense_size, config.intermediate_size) == ((0,), 48, 3072)
    assert (config.num_experts, config.experts_per_token, config.least_divisor) == (64, 6, 1e-12)
    by_other_names = {"num_experts" if key == "moe_num_experts" else key: own[key] for key in own}
    assert read_config(write(tmp_path, "ernie4_5_moe", **by_other_names), strict=True) == config
    for changes, dense in (
        ({"moe_layer_interval": 2}, (0, 2, 4)),
        ({"moe_layer_interval": 3, "moe_layer_end_index": 4}, (0, 1, 3, 4, 5)),
        ({"moe_layer_start_index": 6}, (0, 1, 2, 3, 4, 5)),
    ):
        found = read_config(write(tmp_path, "ernie4_5_moe", **own | changes), strict=True)
        assert found.dense_layers == dense
        (tmp_path / "config.json").write_text(json.dumps(to_hf(found, "float32")))
        assert read_config(tmp_path, strict=True) == found


def test_afmoe_has_windows_in_three_of_four_layers(tmp_path):
    """As in arcee-ai/Trinity-Mini, and without a window in any layer."""
    own = {"num_hidden_layers": 5, "global_attn_every_n_layers": 4, "sliding_window": 2048, "mup_enabled": True}
    own |= {"num_dense_layers": 2, "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid", "n_group": 1}
    config = read_config(write(tmp_path, "afmoe", **own), strict=True)
    assert config.sliding_windows == (2048, 2048, 2048, None, 2048)
    assert config.layer_rotary == (Rotary(1e4), Rotary(1e4), Rotary(1e4), None, Rotary(1e4))
    assert (config.embedding_scale, config.dense_layers, config.expert_scale) == (32**0.5, (0, 1), 2.826)
    without = own | {"layer_types": [FULL] * 5, "mup_enabled": False}
    config = read_config(write(tmp_path, "afmoe", **without), strict=True)
    assert (config.sliding_windows, config.layer_rotary, config.embedding_scale) == ((), (None,) * 5, 1.0)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config, "float32")))
    assert read_config(tmp_path, strict=True) == config


def test_routers_of_ernie_4_5_stay_in_float32(tmp_path):
    """As in transformers, for which rounded ones would choose other experts."""
    shape = {"num_hidden_layers": 2, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24}
    _, params = checkpoint("Ernie4_5_Moe", shape, tmp_path / "published")
    rounded = load_hf(tmp_path / "published", "bfloat16")
    assert {x.dtype.name for x in (rounded.layers[1].mixture.router, rounded.layers[1].mixture.selection_bias)} == {
        "float32"
    }
    assert rounded.layers[1].mlp.up.dtype == "bfloat16"
    np.testing.assert_array_equal(rounded.layers[1].mixture.router, params.layers[1].mixture.router)
    for save, load, name in ((save_hf, load_hf, "hf"), (conversion.save, conversion.load, "own")):
        save(rounded, tmp_path / name)
        again = load(tmp_path / name, "auto")
        for got, stored in zip(jax.tree.leaves(again), jax.tree.leaves(rounded), strict=True):
            assert got.dtype == stored.dtype
            np.testing.assert_array_equal(got, stored)


def test_pythia(tmp_path):
    """As in EleutherAI/pythia-1b-deduped, whose files have masks besides."""
    own = {"num_attention_heads": 4, "hidden_size": 32, "rotary_emb_base": 5000, "rotary_pct": 0.5}
    own |= {"layer_norm_eps": 1e-5, "use_parallel_residual": True, "num_key_value_heads": None, "hidden_act": "gelu"}
    config = read_config(write(tmp_path, "gpt_neox", **own), strict=True)
    assert (config.num_kv_heads, config.rope_theta, config.rotary_dim, config.parallel) == (4, 5e3, 4, True)
    written = to_hf(config, "float32")
    assert (written["rotary_emb_base"], written["rotary_pct"]) == (5000.0, 0.5)
    save_hf(init_params(jax.random.key(0), config), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert tensors["gpt_neox.layers.1.attention.query_key_value.bias"].shape == (96,)
    masks = {"gpt_neox.layers.1.attention.bias": np.ones((1, 1, 8, 8), bool)}
    masks |= {"gpt_neox.layers.1.attention.masked_bias": np.array(-1e9)}
    change_tensors(tmp_path / "model", masks)
    load_hf(tmp_path / "model", strict=True)
    more = {"gpt_neox.layers.2.mlp.dense_h_to_4h.bias": np.ones(4)} | dict.fromkeys(masks)
    change_tensors(tmp_path / "model", more | {"embed_out.weight": None})
    with pytest.raises(ValueError, match=r"1 tensors are missing: embed_out\.weight"):
        load_hf(tmp_path / "model")
    change_tensors(tmp_path / "model", {"embed_out.weight": tensors["gpt_neox.embed_in.weight"]})
    with pytest.warns(
        UserWarning, match="ignored 1 tensors of more layers than num_hidden_layers, 2: gpt_neox.layers.2"
    ):
        load_hf(tmp_path / "model")


@pytest.mark.parametrize(
    ("own", "names"),
    [
        ({"multi_query": True, "new_decoder_architecture": False}, {"input_layernorm"}),
        ({"num_kv_heads": 2, "new_decoder_architecture": True, "multi_query": True}, {"ln_attn", "ln_mlp"}),
        (
            {"num_kv_heads": 2, "new_decoder_architecture": True, "multi_query": True, "num_ln_in_parallel_attn": 1}
            | {"rope_theta": 500042.0},
            {"input_layernorm"},
        ),
        ({"multi_query": False, "parallel_attn": False}, {"input_layernorm", "post_attention_layernorm"}),
    ],
    ids=["7B", "40B", "11B", "none of these"],
)
def test_layouts_of_falcon_are_written_as_they_are_published(own, names, tmp_path):
    shape = {"alibi": False, "bias": False, "parallel_attn": True, "layer_norm_epsilon": 1e-5, "hidden_size": 64}
    shape |= {"apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    shape |= {"ff_factor": 4, "intermediate_size": None, "num_key_value_heads": None}
    config = read_config(write(tmp_path, "falcon", **shape | own), strict=True)
    assert (config.intermediate_size, config.num_kv_heads) == (256, own.get("num_kv_heads", 4 - 3 * own["multi_query"]))
    written = to_hf(config, "float32")
    assert written.items() >= (own | {"multi_query": config.num_kv_heads == 1}).items()
    assert "head_dim" not in written
    save_hf(init_params(jax.random.key(0), config), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    found = {name.split(".")[3] for name in tensors if name.startswith("transformer.h.1.")}
    assert found == names | {"self_attention", "mlp"}
    rows = 64 + 2 * config.num_kv_heads * 16
    assert tensors["transformer.h.1.self_attention.query_key_value.weight"].shape == (rows, 64)


def test_llama_4_ends_with_its_first_chunk(tmp_path):
    """As in meta-llama/Llama-4-Scout-17B-16E-Instruct."""
    rotary = {"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192}
    rotary |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
    text = SIZES | {"model_type": "llama4_text", "num_hidden_layers": 4, "max_position_embeddings": 10485760}
    text |= {"rope_theta": 500000.0, "rope_scaling": rotary, "no_rope_layers": [], "attention_chunk_size": 8192}
    text |= {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 16384, "use_qk_norm": True, "floor_scale": 8192}
    text |= {"attn_temperature_tuning": 4, "attn_scale": 0.1, "for_llm_compressor": False, "num_local_experts": 16}
    config = read_config(write(tmp_path, "llama4", text_config=text), strict=True)
    assert config.max_positions == 8192
    assert config.query_scalings == (None, None, None, QueryScaling(0.1, 8192, offset=1))
    assert config.layer_rotary == (Rotary(5e5, config.rope_scaling),) * 3 + (None,)
    assert (config.expert_size, config.intermediate_size, config.experts_per_token) == (48, 48, 1)


@pytest.mark.filterwarnings("default:.*only the text part")
def test_qwen_3_vl_rotates_text_by_one_position(tmp_path):
    """As in Qwen/Qwen3-VL-4B-Instruct."""
    text = SIZES | {"model_type": "qwen3_vl_text", "head_dim": 128, "max_position_embeddings": 262144}
    text |= {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}
    text |= {"rope_theta": 5000000, "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16"}
    parts = {"text_config": text, "vision_config": {"depth": 24}, "tie_word_embeddings": True, "image_token_id": 151655}
    with pytest.warns(UserWarning, match="left out are vision_config"):
        config = read_config(write(tmp_path, "qwen3_vl", **parts, architectures=["Qwen3VLForConditionalGeneration"]))
    assert (config.family, config.rope_theta, config.rope_scaling, config.tie_embeddings) == ("qwen3", 5e6, None, True)
    del text["rope_theta"], text["max_position_embeddings"]
    config = read_config(write(tmp_path, "qwen3_vl", text_config=text), strict=True)
    assert (config.rope_theta, config.max_positions) == (5e5, 128000)


@pytest.mark.filterwarnings("ignore:.*only the text part")
@pytest.mark.filterwarnings("ignore:.*has no eos_token_id")
def test_a_model_of_any_type_with_a_known_text_part(tmp_path):
    """As in llava-hf/llava-v1.6-mistral-7b-hf, whose text part omits sizes."""
    text = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 32064, "eos_token_id": 2}
    parts = {"text_config": text, "vision_config": {"image_size": 336}, "image_token_index": 32000}
    config = read_config(write(tmp_path, "llava_next", **parts, architectures=["LlavaNextForConditionalGeneration"]))
    sizes = config.hidden_size, config.intermediate_size, config.num_kv_heads
    assert (config.family, sizes) == ("mistral", (4096, 14336, 8))
    assert (config.vocab_size, config.eos_ids, config.media_ids) == (32064, (2,), (32000,))
    for name, of_text in (("gemma4_assistant", "gemma4_text"), ("llava_next", "opt")):
        directory = write(tmp_path, name, text_config=text | {"model_type": of_text})
        with pytest.raises(ValueError, match=f"model_type is '{name}'; supported are"):
            read_config(directory)


@pytest.mark.parametrize("prefix", ["language_model.model.blocks.", "language_model.model.encoder.layers."])
def test_layers_of_text_parts_in_the_names_that_transformers_writes(prefix):
    """As of Kimi K2.5 and Qianfan-OCR: see findings/transformers_kimi_layers.sh."""
    names = {f"{prefix}0.mlp.up_proj.weight": 1, "language_model.lm_head.weight": 2, "model.encoder.layers.0.bias": 3}
    assert text_part(names) == {"model.layers.0.mlp.up_proj.weight": 1, "lm_head.weight": 2}


WITH_VISION = {
    "Gemma3": ("gemma3_text", "siglip_vision_model"),
    "Gemma4": ("gemma4_text", "gemma4_vision"),
    "Gemma4Unified": ("gemma4_unified_text", "gemma4_unified_vision"),
    "Llama4": ("llama4_text", "llama4_vision_model"),
    "Mistral3": ("mistral", "pixtral"),
    "Mistral3, newer": ("ministral3", "pixtral"),
    "Qwen2VL": ("qwen2_vl_text", "qwen2_vl_vision"),
    "Qwen2_5_VL": ("qwen2_5_vl_text", "qwen2_5_vl_vision"),
    "Qwen3VL": ("qwen3_vl_text", "qwen3_vl_vision"),
    "Qwen3VLMoe": ("qwen3_vl_moe_text", "qwen3_vl_moe_vision"),
    "Qwen3_5": ("qwen3_5_text", "qwen3_5_vision"),
    "Qwen3_5Moe": ("qwen3_5_moe_text", "qwen3_5_moe_vision"),
    "Cohere2Vision": ("cohere2", "siglip_vision_model"),
    "Llava": ("mistral", "clip_vision_model"),
    "SmolVLM": ("llama", "smolvlm_vision"),
}


@pytest.fixture(scope="module", params=slow_but(WITH_VISION, "Gemma3"))
def with_vision(request, tmp_path_factory):
    """A tiny model with a vision part, and the directory with it."""
    torch = pytest.importorskip("torch", reason="the test extra installs torch on Python 3.11 only")
    transformers = pytest.importorskip("transformers")
    kind, _, _ = request.param.partition(",")
    is_tied = kind.startswith(("Gemma", "Cohere"))  # and with windows
    text = SIZES | {"head_dim": 8, "initializer_range": 0.3, "sliding_window": 7 if is_tied else None}
    text |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None, "max_position_embeddings": 128}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    if kind.startswith("Gemma4"):
        text |= {"global_head_dim": 12, "pad_token_id": 0}
        text |= {"hidden_size_per_layer_input": 6} if kind == "Gemma4" else {}
        vision |= {"num_key_value_heads": 2, "head_dim": 8, "mm_embed_dim": 16, "output_proj_dims": 32}
    if kind == "Llama4":
        vision |= dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16)
    if kind.startswith("Qwen"):
        text |= rope("default", mrope_section=[1, 1, 2])
        vision |= {"out_hidden_size": 32}
    if kind.startswith("Qwen3_5"):
        text |= RECURRENT_EXPERTS if kind.endswith("Moe") else RECURRENT
    if kind == "Qwen3VLMoe":
        text |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    text_type, vision_type = WITH_VISION[request.param]
    parts = {
        "text_config": text | {"model_type": text_type, "tie_word_embeddings": is_tied},
        "vision_config": vision | {"model_type": vision_type},
        "tie_word_embeddings": is_tied,
        "image_token_index": 3,
        **({"mm_tokens_per_image": 4} if kind == "Gemma3" else {}),
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**parts)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    directory = tmp_path_factory.mktemp(kind)
    model.save_pretrained(directory)
    return model, directory


@pytest.mark.filterwarnings("default:.*only the text part")
def test_the_text_part_of_a_model_with_vision(with_vision, tmp_path, capsys):
    import torch

    model, directory = with_vision
    with pytest.warns(UserWarning, match="only the text part of the model is read; left out are vision_config"):
        params = load_hf(directory, "float32")
    with pytest.raises(ValueError, match="strict=True refuses models of more than text: vision_config"):
        load_hf(directory, strict=True)
    tokens = np.random.default_rng(0).integers(4, 50, (1, 24), dtype=np.int32)
    alone = getattr(model, "language_model", model)  # Llama 4's whole model needs an image in transformers 5.24
    with torch.no_grad():
        expected = alone(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(run_blocks(params, tokens, [10, 14]), expected, atol=2e-4)
    for kind in ("hf", "jlade"):
        assert main(["convert", str(directory), str(tmp_path / kind), "--to", kind]) == 0
        assert capsys.readouterr().err.count("left out are vision_config") == 1
        again, _ = jlade.load(tmp_path / kind, dtype="float32")
        same = {"eos_ids": (), "media_ids": ()}
        assert dataclasses.replace(again.config, **same) == dataclasses.replace(params.config, **same)
        jax.tree.map(np.testing.assert_array_equal, again.layers, params.layers)
    with pytest.raises(ValueError, match="prompt holds token 3, in whose place the model reads an image, a video or"):
        jlade.generate(params, [4, 3, 5], max_new_tokens=1)


@pytest.mark.filterwarnings("ignore:.*only the text part")
@pytest.mark.filterwarnings("ignore:.*has no eos_token_id")
@pytest.mark.parametrize("with_vision", ["Qwen3VLMoe"], indirect=True)
def test_experts_of_qwen_3_vl_are_read_in_both_directions(with_vision, tmp_path):
    """As published, and as transformers 5 writes them: each tensor's shape says which."""
    model, directory = with_vision
    expected = load_hf(directory, "float32")
    model.save_pretrained(tmp_path / "memory", save_original_format=False)
    shutil.copytree(directory, tmp_path / "published")
    for name in ("memory", "published"):
        tensors = load_file(tmp_path / name / "model.safetensors")
        key = next(key for key in tensors if key.endswith("layers.0.mlp.experts.gate_up_proj"))
        assert tensors[key].shape == (8, 48, 32)
        if name == "published":
            columns = {key: array.swapaxes(1, 2).copy() for key, array in tensors.items() if ".experts." in key}
            change_tensors(tmp_path / name, columns)
        params = load_hf(tmp_path / name, "float32")
        assert params.config == expected.config
        assert params.config.family == "qwen3_moe"
        assert_same_arrays(params, expected)
    theirs = type(model).from_pretrained(tmp_path / "published")
    for got, wanted in zip(theirs.parameters(), model.parameters(), strict=True):
        assert got.equal(wanted)


@pytest.mark.filterwarnings("default:.*tensors that predict further tokens")
def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    """As in Qwen/Qwen3-Next-80B-A3B-Instruct."""
    _, params = checkpoint("Qwen3Next", RECURRENT_EXPERTS, tmp_path)
    more = {"mtp.fc.weight": np.zeros((32, 64), np.float32), "mtp.layers.0.input_layernorm.weight": np.zeros(32)}
    change_tensors(tmp_path, more)
    with pytest.warns(
        UserWarning, match=r"ignored 2 tensors that predict further tokens: mtp\.fc\.weight, mtp\.layers"
    ):
        again = load_hf(tmp_path, "float32")
    assert again.config == params.config
    with pytest.raises(ValueError, match="strict=True refuses 2 tensors that predict further tokens"):
        load_hf(tmp_path, strict=True)


def test_minimax_m2_names_the_rotated_elements(tmp_path):
    """As in MiniMaxAI/MiniMax-M2."""
    changes = {"head_dim": 128, "rotary_dim": 64, "use_qk_norm": True, "qk_norm_type": "per_layer", "use_mtp": True}
    changes |= {"scoring_func": "sigmoid", "use_routing_bias": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1}
    fp8 = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic"}
    fp8 |= {"weight_block_size": [128, 128], "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
    config = read_config(write(tmp_path, "minimax_m2", **changes, quantization_config=fp8), strict=True)
    assert (config.rotary_dim, config.rope_theta, config.num_experts) == (64, 5e6, 256)


@pytest.mark.filterwarnings("default:.*only the text part")
@pytest.mark.parametrize("with_vision", ["Qwen2_5_VL"], indirect=True)
def test_files_of_qwen_2_5_vl(with_vision, tmp_path):
    """As in Qwen/Qwen2.5-VL-7B-Instruct, all keys of config.json are in one object; tensors have their newest names."""
    model, directory = with_vision
    model.save_pretrained(tmp_path, save_original_format=False)
    content = json.loads((directory / "config.json").read_text())
    text = content.pop("text_config")
    rotary = {"type": "mrope", "mrope_section": [1, 1, 2]}
    text |= {"rope_theta": text.pop("rope_parameters")["rope_theta"], "rope_scaling": rotary}
    content |= {key: text[key] for key in text if key not in ("model_type", "layer_types", "head_dim")}
    (tmp_path / "config.json").write_text(json.dumps(content | {"vision_token_id": 48}))
    with pytest.warns(UserWarning, match="left out are vision_config"):
        found, expected = (load_hf(path, "float32") for path in (tmp_path, directory))
    same = {"eos_ids": (), "media_ids": ()}
    assert dataclasses.replace(found.config, **same) == dataclasses.replace(expected.config, **same)
    assert_same_arrays(found, expected)


def test_published_keys_of_granite_4_h(tmp_path):
    """As in ibm-granite/granite-4.0-h-tiny."""
    changes = {"position_embedding_type": "nope", "mamba_d_head": 8, "mamba_n_groups": 1, "num_local_experts": 62}
    changes |= {"init_method": "mup", "normalization_function": "rmsnorm", "mamba_chunk_size": 256}
    config = read_config(write(tmp_path, "granitemoehybrid", **changes), strict=True)
    assert (config.num_experts, config.expert_size, config.intermediate_size) == (62, 48, 1024)
    assert config.recurrence == Recurrence(STATE_SPACE, 1, 8, 256, 8, 4, filter_bias=True)
    assert set(config.rotary_by_layer) == {None}


def test_published_keys_of_falcon_h1(tmp_path):
    """As in tiiuae/Falcon-H1-0.5B-Instruct, in which the size of recurrent layers may follow from another one too."""
    factors = {"attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "key_multiplier": 0.390625}
    factors |= {"embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.0390625, "ssm_in_multiplier": 1.25}
    factors |= {"mlp_multipliers": [0.8838834764831844, 0.5859375], "ssm_out_multiplier": 0.23570226039551587}
    factors["ssm_multipliers"] = [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738]
    changes = {"mamba_d_ssm": 48, "mamba_d_head": 6, "mamba_n_heads": 8, "mamba_d_state": 128, "mamba_n_groups": 1}
    changes |= {"mamba_norm_before_gate": False, "mamba_rms_norm": False, "mamba_use_mlp": True, "rope_theta": 1e11}
    changes |= {"attn_layer_indices": None, "mlp_expansion_factor": 8, "time_step_floor": 0.0001, "time_step_max": 0.1}
    changes |= {"time_step_min": 0.001, "num_logits_to_keep": 1, "mamba_chunk_size": 128, "projectors_bias": False}
    config = read_config(write(tmp_path, "falcon_h1", **changes, **factors), strict=True)
    assert config.recurrence == Recurrence(STATE_SPACE, 1, 8, 128, 6, 4, filter_bias=True, norm_place=None)
    assert config.kv_layers == config.recurrent_layers == (0, 1)
    assert (config.embedding_scale, config.logit_scale) == (5.656854249492381, 0.0390625)
    m = config.multipliers
    of_mixer = [m.recurrent_gate, m.recurrent_value, m.recurrent_key, m.recurrent_query, m.decay]
    assert of_mixer == factors["ssm_multipliers"]
    assert (m.gate, m.down, m.attention_output, m.key) == (0.8838834764831844, 0.5859375, 0.9375, 0.390625)
    by_width = read_config(write(tmp_path, "falcon_h1", **changes | {"mamba_d_ssm": None, "mamba_d_head": 8}))
    assert by_width.recurrence.values == 64


def test_published_keys_of_nemotron_h(tmp_path):
    """As in nvidia/NVIDIA-Nemotron-Nano-9B-v2, and in NVIDIA-Nemotron-3-Nano-30B-A3B-BF16."""
    changes = {"chunk_size": 128, "conv_kernel": 4, "expand": 2, "mamba_head_dim": 80, "mamba_num_heads": 16}
    changes |= {"num_logits_to_keep": 1, "rescale_prenorm_residual": True, "residual_in_fp32": False, "n_groups": 8}
    changes |= {"sliding_window": None, "time_step_floor": 1e-4, "time_step_limit": [0.0, math.inf], "use_bias": False}
    changes |= {"time_step_max": 0.1, "time_step_min": 1e-3, "time_step_rank": 256, "rms_norm_eps": 1e-5}
    dense = read_config(write(tmp_path, "nemotron_h", **changes, hybrid_override_pattern="M-M*-"), strict=True)
    assert (dense.num_layers, dense.mlp_layers, dense.attention_layers) == (5, (1, 4), (3,))
    assert (dense.recurrent_layers, dense.num_experts, dense.dense_size) == ((0, 2), 0, 48)
    assert dense.recurrence == Recurrence(STATE_SPACE, 8, 16, 128, 80, 4, filter_bias=True)
    assert set(dense.rotary_by_layer) == {None}
    changes |= {"n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "topk_group": 1}
    changes |= {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "num_experts_per_tok": 6}
    changes |= {"use_mamba_kernels": True, "layer_norm_epsilon": 1e-5}
    changes |= {"routed_scaling_factor": 2.5, "rope_theta": 10000, "partial_rotary_factor": 1.0}
    changes |= {"mamba_ssm_cache_dtype": "float32", "layers_block_type": ["mamba", "moe", "attention", "moe"]}
    config = read_config(write(tmp_path, "nemotron_h", **changes), strict=True)
    assert (config.num_experts, config.expert_size, config.intermediate_size) == (128, 1856, 3712)
    assert (config.mlp_layers, config.dense_layers, config.dense_size) == ((1, 3), (), 0)


@pytest.mark.filterwarnings("default:.*tensors that predict further tokens")
def test_files_of_nemotron_h_with_layers_that_predict_further_tokens(tmp_path):
    _, params = checkpoint("NemotronH", NEMOTRON, tmp_path)
    change_tensors(tmp_path, {"mtp.layers.0.norm.weight": np.zeros(32)})
    with pytest.warns(UserWarning, match=r"ignored 1 tensors that predict further tokens: mtp\.layers"):
        assert load_hf(tmp_path, "float32").config == params.config


def test_published_keys_of_kimi_linear_and_ling_3(tmp_path):
    """As in moonshotai/Kimi-Linear-48B-A3B-Instruct and inclusionAI/Ling-3.0-tiny, whose bound is an integer."""
    shape = {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    shape |= {"q_lora_rank": None, "kv_lora_rank": 32, "first_k_dense_replace": 1, "moe_intermediate_size": 24}
    shape |= {"num_shared_experts": 1, "rope_scaling": None, "topk_group": 1}
    kimi = {"head_dim": 72, "mla_use_nope": True, "model_max_length": 4096, "moe_layer_freq": 1, "num_experts": 8}
    kimi |= {"moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1}
    kimi |= {"num_experts_per_token": 2, "num_nextn_predict_layers": 0, "use_grouped_topk": True, "rope_theta": 1e4}
    kimi["linear_attn_config"] = {"full_attn_layers": [2], "kda_layers": [1], "head_dim": 16, "num_heads": 2}
    config = read_config(write(tmp_path, "kimi_linear", **shape, **kimi), strict=True)
    assert (config.experts_per_token, config.max_positions, config.recurrent_layers) == (2, 4096, (0,))
    assert config.recurrence == Recurrence(CHANNEL_DELTA, 2, 2, 16, 16, 4, gate_rank=16)
    assert config.layer_rotary == (None, None)
    ling = {"architectures": ["BailingMoeV3ForCausalLM"], "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
    ling |= {"layer_group_size": 2, "no_kda_lora": True, "kda_safe_gate": True, "kda_lower_bound": -5, "n_group": 1}
    ling |= {"rotary_dim": 8, "rope_interleave": True, "gated_attention_proj_granularity_type": "head_wise"}
    ling |= {"scoring_func": "sigmoid", "moe_router_enable_expert_bias": True, "router_dtype": "fp32"}
    config = read_config(write(tmp_path, "bailing_hybrid", **shape, **ling), strict=True)
    assert config.recurrence == Recurrence(CHANNEL_DELTA, 4, 4, 16, 16, 4, least_decay=-5.0)
    assert (config.recurrent_layers, config.rope_theta, config.head_gates) == ((0,), 6e6, True)


def test_published_keys_of_lfm2(tmp_path):
    """As in LiquidAI/LFM2-1.2B: two sizes have names that transformers takes in the place of its own."""
    changes = {"block_ff_dim": 96, "tie_embedding": False, "block_multiple_of": 8, "block_dim": 32, "conv_dim": 32}
    changes |= {"full_attn_idxs": [1], "num_heads": 4, "use_pos_enc": True, "block_use_swiglu": True}
    config = read_config(write(tmp_path, "lfm2", **changes), strict=True)
    theirs = pytest.importorskip("transformers").Lfm2Config(**SIZES, **changes)
    assert theirs.intermediate_size == 96
    assert not theirs.tie_word_embeddings
    assert (config.intermediate_size, config.tie_embeddings, config.recurrent_layers) == (64, False, (0,))
