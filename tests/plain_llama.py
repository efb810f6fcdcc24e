"""A LLaMA forward pass in NumPy and float64, for one whole sequence: no cache, no blocks, no batch.

Recurrent layers follow the gated delta rule token by token.
"""

from collections.abc import Sequence

import numpy as np

from jlade.models.llama import LlamaConfig, LlamaLayer, LlamaParams


def logits(params: LlamaParams, tokens: Sequence[int]) -> np.ndarray:
    """Returns the logits [L, V] after each of the L tokens."""
    config = params.config
    length, head_dim = len(tokens), config.head_dim
    hidden = _f64(params.embedding)[np.asarray(tokens)]
    causal = np.tri(length, dtype=bool)
    for number, layer in enumerate(params.layers):
        normed = _norm(hidden, layer.attention_norm, config.norm_eps)
        if number in config.recurrent_layers:
            hidden = _feed_forward(hidden + _delta_rule(layer, normed, config), layer, config.norm_eps)
            continue
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
        joined = mixed.reshape(length, -1)
        if layer.output_gate is not None:
            joined = joined * _sigmoid(normed @ _f64(layer.output_gate).T)
        hidden = _feed_forward(hidden + joined @ _f64(layer.attention_output).T, layer, config.norm_eps)
    output = params.embedding if params.output is None else params.output
    return _norm(hidden, params.norm, config.norm_eps) @ _f64(output).T


def _feed_forward(hidden: np.ndarray, layer: LlamaLayer, eps: float) -> np.ndarray:
    normed = _norm(hidden, layer.mlp_norm, eps)
    return hidden + (_silu(normed @ _f64(layer.gate).T) * (normed @ _f64(layer.up).T)) @ _f64(layer.down).T


def _delta_rule(layer: LlamaLayer, normed: np.ndarray, config: LlamaConfig) -> np.ndarray:
    """Returns the mixture [L, E] of a recurrent layer, token by token."""
    sizes, length = config.delta_rule, len(normed)

    def heads(weight, filters, size: int) -> np.ndarray:
        """Returns [L, heads, size] of a product, after a convolution over the last tokens."""
        product, taps = normed @ _f64(weight).T, _f64(filters).shape[1]
        padded = np.concatenate([np.zeros((taps - 1, product.shape[1])), product])
        mixed = sum(padded[i : i + length] * _f64(filters)[:, i] for i in range(taps))
        return _silu(mixed).reshape(length, -1, size)

    queries = heads(layer.recurrent_query, layer.query_filter, sizes.key_size)
    keys = heads(layer.recurrent_key, layer.key_filter, sizes.key_size)
    values = heads(layer.recurrent_value, layer.value_filter, sizes.value_size)
    queries, keys = (x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6) for x in (queries, keys))
    beta = _sigmoid(normed @ _f64(layer.beta).T)
    step = np.logaddexp(0, normed @ _f64(layer.decay).T + _f64(layer.decay_bias))
    shrink = np.exp(-np.exp(_f64(layer.decay_rate)) * step)
    mixed = np.zeros_like(values)
    for head in range(sizes.value_heads):
        group, memory = head * sizes.key_heads // sizes.value_heads, np.zeros((sizes.key_size, sizes.value_size))
        for t in range(length):
            memory *= shrink[t, head]
            update = beta[t, head] * (values[t, head] - keys[t, group] @ memory)
            memory += np.outer(keys[t, group], update)
            mixed[t, head] = queries[t, group] @ memory / np.sqrt(sizes.key_size)
    gate = _silu(normed @ _f64(layer.recurrent_gate).T)
    return (_norm(mixed, layer.recurrent_norm, config.norm_eps).reshape(length, -1) * gate) @ _f64(
        layer.recurrent_output
    ).T


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _silu(x: np.ndarray) -> np.ndarray:
    return x * _sigmoid(x)


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
