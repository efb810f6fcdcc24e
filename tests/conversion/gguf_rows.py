"""Tiny checkpoints of every architecture of llama.cpp that jlade reads, and the GGUF files that its converter writes.

`python -m tests.conversion.gguf_golden` makes the files, which are in an archive beside the golden texts.
"""

import pathlib
import zipfile
import zlib

import numpy as np

from tests.families import ROWS, SLIDING, model_of, rope

ARCHIVE = pathlib.Path(__file__).parents[1] / "golden" / "gguf.zip"
THREE_OF_FOUR = {"num_hidden_layers": 4, "layer_types": [*SLIDING[:1] * 3, SLIDING[1]], "sliding_window": 7}
LONG = {"max_position_embeddings": 2**20}  # of recurrent models without rotations
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
# What published checkpoints have in config.json, and those that transformers 5 saves have under other names or not.
FALCON_40B = {"num_kv_heads": 2, "n_head_kv": 2}
NEMOTRON = {"d_head": 6, "mamba_d_head": 6}
DENSE_NEMOTRON = NEMOTRON | {"hybrid_override_pattern": "M-*-", "layers_block_type": None, "num_experts_per_tok": None}
DENSE_NEMOTRON |= {"n_routed_experts": None, "num_hidden_layers": 4}
SIGMOID = {"scoring_func": "sigmoid"}
# The row of `tests.families.ROWS`, the changes in it, and keys of config.json besides, None for those to leave out.
# The changes leave out what the converter stores in no file: windows of Mistral and others, factors of attention, ...
MODELS = {
    "llama": ("llama, biases", {}, {}),
    "llama, tied": ("llama, tied", {}, {}),
    "llama, llama3": ("llama, llama3", {}, {}),
    "llama, yarn": ("llama, yarn", {}, {}),
    "llama, experts": ("mixtral", {"sliding_window": None}, {}),
    "mistral3": (
        "ministral3",
        {"sliding_window": None}
        | rope("yarn", **YARN, llama_4_scaling_beta=0.7, mscale=1.0, mscale_all_dim=1.0, rope_theta=500.0),
        {},
    ),
    "mistral3, no scaling of queries": ("llama, tied", {}, {"architectures": ["Mistral3ForConditionalGeneration"]}),
    "mistral4": (
        "mistral4",
        rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.6),
        {"architectures": ["Mistral3ForConditionalGeneration"]},
    ),
    "qwen2": ("qwen2", {}, {}),
    "qwen2moe": ("qwen2_moe", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen3moe": ("qwen3_moe", {}, {}),
    "qwen3next": ("qwen3_next", {}, {}),
    "qwen35": ("qwen3_5_text", {}, {}),
    "qwen35moe": ("qwen3_5_moe_text", {}, {}),
    "gemma": ("gemma", {}, {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 12}, {}),
    "gemma3": (
        "gemma3_text",
        {"query_pre_attn_scalar": 12, "num_hidden_layers": 6, "layer_types": [*SLIDING[:1] * 5, SLIDING[1]]},
        {},
    ),
    "gemma4": ("gemma4_text", {"global_head_dim": 24}, {}),
    "gemma4, experts": ("gemma4_text, experts", {"global_head_dim": 24}, {}),
    "gemma4, embeddings of layers": ("gemma4_text, embeddings of layers", {"global_head_dim": 24}, {}),
    "gemma4, unified": (
        "gemma4_unified_text",
        {"global_head_dim": 24},
        {"architectures": ["Gemma4ForCausalLM"], "moe_intermediate_size": 24},
    ),
    "phi2": ("phi", {"num_key_value_heads": 4, "intermediate_size": 128}, {}),
    "phi3": ("phi3", {}, {}),
    "phi3, longrope": ("phi3, longrope", {}, {}),
    "phimoe": ("phimoe", rope("default"), {"architectures": ["PhiMoEForCausalLM"]}),
    "gptneox": ("gpt_neox", {}, {"rotary_pct": 0.25}),
    "gptneox, sequential": (
        "gpt_neox, sequential",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {"rotary_pct": 0.5},
    ),
    "falcon": ("falcon", {"max_position_embeddings": 2048}, {"num_kv_heads": 1, "n_head_kv": 1}),
    "falcon, 40B": ("falcon, 40B", {"max_position_embeddings": 2048, "bias": False}, FALCON_40B),
    "falcon, 11B": (
        "falcon, 11B",
        {"max_position_embeddings": 2048, "ffn_hidden_size": 128, "rope_parameters": {"rope_type": "default"}},
        FALCON_40B,
    ),
    "olmo2": ("olmo2", {}, {}),
    "olmo2, windows": ("olmo3", {}, {}),
    "olmoe": ("olmoe", {"rms_norm_eps": 1e-5}, {}),
    "granite": ("granite", {}, {}),
    "granitemoe": ("granitemoe", {}, {}),
    "granitehybrid": (
        "granitemoehybrid, experts",
        {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]} | LONG,
        {"layer_types": ["mamba", "attention", "mamba"]},
    ),
    "granitehybrid, no experts": (
        "granitemoehybrid, recurrent",
        {"layer_types": ["mamba", "attention"], "position_embedding_type": None} | LONG,
        {"layer_types": ["mamba", "attention"]},
    ),
    "smollm3": (
        "smollm3",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "sliding_window": None, "layer_types": None}
        | {"use_sliding_window": False},
        {},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None}, {}),
    "stablelm": ("stablelm", {}, {}),
    "stablelm, parallel": ("stablelm, parallel", {}, {}),
    "chatglm": ("glm", {"head_dim": 8, "rms_norm_eps": 1e-5}, {"seq_length": 384}),
    "glm4": ("glm4", {}, {}),
    "glm4moe": ("glm4_moe", {}, {}),
    "glm4moe, Solar": (
        "solar_open",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
        {"first_k_dense_replace": 0},
    ),
    "command-r": ("cohere", {}, {}),
    "command-r, norms of queries": ("cohere, norms of queries and keys", {}, {}),
    "cohere2": ("cohere2", THREE_OF_FOUR, {"rotary_pct": 1.0}),
    "ernie4_5": ("ernie4_5", {}, {}),
    "ernie4_5, biases": ("ernie4_5, biases", {}, {}),
    "ernie4_5-moe": ("ernie4_5_moe", {"moe_norm_min": 1e-12}, {}),
    "exaone4": ("exaone4", {}, {}),
    "exaone-moe": (
        "exaone_moe",
        THREE_OF_FOUR | {"mlp_layer_types": ["dense", *["sparse"] * 3]},
        SIGMOID,
    ),
    "hunyuan-dense": ("hunyuan_v1_dense", rope("default"), {}),
    "seed_oss": ("seed_oss", {}, {}),
    "dots1": ("dots1", {"sliding_window": None, "layer_types": None, "first_k_dense_replace": 1}, SIGMOID),
    "afmoe": ("afmoe", THREE_OF_FOUR, {"route_norm": True, "score_func": "sigmoid"}),
    "minimax-m2": ("minimax_m2", {}, {"rotary_dim": 6, "scoring_func": "sigmoid"}),
    "deepseek2": ("deepseek_v2", {}, {}),
    "deepseek2, Lite": ("deepseek_v2, Lite", {}, {}),
    "deepseek2, V3": (
        "deepseek_v3",
        rope("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0, beta_fast=4.0),
        SIGMOID,
    ),
    "deepseek2, GLM": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": 1},
        SIGMOID,
    ),
    "gpt-oss": ("gpt_oss", {}, {}),
    "llama4": (
        "llama4_text",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 8192, "floor_scale": 8192}
        | {"attn_scale": 0.1, "intermediate_size_mlp": 40},
        {},
    ),
    "llama4, dense layers": (
        "llama4_text, Maverick",
        {"num_local_experts": 128, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}
        | {"attention_chunk_size": 8192, "intermediate_size": 8, "hidden_size": 16, "intermediate_size_mlp": 24},
        {},
    ),
    "falcon-h1": ("falcon_h1", {}, {"head_dim": 8}),
    "falcon-h1, norms": ("falcon_h1, norms after gates", {"tie_word_embeddings": False}, {"head_dim": 8}),
    "lfm2": ("lfm2", {}, {}),
    "lfm2moe": ("lfm2_moe", {"routed_scaling_factor": 1.0}, {}),
    "nemotron_h": ("nemotron_h", LONG | {"norm_topk_prob": False}, DENSE_NEMOTRON),
    "nemotron_h, experts": (
        "nemotron_h, experts",
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]} | LONG,
        NEMOTRON,
    ),
    "nemotron_h, latent": ("nemotron_h, experts of a latent", {"tie_word_embeddings": False} | LONG, NEMOTRON),
    "hy_v3": ("hy_v3", {"mlp_layer_types": ["dense", "sparse", "sparse"]}, {"first_k_dense_replace": 1}),
    "qwen3, joined": ("qwen3, biases, yarn", rope("default"), {}),
}
# Arguments of the converter that join tensors
JOINED = {"qwen3, joined": {"fuse_qkv": True}}


def save_checkpoint(name, directory):
    """Saves the checkpoint of a row, with elements of two values in an order by the names of its tensors."""
    import torch

    row, changes, _ = MODELS[name]
    family, base = ROWS[row]
    model = model_of(family, base | changes)
    with torch.no_grad():
        for tensor, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in tensor and parameter.is_floating_point():
                numbers = np.random.default_rng(zlib.crc32(tensor.encode())).integers(0, 2, parameter.shape)
                parameter.copy_(torch.from_numpy(np.asarray(numbers * 0.375 - 0.125)))
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(directory)


def extract(name, directory):
    """Returns the path of the GGUF file of a row."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        return pathlib.Path(archive.extract(f"{name}.gguf", directory))
