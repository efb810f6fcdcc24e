"""The architectures of tunix's models, with which `jlade.adopt` takes their weights."""

import dataclasses
import inspect
import sys
from typing import Any

import jax
from flax import nnx

from jlade.models.architecture import LlamaConfig
from jlade.models.rotary import LinearScaling, Rotary


def describe(model: Any, max_positions: int) -> LlamaConfig | None:
    """Returns the architecture of a model of tunix, None for a model that cannot be converted.

    Args:
      model: an `nnx.Module`. Llama3, Qwen2, Qwen3, Gemma (1 and 2) and Gemma3 are known. A model with LoRA is not.
      max_positions: of the longest text, in tokens.
    """
    family = FAMILIES.get(f"{type(model).__module__}.{type(model).__qualname__}")
    if family is None or jax.tree.leaves(nnx.state(model, nnx.LoRAParam)):
        return None
    return dataclasses.replace(family(model), max_positions=max_positions)


def _shape(config: Any, vocab_size: int) -> dict[str, Any]:
    """Returns the fields that all families have."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.hidden_dim,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_positions": 1,  # `describe` has it
    }


def _theta(model: Any) -> float:
    """Returns the base of a model's rotations.

    Those of Llama3 and Qwen3 have the default of `apply_rope` in tunix 0.1.7, whatever the configuration says.
    """
    module = sys.modules[type(model).__module__]
    if "rope_theta" in module.Attention.block.__code__.co_names:
        return float(model.config.rope_theta)
    return float(inspect.signature(module.apply_rope).parameters["rope_theta"].default)


def _llama3(model: Any) -> LlamaConfig:
    c = model.config
    shape = _shape(c, c.vocab_size)
    return LlamaConfig(**shape, norm_eps=c.norm_eps, rope_theta=_theta(model), tie_embeddings=c.weight_tying)


def _qwen2(model: Any) -> LlamaConfig:
    c = model.config
    shape, theta = _shape(c, c.vocab_size), float(c.rope_theta)
    return LlamaConfig(
        **shape, norm_eps=c.norm_eps, rope_theta=theta, tie_embeddings=c.use_tied_embedding, qkv_bias=True
    )


def _qwen3(model: Any) -> LlamaConfig:
    c = model.config
    experts: dict[str, Any] = {}
    if c.num_experts is not None:
        experts = {"intermediate_size": 0, "num_experts": c.num_experts, "expert_size": c.hidden_dim}
        experts |= {"experts_per_token": c.num_experts_per_tok, "model_type": "qwen3_moe"}
    return LlamaConfig(
        **_shape(c, c.vocab_size) | experts,
        norm_eps=c.norm_eps,
        rope_theta=_theta(model),
        tie_embeddings=c.use_tied_embedding,
        qk_norm=True,
    )


def _gemma_like(model: Any, model_type: str, **variations: Any) -> LlamaConfig:
    c = model.config
    windows = tuple(
        c.sliding_window_size if layer.attn.attn_type.name == "LOCAL_SLIDING" else None for layer in model.layers
    )
    return LlamaConfig(
        **_shape(c, c.num_embed),
        **variations,
        model_type=model_type,
        norm="rms_plus_one",
        activation="gelu_tanh",
        embedding_scale=c.embed_dim**0.5,
        tie_embeddings=True,
        sliding_windows=windows if any(windows) else (),
    )


def _gemma(model: Any) -> LlamaConfig:
    c = model.config
    if c.use_post_attn_norm != c.use_post_ffw_norm:
        raise ValueError("model must have norms after attention and MLP, or neither: use_post_attn_norm says otherwise")
    return _gemma_like(
        model,
        "gemma2" if c.use_post_attn_norm else "gemma",
        post_norms=c.use_post_attn_norm,
        attention_cap=c.attn_logits_soft_cap,
        logit_cap=c.final_logit_softcap,
    )


def _gemma3(model: Any) -> LlamaConfig:
    attentions = [layer.attn for layer in model.layers]
    rotary = tuple(
        Rotary(
            float(attention.rope_base_frequency),
            None if attention.rope_scale_factor == 1 else LinearScaling(float(attention.rope_scale_factor)),
        )
        for attention in attentions
    )
    scale = float(attentions[0].query_pre_attn_scalar)
    return _gemma_like(model, "gemma3_text", post_norms=True, qk_norm=True, layer_rotary=rotary, attention_scale=scale)


FAMILIES = {
    "tunix.models.llama3.model.Llama3": _llama3,
    "tunix.models.qwen2.model.Qwen2": _qwen2,
    "tunix.models.qwen3.model.Qwen3": _qwen3,
    "tunix.models.gemma.model.Gemma": _gemma,
    "tunix.models.gemma3.model.Gemma3": _gemma3,
}
