"""The families of dense models: what is in their config.json and in their files. `families` has those of all models."""

import dataclasses
from collections.abc import Callable

from jlade.conversion import hf_falcon
from jlade.conversion.family import BIASES, Family
from jlade.conversion.json_files import Values

TANH = "gelu_pytorch_tanh"
LISTED = {"sliding_window": 4096, "layer_types": None}  # layers with and without windows
QWEN = LISTED | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
_GEMMA = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_GEMMA_2 = _GEMMA | LISTED | {"num_key_value_heads": 4, "query_pre_attn_scalar": 256}
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
_GEMMA_4 = _GEMMA_3 | {
    "vocab_size": 262144,
    "num_hidden_layers": 30,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "rope_theta": 10000.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "sliding_window": 512,
    "layer_types": None,
    "tie_word_embeddings": True,
}
del _GEMMA_4["rope_local_base_freq"]
_GEMMA_4_PARTS = {
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
}
ATTENTION_BIAS = {"qkv_bias": "attention_bias", "attention_output_bias": "attention_bias"}
_BIASES = ATTENTION_BIAS | {"mlp_bias": "mlp_bias"}
_CAPS = {"attention_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}
_QUERY_SCALE = {"attention_scale": "query_pre_attn_scalar"}
POST_NORMS = {"pre_norms": False, "post_norms": True}
_FUSED_MLP: dict[str, tuple[str, ...]] = {"mlp.gate_up_proj.weight": ("mlp.gate", "mlp.up")}
_FUSED_ATTENTION: dict[str, tuple[str, ...]] = {
    "self_attn.qkv_proj.weight": ("attention.query", "attention.key", "attention.value")
}
_NORM_BEFORE_MLP = {"mlp_norm.weight": "pre_feedforward_layernorm.weight"}
_ACTIVATION = {"activation": "gelu_tanh"}
_IS_GEMMA = _ACTIVATION | {"norm": "rms_plus_one", "embedding_scale": lambda values: values.size("hidden_size") ** 0.5}
_IS_GELU = {"hidden_act": (TANH, "gelu"), "hidden_activation": (TANH,)}  # Gemma's "gelu" is TANH, says transformers
_GEMMA_4_KEYS = ATTENTION_BIAS | {
    "logit_cap": "final_logit_softcapping",
    "values_from_keys": "attention_k_eq_v",
    "wide_mlp": "use_double_wide_mlp",
}
_GEMMA_4_EXPERTS = {
    "num_experts": "num_experts",
    "experts_per_token": "top_k_experts",
    "expert_size": "moe_intermediate_size",
}
_IS_GEMMA_4 = _IS_GEMMA | {
    "norm": "rms_late",
    "post_norms": True,
    "qk_norm": True,
    "value_norm": True,
    "layer_scale": True,
    "attention_scale": 1.0,
}
_ONLY_GEMMA_4 = _IS_GELU | {
    "rope_scaling": (None,),
    "sliding_window_pattern": (6,),
    "use_bidirectional_attention": (None, "vision"),  # among the tokens of an image
}
_GLM = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
COHERE = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
COHERE_KEYS = ATTENTION_BIAS | {"norm_eps": "layer_norm_eps", "logit_scale": "logit_scale"}
IS_COHERE = {"norm": "layer", "parallel": True, "interleaved_rotary": True}
_ONE_BIAS = dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias"), "use_bias")
HUNYUAN_NORMS = {
    "attention.query_norm": "self_attn.query_layernorm.weight",
    "attention.key_norm": "self_attn.key_layernorm.weight",
}
GRANITE = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_FIRST_OF_FOUR = {"sliding_window_pattern": 4, "sliding_window_offset": 4}  # has no window, not the last one
GRANITE_WINDOWS = LISTED | _FIRST_OF_FOUR | {"sliding_window": 128, "layer_rope_theta": None}
GRANITE_KEYS = ATTENTION_BIAS | {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
_LLAMA_3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MINISTRAL_YARN = {
    "rope_type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _if_mixture(key: str) -> Callable[[Values], int]:
    """Returns the function that reads a number of a mixture of experts, 0 for Gemma 4 without."""
    return lambda values: values.size(key) if values.boolean("enable_moe_block") else 0


_VAULT_GEMMA = Family(
    "VaultGemmaForCausalLM",
    _GEMMA_2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2},
    keys=ATTENTION_BIAS | _CAPS | _QUERY_SCALE,
    fixed=_IS_GEMMA,
    only=_IS_GELU,
    tensors=_NORM_BEFORE_MLP,
    elsewhere=dict.fromkeys((*_CAPS.values(), *_QUERY_SCALE.values())),
    ignored=("sliding_window_pattern",),
)

_GRANITE = Family(
    "GraniteForCausalLM",
    GRANITE,
    keys=GRANITE_KEYS | _BIASES,
    elsewhere={
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": None,
        "logits_scaling": 1.0,
    },
)

_GELUS = {TANH: "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}
_GPT_BIGCODE = Family(
    "GPTBigCodeForCausalLM",
    {
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "activation_function": TANH,
        "multi_query": True,
    },
    aliases={
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    },
    keys={"norm_eps": "layer_norm_epsilon"},
    fixed={"norm": "layer", "norm_bias": True, "gated_mlp": False, "learned_positions": True}
    | dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias"), True)
    | {"activation": lambda values: _GELUS[str(values.get("activation_function"))]},
    derived={
        "intermediate_size": lambda values: values.size("intermediate_size", 4 * values.size("hidden_size")),
        "num_key_value_heads": lambda values: None if not values.boolean("multi_query") else 1,
    },
    written=lambda config: {
        "activation_function": {value: key for key, value in reversed(_GELUS.items())}[config.activation],
        "multi_query": config.num_kv_heads == 1,
    },
    only={"activation_function": tuple(_GELUS), "hidden_act": (None,), "head_dim": (None,)}
    | {"scale_attn_weights": (True,), "add_cross_attention": (False,)},
    rotary="none",
    tensors={
        "mixer_norm.weight": "ln_1.weight",
        "mlp_norm.weight": "ln_2.weight",
        "attention.output": "attn.c_proj.weight",
        "mlp.up": "mlp.c_fc.weight",
        "mlp.down": "mlp.c_proj.weight",
    },
    fused={
        "attn.c_attn.weight": ("attention.query", "attention.key", "attention.value"),
        "attn.c_attn.bias": ("attention.query_bias", "attention.key_bias", "attention.value_bias"),
    },
    row_groups=dict.fromkeys(("attn.c_attn.weight", "attn.c_attn.bias"), lambda config: config.num_kv_heads),
    prefixes={
        "model.embed_tokens.": "transformer.wte.",
        "model.embed_positions.": "transformer.wpe.",
        "model.layers.": "transformer.h.",
        "model.norm.": "transformer.ln_f.",
    },
    unread=("attn.bias", "attn.masked_bias"),
    ignored=("num_key_value_heads",),
    without_effect=("attn_pdrop", "n_ctx", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
)

DENSE: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        {"max_sequence_length": None},
        keys=_BIASES,
        elsewhere=BIASES,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        elsewhere={"sliding_window": None},
        of_parts={"mistral3": "Mistral3ForConditionalGeneration"},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        QWEN,
        fixed={"qkv_bias": True},
        elsewhere={"layer_types": None, "use_sliding_window": False},
        of_parts={
            "qwen2_vl": "Qwen2VLForConditionalGeneration",
            "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
        },
        part_defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        QWEN | {"head_dim": 128},
        keys=ATTENTION_BIAS,
        fixed={"qk_norm": True},
        of_parts={"qwen3_vl": "Qwen3VLForConditionalGeneration"},
        part_defaults={"rope_theta": 500000.0, "max_position_embeddings": 128000},
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        keys=_BIASES,
        fixed={"activation": "relu2", "gated_mlp": False},
        only={"hidden_act": ("relu2",)},
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        {"norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 0.5},
        keys=_BIASES | {"norm_eps": "norm_eps"},
        fixed={"norm": "layer_plus_one", "norm_bias": True, "activation": "relu2", "gated_mlp": False},
        only={"hidden_act": ("relu2",)},
    ),
    "apertus": Family(
        "ApertusForCausalLM",
        {"rms_norm_eps": 1e-5, "rope_scaling": _LLAMA_3 | {"rope_theta": 1.2e7, "factor": 8.0}}
        | {"rope_theta": 1.2e7, "max_position_embeddings": 65536},
        keys=ATTENTION_BIAS,
        fixed={"qk_norm": True, "activation": "xielu", "gated_mlp": False},
        only={"hidden_act": ("xielu",), "qk_norm": (True,), "mlp_bias": (False,), "post_norm": (False,)},
        tensors={
            "mixer_norm.weight": "attention_layernorm.weight",
            "mlp_norm.weight": "feedforward_layernorm.weight",
            "mlp.positive_rate": "mlp.act_fn.alpha_p",
            "mlp.negative_rate": "mlp.act_fn.alpha_n",
            "mlp.slope": "mlp.act_fn.beta",
            "mlp.bound": "mlp.act_fn.eps",
        },
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        _GEMMA | {"num_key_value_heads": 16},
        keys=ATTENTION_BIAS,
        fixed=_IS_GEMMA,
        only=_IS_GELU,
    ),
    "gemma2": dataclasses.replace(
        _VAULT_GEMMA, architecture="Gemma2ForCausalLM", fixed=_IS_GEMMA | {"post_norms": True}
    ),
    "vaultgemma": _VAULT_GEMMA,
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA_2 | _GEMMA_3,
        keys=ATTENTION_BIAS | {"logit_cap": "final_logit_softcapping"} | _QUERY_SCALE,
        fixed=_IS_GEMMA | {"post_norms": True, "qk_norm": True},
        only=_IS_GELU | {"attn_logit_softcapping": (None,)},
        rotary="type",
        tensors=_NORM_BEFORE_MLP,
        of_parts={"gemma3": "Gemma3ForConditionalGeneration"},
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        _GEMMA_4 | _GEMMA_4_PARTS,
        keys=_GEMMA_4_KEYS
        | _GEMMA_4_EXPERTS
        | {"per_layer_size": "hidden_size_per_layer_input", "per_layer_vocab_size": "vocab_size_per_layer_input"},
        fixed=_IS_GEMMA_4
        | {field: _if_mixture(key) for field, key in _GEMMA_4_EXPERTS.items()}
        | {"separate_experts": lambda values: values.boolean("enable_moe_block")},
        only=_ONLY_GEMMA_4,
        rotary="type",
        tensors=_NORM_BEFORE_MLP
        | {
            "mixture.router": "router.proj.weight",
            "mixture.router_scale": "router.scale",
            "mixture.scales": "router.per_expert_scale",
            "mixture.norm": "pre_feedforward_layernorm_2.weight",
            "mixture.post_norm": "post_feedforward_layernorm_2.weight",
            "mixture.shared_post_norm": "post_feedforward_layernorm_1.weight",
            "own_input.gate": "per_layer_input_gate.weight",
            "own_input.projection": "per_layer_projection.weight",
            "own_input.norm": "post_per_layer_input_norm.weight",
        },
        experts={
            "experts.gate_up_proj": ("mixture.gate", "mixture.up"),
            "experts.down_proj": ("mixture.down",),
        },
        joined_experts={},
        of_parts={"gemma4": "Gemma4ForConditionalGeneration"},
    ),
    "gemma4_unified_text": Family(
        "Gemma4UnifiedForCausalLM",
        _GEMMA_4 | {"max_position_embeddings": 262144, "sliding_window": 1024},
        keys=_GEMMA_4_KEYS,
        fixed=_IS_GEMMA_4,
        only=_ONLY_GEMMA_4 | {"hidden_size_per_layer_input": (0,), "enable_moe_block": (False,)},
        rotary="type",
        tensors=_NORM_BEFORE_MLP,
        without_effect=("vocab_size_per_layer_input", "top_k_experts", "moe_intermediate_size"),
        of_parts={"gemma4_unified": "Gemma4UnifiedForConditionalGeneration"},
    ),
    "phi": Family(
        "PhiForCausalLM",
        {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        keys={"norm_eps": "layer_norm_eps"},
        fixed=_ACTIVATION
        | {"norm": "layer", "norm_bias": True, "parallel": True, "gated_mlp": False}
        | dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias", "output_bias"), True),
        only={"hidden_act": ("gelu_new", TANH)},
        tensors={
            "attention.output": "self_attn.dense.weight",
            "mlp.up": "mlp.fc1.weight",
            "mlp.down": "mlp.fc2.weight",
            "norm": "final_layernorm.weight",
        },
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        {
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
            "attention_bias": True,
        },
        aliases={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
        keys=ATTENTION_BIAS | {"norm_eps": "layer_norm_eps", "parallel": "use_parallel_residual"},
        fixed={"activation": "gelu", "norm": "layer", "norm_bias": True, "parallel_norm": True}
        | {"mlp_bias": True, "gated_mlp": False},
        only={"hidden_act": ("gelu",)},
        ignored=("num_key_value_heads",),
        tensors={
            "attention.query": "attention.q_proj.weight",
            "attention.key": "attention.k_proj.weight",
            "attention.value": "attention.v_proj.weight",
            "attention.output": "attention.dense.weight",
            "mlp.up": "mlp.dense_h_to_4h.weight",
            "mlp.down": "mlp.dense_4h_to_h.weight",
        },
        fused={
            "attention.query_key_value.weight": ("attention.query", "attention.key", "attention.value"),
            "attention.query_key_value.bias": ("attention.query_bias", "attention.key_bias", "attention.value_bias"),
        },
        row_groups=dict.fromkeys(
            ("attention.query_key_value.weight", "attention.query_key_value.bias"), lambda config: config.num_kv_heads
        ),
        prefixes={
            "model.embed_tokens.": "gpt_neox.embed_in.",
            "model.layers.": "gpt_neox.layers.",
            "model.norm.": "gpt_neox.final_layer_norm.",
            "lm_head.": "embed_out.",
        },
        unread=("attention.bias", "attention.masked_bias"),
        without_effect=("classifier_dropout",),
    ),
    "falcon": Family(
        "FalconForCausalLM",
        {
            "num_kv_heads": None,
            "ffn_hidden_size": None,
            "multi_query": True,
            "new_decoder_architecture": False,
            "parallel_attn": True,
            "num_ln_in_parallel_attn": None,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "bias": False,
        },
        keys={"norm_eps": "layer_norm_epsilon"}
        | dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias"), "bias"),
        fixed={"activation": "gelu", "norm": "layer", "norm_bias": True, "gated_mlp": False}
        | {"parallel": hf_falcon.is_parallel, "parallel_norm": hf_falcon.has_two_norms},
        derived={"num_key_value_heads": hf_falcon.kv_heads, "intermediate_size": hf_falcon.mlp_size},
        written=hf_falcon.layout,
        only={"activation": ("gelu",), "hidden_act": ("gelu",), "alibi": (False,)}
        | {"apply_residual_connection_post_layernorm": (False,), "head_dim": (None,), "n_embed": (None,)},
        tensors={
            "attention.output": "self_attention.dense.weight",
            "mlp.up": "mlp.dense_h_to_4h.weight",
            "mlp.down": "mlp.dense_4h_to_h.weight",
        },
        parallel_tensors={"mixer_norm.weight": "ln_attn.weight", "mlp_norm.weight": "ln_mlp.weight"},
        fused={
            "self_attention.query_key_value.weight": ("attention.query", "attention.key", "attention.value"),
            "self_attention.query_key_value.bias": (
                "attention.query_bias",
                "attention.key_bias",
                "attention.value_bias",
            ),
        },
        row_groups=dict.fromkeys(
            ("self_attention.query_key_value.weight", "self_attention.query_key_value.bias"),
            lambda config: config.num_kv_heads,
        ),
        prefixes={
            "model.embed_tokens.": "transformer.word_embeddings.",
            "model.layers.": "transformer.h.",
            "model.norm.": "transformer.ln_f.",
        },
        elsewhere={"alibi": False, "new_decoder_architecture": False, "parallel_attn": False},
        without_effect=("ff_factor", "ffn_factor"),
    ),
    "gpt2": dataclasses.replace(
        _GPT_BIGCODE,
        architecture="GPT2LMHeadModel",
        defaults=dict(_GPT_BIGCODE.defaults) | {"activation_function": "gelu_new", "multi_query": False},
        only=dict(_GPT_BIGCODE.only) | {"scale_attn_by_inverse_layer_idx": (False,)},
        row_groups={},
        has_columns=True,
        ignored=("num_key_value_heads", "multi_query"),
        without_effect=(
            "reorder_and_upcast_attn",  # on the rounding alone
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ),
    ),
    "gpt_bigcode": _GPT_BIGCODE,
    "phi3": Family(
        "Phi3ForCausalLM",
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "sliding_window": None,
            "partial_rotary_factor": 1.0,
        },
        rotary="phi",
        fused=_FUSED_ATTENTION | _FUSED_MLP,
        elsewhere={"partial_rotary_factor": 1.0},
    ),
    "olmo": Family(
        "OlmoForCausalLM",
        {"clip_qkv": None},
        keys=ATTENTION_BIAS | {"qkv_bound": "clip_qkv"},
        fixed={"norm": "layer", "norm_eps": 1e-5},
        implied={"norm.weight": 1.0},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {"rms_norm_eps": 1e-5},
        keys=ATTENTION_BIAS,
        fixed=POST_NORMS | {"qk_norm": True, "qk_norm_kind": "whole"},
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        LISTED
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "sliding_window_pattern": 4,
        },
        keys=ATTENTION_BIAS,
        fixed=POST_NORMS | {"qk_norm": True, "qk_norm_kind": "whole"},
        rotary="type",
        ignored=("sliding_window_pattern",),
    ),
    "granite": _GRANITE,
    "granite_swa": dataclasses.replace(
        _GRANITE,
        architecture="GraniteSWAForCausalLM",
        defaults=GRANITE
        | GRANITE_WINDOWS
        | {
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        fixed={"sinks": True},
        ignored=("sliding_window_pattern",),
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        LISTED
        | {
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        keys=_BIASES,
        elsewhere={"no_rope_layers": None},
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
        keys={"norm_eps": "norm_epsilon"} | _ONE_BIAS,
        fixed=_ACTIVATION | {"norm": "layer", "norm_bias": True, "gated_mlp": False},
        only={"hidden_act": (TANH,)},
        tensors={"mlp.up": "mlp.c_fc.weight", "mlp.down": "mlp.c_proj.weight"},
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
        keys={"norm_eps": "layer_norm_eps", "qkv_bias": "use_qkv_bias", "parallel": "use_parallel_residual"},
        fixed={"norm": "layer", "norm_bias": True},
        elsewhere={"use_parallel_residual": False},
    ),
    "glm": Family(
        "GlmForCausalLM",
        _GLM,
        keys={"qkv_bias": "attention_bias"},
        fixed={"interleaved_rotary": True},
        fused=_FUSED_MLP,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        _GLM,
        keys={"qkv_bias": "attention_bias"},
        fixed={"post_norms": True, "interleaved_rotary": True},
        tensors={
            "mixer_post_norm.weight": "post_self_attn_layernorm.weight",
            "mlp_post_norm.weight": "post_mlp_layernorm.weight",
        },
        fused=_FUSED_MLP,
    ),
    "cohere": Family(
        "CohereForCausalLM",
        COHERE | {"rope_theta": 500000.0, "use_qk_norm": False},
        keys=COHERE_KEYS | {"qk_norm": "use_qk_norm"},
        fixed=IS_COHERE | {"qk_norm_kind": "each"},
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        LISTED | COHERE | {"sliding_window_pattern": 4},
        keys=COHERE_KEYS,
        fixed=IS_COHERE,
        rotary="windows",
        elsewhere={"logit_scale": 1.0},
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "use_bias": False,
        },
        keys=_ONE_BIAS,
        fixed={"interleaved_rotary": True},
    ),
    "helium": Family(
        "HeliumForCausalLM",
        {
            "num_key_value_heads": 20,
            "head_dim": 128,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
            "max_position_embeddings": 4096,
        },
        keys={"qkv_bias": "attention_bias", "mlp_bias": "mlp_bias"},
        fixed={"interleaved_rotary": True},
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        LISTED | {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window_pattern": 4},
        fixed=POST_NORMS | {"qk_norm": True},
        rotary="windows",
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        {"rms_norm_eps": 1e-5},
        keys=ATTENTION_BIAS,
        fixed={"qk_norm": True, "qk_norm_kind": "rotated"},
        only={"use_qk_norm": (True,)},
        rotary="alpha",
        tensors=HUNYUAN_NORMS,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "attention_out_bias": False,
        },
        keys={"qkv_bias": "attention_bias", "attention_output_bias": "attention_out_bias", "mlp_bias": "mlp_bias"},
    ),
    "cwm": Family(
        "CwmForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "rope_scaling": _LLAMA_3 | {"rope_theta": 1e6, "factor": 16.0},
            "max_position_embeddings": 131072,
            "sliding_window": 8192,
            "layer_types": None,
            **_FIRST_OF_FOUR,
        },
        keys={"mlp_bias": "mlp_bias"},
        ignored=("sliding_window_pattern",),
    ),
    "ministral": Family("MinistralForCausalLM", LISTED | {"num_key_value_heads": 8, "max_position_embeddings": 131072}),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_scaling": MINISTRAL_YARN
            | {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
            "max_position_embeddings": 262144,
            "sliding_window": None,
        },
        rotary="beta",
        elsewhere={"llama_4_scaling_beta": None},
    ),
}
