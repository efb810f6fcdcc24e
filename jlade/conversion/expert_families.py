"""The families of mixtures of experts: what is in their config.json and in their files."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jlade.conversion.dense_families import (
    ATTENTION_BIAS,
    COHERE,
    COHERE_KEYS,
    GRANITE,
    GRANITE_KEYS,
    GRANITE_WINDOWS,
    HUNYUAN_NORMS,
    IS_COHERE,
    LISTED,
    MINISTRAL_YARN,
    POST_NORMS,
    QWEN,
)
from jlade.conversion.family import JOINED_EXPERTS, Family, by_layer
from jlade.conversion.hf_attention import QUERY_HEADS, VALUE_SCALE, read_query_heads, read_value_size
from jlade.conversion.hf_mixtures import (
    AVERAGE,
    COMBINED,
    DENSE,
    DENSE_PERIOD,
    DENSE_SIZE,
    ROUTING,
    ROUTINGS,
    SPARSE,
    averages,
    cohere_layers,
    write_cohere,
)
from jlade.conversion.hf_rotary import FULL, SLIDING
from jlade.conversion.json_files import Values
from jlade.models.architecture import Multipliers

MLP = ("gate", "up", "down")
GRANITE_EXPERTS = {
    "block_sparse_moe.input_linear.weight": ("mixture.gate", "mixture.up"),
    "block_sparse_moe.output_linear.weight": ("mixture.down",),
}
GRANITE_JOINED_EXPERTS: dict[str, tuple[str, ...]] = {
    "block_sparse_moe.experts.gate_up_proj": ("mixture.gate", "mixture.up"),
    "block_sparse_moe.experts.down_proj": ("mixture.down",),
}
GRANITE_ROUTER = "block_sparse_moe.router.layer.weight"
NUMBERED_EXPERTS: dict[str, tuple[str, ...]] = {
    "block_sparse_moe.experts.{}.w1.weight": ("mixture.gate",),
    "block_sparse_moe.experts.{}.w3.weight": ("mixture.up",),
    "block_sparse_moe.experts.{}.w2.weight": ("mixture.down",),
}
_EXPERTS_ALONE = {"intermediate_size": 0}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
LOCAL_KEYS = {
    "expert_size": "intermediate_size",
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}
QWEN_EXPERTS = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "normalized_experts": "norm_topk_prob",
}
EXPERT_COUNTS = {field: key for field, key in QWEN_EXPERTS.items() if field != "normalized_experts"}
QWEN_SHARED_EXPERT = {f"mlp.{name}": f"mlp.shared_expert.{name}_proj.weight" for name in MLP}

# DeepSeek V3's mixture; see `hf_mixtures`.
_GROUPS = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
_DEEPSEEK = _GROUPS | {"n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1}
_DEEPSEEK_KEYS = QWEN_EXPERTS | {"num_experts": "n_routed_experts", "expert_scale": "routed_scaling_factor"}
_SIGMOIDS = {"routing": "sigmoids", "selection_bias": True}
DEEPSEEK_FIXED = _EXPERTS_ALONE | _SIGMOIDS
_SHARED_EXPERTS = {f"mlp.{name}": f"mlp.shared_experts.{name}_proj.weight" for name in MLP}

# Multi-head latent attention; see `hf_latent`. Published files have more keys than transformers reads.
LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
LATENT_FUSED: dict[str, tuple[str, ...]] = {"self_attn.kv_b_proj.weight": ("attention.key_up", "attention.value_up")}
LATENT_GROUPS = {"self_attn.kv_b_proj.weight": lambda config: config.num_heads}
LATENT_ONLY = {"attention_bias": (False,), "moe_layer_freq": (1,)}
LATENT_WITHOUT_EFFECT = ("aux_loss_alpha", "ep_size", "qk_head_dim", "seq_aux")

_DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    LATENT
    | _DEEPSEEK
    | {
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
    },
    keys=_DEEPSEEK_KEYS | {"interleaved_rotary": "rope_interleave"},
    fixed=DEEPSEEK_FIXED,
    only=LATENT_ONLY | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    tensors=_SHARED_EXPERTS,
    fused=LATENT_FUSED,
    row_groups=LATENT_GROUPS,
)
# With an index of the tokens that are seen; see `hf_attention.read_latent`.
_DEEPSEEK_V32 = dataclasses.replace(
    _DEEPSEEK_V3,
    architecture="DeepseekV32ForCausalLM",
    defaults=dict(_DEEPSEEK_V3.defaults)
    | {"max_position_embeddings": 163840, "mlp_layer_types": None}
    | {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
    only=dict(_DEEPSEEK_V3.only) | {"rope_interleave": (True,), "mlp_bias": (False,)},
    elsewhere={"index_topk": None},
)

_GRANITE_MOE = Family(
    "GraniteMoeForCausalLM",
    GRANITE | LOCAL_EXPERTS,
    keys=GRANITE_KEYS | LOCAL_KEYS,
    fixed=_EXPERTS_ALONE,
    tensors={"mixture.router": GRANITE_ROUTER},
    experts=GRANITE_EXPERTS,
    joined_experts=GRANITE_JOINED_EXPERTS,
    renamed={"block_sparse_moe.router.weight": GRANITE_ROUTER},
)

_GRANITE_MOE_SHARED = dataclasses.replace(
    _GRANITE_MOE,
    architecture="GraniteMoeSharedForCausalLM",
    defaults=dict(_GRANITE_MOE.defaults) | {"shared_intermediate_size": 0},
    fixed={"intermediate_size": lambda values: values.count("shared_intermediate_size")},
    written=lambda config: {"shared_intermediate_size": config.intermediate_size},
    tensors=dict(_GRANITE_MOE.tensors) | {"mlp.down": "shared_mlp.output_linear.weight"},
    fused={"shared_mlp.input_linear.weight": ("mlp.gate", "mlp.up")},
)


def _of_all_layers(key: str) -> Callable[[Values], Any]:
    """Returns the function that reads a value, or the one that a list has for each layer."""

    def read(values: Values) -> Any:
        value = values.get(key)
        is_one = (
            isinstance(value, list)
            and len(value) == values.get("num_hidden_layers")
            and value == value[:1] * len(value)
        )
        return value[0] if is_one else value

    return read


def _mimo_window(values: Values) -> int:
    """Returns the window of MiMo V2: one more than the key of published files has."""
    size = values.get("sliding_window_size")
    return values.size("sliding_window") if size is None else values.size("sliding_window_size") + 1


def _first_dense(layer: int) -> str:
    """Returns the type of an MLP: experts, but in the first layer."""
    return SPARSE if layer else DENSE


MIXTURES: dict[str, Family] = {
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE_SHARED,
    "granitemoe_swa": dataclasses.replace(
        _GRANITE_MOE_SHARED,
        architecture="GraniteMoeSWAForCausalLM",
        defaults=dict(_GRANITE_MOE_SHARED.defaults) | GRANITE_WINDOWS,
        fixed=dict(_GRANITE_MOE_SHARED.fixed) | {"sinks": True},
        tensors=dict(_GRANITE_MOE_SHARED.tensors) | {"mixture.router": "block_sparse_moe.router.weight"},
        experts=GRANITE_JOINED_EXPERTS,
        joined_experts={},
        renamed={},
        ignored=("sliding_window_pattern",),
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1ForCausalLM",
        {"rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1},
        keys=ATTENTION_BIAS
        | {"num_experts": "num_experts", "experts_per_token": "moe_topk", "expert_size": "intermediate_size"},
        fixed={"qk_norm": True, "qk_norm_kind": "rotated"},
        derived={"moe_topk": _of_all_layers("moe_topk")},
        only={"use_qk_norm": (True,)},
        rotary="alpha",
        tensors=HUNYUAN_NORMS
        | {f"mlp.{name}": f"mlp.shared_mlp.{name}_proj.weight" for name in MLP}
        | {"mixture.router": "mlp.gate.wg.weight"},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        LOCAL_EXPERTS
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
            "sliding_window": None,
        },
        keys=LOCAL_KEYS,
        fixed=_EXPERTS_ALONE,
        tensors={"mixture.router": "block_sparse_moe.gate.weight"},
        experts=NUMBERED_EXPERTS,
        renamed={"mlp.gate.weight": "block_sparse_moe.gate.weight"},
        elsewhere=dict.fromkeys(LOCAL_EXPERTS),
        without_effect=("router_jitter_noise",),
    ),
    "phimoe": Family(
        "PhimoeForCausalLM",
        LOCAL_EXPERTS
        | {
            "num_local_experts": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
            "sliding_window": None,
            "lm_head_bias": False,
        },
        keys=LOCAL_KEYS | ATTENTION_BIAS | {"output_bias": "lm_head_bias"},
        fixed=_EXPERTS_ALONE | {"norm": "layer", "norm_bias": True, "routing": "sparsemixer"},
        only={"num_experts_per_tok": (2,), "router_jitter_noise": (0.01,)},
        rotary="mscale",
        tensors={"mixture.router": "block_sparse_moe.gate.weight"},
        experts=NUMBERED_EXPERTS,
        renamed={"mlp.router.weight": "block_sparse_moe.gate.weight"},
        elsewhere={"lm_head_bias": False},
        without_effect=("input_jitter_noise",),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        QWEN
        | {
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        keys=QWEN_EXPERTS | {"qkv_bias": "qkv_bias", "intermediate_size": "shared_expert_intermediate_size"},
        fixed={"shared_router": True},
        tensors=QWEN_SHARED_EXPERT,
        elsewhere={"num_experts": None},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,  # of all layers: there are no layer_types, and the next key does nothing
            "max_window_layers": None,
            "use_sliding_window": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        keys=QWEN_EXPERTS | ATTENTION_BIAS,
        fixed=_EXPERTS_ALONE | {"qk_norm": True},
        only={"use_qk_norm": (True,)},
        expert_layout="either",
        of_parts={"qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration"},
        part_defaults={
            "num_key_value_heads": 16,
            "rope_theta": 500000.0,
            "max_position_embeddings": 128000,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
        },
        part_only={"norm_topk_prob": True, "sliding_window": None},
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        keys=QWEN_EXPERTS | ATTENTION_BIAS | {"expert_size": "intermediate_size"},
        fixed=_EXPERTS_ALONE | {"qk_norm": True, "qk_norm_kind": "whole"},
    ),
    "flex_olmo": Family(
        "FlexOlmoForCausalLM",
        {
            "rope_theta": 500000.0,
            "max_position_embeddings": 4096,
            "num_experts": 7,
            "num_experts_per_tok": 5,
            "norm_topk_prob": False,
        },
        keys=QWEN_EXPERTS | ATTENTION_BIAS | {"expert_size": "intermediate_size"},
        fixed=_EXPERTS_ALONE | POST_NORMS | {"qk_norm": True, "qk_norm_kind": "whole"},
    ),
    "mellum": Family(
        "MellumForCausalLM",
        LISTED
        | {
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "sliding_window": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
            "norm_topk_prob": True,
            "mlp_layer_types": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
        keys=QWEN_EXPERTS | ATTENTION_BIAS,
        fixed=_EXPERTS_ALONE | {"qk_norm": True},
        only={"rope_scaling": (None,)},
        rotary="type",
        without_effect=("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
    ),
    "cohere2_moe": Family(
        "Cohere2MoeForCausalLM",
        LISTED
        | COHERE
        | {
            "head_dim": 128,
            "rms_norm_eps": None,  # of norms in the place of layer norms
            "sliding_window_pattern": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 0,
            "norm_topk_prob": True,
            "first_k_dense_replace": 0,
            "mlp_layer_types": None,
            "moe_intermediate_size": None,  # follows from intermediate_size
            ROUTING: "softmax",
            COMBINED: AVERAGE,
            DENSE_SIZE: None,
            DENSE_PERIOD: 1,
        },
        keys=EXPERT_COUNTS | COHERE_KEYS,
        fixed=IS_COHERE
        | {
            "norm": lambda values: "layer" if values.get("rms_norm_eps") is None else "rms",
            "norm_eps": lambda values: values.number("rms_norm_eps", values.number("layer_norm_eps")),
            "routing": lambda values: ROUTINGS[values.get(ROUTING)],
            "normalized_experts": lambda values: values.get(ROUTING) == "softmax" or values.boolean("norm_topk_prob"),
            "averages_mixture": averages,
        },
        derived={
            "moe_intermediate_size": lambda values: values.size("intermediate_size"),
            "intermediate_size": lambda values: values.size(DENSE_SIZE, values.get("intermediate_size")),
            "layer_types": cohere_layers,
        },
        written=write_cohere,
        only={ROUTING: tuple(ROUTINGS), COMBINED: (AVERAGE, "sum")},
        rotary="windows",
        tensors=_SHARED_EXPERTS,
        ignored=("moe_intermediate_size",),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        _DEEPSEEK
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
        },
        keys=_DEEPSEEK_KEYS | {"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
        fixed=DEEPSEEK_FIXED,
        tensors=_SHARED_EXPERTS,
        without_effect=("num_nextn_predict_layers", "num_mtp_layers"),  # of layers that predict further tokens
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        _DEEPSEEK
        | LISTED
        | {
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "max_window_layers": 62,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
        keys=_DEEPSEEK_KEYS | ATTENTION_BIAS,
        fixed=DEEPSEEK_FIXED | {"qk_norm": True},
        tensors=_SHARED_EXPERTS,
    ),
    "solar_open": Family(
        "SolarOpenForCausalLM",
        _DEEPSEEK
        | {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1280,
        },
        keys=_DEEPSEEK_KEYS | {"qkv_bias": "attention_bias"},
        fixed=DEEPSEEK_FIXED,
        tensors=_SHARED_EXPERTS,
    ),
    "exaone_moe": Family(
        "ExaoneMoeForCausalLM",
        _GROUPS
        | LISTED
        | {
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window_pattern": 4,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "mlp_layer_types": None,
        },
        keys=QWEN_EXPERTS | {"expert_scale": "routed_scaling_factor"},
        fixed=DEEPSEEK_FIXED | {"qk_norm": True},
        rotary="windows",
        tensors=_SHARED_EXPERTS | {"mixture.selection_bias": "mlp.e_score_correction_bias"},
        renamed={"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"},
    ),
    "laguna": Family(
        "LagunaForCausalLM",
        {
            "num_key_value_heads": 8,
            QUERY_HEADS: None,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 1.0,  # of a type of layers, within the next
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            },
            "sliding_window": 512,
            "layer_types": None,
            "gating": True,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "moe_routed_scaling_factor": 1.0,
            "mlp_layer_types": None,
        },
        keys=EXPERT_COUNTS
        | ATTENTION_BIAS
        | {"expert_scale": "moe_routed_scaling_factor", "intermediate_size": "shared_expert_intermediate_size"},
        fixed=_SIGMOIDS
        | {"qk_norm": True, "output_gate": True, "gate_activation": "softplus", "query_heads": read_query_heads}
        | {"head_gates": lambda values: values.get("gating") != "per-element"},
        derived={
            "layer_types": by_layer("layer_types", lambda i: FULL),
            "mlp_layer_types": by_layer("mlp_layer_types", _first_dense),
        },
        written=lambda config: {
            QUERY_HEADS: list(map(config.num_heads_of, range(config.num_layers))),
            "gating": "per-head" if config.head_gates else "per-element",
        },
        only={
            "gating": (True, "per-head", "per-element"),
            "moe_apply_router_weight_on_input": (False,),
            "moe_router_logit_softcapping": (0.0,),
            "rope_scaling": (None,),
        },
        rotary="type",
        tensors=QWEN_SHARED_EXPERT
        | {
            "attention.gate": "self_attn.g_proj.weight",
            "mixture.selection_bias": "mlp.experts.e_score_correction_bias",
        },
        renamed={"mlp.gate.e_score_correction_bias": "mlp.experts.e_score_correction_bias"}
        | {f"mlp.shared_experts.{name}_proj.weight": f"mlp.shared_expert.{name}_proj.weight" for name in MLP},
        ignored=("partial_rotary_factor",),
    ),
    "mimo_v2_flash": Family(
        "MiMoV2FlashForCausalLM",
        {
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            VALUE_SCALE: 0.707,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.334,  # of a type of layers, within the next
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
            },
            "sliding_window": 129,
            "sliding_window_size": None,  # one less, of published files
            "layer_types": None,
            "mlp_layer_types": None,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        keys=_DEEPSEEK_KEYS | {"qkv_bias": "attention_bias"},
        fixed=DEEPSEEK_FIXED
        | {"float32_router": True, "sinks": True, "window_sinks": True, "value_size": read_value_size}
        | {"multipliers": lambda values: Multipliers(attention_output=values.number(VALUE_SCALE, 1.0))},
        derived={
            "num_key_value_heads": lambda values: 2 * values.size("num_key_value_heads"),  # of layers with windows
            "sliding_window": _mimo_window,
            "layer_types": by_layer("layer_types", lambda i: FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING),
            "mlp_layer_types": by_layer("mlp_layer_types", _first_dense),
            "routed_scaling_factor": lambda values: values.get("routed_scaling_factor", 1.0),
        },
        written=lambda config: {
            "num_key_value_heads": config.num_kv_heads // 2,
            "v_head_dim": config.value_size or config.head_dim,
            VALUE_SCALE: config.multipliers.attention_output,
        },
        only={"n_group": (1,), "topk_group": (1,), "rope_scaling": (None,)},
        rotary="type",
        tensors={"attention.sinks": "self_attn.attention_sink_bias"},
        renamed={"self_attn.sinks": "self_attn.attention_sink_bias"},
        ignored=("partial_rotary_factor",),
    ),
    "hy_v3": Family(
        "HYV3ForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "max_position_embeddings": 131072,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
            "first_k_dense_replace": 1,
            "mlp_layer_types": None,
        },
        keys=EXPERT_COUNTS | ATTENTION_BIAS | {"expert_scale": "router_scaling_factor"},
        fixed=DEEPSEEK_FIXED | {"qk_norm": True, "float32_router": True},
        only={"mlp_bias": (False,), "qk_norm": (True,), "route_norm": (True,)},
        tensors={f"mlp.{name}": f"mlp.shared_mlp.{name}_proj.weight" for name in MLP}
        | {"mixture.router": "mlp.router.gate.weight", "mixture.selection_bias": "mlp.expert_bias"},
        renamed={
            "mlp.gate.weight": "mlp.router.gate.weight",
            "mlp.e_score_correction_bias": "mlp.expert_bias",
        }
        | {f"mlp.shared_experts.{name}_proj.weight": f"mlp.shared_mlp.{name}_proj.weight" for name in MLP},
        without_effect=("enable_moe_fp32_combine",),
    ),
    "afmoe": Family(
        "AfmoeForCausalLM",
        LISTED
        | {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 16384,
            "sliding_window": 1024,
            "sliding_window_pattern": 4,
            "mup_enabled": False,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "num_dense_layers": 1,
            "moe_intermediate_size": 1408,
            "route_scale": 1.0,
        },
        keys=EXPERT_COUNTS | ATTENTION_BIAS | {"expert_scale": "route_scale", "embedding_scale": "mup_enabled"},
        fixed=DEEPSEEK_FIXED | {"qk_norm": True, "post_norms": True, "output_gate": True},
        only={"route_norm": (True,), "score_func": ("sigmoid",)}
        | dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), (1,)),
        rotary="local",
        tensors=_SHARED_EXPERTS
        | {
            "mixture.router": "mlp.router.gate.weight",
            "mixture.selection_bias": "mlp.expert_bias",
            "mlp_norm.weight": "pre_mlp_layernorm.weight",
            "mlp_post_norm.weight": "post_mlp_layernorm.weight",
        },
        without_effect=("load_balance_coeff", "use_grouped_mm"),
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        {
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 1536,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": None,  # -1, for which transformers puts the last layer
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        },
        keys={
            "num_experts": "moe_num_experts",
            "experts_per_token": "moe_k",
            "expert_size": "moe_intermediate_size",
            "least_divisor": "moe_norm_min",
        },
        fixed=_EXPERTS_ALONE
        | {"routing": "probabilities", "selection_bias": True, "float32_router": True, "interleaved_rotary": True},
        only={"use_bias": (False,), "use_rmsnorm": (True,), "moe_gate": ("topk",), "moe_use_aux_free": (True,)},
        tensors=_SHARED_EXPERTS | {"mixture.selection_bias": "mlp.moe_statics.e_score_correction_bias"},
        renamed={"mlp.gate.moe_statics.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias"},
        without_effect=("moe_capacity",),
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        LOCAL_EXPERTS
        | {
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5e6,
            "max_position_embeddings": 196608,
            "partial_rotary_factor": 1.0,
            "rotary_dim": None,  # the same, in elements
        },
        keys=LOCAL_KEYS,
        fixed=DEEPSEEK_FIXED | {"qk_norm": True, "qk_norm_kind": "whole"},
        tensors={
            "mixture.router": "block_sparse_moe.gate.weight",
            "mixture.selection_bias": "block_sparse_moe.e_score_correction_bias",
        },
        experts=NUMBERED_EXPERTS,
        renamed={
            "mlp.gate.weight": "block_sparse_moe.gate.weight",
            "mlp.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        },
        only={
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
        },
        elsewhere={"rotary_dim": None},
        without_effect=("router_jitter_noise", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        LATENT
        | {
            "n_routed_experts": 64,
            "num_experts_per_tok": None,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0,
            "n_group": None,
            "topk_group": None,
            "topk_method": "greedy",
        },
        keys=EXPERT_COUNTS | {"num_experts": "n_routed_experts", "expert_scale": "routed_scaling_factor"},
        fixed=_EXPERTS_ALONE
        | {"routing": "probabilities", "group_leaders": 1, "normalized_experts": False, "interleaved_rotary": True},
        only=LATENT_ONLY | {"mlp_bias": (False,), "scoring_func": ("softmax",), "norm_topk_prob": (False,)},
        tensors=_SHARED_EXPERTS,
        fused=LATENT_FUSED,
        row_groups=LATENT_GROUPS,
        without_effect=LATENT_WITHOUT_EFFECT,
    ),
    "deepseek_v3": dataclasses.replace(_DEEPSEEK_V3, other_names=("kimi_k2",)),
    "deepseek_v32": _DEEPSEEK_V32,
    "glm_moe_dsa": dataclasses.replace(
        _DEEPSEEK_V32,
        architecture="GlmMoeDsaForCausalLM",
        defaults=dict(_DEEPSEEK_V32.defaults)
        | {
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202752,
            "n_group": 1,
            "topk_group": 1,
            "index_n_heads": 32,
            "indexer_types": None,
            "index_topk_pattern": None,
            "index_topk_freq": 1,
            "index_skip_topk_offset": 2,
        },
        only=dict(_DEEPSEEK_V32.only) | {"indexer_rope_interleave": (None, True)},
        unread=tuple(  # of layers that have no index of their own
            f"indexer.{name}"
            for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
        ),
        elsewhere={"indexer_types": None, "index_topk_pattern": None, "indexer_rope_interleave": False},
    ),
    "glm4_moe_lite": dataclasses.replace(
        _DEEPSEEK_V3,
        architecture="Glm4MoeLiteForCausalLM",
        defaults=LATENT
        | _DEEPSEEK
        | {
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202752,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
            "mlp_layer_types": None,
            "rope_interleave": True,
        },
    ),
    "mistral4": dataclasses.replace(
        _DEEPSEEK_V3,
        architecture="Mistral4ForCausalLM",
        defaults=LATENT
        | _DEEPSEEK
        | {
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "rope_scaling": MINISTRAL_YARN
            | {"rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192},
            "max_position_embeddings": 1048576,
            "partial_rotary_factor": None,  # that of the sizes
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 0,
            "rope_interleave": True,
        },
        fixed=_EXPERTS_ALONE | {"routing": "probabilities"},
        only=LATENT_ONLY,
        rotary="beta",
        experts=JOINED_EXPERTS,
    ),
    "axk1": dataclasses.replace(
        _DEEPSEEK_V3,
        architecture="AXK1ForCausalLM",
        defaults=dict(_DEEPSEEK_V3.defaults)
        | {
            "max_position_embeddings": 32768,
            "n_routed_experts": 192,
            "first_k_dense_replace": 1,
            "mlp_layer_types": None,
        },
        fixed=DEEPSEEK_FIXED | {"expert_post_norm": True},
        tensors=_SHARED_EXPERTS | {"mlp_post_norm.weight": "post_mlp_layernorm.weight"},
        renamed={"mlp.post_mlp_layernorm.weight": "post_mlp_layernorm.weight"},
        unread=("post_mlp_layernorm.weight",),  # of layers without experts, in published files
        implied={"e_score_correction_bias": 0.0},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        LISTED
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
        keys=LOCAL_KEYS | ATTENTION_BIAS,
        fixed=_EXPERTS_ALONE | {"sinks": True, "router_bias": True, "mlp_bias": True, "activation": "clipped_silu"},
        only={"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
        tensors={"mixture.router": "mlp.router.weight"},
        experts={
            "mlp.experts.gate_up_proj": ("mixture.gate", "mixture.up"),
            "mlp.experts.gate_up_proj_bias": ("mixture.gate_bias", "mixture.up_bias"),
            "mlp.experts.down_proj": ("mixture.down",),
            "mlp.experts.down_proj_bias": ("mixture.down_bias",),
        },
        joined_experts={},
        expert_layout="interleaved",
        without_effect=("experts_per_token", "initial_context_length"),
        ignored=("sliding_window_pattern",),
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM",
        LOCAL_EXPERTS
        | {
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "use_qk_norm": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "layer_types": None,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 16384,
        },
        keys=LOCAL_KEYS | ATTENTION_BIAS | {"qk_norm": "use_qk_norm"},
        fixed={"qk_norm_kind": "weightless", "interleaved_rotary": True, "routing": "sigmoid"},
        only={"num_experts_per_tok": (1,)},
        tensors={f"mlp.{name}": f"feed_forward.shared_expert.{name}_proj.weight" for name in MLP}
        | {"mixture.router": "feed_forward.router.weight"},
        experts={
            "feed_forward.experts.gate_up_proj": ("mixture.gate", "mixture.up"),
            "feed_forward.experts.down_proj": ("mixture.down",),
        },
        joined_experts={},
        expert_layout="columns",
        elsewhere={"attention_chunk_size": None, "attn_temperature_tuning": False, "use_qk_norm": False},
        of_parts={"llama4": "Llama4ForConditionalGeneration"},
    ),
}
