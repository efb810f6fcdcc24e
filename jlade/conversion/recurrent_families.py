"""The families with recurrent layers: what is in their config.json and in their files."""

from jlade.conversion.expert_families import EXPERTS, JOINED_EXPERTS, QWEN_EXPERTS, QWEN_SHARED_EXPERT
from jlade.conversion.family import Family

_QWEN = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_FIXED = {"qk_norm": True, "norm": "rms_plus_one", "output_gate": True}
_ONLY = {"attention_bias": (False,), "attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)}
_HEADS = {"self_attn.q_proj.weight": lambda config: config.num_heads}
_FUSED: dict[str, tuple[str, ...]] = {
    "self_attn.q_proj.weight": ("query", "output_gate"),
    "linear_attn.conv1d.weight": ("query_filter", "key_filter", "value_filter"),
}
_FUSED_INPUTS: dict[str, tuple[str, ...]] = {
    "linear_attn.in_proj_qkv.weight": ("recurrent_query", "recurrent_key", "recurrent_value"),
}
_PREDICTORS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # of layers that predict further tokens
_MIXTURE_KEYS = QWEN_EXPERTS | {"intermediate_size": "shared_expert_intermediate_size"}
_MIXTURE = {"num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}

RECURRENT: dict[str, Family] = {
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        _QWEN
        | _MIXTURE
        | {
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        keys=_MIXTURE_KEYS,
        fixed=_FIXED | {"shared_router": True},
        only=_ONLY,
        tensors=QWEN_SHARED_EXPERT,
        fused=_FUSED
        | {
            "linear_attn.in_proj_qkvz.weight": (
                "recurrent_query",
                "recurrent_key",
                "recurrent_value",
                "recurrent_gate",
            ),
            "linear_attn.in_proj_ba.weight": ("beta", "decay"),
        },
        row_groups=_HEADS
        | dict.fromkeys(
            ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
            lambda config: config.delta_rule.key_heads,
        ),
        experts=EXPERTS,
        joined_experts=JOINED_EXPERTS,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        _QWEN | {"num_key_value_heads": 4},
        fixed=_FIXED,
        only=_ONLY,
        rotary="sections",
        fused=_FUSED | _FUSED_INPUTS,
        row_groups=_HEADS,
        without_effect=_PREDICTORS,
        of_parts={"qwen3_5": "Qwen3_5ForConditionalGeneration"},
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeForCausalLM",
        _QWEN | _MIXTURE | {"num_experts": 256, "num_experts_per_tok": 8},
        keys={field: key for field, key in _MIXTURE_KEYS.items() if field != "normalized_experts"},
        fixed=_FIXED | {"shared_router": True},
        only=_ONLY,
        rotary="sections",
        tensors=QWEN_SHARED_EXPERT,
        fused=_FUSED | _FUSED_INPUTS,
        row_groups=_HEADS,
        experts=EXPERTS,
        joined_experts=JOINED_EXPERTS,
        without_effect=_PREDICTORS,
        of_parts={"qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration"},
    ),
}
