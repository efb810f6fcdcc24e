"""The weights of tunix's models as jlade's: the same numbers, with matrices as jlade multiplies them."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jlade.models.architecture import LlamaConfig
from jlade.models.llama import LlamaLayer, LlamaParams
from jlade.models.rotary import LinearScaling, Rotary

Weights = Mapping[Any, Any]  # arrays of a model, in dictionaries with the names of its modules


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


def convert(state: Any, config: LlamaConfig, dtype: Any) -> LlamaParams:
    """Returns the parameters for the arrays of a model, in one program that other arrays reuse.

    Embeddings, norms, biases and experts are handed on; the other matrices are transposed. Each array is divided among
    devices along the axes along which the model's is.

    Args:
      state: an `nnx.State` of the model, as `nnx.state` or `nnx.variables` return it.
      config: the result of `describe`.
      dtype: that the model computes in.
    """
    return _convert(nnx.to_pure_dict(state), config, dtype)


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def _convert(weights: Weights, config: LlamaConfig, dtype: Any) -> LlamaParams:
    weights = jax.tree.map(lambda x: x.astype(dtype), weights)
    is_gemma = config.norm == "rms_plus_one"
    of_layer = _gemma_layer if is_gemma else _llama_layer
    params: Any = LlamaParams
    converted: LlamaParams = params(
        embedding=weights["embedder"]["input_embedding"],
        layers=tuple(of_layer(weights["layers"][i]) for i in range(config.num_layers)),
        norm=weights["final_norm"]["scale" if is_gemma else "w"],
        output=None if config.tie_embeddings else weights["lm_head"]["w"].T,
        config=config,
    )
    return converted


def _transposed(matrix: jax.Array) -> jax.Array:
    """Returns [out, in] of [in, ...], whose other axes are those of the output."""
    return matrix.reshape(len(matrix), -1).T


def _mlp(weights: Weights) -> dict[str, jax.Array]:
    return {name: weights[f"{name}_proj"]["kernel"].T for name in ("gate", "up", "down")}


def _llama_layer(weights: Weights) -> LlamaLayer:
    attention, mlp = weights["attn"], weights["mlp"]
    output = attention["o_proj"]["w"]  # [H, D, E]
    if "router" in mlp:
        fields = {f"expert_{name}": mlp[f"{name}_proj"] for name in ("gate", "up", "down")}
        fields["router"] = mlp["router"]["kernel"].T
    else:
        fields = _mlp(mlp)
    if "q_norm" in attention:
        fields |= {"query_norm": attention["q_norm"]["w"], "key_norm": attention["k_norm"]["w"]}
    if "q_bias" in attention:
        fields |= {"query_bias": attention["q_bias"], "key_bias": attention["k_bias"]}
        fields |= {"value_bias": attention["v_bias"]}
    return LlamaLayer(
        attention_norm=weights["input_layernorm"]["w"],
        query=_transposed(attention["q_proj"]["w"]),
        key=_transposed(attention["k_proj"]["w"]),
        value=_transposed(attention["v_proj"]["w"]),
        attention_output=output.reshape(-1, output.shape[-1]).T,
        mlp_norm=weights["post_attention_layernorm"]["w"],
        **fields,
    )


def _gemma_layer(weights: Weights) -> LlamaLayer:
    attention = weights["attn"]
    output = attention["attn_vec_einsum"]["w"]  # [H, D, E]
    if "qkv_einsum" in attention:
        query, key, value = attention["qkv_einsum"]["w"]  # [H, E, D] each
    else:
        query, (key, value) = attention["q_einsum"]["w"], attention["kv_einsum"]["w"]
    norms = {
        "query_norm": attention.get("_query_norm"),
        "key_norm": attention.get("_key_norm"),
        "attention_post_norm": weights.get("post_attn_norm", weights.get("post_attention_norm")),  # Gemma 2, Gemma 3
        "mlp_post_norm": weights.get("post_ffw_norm"),
    }
    return LlamaLayer(
        attention_norm=weights["pre_attention_norm"]["scale"],
        query=_transposed(jnp.swapaxes(query, 0, 1)),
        key=_transposed(jnp.swapaxes(key, 0, 1)),
        value=_transposed(jnp.swapaxes(value, 0, 1)),
        attention_output=output.reshape(-1, output.shape[-1]).T,
        mlp_norm=weights["pre_ffw_norm"]["scale"],
        **_mlp(weights["mlp"]),
        **{name: norm["scale"] for name, norm in norms.items() if norm is not None},
    )
