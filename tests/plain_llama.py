"""A LLaMA forward pass in NumPy and float64, for one whole sequence: no cache, no blocks, no batch."""

from collections.abc import Sequence

import numpy as np

from jlade.models.llama import LlamaParams


def logits(params: LlamaParams, tokens: Sequence[int]) -> np.ndarray:
    """Returns the logits [L, V] after each of the L tokens."""
    config = params.config
    length, head_dim = len(tokens), config.head_dim
    hidden = _f64(params.embedding)[np.asarray(tokens)]
    causal = np.tri(length, dtype=bool)
    for layer in params.layers:
        normed = _norm(hidden, layer.attention_norm, config.norm_eps)
        queries = (normed @ _f64(layer.query).T).reshape(length, config.num_heads, head_dim)
        keys = (normed @ _f64(layer.key).T).reshape(length, config.num_kv_heads, head_dim)
        values = (normed @ _f64(layer.value).T).reshape(length, config.num_kv_heads, head_dim)
        mixed = np.zeros_like(queries)
        for head in range(config.num_heads):
            kv_head = head * config.num_kv_heads // config.num_heads
            query, key = _rotate(queries[:, head], config.rope_theta), _rotate(keys[:, kv_head], config.rope_theta)
            scores = np.where(causal, query @ key.T / np.sqrt(head_dim), -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            mixed[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ values[:, kv_head]
        hidden = hidden + mixed.reshape(length, -1) @ _f64(layer.attention_output).T
        normed = _norm(hidden, layer.mlp_norm, config.norm_eps)
        gate = normed @ _f64(layer.gate).T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (normed @ _f64(layer.up).T)) @ _f64(layer.down).T
    output = params.embedding if params.output is None else params.output
    return _norm(hidden, params.norm, config.norm_eps) @ _f64(output).T


def _f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _norm(x: np.ndarray, weight, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * _f64(weight)


def _rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Returns `x` [L, D] with the pairs (i, i + D/2) rotated, as complex numbers."""
    half = x.shape[1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=1)
