"""A LLaMA forward pass in NumPy and float64, for one whole sequence: no cache, no blocks, no batch.

Recurrent layers follow their rule token by token.
"""

from collections.abc import Sequence

import numpy as np

from jlade.models.architecture import BEFORE_GATE, CHANNEL_DELTA, CONVOLUTION, DELTA
from jlade.models.layers import Layer
from jlade.models.llama import LlamaConfig, LlamaParams


def logits(params: LlamaParams, tokens: Sequence[int]) -> np.ndarray:
    """Returns the logits [L, V] after each of the L tokens."""
    config = params.config
    length, head_dim = len(tokens), config.head_dim
    hidden, factors = config.embedding_scale * _f64(params.embedding)[np.asarray(tokens)], config.multipliers
    causal = np.tri(length, dtype=bool)
    for number, layer in enumerate(params.layers):
        if number in (config.mlp_layers or ()):
            hidden = _feed_forward(hidden, layer, config)
            continue
        normed = _norm(hidden, layer.mixer_norm.weight, config.norm_eps)
        if number in config.recurrent_layers:
            rule = {DELTA: _delta_rule, CHANNEL_DELTA: _delta_rule, CONVOLUTION: _convolution}.get(
                config.recurrence.rule, _state_space
            )
            hidden = hidden + factors.recurrent_output * rule(layer, factors.recurrent_input * normed, config)
        if number not in config.attention_layers:
            hidden = _feed_forward(hidden, layer, config)
            continue
        normed = factors.attention_input * normed
        queries = (normed @ _f64(layer.attention.query).T).reshape(length, config.num_heads, head_dim)
        keys = factors.key * (normed @ _f64(layer.attention.key).T).reshape(length, config.num_kv_heads, head_dim)
        values = (normed @ _f64(layer.attention.value).T).reshape(length, config.num_kv_heads, head_dim)
        mixed = np.zeros_like(queries)
        for head in range(config.num_heads):
            kv_head = head * config.num_kv_heads // config.num_heads
            query, key = _rotate(queries[:, head], config.rope_theta), _rotate(keys[:, kv_head], config.rope_theta)
            scores = np.where(causal, query @ key.T / np.sqrt(head_dim), -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            mixed[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ values[:, kv_head]
        joined = mixed.reshape(length, -1)
        if layer.attention.gate is not None:
            joined = joined * _sigmoid(normed @ _f64(layer.attention.gate).T)
        added = factors.attention_output * joined @ _f64(layer.attention.output).T
        hidden = _feed_forward(hidden + added, layer, config)
    output = params.embedding if params.output is None else params.output
    return _norm(hidden, params.norm, config.norm_eps) @ _f64(output).T


def _feed_forward(hidden: np.ndarray, layer: Layer, config: LlamaConfig) -> np.ndarray:
    """Returns the hidden states after the MLP of a layer, unless it has a mixer alone."""
    if layer.mlp is None:
        return hidden
    normed, factors = _norm(hidden, layer.mlp_norm.weight, config.norm_eps), config.multipliers
    inner = _silu(factors.gate * normed @ _f64(layer.mlp.gate).T) * (normed @ _f64(layer.mlp.up).T)
    return hidden + factors.down * inner @ _f64(layer.mlp.down).T


def _delta_rule(layer: Layer, normed: np.ndarray, config: LlamaConfig) -> np.ndarray:
    """Returns the mixture [L, E] of a recurrent layer, token by token."""
    sizes, length = config.recurrence, len(normed)
    queries, keys, values, _, shrink = _of_tokens(layer, normed, config)
    queries, keys = (x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6) for x in (queries, keys))
    beta = _sigmoid(normed @ _f64(layer.recurrent.beta).T)
    mixed = np.zeros_like(values)
    for head in range(sizes.value_heads):
        group, memory = head * sizes.key_heads // sizes.value_heads, np.zeros((sizes.key_size, sizes.value_size))
        for t in range(length):
            memory *= shrink[t, head][..., None]
            update = beta[t, head] * (values[t, head] - keys[t, group] @ memory)
            memory += np.outer(keys[t, group], update)
            mixed[t, head] = queries[t, group] @ memory / np.sqrt(sizes.key_size)
    gate = _gate(layer.recurrent, "gate", normed)
    gate = _sigmoid(gate) if sizes.rule == CHANNEL_DELTA else _silu(gate)
    return (_norm(mixed, layer.recurrent.norm, config.norm_eps).reshape(length, -1) * gate) @ _f64(
        layer.recurrent.output
    ).T


def _state_space(layer: Layer, normed: np.ndarray, config: LlamaConfig) -> np.ndarray:
    """Returns `_delta_rule` for Mamba-2."""
    sizes, length = config.recurrence, len(normed)
    queries, keys, values, step, shrink = _of_tokens(layer, normed, config)
    mixed = np.zeros_like(values)
    for head in range(sizes.value_heads):
        group, memory = head * sizes.key_heads // sizes.value_heads, np.zeros((sizes.key_size, sizes.value_size))
        for t in range(length):
            memory = shrink[t, head] * memory + step[t, head] * np.outer(keys[t, group], values[t, head])
            mixed[t, head] = queries[t, group] @ memory + _f64(layer.recurrent.skip)[head] * values[t, head]
    gate = _silu(config.multipliers.recurrent_gate * normed @ _f64(layer.recurrent.gate).T)
    mixed, is_before = mixed.reshape(length, -1), sizes.norm_place == BEFORE_GATE
    mixed = mixed if is_before else mixed * gate
    by_group = _norm(mixed.reshape(length, sizes.key_heads, -1), 1.0, config.norm_eps).reshape(length, -1)
    mixed = by_group * _f64(layer.recurrent.norm)
    return (mixed * gate if is_before else mixed) @ _f64(layer.recurrent.output).T


def _convolution(layer: Layer, normed: np.ndarray, config: LlamaConfig) -> np.ndarray:
    """Returns `_delta_rule` for a convolution alone."""
    names = "query", "key", "value"
    queries, keys, values = (normed @ _f64(getattr(layer.recurrent, name)).T for name in names)
    return queries * _convolve(keys * values, layer.recurrent.value_filter, None) @ _f64(layer.recurrent.output).T


def _of_tokens(layer: Layer, normed: np.ndarray, config: LlamaConfig) -> tuple[np.ndarray, ...]:
    """Returns queries, keys and values [L, heads, size], and times and factors of the state [L, heads]."""
    sizes, heads = config.recurrence, []
    for name, size in (("query", sizes.key_size), ("key", sizes.key_size), ("value", sizes.value_size)):
        weight = _f64(getattr(layer.recurrent, name))
        product = getattr(config.multipliers, f"recurrent_{name}") * normed @ weight.T
        filters, bias = (getattr(layer.recurrent, f"{name}_{end}") for end in ("filter", "filter_bias"))
        heads.append(_silu(_convolve(product, filters, bias)).reshape(len(normed), -1, size))
    time = config.multipliers.decay * _gate(layer.recurrent, "decay", normed) + _f64(layer.recurrent.decay_bias)
    rate = np.exp(_f64(layer.recurrent.decay_rate))
    if sizes.rule == CHANNEL_DELTA:
        time, rate = time.reshape(len(normed), sizes.key_heads, -1), rate[:, None]
    step = np.logaddexp(0, time)
    bounded = sizes.least_decay is not None
    return *heads, step, np.exp(sizes.least_decay * _sigmoid(rate * time) if bounded else -rate * step)


def _gate(part, name: str, normed: np.ndarray) -> np.ndarray:
    """Returns the product of hidden states with the matrix of a gate, or of the latents that another one makes."""
    down = getattr(part, f"{name}_down", None)
    return (normed if down is None else normed @ _f64(down).T) @ _f64(getattr(part, name)).T


def _convolve(x: np.ndarray, filters, bias) -> np.ndarray:
    """Returns a convolution [L, C] over the last tokens."""
    taps = _f64(filters).shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    mixed = sum(padded[i : i + len(x)] * _f64(filters)[:, i] for i in range(taps))
    return mixed if bias is None else mixed + _f64(bias)


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
