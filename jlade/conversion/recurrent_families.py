"""The families with recurrent layers: what is in their config.json and in their files."""

import math
from collections.abc import Callable
from typing import Any

from jlade.conversion.dense_families import ATTENTION_BIAS, GRANITE, GRANITE_KEYS, POST_NORMS
from jlade.conversion.expert_families import (
    DEEPSEEK_FIXED,
    EXPERT_COUNTS,
    GRANITE_EXPERTS,
    GRANITE_JOINED_EXPERTS,
    GRANITE_ROUTER,
    LATENT,
    LATENT_FUSED,
    LATENT_GROUPS,
    LATENT_ONLY,
    LATENT_WITHOUT_EFFECT,
    LOCAL_EXPERTS,
    LOCAL_KEYS,
    MLP,
    NUMBERED_EXPERTS,
    QWEN_EXPERTS,
    QWEN_SHARED_EXPERT,
)
from jlade.conversion.family import Family, by_layer
from jlade.conversion.hf_attention import MULTIPLIER_DEFAULTS
from jlade.conversion.hf_channel_delta import HEADS, OF_LING, SIZE, TAPS
from jlade.conversion.hf_mixtures import listed_layers
from jlade.conversion.hf_recurrent import CONV, DOUBLES, EXPERT_SIZES, mlp_size
from jlade.conversion.hf_rotary import FULL, LINEAR, SLIDING
from jlade.conversion.json_files import Values

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
    "self_attn.q_proj.weight": ("attention.query", "attention.gate"),
    "linear_attn.conv1d.weight": ("recurrent.query_filter", "recurrent.key_filter", "recurrent.value_filter"),
}
_FUSED_INPUTS: dict[str, tuple[str, ...]] = {
    "linear_attn.in_proj_qkv.weight": ("recurrent.query", "recurrent.key", "recurrent.value"),
}
_PREDICTORS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # of layers that predict further tokens
_SHARED_SIZE = {"intermediate_size": "shared_expert_intermediate_size"}
_MIXTURE = {"num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_MAMBA = {f"recurrent.{name}": f"mamba.{name}_proj.weight" for name in ("query", "key", "value", "gate")} | {
    "recurrent.decay": "mamba.decay_proj.weight",
    "recurrent.query_filter": "mamba.query_conv.weight",
    "recurrent.key_filter": "mamba.key_conv.weight",
    "recurrent.value_filter": "mamba.value_conv.weight",
    "recurrent.output": "mamba.out_proj.weight",
    "recurrent.norm": "mamba.norm.weight",
    "recurrent.decay_rate": "mamba.A_log",
    "recurrent.decay_bias": "mamba.dt_bias",
    "recurrent.skip": "mamba.D",
}
_MAMBA_FUSED: dict[str, tuple[str, ...]] = {
    "mamba.in_proj.weight": (
        "recurrent.gate",
        "recurrent.value",
        "recurrent.key",
        "recurrent.query",
        "recurrent.decay",
    ),
    "mamba.conv1d.weight": ("recurrent.value_filter", "recurrent.key_filter", "recurrent.query_filter"),
    "mamba.conv1d.bias": ("recurrent.value_filter_bias", "recurrent.key_filter_bias", "recurrent.query_filter_bias"),
}
_FALCON_H1_TENSORS = (
    _MAMBA
    | {f"mlp.{name}": f"feed_forward.{name}_proj.weight" for name in ("gate", "up", "down")}
    | {"mlp_norm.weight": "pre_ff_layernorm.weight", "norm": "final_layernorm.weight"}
)
# transformers bounds the steps of prompts by others, and not those of the tokens that it generates.
_NO_LIMIT = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
_MAMBA_SIZES = {
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_d_state": 256,
    "mamba_d_head": None,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_ONLY_MAMBA = {
    "mamba_proj_bias": (False,),
    "time_step_limit": _NO_LIMIT,
}
_NEMOTRON_KEYS = (
    QWEN_EXPERTS
    | EXPERT_SIZES
    | {
        "norm_eps": "layer_norm_epsilon",
        "expert_scale": "routed_scaling_factor",
    }
)
_NEMOTRON_TENSORS = {field: name.replace("mamba.", "mixer.") for field, name in _MAMBA.items()} | {
    "mixer_norm.weight": "norm.weight",
    "mlp_norm.weight": "norm.weight",
    "attention.query": "mixer.q_proj.weight",
    "attention.key": "mixer.k_proj.weight",
    "attention.value": "mixer.v_proj.weight",
    "attention.output": "mixer.o_proj.weight",
    "mlp.up": "mixer.shared_experts.up_proj.weight",
    "mlp.down": "mixer.shared_experts.down_proj.weight",
    "mixture.router": "mixer.gate.weight",
    "mixture.selection_bias": "mixer.gate.e_score_correction_bias",
    "mixture.up": "mixer.experts.up_proj.weight",
    "mixture.down": "mixer.experts.down_proj.weight",
    "mixture.input": "mixer.fc1_latent_proj.weight",
    "mixture.output": "mixer.fc2_latent_proj.weight",
    "norm": "norm_f.weight",
}
_LFM2 = {
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "tie_embedding": None,  # in the place of the other one
    "layer_types": None,
    "conv_L_cache": 3,
}
_LFM2_TENSORS = {
    "mixer_norm.weight": "operator_norm.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "attention.query_norm": "self_attn.q_layernorm.weight",
    "attention.key_norm": "self_attn.k_layernorm.weight",
    "attention.output": "self_attn.out_proj.weight",
    "mlp.gate": "feed_forward.w1.weight",
    "mlp.up": "feed_forward.w3.weight",
    "mlp.down": "feed_forward.w2.weight",
    "recurrent.value_filter": "conv.conv.weight",
    "recurrent.output": "conv.out_proj.weight",
    "norm": "embedding_norm.weight",
}
_LFM2_FUSED: dict[str, tuple[str, ...]] = {
    "conv.in_proj.weight": ("recurrent.key", "recurrent.query", "recurrent.value"),
}
_LFM2_FIXED = {
    "qk_norm": True,
    "tie_embeddings": lambda values: values.boolean("tie_embedding", values.boolean("tie_word_embeddings")),
}
_LFM2_EXPERTS: dict[str, tuple[str, ...]] = {
    f"feed_forward.experts.{{}}.{name}.weight": (f"mixture.{field}",)
    for name, field in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
}


_KDA = {
    "recurrent.query": "q_proj.weight",
    "recurrent.key": "k_proj.weight",
    "recurrent.value": "v_proj.weight",
    "recurrent.query_filter": "q_conv1d.weight",
    "recurrent.key_filter": "k_conv1d.weight",
    "recurrent.value_filter": "v_conv1d.weight",
    "recurrent.output": "o_proj.weight",
    "recurrent.beta": "b_proj.weight",
    "recurrent.decay": "f_b_proj.weight",
    "recurrent.decay_down": "f_a_proj.weight",
    "recurrent.gate": "g_b_proj.weight",
    "recurrent.gate_down": "g_a_proj.weight",
    "recurrent.decay_rate": "A_log",
    "recurrent.decay_bias": "dt_bias",
    "recurrent.norm": "o_norm.weight",
}
_LING = {field: name for field, name in _KDA.items() if not field.endswith("_down")} | {
    "recurrent.output": "dense.weight",
    "recurrent.decay": "f_proj.weight",
    "recurrent.gate": "g_proj.weight",
    "attention.query": "q_proj.weight",
    "attention.query_down": "q_a_proj.weight",
    "attention.query_down_norm": "q_a_layernorm.weight",
    "attention.key_down": "kv_a_proj_with_mqa.weight",
    "attention.key_down_norm": "kv_a_layernorm.weight",
    "attention.key_up": "k_b_proj.weight",
    "attention.value_up": "v_b_proj.weight",
    "attention.gate": "g_proj.weight",
    "attention.output": "dense.weight",
}
_LING_JOINED = "q_b_proj.weight", "kv_b_proj.weight", "conv1d.weight"
_FORGET_GATE = "f_proj.weight", "f_a_proj.weight", "f_b_proj.weight", "A_log", "dt_bias"  # of both families
_FILTERS = tuple(f"self_attn.{name}_conv1d.weight" for name in "qkv")
_KIMI = LATENT | {
    "q_lora_rank": None,
    "layer_types": None,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "mlp_layer_types": None,
}
_KIMI_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "n_shared_experts": "num_shared_experts",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
}
_KIMI_KEYS = QWEN_EXPERTS | {"expert_scale": "routed_scaling_factor"}
_ONLY_KIMI = LATENT_ONLY | {"tie_word_embeddings": (False,)}  # transformers ties none
_KIMI_MIXTURE = {f"mlp.{name}": f"shared_experts.{name}_proj.weight" for name in MLP} | {
    "mixture.router": "gate.weight",
    "mixture.selection_bias": "gate.e_score_correction_bias",
}


def _if_mixture(key: str) -> Callable[[Values], int]:
    """Returns the function that reads a number of a mixture of experts, 0 for Granite 4 without."""
    return lambda values: 0 if values.get("num_local_experts", 0) == 0 else values.size(key)


def _lfm3_layer(layer: int) -> str:
    """Returns the type of a layer of LFM3, where its configuration does not list them."""
    return {0: SLIDING, 2: FULL}.get(layer % 4, CONV) if layer else CONV


def _bamba_layers(values: Values) -> list[str]:
    """Returns the types of the layers of Bamba, whose configuration lists those with attention."""
    layers = range(values.size("num_hidden_layers"))
    attention = listed_layers(values, "attn_layer_indices", layers, [])
    return [FULL if i in attention else LINEAR for i in layers]


def _or(key: str, other: str) -> Callable[[Values], Any]:
    """Returns the function that reads a value, or that of another key where it is missing."""
    return lambda values: values.get(key, values.get(other))


def _olmo_base(values: Values) -> Any:
    """Returns the rotary base of OLMo Hybrid, None for no rotation: null is no missing key there."""
    settings = values.get("rope_parameters", {})
    own = settings if isinstance(settings, dict) else {}
    return own.get("rope_theta", values.values["rope_theta"])


def _olmo_key_size(values: Values) -> int:
    """Returns the elements of a recurrent head's key in OLMo Hybrid."""
    number = values.size("linear_num_key_heads", values.get("num_attention_heads"))
    return values.size("linear_key_head_dim", 3 * values.size("hidden_size") // (4 * number))


_OLMO_SIZES: dict[str, Callable[[Values], Any]] = {
    "linear_num_key_heads": _or("linear_num_key_heads", "num_attention_heads"),
    "linear_num_value_heads": _or("linear_num_value_heads", "num_attention_heads"),
    "linear_key_head_dim": _olmo_key_size,
    "linear_value_head_dim": lambda values: values.get("linear_value_head_dim", 2 * _olmo_key_size(values)),
}


def _rotated(values: Values) -> Any:
    """Returns the head_dim of transformers, whatever is in published files."""
    return values.get("qk_rope_head_dim")


RECURRENT: dict[str, Family] = {
    "bailing_hybrid": Family(
        "BailingHybridForCausalLM",
        _KIMI
        | dict.fromkeys((HEADS, SIZE, TAPS, "rotary_dim"))
        | {
            "head_dim": 128,
            "rope_theta": 6e6,
            "max_position_embeddings": 262144,
            "layer_group_size": 6,
            "max_window_layers": None,  # of windows, which are not there
            "short_conv_kernel_size": 4,
            "kda_safe_gate": True,
            "kda_lower_bound": -5.0,
            "num_experts": 512,
            "moe_intermediate_size": 768,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 2,
        },
        aliases=_KIMI_NAMES,
        keys=_KIMI_KEYS,
        fixed=DEEPSEEK_FIXED
        | dict.fromkeys(("float32_router", "interleaved_rotary", "output_gate", "head_gates"), True),
        derived={key: _or(key, other) for key, other in OF_LING.items()} | {"head_dim": _rotated},
        only=_ONLY_KIMI
        | dict.fromkeys(("scoring_func", "score_function"), ("sigmoid",))
        | dict.fromkeys(("no_kda_lora", "rope_interleave", "moe_router_enable_expert_bias", "use_qk_norm"), (True,))
        | dict.fromkeys(("use_bias", "use_qkv_bias", "use_mla_nope", "scale_router_input"), (False,))
        | dict.fromkeys(("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"), (None,))
        | {"gated_attention_proj_granularity_type": ("head_wise",), "topk_method": ("noaux_tc",)}
        | {"partial_rotary_factor": (None, 0.5)},  # of head_dim, in published files
        tensors={field: f"attention.{name}" for field, name in _LING.items()}
        | {f"mlp.{name}": f"mlp.shared_experts.{name}_proj.weight" for name in MLP}
        | {"mixture.selection_bias": "mlp.gate.expert_bias"},
        fused={"attention.kv_b_proj.weight": ("attention.key_up", "attention.value_up")},
        row_groups={"attention.kv_b_proj.weight": lambda config: config.num_heads},
        renamed={f"self_attn.{name}": f"attention.{name}" for name in (*_LING.values(), *_LING_JOINED)}
        | {f"self_attn.forget_gate.{name}": f"attention.{name}" for name in _FORGET_GATE}
        | {"self_attn.o_proj.weight": "attention.dense.weight"}
        | {"mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias"},
        divided={"attention.conv1d.weight": tuple(f"attention.{name}_conv1d.weight" for name in "qkv")},
        prefixes={"model.embed_tokens.": "model.word_embeddings."},
        without_effect=(
            *LATENT_WITHOUT_EFFECT,
            "moe_shared_expert_intermediate_size",
            "mtp_loss_scaling_factor",
            "mtp_use_kda",
            "num_kv_heads_for_linear_attn",
            "router_dtype",
        ),
        other_architectures=("BailingMoeV3ForCausalLM",),
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        GRANITE
        | LOCAL_EXPERTS
        | {
            "shared_intermediate_size": 1024,
            "position_embedding_type": None,
            "layer_types": None,
            **_MAMBA_SIZES,
        },
        keys=GRANITE_KEYS | LOCAL_KEYS | {"intermediate_size": "shared_intermediate_size"},
        fixed={field: _if_mixture(key) for field, key in LOCAL_KEYS.items()},
        only=_ONLY_MAMBA,
        tensors=_MAMBA | {"mixture.router": GRANITE_ROUTER, "mlp.down": "shared_mlp.output_linear.weight"},
        fused=_MAMBA_FUSED | {"shared_mlp.input_linear.weight": ("mlp.gate", "mlp.up")},
        experts=GRANITE_EXPERTS,
        joined_experts=GRANITE_JOINED_EXPERTS,
        renamed={"block_sparse_moe.router.weight": GRANITE_ROUTER},
        without_effect=("init_method", "mamba_chunk_size", "normalization_function"),
    ),
    "falcon_h1": Family(
        "FalconH1ForCausalLM",
        MULTIPLIER_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "embedding_multiplier": 1.0,
            "lm_head_multiplier": 1.0,
            "mamba_d_ssm": 1024,
            **_MAMBA_SIZES,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
        },
        keys=ATTENTION_BIAS
        | {
            "mlp_bias": "mlp_bias",
            "embedding_scale": "embedding_multiplier",
            "logit_scale": "lm_head_multiplier",
        },
        only=_ONLY_MAMBA | {"projectors_bias": (False,)},
        tensors=_FALCON_H1_TENSORS,
        fused=_MAMBA_FUSED,
        without_effect=(  # but the first two, of published files
            "mamba_chunk_size",
            "num_logits_to_keep",
            "attn_layer_indices",
            "mamba_use_mlp",
            "mlp_expansion_factor",
            "time_step_floor",
            "time_step_max",
            "time_step_min",
        ),
        elsewhere=MULTIPLIER_DEFAULTS | {"lm_head_multiplier": 1.0},
    ),
    "bamba": Family(
        "BambaForCausalLM",
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144,
            "partial_rotary_factor": 0.5,
            "attn_layer_indices": None,
            "layer_types": None,  # follows from the key before
            **_MAMBA_SIZES,
        },
        keys=ATTENTION_BIAS | {"mlp_bias": "mlp_bias"},
        derived={"layer_types": _bamba_layers},
        written=lambda config: {"attn_layer_indices": list(config.attention_layers)},
        only=_ONLY_MAMBA,
        tensors=_FALCON_H1_TENSORS,
        fused=_MAMBA_FUSED,
        # The rotated part of a head is a half, unless rope_parameters say otherwise.
        ignored=("layer_types", "partial_rotary_factor"),
        without_effect=("attn_rotary_emb", "z_loss_coefficient"),
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        _LFM2
        | {
            "full_attn_idxs": None,
            "block_ff_dim": None,  # in the place of intermediate_size
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
        },
        keys={"norm_eps": "norm_eps", "intermediate_size": "intermediate_size"},
        fixed=_LFM2_FIXED | {"intermediate_size": mlp_size},
        only={"conv_bias": (False,)},
        tensors=_LFM2_TENSORS,
        fused=_LFM2_FUSED,
        without_effect=(  # of published files
            "block_dim",
            "block_mlp_init_scale",
            "block_norm_eps",
            "block_out_init_scale",
            "block_use_swiglu",
            "block_use_xavier_init",
            "conv_dim",
            "conv_dim_out",
            "conv_use_xavier_init",
            "num_heads",
            "use_pos_enc",
        ),
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM",
        _LFM2
        | {
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
        keys=QWEN_EXPERTS
        | {"norm_eps": "norm_eps", "expert_scale": "routed_scaling_factor", "selection_bias": "use_expert_bias"},
        fixed=_LFM2_FIXED | {"intermediate_size": 0, "routing": "sigmoids", "expert_epsilon": 1e-6},
        only={"conv_bias": (False,)},
        tensors=_LFM2_TENSORS
        | {"mixture.router": "feed_forward.gate.weight", "mixture.selection_bias": "feed_forward.expert_bias"}
        | {f"mixture.{name}": f"feed_forward.experts.{name}.weight" for name in ("gate", "up", "down")},
        fused=_LFM2_FUSED,
        experts=_LFM2_EXPERTS,
        joined_experts={
            "feed_forward.experts.gate_up_proj": ("mixture.gate", "mixture.up"),
            "feed_forward.experts.down_proj": ("mixture.down",),
        },
    ),
    "lfm3": Family(
        "Lfm3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "head_dim": 128,
            "norm_eps": 1e-5,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            },
            "max_position_embeddings": 128000,
            "tie_word_embeddings": True,
            "sliding_window": 256,
            "layer_types": None,
            "conv_L_cache": 7,
            "use_sandwich_norm": True,
            "use_attention_gate": True,
        },
        keys=ATTENTION_BIAS
        | {"norm_eps": "norm_eps", "post_norms": "use_sandwich_norm", "output_gate": "use_attention_gate"},
        fixed={"qk_norm": True, "head_gates": lambda values: values.boolean("use_attention_gate")},
        derived={"layer_types": by_layer("layer_types", _lfm3_layer)},
        only={"conv_bias": (False,), "rope_scaling": (None,)},
        rotary="type",
        tensors={path: name for path, name in _LFM2_TENSORS.items() if not path.startswith("attention.")}
        | {"mixer_post_norm.weight": "post_operator_norm.weight", "mlp_post_norm.weight": "post_ffn_norm.weight"},
        fused=_LFM2_FUSED,
        renamed={"self_attn.g_proj.weight": "self_attn.gate_proj.weight"},
    ),
    "kimi_linear": Family(
        "KimiLinearForCausalLM",
        _KIMI
        | {HEADS: 32, SIZE: 128, TAPS: 4}
        | {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1048576,
            "linear_attn_config": None,
            "num_experts": 256,
            "moe_intermediate_size": 1024,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.446,
            "first_k_dense_replace": 1,
        },
        aliases=_KIMI_NAMES,
        keys=_KIMI_KEYS,
        fixed=DEEPSEEK_FIXED | {"float32_router": True},
        derived={"head_dim": _rotated},
        only=_ONLY_KIMI
        | dict.fromkeys(("rope_scaling", "rope_parameters"), (None,))
        | {"mla_use_nope": (True,), "moe_router_activation_func": ("sigmoid",)},
        rotary="none",
        tensors={field: f"self_attn.{name}" for field, name in _KDA.items()}
        | {field: f"block_sparse_moe.{name}" for field, name in _KIMI_MIXTURE.items()},
        fused=LATENT_FUSED,
        row_groups=LATENT_GROUPS,
        experts=NUMBERED_EXPERTS,
        renamed={f"self_attn.forget_gate.{name}": f"self_attn.{name}" for name in _FORGET_GATE}
        | {f"mlp.{name}": f"block_sparse_moe.{name}" for name in _KIMI_MIXTURE.values()}
        | {f"block_sparse_moe.{name}_proj.weight": f"mlp.{name}_proj.weight" for name in MLP},
        divided={"self_attn.conv1d.weight": _FILTERS},
        without_effect=(*LATENT_WITHOUT_EFFECT, "use_grouped_topk"),
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 4096,
            "layers_block_type": None,
            "hybrid_override_pattern": None,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "moe_latent_size": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        aliases={
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "rms_norm_eps": "layer_norm_epsilon",  # of published files, which transformers does not read
        },
        keys=_NEMOTRON_KEYS,
        fixed=dict.fromkeys(("intermediate_size", *EXPERT_COUNTS), 0)  # unless some layers have experts
        | {"norm": "rms_late", "activation": "relu2", "gated_mlp": False, "routing": "sigmoids"}
        | {"selection_bias": True, "float32_router": True},
        only={
            "mlp_hidden_act": ("relu2",),
            "mamba_hidden_act": ("silu",),
            "n_shared_experts": (1,),
            **dict.fromkeys(("sliding_window", "rope_scaling", "rope_parameters"), (None,)),
            **dict.fromkeys(("time_step_limit", "mamba_dt_limit"), _NO_LIMIT),
            **dict.fromkeys(
                ("mlp_bias", "use_bias", "mamba_proj_bias", "attention_bias", "residual_in_fp32"), (False,)
            ),
        },
        rotary="none",
        tensors=_NEMOTRON_TENSORS,
        fused={name.replace("mamba.", "mixer."): fields for name, fields in _MAMBA_FUSED.items()},
        experts={f"mixer.experts.{{}}.{name}_proj.weight": (f"mixture.{name}",) for name in ("up", "down")},
        joined_experts={f"mixer.experts.{name}_proj": (f"mixture.{name}",) for name in ("up", "down")},
        prefixes={"model.embed_tokens.": "backbone.embeddings.", "model.": "backbone."},
        without_effect=(  # some of published files alone
            "attention_head_dim",
            "chunk_size",
            "expand",
            "mamba_dt_init_floor",
            "mamba_dt_max",
            "mamba_dt_min",
            "mamba_expand",
            "mamba_ssm_cache_dtype",
            "moe_shared_expert_overlap",
            "mtp_hybrid_override_pattern",
            "mtp_layers_block_type",
            "num_logits_to_keep",
            "num_nextn_predict_layers",
            "rescale_prenorm_residual",
            "time_step_floor",
            "time_step_max",
            "time_step_min",
            "time_step_rank",
            "use_mamba_kernels",
        ),
    ),
    "olmo_hybrid": Family(
        "OlmoHybridForCausalLM",
        {
            "max_position_embeddings": 65536,
            "layer_types": None,
            "full_attention_interval": 4,
            **dict.fromkeys(_OLMO_SIZES),
            "linear_conv_kernel_dim": 4,
            DOUBLES: True,
        },
        keys=ATTENTION_BIAS,
        fixed=POST_NORMS | {"recurrent_pre_norms": True, "qk_norm": True, "qk_norm_kind": "whole"},
        derived=_OLMO_SIZES
        | {
            "position_embedding_type": lambda values: None if _olmo_base(values) is None else "rope",
            "rope_parameters": lambda values: None if _olmo_base(values) is None else values.get("rope_parameters"),
        },
        written=lambda config: {} if any(config.rotary_by_layer) else {"rope_theta": None},
        tensors={
            "recurrent.gate": "linear_attn.g_proj.weight",
            "recurrent.beta": "linear_attn.b_proj.weight",
            "recurrent.decay": "linear_attn.a_proj.weight",
            "recurrent.output": "linear_attn.o_proj.weight",
            "recurrent.norm": "linear_attn.o_norm.weight",
        }
        | {f"recurrent.{name}_filter": f"linear_attn.{name[0]}_conv1d.weight" for name in ("query", "key", "value")},
        renamed={  # transformers writes the second of layers with attention, too
            "attention_layer_norm.weight": "input_layernorm.weight",
            "feedforward_layer_norm.weight": "post_attention_layernorm.weight",
        },
        ignored=("full_attention_interval",),
        without_effect=(
            "linear_a_log_max",
            "linear_a_log_min",
            "linear_dt_init_floor",
            "linear_dt_max",
            "linear_dt_min",
        ),
    ),
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
        keys=QWEN_EXPERTS | _SHARED_SIZE,
        fixed=_FIXED | {"shared_router": True},
        only=_ONLY,
        tensors=QWEN_SHARED_EXPERT,
        fused=_FUSED
        | {
            "linear_attn.in_proj_qkvz.weight": (
                "recurrent.query",
                "recurrent.key",
                "recurrent.value",
                "recurrent.gate",
            ),
            "linear_attn.in_proj_ba.weight": ("recurrent.beta", "recurrent.decay"),
        },
        row_groups=_HEADS
        | dict.fromkeys(
            ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
            lambda config: config.recurrence.key_heads,
        ),
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
        keys=EXPERT_COUNTS | _SHARED_SIZE,
        fixed=_FIXED | {"shared_router": True},
        only=_ONLY,
        rotary="sections",
        tensors=QWEN_SHARED_EXPERT,
        fused=_FUSED | _FUSED_INPUTS,
        row_groups=_HEADS,
        without_effect=_PREDICTORS,
        of_parts={"qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration"},
    ),
}
