"""The families of transformers that jlade runs: what is in their config.json and in their files.

A family is one entry of `FAMILIES`: the keys that it reads, and what distinguishes its models from LLaMA. The text of
docs/models.md, "Adding a family", shows one.
"""

from typing import Any

from jlade.conversion.family import Family, WithText

TANH = "gelu_pytorch_tanh"
_LISTED = {"sliding_window": 4096, "layer_types": None}  # layers with and without windows
_QWEN = _LISTED | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
_GEMMA = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True, "attention_bias": False}
_GEMMA_2 = _GEMMA | _LISTED | {"num_key_value_heads": 4, "query_pre_attn_scalar": 256}
_GEMMA_3 = {
    "vocab_size": 262208,  # the text part of a gemma3 checkpoint leaves out even sizes
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": None,
    "sliding_window_pattern": 6,
}
_ATTENTION_BIAS = {"qkv_bias": "attention_bias", "attention_output_bias": "attention_bias"}
_BIASES = _ATTENTION_BIAS | {"mlp_bias": "mlp_bias"}
_CAPS = {"attention_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}
_QUERY_SCALE = {"attention_scale": "query_pre_attn_scalar"}
_POST_NORMS = {"pre_norms": False, "post_norms": True}
_FUSED_MLP: dict[str, tuple[str, ...]] = {"mlp.gate_up_proj.weight": ("gate", "up")}
_FUSED_ATTENTION: dict[str, tuple[str, ...]] = {"self_attn.qkv_proj.weight": ("query", "key", "value")}
_NORM_BEFORE_MLP = {"mlp_norm": "pre_feedforward_layernorm.weight"}
_ACTIVATION = {"activation": "gelu_tanh"}
_IS_GEMMA = _ACTIVATION | {"norm": "rms_plus_one", "embedding_scale": lambda values: values.size("hidden_size") ** 0.5}
_IS_GELU = {"hidden_act": (TANH, "gelu"), "hidden_activation": (TANH,)}  # Gemma's "gelu" is TANH, says transformers

_EXPERTS = {
    "mlp.experts.{}.gate_proj.weight": ("expert_gate",),
    "mlp.experts.{}.up_proj.weight": ("expert_up",),
    "mlp.experts.{}.down_proj.weight": ("expert_down",),
}
_JOINED_EXPERTS = {
    "block_sparse_moe.input_linear.weight": ("expert_gate", "expert_up"),
    "block_sparse_moe.output_linear.weight": ("expert_down",),
}
_NUMBERED_EXPERTS: dict[str, tuple[str, ...]] = {
    "block_sparse_moe.experts.{}.w1.weight": ("expert_gate",),
    "block_sparse_moe.experts.{}.w3.weight": ("expert_up",),
    "block_sparse_moe.experts.{}.w2.weight": ("expert_down",),
}
_EXPERTS_ALONE = {"intermediate_size": 0}
_ALL_SPARSE: dict[str, tuple[Any, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
_LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_LOCAL_KEYS = {
    "expert_size": "intermediate_size",
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}
_QWEN_EXPERTS = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "normalized_experts": "norm_topk_prob",
}
_GRANITE = {
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GRANITE_KEYS = _ATTENTION_BIAS | {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}

WITH_TEXT = {
    "gemma3": WithText("Gemma3ForConditionalGeneration", "gemma3_text"),
    "llama4": WithText("Llama4ForConditionalGeneration", "llama4_text"),
    "mistral3": WithText("Mistral3ForConditionalGeneration", "mistral"),
}
FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        {"attention_bias": False, "mlp_bias": False, "max_sequence_length": None},
        keys=_BIASES,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN, fixed={"qkv_bias": True}),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _QWEN | {"head_dim": 128, "attention_bias": False},
        keys=_ATTENTION_BIAS,
        fixed={"qk_norm": True},
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        _GEMMA | {"num_key_value_heads": 16},
        keys=_ATTENTION_BIAS,
        fixed=_IS_GEMMA,
        only=_IS_GELU,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA_2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2},
        keys=_ATTENTION_BIAS | _CAPS | _QUERY_SCALE,
        fixed=_IS_GEMMA | {"post_norms": True},
        only=_IS_GELU,
        tensors=_NORM_BEFORE_MLP,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA_2 | _GEMMA_3,
        keys=_ATTENTION_BIAS | {"logit_cap": "final_logit_softcapping"} | _QUERY_SCALE,
        fixed=_IS_GEMMA | {"post_norms": True, "qk_norm": True},
        only=_IS_GELU | {"attn_logit_softcapping": (None,)},
        rotary="type",
        tensors=_NORM_BEFORE_MLP,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "sliding_window": None,
            "partial_rotary_factor": 1.0,
        },
        fused=_FUSED_ATTENTION | _FUSED_MLP,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"rms_norm_eps": 1e-5, "attention_bias": False},
        keys=_ATTENTION_BIAS,
        fixed=_POST_NORMS | {"qk_norm": True, "qk_norm_kind": "whole"},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        _LISTED
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_local_base_freq": None,
            "attention_bias": False,
            "sliding_window_pattern": 4,
        },
        keys=_ATTENTION_BIAS,
        fixed=_POST_NORMS | {"qk_norm": True, "qk_norm_kind": "whole"},
        rotary="type",
    ),
    "granite": Family(
        "GraniteForCausalLM",
        _GRANITE | {"mlp_bias": False},
        keys=_GRANITE_KEYS | _BIASES,
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        _GRANITE | _LOCAL_EXPERTS,
        keys=_GRANITE_KEYS | _LOCAL_KEYS,
        fixed=_EXPERTS_ALONE,
        tensors={"router": "block_sparse_moe.router.layer.weight"},
        experts=_JOINED_EXPERTS,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _LOCAL_EXPERTS
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
            "sliding_window": None,
        },
        keys=_LOCAL_KEYS,
        fixed=_EXPERTS_ALONE,
        tensors={"router": "block_sparse_moe.gate.weight"},
        experts=_NUMBERED_EXPERTS,
    ),
    "phimoe": Family(
        "PhimoeForCausalLM",
        _LOCAL_EXPERTS
        | {
            "num_local_experts": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": None,
            "sliding_window": None,
            "attention_bias": False,
            "lm_head_bias": False,
        },
        keys=_LOCAL_KEYS | _ATTENTION_BIAS | {"output_bias": "lm_head_bias"},
        fixed=_EXPERTS_ALONE | {"norm": "layer", "norm_bias": True, "routing": "sparsemixer"},
        only={"num_experts_per_tok": (2,), "router_jitter_noise": (0.01,)},
        rotary="mscale",
        tensors={"router": "block_sparse_moe.gate.weight"},
        experts=_NUMBERED_EXPERTS,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        _QWEN
        | {
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
        },
        keys=_QWEN_EXPERTS | {"qkv_bias": "qkv_bias", "intermediate_size": "shared_expert_intermediate_size"},
        fixed={"shared_router": True},
        only=_ALL_SPARSE,
        tensors={field: f"mlp.shared_expert.{field}_proj.weight" for field in ("gate", "up", "down")},
        experts=_EXPERTS,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _QWEN
        | {
            "num_key_value_heads": 4,
            "attention_bias": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        keys=_QWEN_EXPERTS | _ATTENTION_BIAS,
        fixed=_EXPERTS_ALONE | {"qk_norm": True},
        only=_ALL_SPARSE,
        experts=_EXPERTS,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "attention_bias": False,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        keys=_QWEN_EXPERTS | _ATTENTION_BIAS | {"expert_size": "intermediate_size"},
        fixed=_EXPERTS_ALONE | {"qk_norm": True, "qk_norm_kind": "whole"},
        experts=_EXPERTS,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _LISTED
        | {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "max_position_embeddings": 131072,
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        keys=_LOCAL_KEYS | _ATTENTION_BIAS,
        fixed=_EXPERTS_ALONE | {"sinks": True, "router_bias": True, "mlp_bias": True, "activation": "clipped_silu"},
        only={"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
        tensors={"router": "mlp.router.weight"},
        experts={
            "mlp.experts.gate_up_proj": ("expert_gate", "expert_up"),
            "mlp.experts.gate_up_proj_bias": ("expert_gate_bias", "expert_up_bias"),
            "mlp.experts.down_proj": ("expert_down",),
            "mlp.experts.down_proj_bias": ("expert_down_bias",),
        },
        expert_layout="interleaved",
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM",
        _LOCAL_EXPERTS
        | {
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "attention_bias": False,
            "use_qk_norm": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "layer_types": None,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "moe_layers": None,
        },
        keys=_LOCAL_KEYS | _ATTENTION_BIAS | {"qk_norm": "use_qk_norm"},
        fixed={"qk_norm_kind": "weightless", "interleaved_rotary": True, "routing": "sigmoid"},
        only={"num_experts_per_tok": (1,), "interleave_moe_layer_step": (1,)},
        tensors={field: f"feed_forward.shared_expert.{field}_proj.weight" for field in ("gate", "up", "down")}
        | {"router": "feed_forward.router.weight"},
        experts={
            "feed_forward.experts.gate_up_proj": ("expert_gate", "expert_up"),
            "feed_forward.experts.down_proj": ("expert_down",),
        },
        expert_layout="columns",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _LISTED
        | {
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        keys=_BIASES,
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        {
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "max_position_embeddings": 4096,
            "sliding_window": None,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        keys={
            "rms_norm_eps": "norm_epsilon",
            "qkv_bias": "use_bias",
            "attention_output_bias": "use_bias",
            "mlp_bias": "use_bias",
        },
        fixed=_ACTIVATION | {"norm": "layer", "norm_bias": True, "gated_mlp": False},
        only={"hidden_act": (TANH,)},
        tensors={"up": "mlp.c_fc.weight", "down": "mlp.c_proj.weight"},
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        {
            "num_key_value_heads": 32,
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "use_parallel_residual": False,
        },
        keys={"rms_norm_eps": "layer_norm_eps", "qkv_bias": "use_qkv_bias", "parallel": "use_parallel_residual"},
        fixed={"norm": "layer", "norm_bias": True},
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-07,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
        },
        keys={"qkv_bias": "attention_bias"},
        fixed={"post_norms": True, "interleaved_rotary": True},
        tensors={
            "attention_post_norm": "post_self_attn_layernorm.weight",
            "mlp_post_norm": "post_mlp_layernorm.weight",
        },
        fused=_FUSED_MLP,
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        _LISTED
        | {
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "sliding_window_pattern": 4,
        },
        keys=_ATTENTION_BIAS | {"rms_norm_eps": "layer_norm_eps", "logit_scale": "logit_scale"},
        fixed={"norm": "layer", "parallel": True, "interleaved_rotary": True},
        rotary="windows",
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        _LISTED | {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window_pattern": 4},
        fixed=_POST_NORMS | {"qk_norm": True},
        rotary="windows",
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        {"rms_norm_eps": 1e-5, "attention_bias": False},
        keys=_ATTENTION_BIAS,
        fixed={"qk_norm": True, "qk_norm_kind": "rotated"},
        only={"use_qk_norm": (True,)},
        rotary="alpha",
        tensors={"query_norm": "self_attn.query_layernorm.weight", "key_norm": "self_attn.key_layernorm.weight"},
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
        },
        keys={"qkv_bias": "attention_bias", "attention_output_bias": "attention_out_bias", "mlp_bias": "mlp_bias"},
    ),
    "ministral": Family(
        "MinistralForCausalLM", _LISTED | {"num_key_value_heads": 8, "max_position_embeddings": 131072}
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            "max_position_embeddings": 262144,
            "sliding_window": None,
        },
        rotary="beta",
    ),
}


def family_of(model_type: str) -> Family:
    """Returns the family of a `model_type`.

    Raises:
      ValueError: there is none; the message names those that there are.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"model_type is {model_type!r}; supported are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]
